"""Small pipelines of every family, made here: SmolLM2's vocabulary under other splits, and a SentencePiece-like one."""

import functools
import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, models, normalizers, trainers

from bench.encoding import fuzz
from gateway.encoding.nasty_texts import nasty_texts
from gateway.encoding.pipeline import SPLITS, Family
from nodeagent.engines.reference.gguf_file import GgufFile
from nodeagent.engines.reference.loaded_model import default_model_path
from nodeagent.engines.reference.tokenizer import read_tokenizer_files

Pipeline = dict[str, Any]

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Prepend", "prepend": "▁"}
_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "BEGIN", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "END", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {
        "BEGIN": {"id": "BEGIN", "ids": [1, 2], "tokens": ["a", "b"]},
        "END": {"id": "END", "ids": [3], "tokens": ["c"]},
    },
}


@functools.cache
def smollm2_content() -> bytes:
    """The model's own `tokenizer.json`."""
    with GgufFile(default_model_path()) as file:
        return read_tokenizer_files(file).tokenizer_json


def smollm2() -> Pipeline:
    return dict(json.loads(smollm2_content()))


def split_by(family: Family, template: bool = False) -> Pipeline:
    """SmolLM2's vocabulary under the split of another family."""
    expressions = next(expressions for expressions, each in SPLITS.items() if each is family)
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in expressions
    ]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [*splits, dict(_BYTE_LEVEL, use_regex=False)]}
    return dict(smollm2(), pre_tokenizer=pre_tokenizer, post_processor=_TEMPLATE if template else None)


def nested_tokens() -> Pipeline:
    """Added tokens that begin alike, lie in each other, or are found in a second pass."""
    pipeline = smollm2()
    rows = [(token, False) for token in ("<|", "<|x|>", "|>", "x|>y", "\n\n", "▁▁")] + [("the", True), ("<|the", True)]
    for number, (content, is_normalized) in enumerate(rows):
        token = dict(pipeline["added_tokens"][0], id=100 + number, content=content, normalized=is_normalized)
        pipeline["added_tokens"].append(dict(token, special=not is_normalized))
    # The library gives tokens that the vocabulary lacks the next free ids, whatever the file says.
    return dict(json.loads(Tokenizer.from_str(json.dumps(pipeline)).to_str()))


def stripping_tokens() -> Pipeline:
    """Added tokens that take the spaces beside them, and a space before every gap."""
    pipeline = smollm2()
    tokens = pipeline["added_tokens"]
    tokens[1]["lstrip"] = tokens[2]["rstrip"] = tokens[5]["lstrip"] = tokens[5]["rstrip"] = True
    return dict(pipeline, pre_tokenizer=dict(_BYTE_LEVEL, add_prefix_space=True))


@functools.cache
def _sentencepiece_content() -> str:
    """A vocabulary trained on nasty texts, whose merges cross words, with bytes for what it lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=2500, special_tokens=special, show_progress=False, max_token_length=12, limit_alphabet=400
    )
    tokenizer.train_from_iterator([text[:400] for text in nasty_texts((), 150, seed=7)], trainer)
    return str(tokenizer.to_str())


def sentencepiece(normalizer: Pipeline | None, pre_tokenizer: Pipeline | None) -> Pipeline:
    pipeline: Pipeline = json.loads(_sentencepiece_content())
    added = [token for token in pipeline["added_tokens"] if not token["content"].startswith("<0x")]
    return dict(
        pipeline,
        added_tokens=added,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        post_processor=_TEMPLATE,
        decoder=None,
    )


def line_end_tokens() -> Pipeline:
    """Added tokens of line ends alone, behind which a gap begins."""
    pipeline = sentencepiece({"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}, None)
    for content in ("\n", "\n\n"):
        pipeline["added_tokens"].append(dict(pipeline["added_tokens"][0], id=9000, content=content))
    return dict(json.loads(Tokenizer.from_str(json.dumps(pipeline)).to_str()))


def _metaspace(scheme: str) -> Pipeline:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}


PIPELINES: dict[str, Callable[[], Pipeline]] = {
    "gpt2 and digits": smollm2,
    "gpt2": lambda: dict(smollm2(), pre_tokenizer=_BYTE_LEVEL),
    "cl100k": lambda: split_by(Family.CL100K, template=True),
    "cl100k, NFC": lambda: dict(split_by(Family.CL100K), normalizer={"type": "NFC"}),
    "o200k": lambda: split_by(Family.O200K),
    "deepseek": lambda: split_by(Family.DEEPSEEK),
    "nested tokens": nested_tokens,
    "stripping tokens": stripping_tokens,
    "gpt2, a space before gaps": lambda: dict(smollm2(), pre_tokenizer=dict(_BYTE_LEVEL, add_prefix_space=True)),
    "gemma": lambda: sentencepiece(_REPLACE, None),
    "legacy llama": lambda: sentencepiece({"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}, None),
    "legacy llama, line ends as tokens": line_end_tokens,
    "mistral": lambda: sentencepiece(None, _metaspace("first")),
    "metaspace always": lambda: sentencepiece(None, _metaspace("always")),
}


def loaded(pipeline: Pipeline, backend: str | None = "tokenizers") -> fuzz.Tokenizer:
    return fuzz.load("test", json.dumps(pipeline).encode(), backend)


@functools.cache
def family(name: str) -> fuzz.Tokenizer:
    """One of `PIPELINES`, loaded once."""
    return loaded(PIPELINES[name]())
