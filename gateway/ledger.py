"""The gateway's own account of requests in flight, per engine, in seconds. One object, one owner.

Work is booked before a request is sent, released at the end of its body, and its prefill counts until the first byte.
The wait on an engine is a queue's arithmetic: each outstanding request starts when the one before it is done, and
takes its predicted service; every first byte corrects the prediction for those behind. A whole answer shows nothing
before its end, so its prefill is taken for done when its predicted service is over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Booking:
    """One request on one engine; the ledger's, not to be changed by others."""

    engine: str
    service_s: float
    booked_at: float
    is_streamed: bool
    is_prefilling: bool = True
    is_open: bool = True


@dataclass(slots=True)
class _Account:
    bookings: list[Booking] = field(default_factory=list)
    last_first_byte_at: float = float("-inf")


class Ledger:
    """Books, and answers what is ahead of a request. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def book(self, engine: str, service_s: float, is_streamed: bool = True) -> Booking:
        """Book `service_s` seconds on an engine; call before sending."""
        booking = Booking(engine, service_s, self._clock(), is_streamed)
        self._accounts.setdefault(engine, _Account()).bookings.append(booking)
        return booking

    def first_byte(self, booking: Booking) -> None:
        """The prefill is done; repeating it changes nothing."""
        if booking.is_open and booking.is_prefilling:
            booking.is_prefilling = False
            account = self._accounts[booking.engine]
            account.last_first_byte_at = max(account.last_first_byte_at, self._clock())

    def release(self, booking: Booking) -> None:
        """The request is over, however it ended; repeating it changes nothing."""
        if not booking.is_open:
            return
        booking.is_open = False
        account = self._accounts[booking.engine]
        account.bookings.remove(booking)
        if not account.bookings:
            del self._accounts[booking.engine]

    def wait_s(self, engine: str) -> float:
        """Seconds of booked work before a new request on this engine would start."""
        ends = [end for _, end in self._prefill_ends(engine)]
        account = self._accounts.get(engine)
        free_at = max(ends, default=account.last_first_byte_at if account else 0.0)
        return max(0.0, free_at - self._clock())

    def prefills(self, engine: str) -> int:
        """Requests on this engine whose prefill is still to be done, as far as is known."""
        now = self._clock()
        return sum(booking.is_streamed or end > now for booking, end in self._prefill_ends(engine))

    def _prefill_ends(self, engine: str) -> Iterator[tuple[Booking, float]]:
        """Each outstanding prefill, in order, and when it is expected to end."""
        account = self._accounts.get(engine)
        if account is None:
            return
        free_at = account.last_first_byte_at
        for booking in account.bookings:
            if booking.is_prefilling:
                free_at = max(free_at, booking.booked_at) + booking.service_s
                yield booking, free_at

    def running(self, engine: str) -> int:
        """Open requests on this engine."""
        account = self._accounts.get(engine)
        return len(account.bookings) if account else 0

    def engines(self) -> tuple[str, ...]:
        """Engines with open requests."""
        return tuple(self._accounts)
