"""Nasty texts through the gateway's encoder, cut wherever it may cut, against plain Hugging Face `tokenizers`."""

from dataclasses import dataclass, field, replace
from itertools import islice

from gateway.encoding.cuts import CutRules, Cutter, CutterEverywhere, cut_rules
from gateway.encoding.examination import fastest_backend, rest_backends, told_stretches
from gateway.encoding.nasty_texts import nasty_texts
from gateway.encoding.piece_encoder import Depth, PieceEncoder
from gateway.encoding.pipeline import Pipeline, read_pipeline
from gateway.encoding.tokenizer import BACKENDS, Backend, HuggingFaceBackend

BATCH_TEXTS = 500
ADDED_TOKENS_MAX = 60
"""Of Gemma's six thousand added tokens, the first and the odd ones are as good as all."""
FINE_CHARS = 16
CACHE_BYTES = 8 * 2**20
"""Kept from text to text, and small: so what is stale or dropped would show."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer and everything that encodes for it."""

    name: str
    pipeline: Pipeline
    rules: CutRules
    reference: HuggingFaceBackend
    whole: Backend
    rest: Backend

    def with_rules(self, rules: CutRules) -> "Tokenizer":
        """The same with other rules."""
        return replace(self, rules=rules)

    def encoder(self, cache_bytes_max: int) -> PieceEncoder:
        """An encoder as the gateway uses it."""
        encoder = PieceEncoder(
            self.pipeline, Cutter(self.rules, self.rest.piece_chars), self.whole, self.rest, cache_bytes_max
        )
        encoder.depth = Depth.PIECES
        return encoder

    def added_tokens(self) -> list[str]:
        """Some of its added tokens, for texts."""
        contents = [token.content for token in self.pipeline.added_tokens]
        return contents[: ADDED_TOKENS_MAX // 2] + contents[:: max(1, 2 * len(contents) // ADDED_TOKENS_MAX)]


@dataclass(slots=True)
class FuzzReport:
    """What a fuzz did and found."""

    tokenizer: str
    backend: str
    texts: int = 0
    characters: int = 0
    cuts: int = 0
    told: int = 0
    """Stretches whose ids were told from those of whole texts."""
    mismatches: list[str] = field(default_factory=list)


def load(name: str, content: bytes, backend: str | None = None) -> Tokenizer:
    """A tokenizer from the content of a `tokenizer.json`, with the gateway's backend or the one that is named."""
    text = content.decode()
    reference, pipeline = HuggingFaceBackend(text), read_pipeline(text)
    if backend is None:
        whole = fastest_backend(text, reference)
    else:
        whole = reference if backend == reference.name else BACKENDS[backend](text)
    rules = cut_rules(pipeline)
    if backend is None:
        rest = next(rest_backends(pipeline, whole))
    else:
        rest = BACKENDS[backend](pipeline.without_prefix) if pipeline.without_prefix else whole
    return Tokenizer(name, pipeline, rules, reference, whole, rest)


def fuzz(tokenizer: Tokenizer, texts: int, seed: int) -> FuzzReport:
    """Of four texts one is cut at every place, one at every place between added tokens only, one at every place within
    gaps only, and one as the gateway cuts, but finer.
    """
    report = FuzzReport(tokenizer.name, tokenizer.rest.name)
    rules = tokenizer.rules
    cutters = (
        CutterEverywhere(rules, 0),
        CutterEverywhere(rules, FINE_CHARS * 1000),
        CutterEverywhere(replace(rules, between_tokens=False), 0),
        Cutter(rules, FINE_CHARS, 4 * FINE_CHARS),
    )
    encoders = [
        PieceEncoder(tokenizer.pipeline, each, tokenizer.whole, tokenizer.rest, CACHE_BYTES) for each in cutters
    ]
    for encoder in encoders:
        encoder.depth = Depth.PIECES
    drawn = nasty_texts(tokenizer.added_tokens(), texts, seed)
    while batch := list(islice(drawn, BATCH_TEXTS)):
        expected = tokenizer.reference.encode_batch(batch)
        for number, (text, ids) in enumerate(zip(batch, expected, strict=True)):
            kind = number % len(cutters)
            report.texts += 1
            report.characters += len(text)
            report.cuts += len(cutters[kind].pieces(text)) - 1
            told = told_stretches(encoders[kind], text)
            report.told += told
            if told < 0 or encoders[kind].encode(text) != ids:
                report.mismatches.append(text)
    return report
