"""The gateway's own account of requests in flight, per engine, in seconds and tokens. One object, one owner.

Work is booked before a request is sent, released at the end of its body, and its prefill counts until the first byte.
An engine prefills in the order of arrival, so the wait is a queue's arithmetic, and it takes three numbers of the
whole queue: the sum of predicted services (`backlog_s`), and of its head the service and since when it runs. The head
runs since it was booked, or since the last first byte or end before it, which corrects all that was predicted behind.

    wait = backlog - head + |head - elapsed|

While the head is within its prediction that is the backlog less what has elapsed. A head that is overdue is expected to
take as long again as it is overdue: a little late is a little slow, and an engine that doesn't answer any more looks
busier every second. A whole answer shows nothing before its end, so its prefill is taken for done when its predicted
service is over.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from directory.members import BOOKED_SERVICE_S_MAX

SERVICE_S_MAX = BOOKED_SERVICE_S_MAX
"""A prediction counts for so much at most: no answer is waited for as long, and sums of seconds stay exact enough."""
RECENT_S = 30.0
"""In what time the memory of what was assigned to an engine fades to a third (1/e)."""
RECENT_S_MIN = 0.01
"""Less than this was long ago, or next to nothing."""
RECENT_ENGINES_MAX = 4096
"""Engines of which that is remembered; those that were given nothing for longest are forgotten first."""


@dataclass(eq=False, slots=True)
class Booking:
    """One request on one engine; the ledger's, not to be changed by others."""

    engine: str
    service_s: float
    new_tokens: int
    held_tokens: int
    starts_at: float
    """Its prefill starts then at the earliest."""
    is_streamed: bool
    is_prefilling: bool = True
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Account:
    """What is booked on an engine, to be joined with other gateways' accounts of it.

    Of the prefills that are outstanding: `backlog_s` is the sum of their services, `head_s` that of the first one, and
    `head_at` when it could start. `free_at` is when the engine last showed that it was done with one. `queued_tokens`
    are still to be computed there (a prompt counts whole until it is done), `active_tokens` are what the prompts of all
    open requests hold of its KV cache; what several have in common is held once.
    """

    backlog_s: float
    head_s: float
    head_at: float
    free_at: float
    prefills: int
    running: int
    queued_tokens: int
    active_tokens: int

    def wait_s(self, now: float, free_at: float = float("-inf")) -> float:
        """Seconds of this work before a new request would start. At `free_at` the engine was done with another's."""
        if not self.prefills:
            return 0.0
        elapsed_s = max(0.0, now - max(self.free_at, self.head_at, free_at))
        return max(0.0, self.backlog_s - self.head_s) + abs(self.head_s - elapsed_s)


IDLE = Account(0.0, 0.0, float("-inf"), float("-inf"), 0, 0, 0, 0)


@dataclass(slots=True)
class _Queue:
    prefills: OrderedDict[Booking, None] = field(default_factory=OrderedDict)
    free_at: float = float("-inf")
    backlog_s: float = 0.0
    running: int = 0
    queued_tokens: int = 0
    active_tokens: int = 0
    account: Account | None = None
    """As it was asked for since the last change; `None` where it wasn't."""


class Ledger:
    """Books, and answers what is ahead of a request. `clock` gives monotonic seconds.

    Nothing here takes longer where more requests are open. `changes` counts what was booked, begun and released;
    `on_change` hears of each.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[str, _Queue] = {}
        self._recent: dict[str, tuple[float, float]] = {}
        self._freed: dict[str, Account] = {}
        self.changes = 0
        self.on_change: Callable[[], None] = lambda: None

    def book(
        self,
        engine: str,
        service_s: float,
        is_streamed: bool = True,
        new_tokens: int = 0,
        held_tokens: int = 0,
        ahead_s: float = 0.0,
    ) -> Booking:
        """Book `service_s` seconds on an engine; call before sending.

        `new_tokens` of the prompt are to be computed, and `held_tokens` take room in the engine's KV cache that wasn't
        taken before. `ahead_s` are the seconds of other gateways' work before it: a whole answer doesn't show when its
        turn came.
        """
        service_s = min(SERVICE_S_MAX, service_s)
        assert service_s >= 0, "no work takes less than no time"
        now = self._clock()
        self._remember(engine, service_s, now)
        starts_at = now if is_streamed else now + ahead_s
        booking = Booking(engine, service_s, new_tokens, held_tokens, starts_at, is_streamed)
        queue = self._queue_of(engine)
        queue.prefills[booking] = None
        queue.backlog_s += service_s
        queue.queued_tokens += new_tokens
        queue.active_tokens += held_tokens
        self._note_change(queue, 1)
        return booking

    def open(self, engine: str) -> Booking:
        """A request that computes nothing there: it counts as open, and for no work."""
        self._note_change(self._queue_of(engine), 1)
        return Booking(engine, 0.0, 0, 0, self._clock(), is_streamed=True, is_prefilling=False)

    def first_byte(self, booking: Booking, is_computed: bool = True) -> None:
        """The prefill is done, or it was refused and won't be (not `is_computed`); repeating it changes nothing.

        A refusal shows nothing of what the engine does for others: its server may say no while its model hangs.
        """
        if booking.is_open and booking.is_prefilling:
            queue, now = self._queues[booking.engine], self._clock()
            _settle(queue, now)
            if booking.is_prefilling:
                if is_computed or _is_head(queue, booking):
                    queue.free_at = max(queue.free_at, now)
                _end_prefill(queue, booking)
            self._note_change(queue)

    def release(self, booking: Booking) -> None:
        """The request is over, however it ended; repeating it changes nothing."""
        if not booking.is_open:
            return
        booking.is_open = False
        queue, now = self._queues[booking.engine], self._clock()
        _settle(queue, now)
        if booking.is_prefilling:
            if _is_head(queue, booking):  # what is behind it begins now
                queue.free_at = max(queue.free_at, now)
            _end_prefill(queue, booking)
        queue.active_tokens -= booking.held_tokens
        self._note_change(queue, -1)
        if not queue.running:
            del self._queues[booking.engine]
            if booking.engine in self._recent:  # another gateway's work may have begun then
                self._freed[booking.engine] = replace(IDLE, free_at=queue.free_at)

    def account(self, engine: str) -> Account:
        """All that is booked on an engine."""
        queue = self._queues.get(engine)
        if queue is None:
            return self._freed.get(engine, IDLE)
        _settle(queue, self._clock())
        if queue.account is None:
            head = next(iter(queue.prefills), None)
            queue.account = Account(
                queue.backlog_s,
                head.service_s if head else 0.0,
                head.starts_at if head else float("-inf"),
                queue.free_at,
                len(queue.prefills),
                queue.running,
                queue.queued_tokens,
                queue.active_tokens,
            )
        return queue.account

    def wait_s(self, engine: str) -> float:
        """Seconds of booked work before a new request on this engine would start."""
        return self.account(engine).wait_s(self._clock())

    def prefills(self, engine: str) -> int:
        """Requests on this engine whose prefill is still to be done, as far as is known."""
        return self.account(engine).prefills

    def running(self, engine: str) -> int:
        """Open requests on this engine."""
        return self.account(engine).running

    def queued_tokens(self, engine: str) -> int:
        """Prompt tokens that this engine has still to compute; the prompt it computes now counts whole."""
        return self.account(engine).queued_tokens

    def active_tokens(self, engine: str) -> int:
        """What the prompts of all open requests hold of this engine's KV cache."""
        return self.account(engine).active_tokens

    def recent_s(self, engine: str) -> float:
        """Seconds of work given to an engine lately, done or not; they fade with `RECENT_S`."""
        seconds, at = self._recent.get(engine, (0.0, 0.0))
        return seconds * math.exp((at - self._clock()) / RECENT_S) if seconds else 0.0

    def recent_engines(self) -> tuple[str, ...]:
        """Engines that were given work lately, as far as it is remembered."""
        return tuple(engine for engine in self._recent if self.recent_s(engine) >= RECENT_S_MIN)

    def engines(self) -> tuple[str, ...]:
        """Engines with open requests."""
        return tuple(self._queues)

    def _queue_of(self, engine: str) -> _Queue:
        if engine not in self._queues:
            self._queues[engine] = _Queue(free_at=self._freed.get(engine, IDLE).free_at)
        return self._queues[engine]

    def _note_change(self, queue: _Queue, opened: int = 0) -> None:
        queue.running += opened
        queue.account = None
        self.changes += 1
        self.on_change()

    def _remember(self, engine: str, service_s: float, now: float) -> None:
        recent_s = self.recent_s(engine) + service_s
        self._recent.pop(engine, None)
        self._recent[engine] = (recent_s, now)
        if len(self._recent) > RECENT_ENGINES_MAX:
            forgotten = next(iter(self._recent))
            del self._recent[forgotten]
            self._freed.pop(forgotten, None)


def _settle(queue: _Queue, now: float) -> None:
    """Take whole answers' prefills for done whose predicted service is over, one after the other."""
    while queue.prefills:
        head = next(iter(queue.prefills))
        end = max(queue.free_at, head.starts_at) + head.service_s
        if head.is_streamed or end > now:
            return
        _end_prefill(queue, head)
        queue.free_at, queue.account = end, None


def _is_head(queue: _Queue, booking: Booking) -> bool:
    return next(iter(queue.prefills)) is booking


def _end_prefill(queue: _Queue, booking: Booking) -> None:
    booking.is_prefilling = False
    del queue.prefills[booking]
    queue.backlog_s = queue.backlog_s - booking.service_s if queue.prefills else 0.0
    queue.queued_tokens -= booking.new_tokens
