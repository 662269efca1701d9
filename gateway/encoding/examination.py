"""What may be done with a tokenizer: which backend encodes as the reference does, and how far texts may be taken apart.

Both are tried on nasty texts before a request is encoded that way. Takes seconds, and holds the GIL for much of them
(the reference can't be loaded without): `examiner.py` runs it in a process of its own.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gateway.encoding.cuts import CutRules, CutterEverywhere, cut_rules
from gateway.encoding.nasty_texts import BYTE_NAMES, EVERY_BYTE, nasty_texts
from gateway.encoding.piece_encoder import Depth, PieceEncoder
from gateway.encoding.pipeline import Pipeline, Unsupported, read_pipeline
from gateway.encoding.tokenizer import Backend, FastokensBackend, HuggingFaceBackend

logger = logging.getLogger(__name__)

PROOF_TEXTS = 300
PROOF_CACHE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Parts:
    """How texts are taken apart, which backend encodes all but first pieces, and how far that is proved."""

    pipeline: Pipeline
    rules: CutRules
    backend: str
    depth: Depth


@dataclass(frozen=True, slots=True)
class Examination:
    """The verdict on a tokenizer. `parts` is `None` where texts must be encoded whole; `reason` says why."""

    backend: str
    token_chars_max: int
    parts: Parts | None
    reason: str = ""


def examine(content: bytes) -> Examination:
    """Examine the content of a `tokenizer.json`. Raises `ValueError` if it isn't one."""
    try:
        text = content.decode()
        reference = HuggingFaceBackend(text)
    except Exception as error:  # the library raises bare Exception for content it can't read
        raise ValueError(f"not a tokenizer.json: {error}") from error
    backend = fastest_backend(text, reference)
    token_chars_max = reference.longest_token_chars()
    try:
        pipeline = read_pipeline(text)
    except Unsupported as error:
        return Examination(backend.name, token_chars_max, None, str(error))
    if {token.content: token.token_id for token in pipeline.added_tokens} != reference.added_tokens():
        return Examination(backend.name, token_chars_max, None, "added tokens under other ids than the file says")
    rules = cut_rules(pipeline)
    pipeline = replace(pipeline, vocabulary=())
    for rest in rest_backends(pipeline, backend):
        depth = proven_depth(pipeline, rules, backend, rest)
        if depth is not Depth.WHOLE:
            if not tells_stretches(pipeline, rules, backend, rest):
                pipeline = replace(pipeline, token_bytes=b"")
            reason = "" if depth is Depth.PIECES else "how it splits text isn't known"
            return Examination(backend.name, token_chars_max, Parts(pipeline, rules, rest.name, depth), reason)
    return Examination(backend.name, token_chars_max, None, "taken apart, texts got other ids in a test")


def fastest_backend(pipeline: str, reference: HuggingFaceBackend) -> Backend:
    """fastokens, if it loads the pipeline and agrees with its `reference` on `PROOF_TEXTS` nasty texts."""
    try:
        fast = FastokensBackend(pipeline)
    except Exception as error:  # noqa: BLE001 - whatever it doesn't support, the reference serves
        logger.info("fastokens doesn't support this tokenizer, using tokenizers: %s", error)
        return reference
    texts = [EVERY_BYTE, *BYTE_NAMES, *nasty_texts(list(reference.added_tokens()), PROOF_TEXTS)]
    expected = _encodings(reference, texts)
    try:
        agrees = _encodings(fast, texts) == expected
    except ValueError as error:  # a byte that the vocabulary lacks: the reference leaves it out
        logger.info("fastokens refuses a text that tokenizers encodes: %s", error)
        agrees = False
    if not agrees:
        logger.warning("fastokens disagrees with tokenizers on this tokenizer, using tokenizers")
        return reference
    return fast


def rest_backends(pipeline: Pipeline, whole: Backend) -> Iterator[Backend]:
    """What may encode all but first pieces, best first: it has no prefix to put, so fastokens may do where it can't
    for `whole`.
    """
    if not pipeline.without_prefix:
        yield whole
        return
    reference = HuggingFaceBackend(pipeline.without_prefix)
    fastest = fastest_backend(pipeline.without_prefix, reference)
    yield fastest
    if fastest is not reference and whole.name != FastokensBackend.name:
        yield reference


def proven_depth(pipeline: Pipeline, rules: CutRules, whole: Backend, rest: Backend) -> Depth:
    """The greatest depth at which nasty texts, cut wherever the rules allow it, have the ids of the whole texts."""
    texts = [EVERY_BYTE, *BYTE_NAMES, *nasty_texts([token.content for token in pipeline.added_tokens], PROOF_TEXTS)]
    expected = _encodings(whole, texts)
    for depth in (Depth.PIECES, Depth.SEGMENTS) if rules.every else (Depth.SEGMENTS,):
        encoders = [
            PieceEncoder(pipeline, CutterEverywhere(rules, piece_chars), whole, rest, PROOF_CACHE_BYTES)
            for piece_chars in (0, rest.piece_chars)
        ]
        for encoder in encoders:
            encoder.depth = depth
        if all([(each.encode(text), each.encode(text, True)) for text in texts] == expected for each in encoders):
            return depth
        logger.warning("a tokenizer's texts can't be taken apart as its pipeline says: %s", depth.name)
    return Depth.WHOLE


def tells_stretches(pipeline: Pipeline, rules: CutRules, whole: Backend, rest: Backend) -> bool:
    """Whether what is told of stretches from the ids of nasty texts as wholes are the ids of the stretches."""
    encoder = PieceEncoder(pipeline, CutterEverywhere(rules, rest.piece_chars), whole, rest, PROOF_CACHE_BYTES)
    encoder.depth = Depth.PIECES
    texts = nasty_texts([token.content for token in pipeline.added_tokens], PROOF_TEXTS)
    if any(told_stretches(encoder, text) < 0 for text in texts):
        logger.warning("a tokenizer's tokens aren't as long as its vocabulary says")
        return False
    return True


def told_stretches(encoder: PieceEncoder, text: str) -> int:
    """How many stretches' ids can be told from those of the whole text; -1 if one has other ids by itself."""
    ids = encoder.encode(text)
    if not encoder.goes_at_once(text):
        return 0
    new = encoder.encode_at_once(text)
    if new.ids != ids:
        return -1
    told = encoder.take_apart(new) or []
    if len(told) < 2:
        return 0
    known = [encoder.cache.get(stretch, encoder.is_first(place)) for place, (stretch, _) in enumerate(told)]
    return len(told) if known == [stretch_ids for _, stretch_ids in told] else -1


def _encodings(backend: Backend, texts: Iterable[str]) -> list[tuple[bytes, bytes]]:
    """The ids of each text, without and with special tokens around it."""
    return [(backend.encode(text), backend.encode(text, True)) for text in texts]
