"""What this agent knows of another host's: how fast it is, how well it behaves, and what is asked of it."""

import logging
from dataclasses import dataclass, field

from nodeagent.hints import PeerAddress
from nodeagent.peers.connection import PeerConnection
from nodeagent.peers.peer_rate import PeerRate
from nodeagent.peers.worth import PeerEstimate

BAD_ANSWERS_MAX = 3
LEFT_ALONE_S = 60.0
"""How long a peer is left alone after so many bad answers, or one that refused this agent."""
UNREACHABLE_S = 5.0
"""How long one is left alone that can't be reached."""
FIRST_BYTE_WEIGHT = 0.2
IDLE_MAX_S = 20.0
"""How long a connection is kept that nobody uses."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Wish:
    """A chunk that hints named and that is to be fetched. `askers` counts hints less those that were cancelled."""

    directory_key: bytes
    peer: "Peer"
    made_at_s: float
    askers: int = 1


@dataclass(eq=False, slots=True)
class Peer:
    """One other agent. Moments are monotonic seconds."""

    address: PeerAddress
    rate: PeerRate = field(default_factory=PeerRate)
    first_byte_s: float = 0.0
    measured_at_s: float | None = None
    probed_at_s: float | None = None
    bad_answers: int = 0
    left_alone_until_s: float = 0.0
    waiting: dict[bytes, Wish] = field(default_factory=dict)
    fetching: int = 0
    _idle: list[tuple[float, PeerConnection]] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        """Whether anything is asked of it."""
        return bool(self.waiting) or self.fetching > 0

    def estimate(self) -> PeerEstimate:
        """What a decision needs."""
        return PeerEstimate(self.rate.bytes_per_s, self.first_byte_s, self.probed_at_s)

    def note_first_byte(self, seconds: float) -> None:
        """An answer began so long after its question."""
        weight = FIRST_BYTE_WEIGHT if self.first_byte_s else 1.0
        self.first_byte_s += weight * (seconds - self.first_byte_s)

    def note_bad_answer(self, now_s: float) -> None:
        """It sent what isn't a chunk, or not the one asked for."""
        self.bad_answers += 1
        if self.bad_answers >= BAD_ANSWERS_MAX:
            self.bad_answers = 0
            self.leave_alone(now_s, LEFT_ALONE_S)
            logger.warning(
                "peer %s has sent %d bad answers; it is left alone for %g s",
                self.address,
                BAD_ANSWERS_MAX,
                LEFT_ALONE_S,
            )

    def leave_alone(self, now_s: float, seconds: float) -> None:
        """Ask nothing of it for so long."""
        self.left_alone_until_s = max(self.left_alone_until_s, now_s + seconds)
        self.close_idle()

    @property
    def has_idle(self) -> bool:
        """Whether there is a connection that nobody uses."""
        return bool(self._idle)

    def take_idle(self) -> PeerConnection | None:
        """A connection that nobody uses, the one used last."""
        return self._idle.pop()[1] if self._idle else None

    def give_idle(self, connection: PeerConnection, now_s: float) -> None:
        """A connection that is in good order, for the next who needs one."""
        self._idle.append((now_s, connection))

    def close_idle(self, before_s: float | None = None) -> None:
        """Close connections that weren't used since, or all."""
        for each in [each for each in self._idle if before_s is None or each[0] < before_s]:
            self._idle.remove(each)
            each[1].close()
