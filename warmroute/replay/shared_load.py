"""What gateways know of each other's load: each adds what the others have last published, as it must be by now."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one gateway has open on one engine: seconds of work booked, requests, and tokens."""

    wait_s: float = 0.0
    prefills: int = 0
    running: int = 0
    queued_tokens: int = 0
    active_tokens: int = 0


class OthersLoad:
    """The newest that each other gateway said. Booked seconds fall as time passes, the rest stays."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[float, Mapping[str, EngineLoad]]] = {}

    def hear(self, gateway: int, said_at: float, load: Mapping[str, EngineLoad]) -> None:
        """A gateway's load as of `said_at`, instead of what it said before."""
        self._said[gateway] = said_at, load

    def add_to(self, own: EngineLoad, engine: str, now: float) -> EngineLoad:
        """An engine's load, the others' added."""
        for said_at, load in self._said.values():
            other = load.get(engine)
            if other is not None:
                own = EngineLoad(
                    own.wait_s + max(0.0, other.wait_s - (now - said_at)),
                    own.prefills + other.prefills,
                    own.running + other.running,
                    own.queued_tokens + other.queued_tokens,
                    own.active_tokens + other.active_tokens,
                )
        return own
