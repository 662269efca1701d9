"""Responses that engines keep: `GET` and `DELETE /v1/responses/{id}`, `POST /v1/responses/{id}/cancel`.

They go to the engine that made the response, and nowhere else; no other could answer. They compute nothing, so nothing
is booked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import NoEngineAvailable, NotFound, UpstreamError, UpstreamTimeout, quoted
from gateway.fleet import Fleet
from gateway.openai_schema import RESPONSES
from gateway.response_homes import ID_CHARS_MAX, ResponseHomes
from gateway.sink import Sink
from gateway.upstream import Answer, EngineFailed, Headers, Upstream

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

    def __init__(self, homes: ResponseHomes, fleet: Fleet, upstream: Upstream) -> None:
        self._homes, self._fleet, self._upstream = homes, fleet, upstream

    async def serve(self, asked: StoredPath, method: str, query: bytes, headers: Headers, sink: Sink) -> None:
        """Answer it. Raises `GatewayError` while nothing was sent to the client."""
        engine = self._homes.find(asked.response_id)
        view = None if engine is None else self._fleet.table.engines.get(engine)
        if view is None:
            raise NotFound(f"no engine here is known to have the response {quoted(asked.response_id)}", "response_id")
        if view.state != "ready":
            raise NoEngineAvailable(f"the engine that has the response {quoted(asked.response_id)} isn't ready")
        url = f"{view.url}{asked.path}" + (f"?{query.decode('latin-1')}" if query else "")
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
        if method == "DELETE" and answer.status == 200:
            self._homes.forget(asked.response_id)


async def _relay(answer: Answer, sink: Sink) -> None:
    """Piece by piece. Where it breaks off, the client's connection is cut, and it sees that this isn't the end."""
    await sink.start(answer.status, answer.headers())
    try:
        async for piece in answer.pieces():
            await sink.write(piece)
    except EngineFailed:
        return
    await sink.finish()
