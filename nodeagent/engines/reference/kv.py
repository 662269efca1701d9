"""The keys and values of one sequence, and the chunks that are cut from it and put into it."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_GROWTH_TOKENS = 512


class KvSequence:
    """KV of a sequence: float32 [layers, 2, kv_heads, capacity, head_dim], of which `length` tokens are valid.

    A head's keys lie together, row by row, so growing changes no stride that a matrix product sees.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity_tokens: int) -> None:
        self._data = np.empty((layers, 2, kv_heads, capacity_tokens, head_dim), np.float32)
        self.length = 0

    @property
    def capacity_tokens(self) -> int:
        """How many tokens fit before the buffer grows."""
        return int(self._data.shape[3])

    def reserve(self, tokens: int) -> None:
        """Make room for that many tokens in all."""
        if tokens <= self.capacity_tokens:
            return
        layers, two, kv_heads, _, head_dim = self._data.shape
        grown = np.empty((layers, two, kv_heads, tokens + _GROWTH_TOKENS, head_dim), np.float32)
        grown[:, :, :, : self.length] = self._data[:, :, :, : self.length]
        self._data = grown

    def write(self, layer: int, position: int, keys: Floats, values: Floats) -> None:
        """Write one layer's keys and values, each [count, kv_heads, head_dim], from `position` on.

        The caller moves `length` once, when all layers are written. Threads may write different positions.
        """
        end = position + len(keys)
        self._data[layer, 0, :, position:end] = keys.transpose(1, 0, 2)
        self._data[layer, 1, :, position:end] = values.transpose(1, 0, 2)

    def keys(self, layer: int, head: int, tokens: int) -> Floats:
        """A view of one head's first keys: [tokens, head_dim]."""
        return self._data[layer, 0, head, :tokens]

    def values(self, layer: int, head: int, tokens: int) -> Floats:
        """A view of one head's first values: [tokens, head_dim]."""
        return self._data[layer, 1, head, :tokens]

    def export_tokens(self, start: int, end: int) -> Floats:
        """A contiguous copy of the KV of tokens start..end: a chunk's payload."""
        assert 0 <= start < end <= self.length, "only computed tokens can be exported"
        return np.array(self._data[:, :, :, start:end], order="C")

    def import_tokens(self, payload: Floats) -> None:
        """Take a chunk's payload as the KV of the next tokens."""
        end = self.length + payload.shape[3]
        self.reserve(end)
        self._data[:, :, :, self.length : end] = payload
        self.length = end

    def empty_payload(self, tokens: int) -> Floats:
        """An array in the form of a chunk's payload, its contents undefined."""
        layers, two, kv_heads, _, head_dim = self._data.shape
        return np.empty((layers, two, kv_heads, tokens, head_dim), np.float32)
