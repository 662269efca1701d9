"""ApproxTree: which prefixes were sent to which engine, as a router believes that hears nothing from engines."""

from collections import OrderedDict
from collections.abc import Sequence

CHUNKS_MAX = 32_768
"""Chunks remembered for each engine: SGLang's 2**26 characters, at four a token and 512 tokens a chunk."""


class ApproxTree:
    """For each engine the chunk keys of prompts sent to it; those that weren't sent for longest are forgotten first.

    A key names all before it, so a set of keys is a tree. A prompt's first chunk is remembered last: leaves go first.
    """

    def __init__(self, chunks_max: int = CHUNKS_MAX) -> None:
        self._chunks_max = chunks_max
        self._keys: dict[str, OrderedDict[bytes, None]] = {}

    def insert(self, engine: str, keys: Sequence[bytes]) -> None:
        """A prompt with these chunk keys was sent to `engine`."""
        held = self._keys.setdefault(engine, OrderedDict())
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._chunks_max:
            held.popitem(last=False)

    def match(self, engine: str, keys: Sequence[bytes]) -> int:
        """How many leading chunks were sent to `engine`."""
        held = self._keys.get(engine)
        if not held:
            return 0
        return next((position for position, key in enumerate(keys) if key not in held), len(keys))

    def size(self, engine: str) -> int:
        """Chunks remembered for `engine`."""
        return len(self._keys.get(engine, ()))
