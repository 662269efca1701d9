"""A SentencePiece model file (BPE) into a `tokenizer.json`, as transformers converts one.

The file is a protobuf message whose field 1 repeats: a piece with its spelling (1), score (2, float) and type (3); see
sentencepiece_model.proto. Merges are what transformers' SentencePieceExtractor makes of the scores.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary."""

    spelling: str
    score: float
    kind: int


def pieces_of(content: bytes) -> list[Piece]:
    """The vocabulary of a model file's content, in order of ids."""
    pieces = []
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            parts = dict(_fields(value))
            (score,) = struct.unpack("<f", parts.get(2, b"\0\0\0\0"))
            pieces.append(Piece(parts[1].decode(), score, parts.get(3, 1)))
    return pieces


def tokenizer_json(content: bytes) -> bytes:
    """The pipeline of a model file's content: Mistral's, which puts a space before a text's start only."""
    pieces = pieces_of(content)
    vocabulary = {piece.spelling: number for number, piece in enumerate(pieces)}
    special = [
        {
            "id": number,
            "content": piece.spelling,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, piece in enumerate(pieces)
        if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    pipeline = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": _METASPACE,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [vocabulary["<s>"]], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": _merges(pieces, vocabulary),
        },
    }
    return json.dumps(pipeline, ensure_ascii=False).encode()


def _merges(pieces: list[Piece], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for piece in pieces:
        whole = piece.spelling
        splits = [(whole[:place], whole[place:]) for place in range(1, len(whole))]
        known = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(piece.score, left, right) for left, right in known]
    merges.sort(key=lambda row: (row[0], len(row[1]), len(row[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """A protobuf message's fields: their numbers, and integers or bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, place = _varint(message, place)
            yield number, value
            continue
        length = {_FIXED64: 8, _FIXED32: 4}.get(wire)
        if length is None:
            assert wire == _BYTES, f"wire type {wire}"
            length, place = _varint(message, place)
        yield number, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
