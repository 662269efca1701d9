"""The tokenizer that vLLM encodes prompts with, as files for gateways: what is in force, not what lies in the folder.

vLLM loads it by transformers' AutoTokenizer, which may make another pipeline of the same `tokenizer.json` than the file
says: a class rebuilds it from vocabulary and merges, or puts tokens around texts that the file doesn't. So the live
tokenizer is asked. What it does beyond its pipeline, in Python, can't be written down: such a one is found by trying.

fastokens (VLLM_USE_FASTOKENS) runs a pipeline faster, and isn't another: its shim takes the whole JSON of a loaded
tokenizer. But it says that same JSON for ever, whatever is set later, so behind it the pipeline is tried as well.
Attributes are those of transformers 5 and `tokenizers` 0.23.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""All that transformers gives a template by name."""
PROBES: tuple[str, ...] = (
    "",
    " ",
    "Hello",
    " Hello  world\n\n\tagain \r\n",
    "It's 10:45, isn't it? Über 1,234.5678 or 2024-01-02...",
    "İstanbul Straße ΣΊΣΥΦΟΣ ﬁx é e\u0301 각 \u1112\u1161\u11ab",
    "你好\uff0c世界。今天天气很好\uff01 日本語 カタカナ \u3000x",
    "👩\u200d👩\u200d👧 🇩🇪 \u2028\xa0\u200b\ufeff\x1c\x85 ▁▁ Ġ",
    "def f(x):\n    return x + 1  # <s></s> [INST] <|im_end|><|endoftext|>\n",
)
PROBED_TOKENS_MAX = 64
OTHER_FILES = ("chat_template.json",)
"""Of the folder: a processor's template, which the tokenizer doesn't know of."""
_NAMES = ("tokenizer*", "tekken*", "vocab*", "merges*", "*.tiktoken", "special_tokens_map.json", "added_tokens.json")
_BYTES_MAX = 256 << 20


@dataclass(frozen=True, slots=True)
class TokenizerInUse:
    """`pipeline` is the content of a `tokenizer.json` that encodes as vLLM does, the same bytes for the same pipeline.

    `None` where no such file can be: texts are known to nobody but the engine, and `reason` says why.
    """

    pipeline: bytes | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | Mapping[str, str] | None = None
    reason: str = ""

    def files(self, folder: Path) -> dict[str, bytes]:
        """By name, what a gateway needs to do as this engine does: nothing, without a pipeline. Raises `OSError`."""
        if self.pipeline is None:
            return {}
        config: dict[str, Any] = {name: self.special_tokens.get(name) for name in SPECIAL_TOKENS}
        if isinstance(self.chat_template, str):
            config["chat_template"] = self.chat_template
        elif self.chat_template is not None:
            named = sorted(self.chat_template.items())
            config["chat_template"] = [{"name": name, "template": template} for name, template in named]
        others = {name: (folder / name).read_bytes() for name in OTHER_FILES if (folder / name).is_file()}
        return {"tokenizer.json": self.pipeline, "tokenizer_config.json": _stable_json(config), **others}

    def digest(self, folder: Path) -> str:
        """Hex sha256 of what decides its ids: the pipeline, or else the files it is loaded from. Raises `OSError`."""
        if self.pipeline is not None:
            return hashlib.sha256(self.pipeline).hexdigest()
        whole = hashlib.sha256()
        for path in sorted({path for name in _NAMES for path in folder.glob(name)}):
            if path.is_file() and path.stat().st_size <= _BYTES_MAX:
                whole.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return whole.hexdigest()


def tokenizer_in_use(tokenizer: Any) -> TokenizerInUse:
    """What vLLM's `cached_tokenizer_from_config` returned: `None`, a tokenizer of transformers, or one of its own."""
    if tokenizer is None:
        return TokenizerInUse(None, reason="vLLM was started without a tokenizer")
    name = type(tokenizer).__name__
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        return TokenizerInUse(None, reason=f"{name} has no pipeline, it is code of its own")
    try:
        # How texts were cut off or filled up last isn't part of it: the live tokenizer is called one way or another.
        decoded = msgspec.json.decode(backend.to_str()) | {"truncation": None, "padding": None}
        pipeline = msgspec.json.encode(decoded, order="sorted")
        added = [str(token["content"]) for token in decoded["added_tokens"]]
        surprise = _surprise(tokenizer, backend, pipeline, added)
        special_tokens, template = dict(tokenizer.special_tokens_map), tokenizer.chat_template
    except Exception as error:  # noqa: BLE001 - foreign code, of which one that fails is one that isn't known
        return TokenizerInUse(None, reason=f"{name} can't be asked: {type(error).__name__}: {error}")
    if surprise is not None:
        return TokenizerInUse(None, reason=f"{name} encodes {surprise} otherwise than its pipeline")
    return TokenizerInUse(pipeline, special_tokens, template)


def _surprise(tokenizer: Any, backend: Any, pipeline: bytes, added: Sequence[str]) -> str | None:
    """What the tokenizer, called as vLLM calls it, encodes otherwise than its pipeline; `None` for nothing."""
    if getattr(tokenizer, "split_special_tokens", False):
        return "special tokens in a text"
    if not isinstance(backend, tokenizers.Tokenizer):
        backend = tokenizers.Tokenizer.from_str(pipeline.decode())
    for text in (*PROBES, *(f"a {token} b{token}" for token in added[:PROBED_TOKENS_MAX])):
        for adds_special in (False, True):
            try:
                called = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
            except ValueError:  # fastokens, for a byte that the vocabulary lacks: the engine refuses such a prompt
                continue
            if list(called) != list(backend.encode_batch([text], add_special_tokens=adds_special)[0].ids):
                return repr(text)
    return "special tokens in a text" if getattr(backend, "encode_special_tokens", False) else None


def _stable_json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
