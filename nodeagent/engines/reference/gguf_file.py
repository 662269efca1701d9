"""Reads a GGUF file of a Llama-type model: its settings, vocabulary, chat template and weights.

The container is parsed here, in one pass over a map of the file: the gguf package's reader builds several arrays for
each of a vocabulary's strings and takes seconds. The package decodes the quantised tensors. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import hashlib
import mmap
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from nodeagent.engines.reference.errors import ModelFileError

Weights = NDArray[np.float32]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_BYTES_DEFAULT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DIGEST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    """Where a tensor lies: its shape (rows first), its quantisation, and its bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    length: int


class GgufFile:
    """An open model file. Raises `ModelFileError` where it is none; close it when the weights are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise ModelFileError(f"{path} is not a GGUF model file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"the model file {path} can't be read: {error.strerror}") from error
        try:
            self.fields, self._tensors = _Parser(self._map).parse()
        except (struct.error, ValueError, KeyError, IndexError, OverflowError, MemoryError, RecursionError) as error:
            self._map.close()
            raise ModelFileError(f"{path} is not a readable GGUF model file (damaged, or cut short)") from error

    def close(self) -> None:
        """Release the file; arrays that were read stay valid."""
        self._map.close()

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def field(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """A setting that must be there and of that type, else `ModelFileError`."""
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise ModelFileError(f"{self.path} has no usable {name}: it is not a Llama-type model with a tokenizer")
        return value

    @property
    def tensor_names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._tensors)

    def tensors(self, threads: int) -> dict[str, Weights]:
        """All tensors as float32, rows first, decoded by that many threads."""
        with ThreadPoolExecutor(max(1, threads)) as pool:
            return dict(zip(self._tensors, pool.map(self._decode, self._tensors), strict=True))

    def _decode(self, name: str) -> Weights:
        place = self._tensors[name]
        raw = np.frombuffer(self._map, np.uint8, place.length, place.start)
        try:
            if place.kind == GGMLQuantizationType.F32:
                return raw.view(np.float32).reshape(place.shape).copy()
            decoded = dequantize(raw.reshape(*place.shape[:-1], -1), place.kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelFileError(f"{self.path} holds {name} as {place.kind.name}, which can't be decoded") from error
        return np.ascontiguousarray(decoded, dtype=np.float32).reshape(place.shape)


def content_sha256(path: Path) -> str:
    """sha256 of a file's content, hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_DIGEST_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


class _Parser:
    """One pass over the header. Anything out of bounds ends in one of the exceptions `GgufFile` translates."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def parse(self) -> tuple[dict[str, Any], dict[str, _TensorPlace]]:
        if self._scalar("I") not in _VERSIONS:
            raise ValueError("unknown version")
        tensor_count, field_count = self._scalar("Q"), self._scalar("Q")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self._string()
            fields[name] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", _ALIGNMENT_BYTES_DEFAULT)
        base = -(-self._at // alignment) * alignment
        tensors = {name: self._place(shape, kind, base + offset) for name, shape, kind, offset in entries}
        return fields, tensors

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._at + length
        if end > len(self._data):
            raise ValueError("a string reaches past the end")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = list(layout.unpack_from(self._data, self._at))
        self._at += layout.size
        return values

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
        return name, shape[::-1], GGMLQuantizationType(self._scalar("I")), self._scalar("Q")

    def _place(self, shape: tuple[int, ...], kind: GGMLQuantizationType, start: int) -> _TensorPlace:
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for size in shape:
            elements *= size
        length = elements // block_elements * block_bytes
        if not shape or shape[-1] % block_elements or start + length > len(self._data):
            raise ValueError("a tensor reaches past the end")
        return _TensorPlace(shape, kind, start, length)
