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
├─ ChunkForgotten      a chunk that was forgotten while it was being written: nothing of it is kept
├─ TombstonesFull      more would have to be remembered of what is forgotten than can be; nothing was forgotten
├─ TombstonesUnreadable  what a place says of what was forgotten can't be believed; its chunks aren't used
├─ ForgetRefused       a request to forget that doesn't say what; nothing was forgotten
├─ ForgetBusy          too many wait to have something forgotten; to be tried again
├─ HintRefused         a body that is no hint; the message names the field
├─ PeersUnavailable    the place at which other hosts' agents would ask can't be had, or its certificate can't
├─ PeerError           another host's agent didn't bring a chunk: only the hint is lost
│  ├─ PeerUnreachable     no connection, or it ended, or nothing came for too long
│  ├─ PeerRefused         one side doesn't know the fleet's token, or speaks another version
│  └─ PeerBadBytes        what came isn't a message, or isn't what was asked for; counted against that peer
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


class ChunkForgotten(AgentError):
    """A chunk that was forgotten meanwhile."""


class TombstonesFull(AgentError):
    """No more can be remembered of what is forgotten; the message says what would do."""


class TombstonesUnreadable(AgentError):
    """Tombstones that aren't what they should be; the message says why."""


class ForgetRefused(AgentError):
    """A request to forget that can't be followed; the message says what would be right."""


class ForgetBusy(AgentError):
    """Too many requests to forget are under way."""


class HintRefused(AgentError):
    """A body that isn't a hint to prefetch; the message names the field."""


class PeersUnavailable(AgentError):
    """This host's place for other hosts' agents can't be opened as it is configured; the message says why."""


class PeerError(AgentError):
    """A conversation with another host's agent that has ended before its time."""


class PeerUnreachable(PeerError):
    """The other agent can't be reached, or has said nothing for too long."""


class PeerRefused(PeerError):
    """The two agents have no token, or no version, in common."""


class PeerBadBytes(PeerError):
    """The other agent sent what no sound agent sends."""


class DoorUnavailable(AgentError):
    """The door can't be opened at its path; the message says why."""


class DoorProtocolError(AgentError):
    """Bytes at the door that aren't a message of this version."""


class HelloRefused(AgentError):
    """An engine that must not be attached; the message is what the engine is told."""
