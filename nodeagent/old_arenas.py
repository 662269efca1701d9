"""The arenas of connections that were lost: kept for chunks that are still open, but not for long.

While its agent lives, a lost connection comes back within a moment, and chunks that were opened before stay readable.
An agent that is gone for good leaves memory that only its engines' maps still hold, all of it for one open chunk; and
its successor needs that memory. So an arena that isn't met again within `OLD_ARENA_S` is unmapped, and what is still
open in it becomes a miss. Where nothing is open, nobody refers to it, and it went at once.
"""

import weakref
from dataclasses import dataclass

from nodeagent.arena_map import ArenaMap

OLD_ARENA_S = 3.0
COPY_WAIT_S = 0.05
"""When an arena from which bytes are just being copied is looked at again."""


@dataclass(frozen=True, slots=True)
class _OldArena:
    life: bytes
    arena: weakref.ref[ArenaMap]
    due_at: float


class OldArenas:
    """Belongs to the client's thread. `now` is in monotonic seconds; a life names a run of the agent."""

    def __init__(self) -> None:
        self._arenas: list[_OldArena] = []

    def add(self, life: bytes, arena: ArenaMap, now: float) -> None:
        """The connection that brought this arena is lost."""
        self._arenas.append(_OldArena(life, weakref.ref(arena), now + OLD_ARENA_S))

    def keep(self, life: bytes) -> None:
        """This run of the agent lives: what was opened in its arena goes on to be held."""
        self._arenas = [each for each in self._arenas if each.life != life]

    def let_go(self, now: float) -> float | None:
        """Unmap what is due. Returns after how many seconds to ask again; `None` where nothing is left."""
        left, waits = [], []
        for each in self._arenas:
            arena = each.arena()
            if arena is None or (now >= each.due_at and arena.close()):
                continue
            left.append(each)
            waits.append(max(each.due_at - now, COPY_WAIT_S))
        self._arenas = left
        return min(waits, default=None)
