"""What a `tokenizer.json` says about how texts may be cut: nothing is assumed of a pipeline that isn't known.

ids(text) = the ids of its added tokens, and of each gap between them by itself; only a prefix (a space that is put
before a text) knows whether a gap comes first. That is so for the normalizers and pre-tokenizers below, read from the
source of `tokenizers` 0.23, and for BPE without dropout. Whatever else there is raises `Unsupported`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from directory.chunks import pack_tokens
from gateway.encoding.added_tokens import AddedToken

_REPLACE_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPLIT_SPACE = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = rf"(?i:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + _TAIL
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s" + f"(?i:{_ENGLISH})?|"
_O200K = _CASED % ("*", "+") + _CASED % ("+", "*") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _TAIL,
)


_BYTE = re.compile("<0x[0-9A-F]{2}>")
TOKENS_MAX = 2**22
"""Ids beyond are no vocabulary's."""


class Unsupported(Exception):
    """This pipeline's texts can't be taken apart; the message says why."""


class Family(Enum):
    """How a gap is split before BPE, where the split is known to the letter."""

    GPT2 = "gpt2"
    CL100K = "cl100k"
    """Llama 3, Qwen 2 and 3: alike in all that matters for cuts."""
    O200K = "o200k"
    DEEPSEEK = "deepseek"
    SENTENCEPIECE = "sentencepiece"
    """BPE over whole gaps: Llama 2, Mistral, Gemma."""


SPLITS: dict[tuple[str, ...], Family] = {
    (_CL100K % "",): Family.CL100K,
    (_CL100K % "{1,3}",): Family.CL100K,
    (_O200K,): Family.O200K,
    _DEEPSEEK: Family.DEEPSEEK,
}
"""By the expressions of the pre-tokenizer's `Split`s; one that differs in a character is another, and unknown."""


class Prefix(Enum):
    """Before which gaps the tokenizer puts a space."""

    NONE = "none"
    GAPS = "gaps"
    """Before each."""
    START = "start"
    """Before one that begins the whole text."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline whose texts can be taken apart. `family` is `None` where gaps can't be."""

    added_tokens: tuple[AddedToken, ...]
    family: Family | None
    prefix: Prefix
    without_prefix: str
    """The pipeline for text that follows in a gap, as JSON; empty where that is the pipeline itself."""
    ids_before: bytes
    ids_after: bytes
    """What is put around a text's ids (little-endian u32) where special tokens are asked for."""
    vocabulary: tuple[str, ...]
    token_bytes: bytes
    """How many UTF-8 bytes of text each token stands for, by its id, as little-endian u32; empty where gaps can't be
    cut."""
    composes: bool
    """Whether texts are brought into the normal form C first."""


def read_pipeline(content: str) -> Pipeline:
    """Read the content of a `tokenizer.json`. Raises `Unsupported`."""
    try:
        return _read(orjson.loads(content))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Unsupported(f"a tokenizer.json of another shape ({type(error).__name__}: {error})") from error


def _read(config: Mapping[str, Any]) -> Pipeline:
    model = config["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        raise Unsupported("not BPE, or BPE with dropout")
    normalizers = _members(config["normalizer"], "normalizers")
    pre_tokenizers = _members(config["pre_tokenizer"], "pretokenizers")
    added_tokens = _added_tokens(config["added_tokens"], has_normalizer=bool(normalizers))
    prefix, rest_normalizers, rest_pre_tokenizers = _without_prefix(normalizers, pre_tokenizers)
    rest = dict(
        config,
        normalizer={"type": "Sequence", "normalizers": rest_normalizers} if rest_normalizers else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": rest_pre_tokenizers} if rest_pre_tokenizers else None,
    )
    before, after = _ids_around(config["post_processor"])
    family = _family(normalizers, pre_tokenizers)
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        family = None
    return Pipeline(
        added_tokens,
        family,
        prefix,
        "" if prefix is Prefix.NONE else orjson.dumps(rest).decode(),
        before,
        after,
        tuple(model["vocab"]),
        _token_bytes(model, added_tokens, family) if family else b"",
        any(part["type"] == "NFC" for part in normalizers),
    )


def _token_bytes(model: Mapping[str, Any], added_tokens: Sequence[AddedToken], family: Family) -> bytes:
    """No token stands for less text than this says: so where lengths add up, each of them is right."""
    vocabulary: Mapping[str, int] = model["vocab"]
    added = {token.token_id: len(token.content.encode()) for token in added_tokens}
    if family is Family.SENTENCEPIECE:
        # Added tokens of "▁" are also what spaces become, which is shorter, and far more common.
        lengths = added | {number: _spelled_bytes(spelling) for spelling, number in vocabulary.items()}
    else:
        lengths = {number: len(spelling) for spelling, number in vocabulary.items()} | added
    if model.get("unk_token") in vocabulary:
        lengths[vocabulary[model["unk_token"]]] = 0
    tokens = max(lengths, default=-1) + 1
    if tokens > TOKENS_MAX:
        return b""
    return pack_tokens([lengths.get(number, 0) for number in range(tokens)])


def _members(part: Mapping[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [dict(part)]


def _added_tokens(rows: Sequence[Mapping[str, Any]], has_normalizer: bool) -> tuple[AddedToken, ...]:
    tokens = tuple(
        AddedToken(row["content"], int(row["id"]), row["lstrip"], row["rstrip"], row["normalized"])
        for row in rows
        if row["content"]
    )
    if any(row["single_word"] for row in rows):
        raise Unsupported("added tokens that match whole words only")
    if has_normalizer and any(token.is_normalized for token in tokens):
        raise Unsupported("added tokens that are looked for in normalized text")
    strips = any(token.strips_before or token.strips_after for token in tokens)
    if strips and any(re.search(r"\s|\x85", token.content) for token in tokens):
        raise Unsupported("added tokens that strip spaces beside others that hold spaces")
    return tokens


def _without_prefix(
    normalizers: Sequence[dict[str, Any]], pre_tokenizers: Sequence[dict[str, Any]]
) -> tuple[Prefix, list[dict[str, Any]], list[dict[str, Any]]]:
    """Where a space is put before a text, and the parts of the pipeline that don't."""
    prefix, rest_normalizers, rest_pre_tokenizers = Prefix.NONE, [], []
    for part in normalizers:
        if part["type"] == "Prepend":
            prefix = Prefix.GAPS
        elif part["type"] in ("NFC", "Replace"):
            rest_normalizers.append(part)
        else:
            raise Unsupported(f"the normalizer {part['type']}")
    for place, part in enumerate(pre_tokenizers):
        if part["type"] == "Metaspace":
            scheme = part["prepend_scheme"]
            prefix = {"first": Prefix.START, "always": Prefix.GAPS, "never": prefix}[scheme]
            if len(pre_tokenizers) == 1 and part["replacement"] == "▁" and part["split"] is False:
                rest_normalizers.append(_REPLACE_SPACE)  # which is all it does, and what fastokens can do as well
            else:
                rest_pre_tokenizers.append(dict(part, prepend_scheme="never"))
        elif part["type"] == "ByteLevel" and part["add_prefix_space"]:
            if place:
                raise Unsupported("a space put before a text after it was split")
            prefix = Prefix.GAPS
            rest_pre_tokenizers.append(dict(part, add_prefix_space=False))
        elif part["type"] in ("Split", "ByteLevel", "Digits"):
            rest_pre_tokenizers.append(part)
        else:
            raise Unsupported(f"the pre-tokenizer {part['type']}")
    return prefix, rest_normalizers, rest_pre_tokenizers


def _family(normalizers: Sequence[dict[str, Any]], pre_tokenizers: Sequence[dict[str, Any]]) -> Family | None:
    kinds = [part["type"] for part in pre_tokenizers]
    if kinds[-1:] == ["ByteLevel"]:
        if any(part["type"] != "NFC" for part in normalizers):
            return None
        splits, byte_level = pre_tokenizers[:-1], pre_tokenizers[-1]
        if byte_level["use_regex"]:
            return Family.GPT2 if kinds[:-1] in ([], ["Digits"]) else None
        if any(part["type"] != "Split" or part["behavior"] != "Isolated" or part["invert"] for part in splits):
            return None
        return SPLITS.get(tuple(_expression(part["pattern"]) for part in splits))
    is_whole = (
        not pre_tokenizers
        or list(pre_tokenizers) == [_SPLIT_SPACE]
        or (kinds == ["Metaspace"] and pre_tokenizers[0]["replacement"] == "▁" and pre_tokenizers[0]["split"] is False)
    )
    replaces_spaces = kinds == ["Metaspace"] or _REPLACE_SPACE in normalizers
    is_plain = all(part == _REPLACE_SPACE or part == {"type": "Prepend", "prepend": "▁"} for part in normalizers)
    return Family.SENTENCEPIECE if is_whole and replaces_spaces and is_plain else None


def _spelled_bytes(spelling: str) -> int:
    if spelling.isascii():
        return 1 if _BYTE.fullmatch(spelling) else len(spelling)
    return len(spelling.replace("▁", " ").encode())


def _expression(pattern: Mapping[str, str]) -> str:
    """Line ends may stand in it as themselves or escaped."""
    return pattern.get("Regex", "").replace("\r", r"\r").replace("\n", r"\n")


def _ids_around(post_processor: Mapping[str, Any] | None) -> tuple[bytes, bytes]:
    before, after = b"", b""
    for part in _members(post_processor, "processors"):
        if part["type"] == "ByteLevel":
            continue
        if part["type"] != "TemplateProcessing":
            raise Unsupported(f"the post-processor {part['type']}")
        ids_of = {name: pack_tokens(token["ids"]) for name, token in part["special_tokens"].items()}
        pieces = [ids_of[piece["SpecialToken"]["id"]] if "SpecialToken" in piece else None for piece in part["single"]]
        if pieces.count(None) != 1:
            raise Unsupported("a template without the text, or with several")
        place = pieces.index(None)
        before, after = (
            b"".join(filter(None, pieces[:place])) + before,
            after + b"".join(filter(None, pieces[place + 1 :])),
        )
    return before, after
