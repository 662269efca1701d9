"""What can go wrong in the node agent.

AgentError
├─ TierUnavailable     a tier can't be had as asked (memory, chunk size); the agent lives on without it
│  └─ MemoryShort      the machine has the memory, but others hold it now: worth asking again
├─ ChunkCorrupt        a chunk's bytes or header aren't what they should be: a miss, and the copy goes
│  └─ ChunkForeign     written by another version, or encrypted with a key that isn't here
├─ DriveAway           a drive is in quarantine, or too much waits for it: a miss, and nothing is wrong with its chunks
├─ ChunkConflict       other bytes are stored under the key already; the new ones are refused
├─ BudgetSpent         a drive may not be written any more for now: its endurance budget is used up
├─ PinsFull            more keys would be pinned than can be
├─ DoorUnavailable     the door's socket can't be opened: a live agent listens there, or the path isn't usable
├─ DoorProtocolError   what came through the door isn't a message; the connection is closed, the agent lives
└─ HelloRefused        an engine's description that must not be registered; its connection is told why
"""


class AgentError(Exception):
    """Base of everything the node agent raises."""


class TierUnavailable(AgentError):
    """A tier can't be had as asked; the message says what was asked and what there is."""


class MemoryShort(TierUnavailable):
    """Memory that this machine has is held by others at the moment."""


class ChunkCorrupt(AgentError):
    """A copy of a chunk that must not be used; the message says what is wrong with it."""


class ChunkForeign(ChunkCorrupt):
    """A chunk's file that this agent can't read, though nothing is wrong with it."""


class ChunkConflict(AgentError):
    """A chunk's key is taken by other bytes."""


class DriveAway(AgentError):
    """A drive that can't be asked now; the message says why."""


class BudgetSpent(AgentError):
    """A drive's endurance budget doesn't hold the bytes of a write; nothing was written."""


class PinsFull(AgentError):
    """No more keys can be pinned; the message says how many can."""


class DoorUnavailable(AgentError):
    """The door can't be opened at its path; the message says why."""


class DoorProtocolError(AgentError):
    """Bytes at the door that aren't a message of this version."""


class HelloRefused(AgentError):
    """An engine that must not be attached; the message is what the engine is told."""
