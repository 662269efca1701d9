"""The answer to one request: parsed as it comes, kept until it is read.

It is complete when HTTP says so: after a length, after a last chunk, at once where there is no body, or with the end of
the connection where nothing else is said. What comes before the final head (1xx) and behind the last chunk (trailers)
is left out.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import httptools

from gateway.upstream_http.errors import AnswerTimedOut, ConnectionBroken, ExchangeFailed, NotHttp

HEAD_BYTES_MAX = 128 * 1024
"""Of a head, and of all else that comes without a byte of the body: chunk extensions, trailers, 1xx. Such bytes are
looked at after each read, so the last one may exceed it."""
BODY_BYTES_WAITING_MAX = 128 * 1024
"""Beyond this nothing more is read until somebody takes what there is. The last read may exceed it."""
BODILESS = frozenset({204, 304})
CODINGS = frozenset({b"chunked", b"identity"})
"""Transfer codings that leave a body as it was meant."""


class Line(Protocol):
    """What an exchange asks of its connection."""

    is_held: bool

    def wake_at(self, deadline: float) -> None:
        """See to it that `deadline` is looked at when it is there (the loop's time)."""

    def resume(self) -> None:
        """Read on."""

    def abort(self) -> None:
        """Close the connection at once."""


class Exchange:
    """One answer. Close it, whatever happens. Only one may wait at a time.

    The methods whose names begin with `on_` are httptools'; `feed`, `finish` and `fail` are the connection's.
    """

    __slots__ = (
        "_head_bytes",
        "_is_bodiless",
        "_line",
        "_loop",
        "_parser",
        "_pieces",
        "_quiet_bytes",
        "_taker",
        "_taker_timeout_s",
        "_waiter",
        "deadline",
        "failure",
        "has_received",
        "headers",
        "is_clean",
        "is_end_told",
        "is_head_there",
        "is_over",
        "status",
        "waiting_bytes",
    )

    def __init__(self, line: Line, loop: asyncio.AbstractEventLoop, is_bodiless: bool = False) -> None:
        self._line, self._loop, self._is_bodiless = line, loop, is_bodiless
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """As they came, without the whitespace around the values."""
        self.is_head_there = False
        self.is_end_told = False
        """Whether HTTP says where the body ends; else it ends with the connection, whyever that ends."""
        self.is_over = False
        self.is_clean = False
        """Once it is over: whether another request may follow on the connection."""
        self.has_received = False
        """Whether a byte came, of whatever kind."""
        self.failure: ExchangeFailed | None = None
        self.waiting_bytes = 0
        self.deadline = math.inf
        """Until when somebody waits; looked at by the connection."""
        self._pieces: list[bytes] = []
        self._head_bytes = self._quiet_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Callable[[bytes], bool] | None = None
        self._taker_timeout_s = math.inf
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        # What doesn't change where an answer ends is accepted, as other clients do: control characters in values,
        # lines without CR, spaces behind a chunk's size.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )

    async def head(self, deadline: float) -> None:
        """Wait for the final head: then there are `status` and `headers`. Raises `ExchangeFailed`."""
        while not self.is_head_there:
            self._raise_failure()
            await self.wait(deadline)

    async def read(self, timeout_s: float) -> bytes:
        """What has come of the body since the last call, waited for if nothing has; nothing at its end.

        Raises `ExchangeFailed` where it breaks off, after all that came before.
        """
        if not self._pieces and not self.is_over:
            deadline = self._loop.time() + timeout_s
            while not self._pieces and not self.is_over:
                self._raise_failure()
                await self.wait(deadline)
        return self._take()

    async def pass_to(self, take: Callable[[bytes], bool], timeout_s: float) -> bool:
        """Give what comes of the body to `take` at the moment when it comes; whether the body is at its end.

        This ends sooner where `take` says false: it has taken that piece, and doesn't want more yet. No task is woken
        for a piece, which costs more than to pass it on. `timeout_s` is for each. Raises `ExchangeFailed`, as `read`.
        """
        while True:
            if self._pieces and not take(self._take()):
                return False
            if self.is_over:
                return True
            self._raise_failure()
            self._taker, self._taker_timeout_s = take, timeout_s
            try:
                await self.wait(self._loop.time() + timeout_s)
            finally:
                wants_more, self._taker = self._taker is not None, None
            if not wants_more:
                return False

    async def wait(self, deadline: float) -> None:
        """Wait until anything has changed. Failures, and the deadline's passing, are changes."""
        assert self._waiter is None, "one waits at a time"
        waiter = self._waiter = self._loop.create_future()
        self.deadline = deadline
        self._line.wake_at(deadline)
        try:
            await waiter
        finally:
            self._waiter, self.deadline = None, math.inf

    def close(self) -> None:
        """Leave it: if it isn't over, the connection is closed at once."""
        if not self.is_over:
            self.fail(ConnectionBroken("it was left"))
            self._line.abort()

    def feed(self, data: bytes) -> None:
        """Parse what came."""
        assert self._parser is not None, "it goes on"
        self.has_received = True
        self._quiet_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.is_clean = False
            kind = ConnectionBroken if self.is_head_there else NotHttp
            self.fail(kind(f"its answer breaks HTTP's rules: {error}"))
        if self._quiet_bytes > HEAD_BYTES_MAX:
            self.fail(NotHttp(f"more than {HEAD_BYTES_MAX} bytes of an answer without its body"))
        if self.is_over or self.failure is not None:
            self._parser = None
        if self._taker is None or not self._pass_on(self._taker):
            self.wake()

    def finish(self) -> None:
        """The connection has ended: so has the body, if nothing else ends it; else this is a failure."""
        if self.is_head_there and not self.is_end_told:
            self._end()
        else:
            self.fail(ConnectionBroken("closed before the end of its answer" if self.has_received else "closed"))
        self._parser = None
        self.wake()

    def fail(self, failure: ExchangeFailed) -> None:
        """It breaks off; what is over stays so."""
        if not self.is_over and self.failure is None:
            self.failure, self._parser = failure, None
        self.wake()

    def look_at_clock(self, now: float) -> bool:
        """Fail if the deadline has passed; whether it has."""
        if now < self.deadline:
            return False
        self.fail(AnswerTimedOut("was too slow"))
        return True

    def wake(self) -> None:
        """Let the one who waits look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_message_begin(self) -> None:
        """An answer begins; behind the end of this one it is somebody else's, or garbage."""
        if self.is_over:
            self.is_clean = False
        self.headers = self.headers if self.is_head_there else []

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if self.is_head_there:
            return
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            self.fail(NotHttp(f"a head of more than {HEAD_BYTES_MAX} bytes"))
        if b"\0" in value:  # RFC 9110, 5.5
            self.fail(NotHttp("its answer has a header with a NUL"))
        self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """A head is there: the final one, unless it is a 1xx other than 101, after which nothing else follows."""
        if self.is_head_there or self.failure is not None or self._parser is None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            return
        if not self._parser.get_http_version().startswith("1."):
            self.fail(NotHttp("its answer isn't HTTP/1"))
            return
        if not self._reads_framing(status):
            self.fail(NotHttp("its answer has a transfer coding that nobody asked for"))
            return
        self.status, self.is_head_there, self._quiet_bytes = status, True, 0
        if self._is_bodiless:
            self.is_clean = self._parser.should_keep_alive()
            self._end()

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        if self.is_over or self.failure is not None:
            self.is_clean = False
            return
        self._pieces.append(piece)
        self.waiting_bytes += len(piece)
        self._quiet_bytes = 0

    def on_message_complete(self) -> None:
        """The end of an answer, or of a 1xx."""
        if self.is_head_there and not self.is_over and self.failure is None and self._parser is not None:
            self.is_clean = self._parser.should_keep_alive()
            self._end()

    def _reads_framing(self, status: int) -> bool:
        """Note whether the end will be told; false where the body isn't what it would be taken for."""
        self.is_end_told = self._is_bodiless or status in BODILESS
        for name, value in self.headers:
            lower = name.lower()
            if lower == b"content-length":
                self.is_end_told = True
            elif lower == b"transfer-encoding":
                if value.lower() not in CODINGS:
                    return False
                self.is_end_told |= value.lower() == b"chunked"
        return True

    def _end(self) -> None:
        if self.failure is None:
            self.is_over, self._quiet_bytes = True, 0

    def _pass_on(self, take: Callable[[bytes], bool]) -> bool:
        """Give what came to the one who takes it; whether that is all, and who waits need not be woken."""
        if self._pieces and not take(self._take()):
            self._taker = None
            return False
        self.deadline = self._loop.time() + self._taker_timeout_s
        return not self.is_over and self.failure is None

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _take(self) -> bytes:
        pieces = self._pieces
        taken = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.waiting_bytes = 0
        if self._line.is_held and not self.is_over:
            self._line.resume()
        return taken
