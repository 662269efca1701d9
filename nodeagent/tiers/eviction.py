"""Which chunks go first. Pure: no clock, no I/O.

Least recently used, with one rule more: touching a chunk touches its known ancestors *after* it, so that the walk of
a hit ends at the root. A parent is then never older than its child, chains are eaten from their leaves, and matched
prefixes stay unbroken, without any list of children. A touch costs as many steps as the chain is long.

A chunk that is held (referenced) when its turn comes is skipped, and that counts as a touch: it is in use, and its
ancestors shouldn't go before it. They do where nothing else is left, or one held leaf would keep a whole tier full.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Keeps chunks in the order in which they should go."""

    def add(self, key: bytes, parent: bytes | None, position: int) -> None:
        """A chunk was stored; it is new, or replaces itself."""
        ...

    def add_oldest(self, key: bytes, parent: bytes | None, position: int) -> None:
        """A chunk from before was found, or is put in its place: it goes before all others."""
        ...

    def touch(self, key: bytes) -> None:
        """A chunk was used, and with it its ancestors. An unknown key is ignored."""
        ...

    def remove(self, key: bytes) -> None:
        """A chunk is gone. An unknown key is ignored."""
        ...

    def take_victims(self, count: int, is_held: Callable[[bytes], bool]) -> list[bytes]:
        """Up to `count` chunks that should go, oldest first; they are removed. Held ones are left."""
        ...

    def newest_first(self) -> Iterator[bytes]:
        """All keys, most recently used first."""
        ...

    def oldest_first(self) -> Iterator[bytes]:
        """All keys in the order in which they should go, held or not."""
        ...


_Link = tuple[bytes | None, int]
"""Parent and position. The garbage collector stops looking at plain tuples of such, and at no others."""


class Lru:
    """Least recently used, ancestors touched last."""

    def __init__(self) -> None:
        self._links: OrderedDict[bytes, _Link] = OrderedDict()

    def add(self, key: bytes, parent: bytes | None, position: int) -> None:
        """See `EvictionPolicy`."""
        self._links[key] = (parent, position)
        self.touch(key)

    def add_oldest(self, key: bytes, parent: bytes | None, position: int) -> None:
        """See `EvictionPolicy`."""
        self._links[key] = (parent, position)
        self._links.move_to_end(key, last=False)

    def touch(self, key: bytes) -> None:
        """See `EvictionPolicy`. The walk ends where positions don't fall by one: so it ends, whatever was claimed."""
        link = self._links.get(key)
        while link is not None:
            self._links.move_to_end(key)
            parent, position = link
            if parent is None:
                return
            key, above = parent, self._links.get(parent)
            link = above if above is not None and above[1] == position - 1 else None

    def remove(self, key: bytes) -> None:
        """See `EvictionPolicy`."""
        self._links.pop(key, None)

    def take_victims(self, count: int, is_held: Callable[[bytes], bool]) -> list[bytes]:
        """See `EvictionPolicy`. Skips each held chunk once: when one comes up again, all that is left is above it."""
        victims: list[bytes] = []
        skipped: set[bytes] = set()
        while self._links and len(victims) < count:
            oldest = next(iter(self._links))
            if oldest in skipped:
                return victims or self._take_above_held(is_held)
            if is_held(oldest):
                skipped.add(oldest)
                self.touch(oldest)
            else:
                del self._links[oldest]
                victims.append(oldest)
        return victims

    def _take_above_held(self, is_held: Callable[[bytes], bool]) -> list[bytes]:
        """When nothing else is left: the deepest ancestor that isn't held itself, rather than nothing."""
        victim = next((key for key in self._links if not is_held(key)), None)
        if victim is None:
            return []
        del self._links[victim]
        return [victim]

    def newest_first(self) -> Iterator[bytes]:
        """See `EvictionPolicy`."""
        return reversed(self._links)

    def oldest_first(self) -> Iterator[bytes]:
        """See `EvictionPolicy`."""
        return iter(self._links)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}
