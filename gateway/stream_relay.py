"""One stream of events on its way from an engine to a client: whole events, passed on at the moment when they come.

A streamed token is the gateway's commonest work, so no task is woken for it: what an engine's connection receives goes
through `take` to the client's connection at once. Where that can't be, because the stream has just begun or the client
is behind, the request's own task sends what is left over, and meanwhile the engine's connection fills up and is held.
"""

from collections.abc import Awaitable, Callable

from gateway.audit import StreamTail
from gateway.events import EventCutter
from gateway.sink import Sink
from gateway.upstream import Answer


class StreamRelay:
    """For one stream. `start` sends the head; `choose` says what of the next events the client gets."""

    def __init__(self, sink: Sink, start: Callable[[], Awaitable[None]], choose: Callable[[bytes], bytes]) -> None:
        self._sink, self._start, self._choose = sink, start, choose
        self._cutter = EventCutter()
        self._left: bytes | None = None
        self.tail = StreamTail()
        """Of what the engine sent."""
        self.has_started = False
        """Whether the client has been sent anything: it is at the first whole event."""

    async def run(self, answer: Answer) -> None:
        """Pass it on to its end. Raises `EngineFailed` where it breaks, and what came of an event is dropped."""
        self.take(answer.first)
        await self._send_left()
        while not await answer.pass_to(self.take):
            await self._send_left()
        if rest := self._cutter.rest(answer.is_end_told):
            self._pass_on(rest)
            await self._send_left()

    def take(self, piece: bytes) -> bool:
        """The next piece of the stream; false where some is left over, and no more is wanted until that is sent."""
        events = self._cutter.add(piece)
        return self._pass_on(events) if events else True

    def _pass_on(self, events: bytes) -> bool:
        self.tail.add(events)
        chosen = self._choose(events)
        if self.has_started and (not chosen or self._sink.push(chosen)):
            return True
        self._left = chosen
        return False

    async def _send_left(self) -> None:
        if self._left is None:
            return
        if not self.has_started:
            await self._start()
            self.has_started = True
        left, self._left = self._left, None
        if left:
            await self._sink.write(left)
