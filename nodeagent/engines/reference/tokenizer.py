"""The tokenizer, built from the model file's own vocabulary, merges, token types and pre-tokenizer name.

Text is encoded plainly: the pipeline has no post-processor, so nothing is put before or after it. Special tokens
that are spelled out in a text become special tokens, in chats and completions alike, as with Hugging Face.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from nodeagent.engines.reference.errors import InvalidRequest, ModelFileError
from nodeagent.engines.reference.gguf_file import GgufFile

_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
    "gpt-2": _BYTE_LEVEL,
}
"""How text is split before merges apply, by the name in `tokenizer.ggml.pre`. Others are refused: a wrong split gives
plausible, wrong token ids."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a gateway needs to encode as this engine does: name -> content, deterministic bytes."""

    tokenizer_json: bytes
    chat_template: str
    bos_token: str
    eos_token: str

    def as_mapping(self) -> dict[str, bytes]:
        """The files under the names Hugging Face gives them."""
        config = {
            "add_bos_token": False,
            "add_prefix_space": False,
            "bos_token": self.bos_token,
            "clean_up_tokenization_spaces": False,
            "eos_token": self.eos_token,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        return {
            "tokenizer.json": self.tokenizer_json,
            "chat_template.jinja": self.chat_template.encode(),
            "tokenizer_config.json": _stable_json(config),
        }


def read_tokenizer_files(file: GgufFile) -> TokenizerFiles:
    """Build the files from a model file. Raises `ModelFileError` for a tokenizer that isn't known to the letter."""
    if (kind := file.field("tokenizer.ggml.model", str)) != "gpt2":
        raise ModelFileError(f"{file.path} has a tokenizer of type {kind!r}; this engine knows 'gpt2' (byte-level BPE)")
    pre = file.field("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelFileError(f"{file.path} splits text by {pre!r}, which this engine doesn't know (known: {known})")
    if file.fields.get("tokenizer.ggml.add_bos_token", False) or file.fields.get("tokenizer.ggml.add_eos_token", False):
        raise ModelFileError(f"{file.path} wants tokens added around every text, which this engine doesn't do")
    tokens, kinds = file.field("tokenizer.ggml.tokens", list), file.field("tokenizer.ggml.token_type", list)
    special = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL_TOKEN,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)
    ]
    pipeline = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in file.field("tokenizer.ggml.merges", list)],
        },
    }
    eos = file.field("tokenizer.ggml.eos_token_id", int)
    bos = file.fields.get("tokenizer.ggml.bos_token_id", eos)
    return TokenizerFiles(
        tokenizer_json=_stable_json(pipeline),
        chat_template=file.field("tokenizer.chat_template", str),
        bos_token=tokens[bos],
        eos_token=tokens[eos],
    )


class TextTokenizer:
    """Text to token ids. Thread-safe."""

    def __init__(self, files: TokenizerFiles) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
        except Exception as error:
            raise ModelFileError(f"the model's tokenizer can't be built: {error}") from error
        pipeline = json.loads(files.tokenizer_json)
        vocabulary: dict[str, int] = pipeline["model"]["vocab"]
        self._special = {token["id"] for token in pipeline["added_tokens"] if token["special"]}
        added = {token["id"]: token["content"].encode() for token in pipeline["added_tokens"]}
        byte_of = {character: byte for byte, character in byte_alphabet().items()}
        self.vocabulary_size = len(vocabulary)
        self.eos_id = vocabulary[files.eos_token]
        self._token_bytes = [b""] * (max(vocabulary.values()) + 1)
        for token, index in vocabulary.items():
            self._token_bytes[index] = added.get(index) or bytes(byte_of.get(character, 0x3F) for character in token)
        self.token_bytes_max = max(len(each) for each in self._token_bytes)

    def encode(self, text: str) -> list[int]:
        """The ids of a text's tokens. Raises `InvalidRequest` for text that no encoding can hold."""
        try:
            return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the prompt must be valid Unicode text") from error

    def text_bytes(self, token_id: int) -> bytes:
        """What a generated token adds to the text, in UTF-8, perhaps a part of a character; special tokens nothing."""
        return b"" if token_id in self._special else self._token_bytes[token_id]

    def spelling(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return str(self._tokenizer.id_to_token(token_id))


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (the table of GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return table


def _stable_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
