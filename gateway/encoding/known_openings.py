"""How prompts began that were encoded before, and the ids of that: a conversation's next turn isn't cut up again.

A trie of blocks of `BLOCK_CHARS` characters. A block says up to which place its text and that of the blocks before it
are known, and the ids since the place before: the last safe place (`gateway.encoding.cuts`) whose next character lies
within the block still, since what makes a place safe are its neighbours alone. So ids(text) = ids(text[:place]), then
those of the rest, for every text that begins with these blocks. Keys are the very texts, so no two can be taken for
each other.

Two generations, as in `PieceCache`; a path that is asked for goes over into the young one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Self

BLOCK_CHARS = 2048
BLOCK_BYTES = 400
"""About what a block costs beside its text and its ids."""


@dataclass(slots=True)
class _Block:
    """`place` counts characters from the text's start; `following` are the blocks that came after this one, by text."""

    place: int
    ids: bytes
    following: "dict[str, Self]" = field(default_factory=dict)


@dataclass(slots=True)
class Opening:
    """What `known` has of how a text begins: the ids of its first `place` characters, in parts."""

    known: "KnownOpenings | None" = None
    place: int = 0
    parts: list[bytes] = field(default_factory=list)
    blocks: list[tuple[str, _Block]] = field(default_factory=list)
    is_young: bool = True

    def go_on(self, text: str, stretches: Iterable[tuple[int, bytes]]) -> None:
        """Keep how `text` goes on after this: `stretches`, each with the place of its end, a safe one, and its ids."""
        if self.known is not None:
            self.known.learn(text, self, stretches)


class KnownOpenings:
    """For several threads, of which one learns."""

    def __init__(self, bytes_max: int, block_chars: int = BLOCK_CHARS) -> None:
        self._generation_bytes_max, self._block_chars = bytes_max // 2, block_chars
        self._young: dict[str, _Block] = {}
        self._old: dict[str, _Block] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def bytes_used(self) -> int:
        """What its blocks take, about."""
        return self._young_bytes + self._old_bytes

    def find(self, text: str) -> Opening:
        """The longest opening of `text` that is known."""
        found = self._walk(self._young, text)
        if self._old and len(found.blocks) < len(text) // self._block_chars:
            older = self._walk(self._old, text)
            if older.place > found.place:
                older.is_young = False
                return older
        return found

    def nothing(self) -> Opening:
        """That of a text of which nothing is known, or of which all is to be learned anew."""
        return Opening(self)

    def _walk(self, following: dict[str, _Block], text: str) -> Opening:
        opening, block_chars, start = Opening(self), self._block_chars, 0
        parts, blocks = opening.parts, opening.blocks
        while (block := following.get(chars := text[start : start + block_chars])) is not None:
            parts.append(block.ids)
            blocks.append((chars, block))
            following = block.following
            start += block_chars
        opening.place = blocks[-1][1].place if blocks else 0
        return opening

    def learn(self, text: str, opening: Opening, stretches: Iterable[tuple[int, bytes]]) -> None:
        """See `Opening.go_on`."""
        following = self._following(opening)
        place, ids = opening.place, list[bytes]()
        start, more = len(opening.blocks) * self._block_chars, iter(stretches)
        end, found = next(more, (0, b""))
        while following is not None and end and start + self._block_chars <= len(text):
            after = start + self._block_chars
            while 0 < end < after:
                place = end
                ids.append(found)
                end, found = next(more, (0, b""))
            following = self._keep(following, text[start:after], place, b"".join(ids))
            ids.clear()
            start = after

    def _following(self, opening: Opening) -> dict[str, _Block] | None:
        """Where blocks after this opening belong, in the young generation; its own go over if they aren't there."""
        if opening.is_young:
            return opening.blocks[-1][1].following if opening.blocks else self._young
        following: dict[str, _Block] | None = self._young
        for chars, block in opening.blocks:
            if following is not None:
                following = self._keep(following, chars, block.place, block.ids)
        return following

    def _keep(self, following: dict[str, _Block], chars: str, place: int, ids: bytes) -> dict[str, _Block] | None:
        """Where the blocks after this one belong; `None` where it is known by another place, from which their ids don't
        go on.
        """
        if (there := following.get(chars)) is not None:
            return there.following if there.place == place else None
        block = following[chars] = _Block(place, ids)
        self._young_bytes += getsizeof(chars) + getsizeof(ids) + BLOCK_BYTES
        if self._young_bytes > self._generation_bytes_max:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        return block.following
