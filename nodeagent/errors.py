"""What can go wrong in the node agent.

AgentError
├─ TierUnavailable     a tier can't be had as asked (memory, chunk size); the agent lives on without it
├─ DoorUnavailable     the door's socket can't be opened: a live agent listens there, or the path isn't usable
├─ DoorProtocolError   what came through the door isn't a message; the connection is closed, the agent lives
└─ HelloRefused        an engine's description that must not be registered; its connection is told why
"""


class AgentError(Exception):
    """Base of everything the node agent raises."""


class TierUnavailable(AgentError):
    """A tier can't be had as asked; the message says what was asked and what there is."""


class DoorUnavailable(AgentError):
    """The door can't be opened at its path; the message says why."""


class DoorProtocolError(AgentError):
    """Bytes at the door that aren't a message of this version."""


class HelloRefused(AgentError):
    """An engine that must not be attached; the message is what the engine is told."""
