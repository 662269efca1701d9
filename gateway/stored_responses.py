"""Responses that engines keep: `GET` and `DELETE /v1/responses/{id}`, `POST /v1/responses/{id}/cancel`.

They go to the engine that made the response, and nowhere else; no other could answer. They compute nothing, so they are
open requests there in the ledger, and no work.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.audit import StreamTail
from gateway.error_shapes import broken_stream_event
from gateway.errors import NoEngineAvailable, NotFound, UpstreamError, UpstreamTimeout, quoted
from gateway.events import whole_events
from gateway.fleet import EngineView, Fleet
from gateway.header_rules import Headers
from gateway.ledger import Ledger
from gateway.openai_schema import RESPONSES
from gateway.response_homes import ID_CHARS_MAX, ResponseHomes
from gateway.sink import Sink
from gateway.upstream import Answer, EngineFailed, Upstream

logger = logging.getLogger(__name__)

_PATH = re.compile(rf"{RESPONSES}/([A-Za-z0-9_.:-]{{1,{ID_CHARS_MAX}}})(/cancel)?")
METHODS: Mapping[bool, tuple[str, ...]] = {False: ("GET", "DELETE"), True: ("POST",)}
"""With which methods a response is asked for, and (true) its cancellation."""


@dataclass(frozen=True, slots=True)
class StoredPath:
    """A path that names a response."""

    response_id: str
    is_cancel: bool

    @property
    def path(self) -> str:
        """The path as it came."""
        return self.label.format(id=self.response_id)

    @property
    def label(self) -> str:
        """The path without its id, as metrics name it."""
        return f"{RESPONSES}/{{id}}/cancel" if self.is_cancel else f"{RESPONSES}/{{id}}"

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods it is served with."""
        return METHODS[self.is_cancel]


def read_path(path: str) -> StoredPath | None:
    """The response that a path names, if it names one."""
    match = _PATH.fullmatch(path)
    return StoredPath(match[1], bool(match[2])) if match else None


class StoredResponses:
    """Passes such requests on."""

    def __init__(self, homes: ResponseHomes, fleet: Fleet, upstream: Upstream, ledger: Ledger) -> None:
        self._homes, self._fleet, self._upstream, self._ledger = homes, fleet, upstream, ledger

    async def serve(self, asked: StoredPath, method: str, query: bytes, headers: Headers, sink: Sink) -> None:
        """Answer it. Raises `GatewayError` while nothing was sent to the client."""
        engine = self._homes.find(asked.response_id)
        view = None if engine is None else self._fleet.table.engines.get(engine)
        if view is None:
            raise NotFound(f"no engine here is known to have the response {quoted(asked.response_id)}", "response_id")
        if view.state != "ready":
            raise NoEngineAvailable(f"the engine that has the response {quoted(asked.response_id)} isn't ready")
        url = f"{view.url}{asked.path}" + (f"?{query.decode('latin-1')}" if query else "")
        booking = self._ledger.open(view.engine)
        try:
            status = await self._pass_on(view, url, method, headers, sink)
        finally:
            self._ledger.release(booking)
        if method == "DELETE" and status == 200:
            self._homes.forget(asked.response_id)

    async def _pass_on(self, view: EngineView, url: str, method: str, headers: Headers, sink: Sink) -> int:
        try:
            answer = await self._upstream.send(url, headers, b"", view.api_key, method)
        except EngineFailed as failure:
            if failure.is_connection:
                self._fleet.note_failure(view.engine)
            kind = UpstreamTimeout if failure.is_timeout else UpstreamError
            raise kind(f"the engine that has the response failed: {failure}") from failure
        try:
            await _relay(answer, sink)
        finally:
            answer.close()
        return answer.status


async def _relay(answer: Answer, sink: Sink) -> None:
    """Piece by piece. Where it breaks off, a stream ends with an error event; else the client's connection is cut."""
    is_stream = answer.content_type == "text/event-stream"
    headers = answer.headers()
    if is_stream:  # an event may be added at the end
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    await sink.start(answer.status, headers)
    tail = StreamTail()
    try:
        async for piece in whole_events(answer.pieces(), answer.is_end_told) if is_stream else answer.pieces():
            tail.add(piece)
            await sink.write(piece)
        if is_stream and not answer.is_end_told and not tail.is_done:
            raise EngineFailed("connection ended in the middle of a stream", is_connection=True)
    except EngineFailed as failure:
        logger.warning("a kept response broke off on its way: %s", failure)
        if not is_stream:
            return
        if not tail.is_done:
            said = f"the engine failed while it was answering: {failure}"
            await sink.write(broken_stream_event(said, RESPONSES, tail.kept))
    await sink.finish()
