"""Which engine made which response of `/v1/responses`: only that engine can go on from it, or show it again.

Engines keep responses in memory. So a request that goes on from one (`previous_response_id`) is sent to the engine that
made it, however busy that is. What isn't known here (another gateway saw it, or too long ago) is routed by session, and
the engine says that there is no such response.
"""

from collections import OrderedDict
from collections.abc import Callable

import orjson

from gateway.events import are_early
from gateway.fleet import FAILING, EngineView, FleetTable
from gateway.openai_schema import RESPONSES, InferenceRequest
from gateway.sink import Sink

RESPONSES_MAX = 100_000
"""About 20 MB; the oldest go first."""
RESPONSE_KEPT_S = 24 * 3600.0
ID_CHARS_MAX = 200


class ResponseHomes:
    """A bounded map from response ids to engines, whose entries expire. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float], responses_max: int = RESPONSES_MAX) -> None:
        self._clock, self._responses_max = clock, responses_max
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self.on_change: Callable[[str, str | None], None] = lambda response_id, engine: None
        """Hears of each response that is noted here, with its engine, or forgotten here, with none."""

    def __len__(self) -> int:
        return len(self._homes)

    def note(self, response_id: str, engine: str) -> None:
        """This engine has made this response."""
        self._keep(response_id, engine)
        self.on_change(response_id, engine)

    def hear(self, response_id: str, engine: str | None) -> None:
        """Another process of this gateway has noted it, or forgotten it."""
        if engine is None:
            self._homes.pop(response_id, None)
        else:
            self._keep(response_id, engine)

    def _keep(self, response_id: str, engine: str) -> None:
        now = self._clock()
        self._homes[response_id] = (engine, now + RESPONSE_KEPT_S)
        self._homes.move_to_end(response_id)
        while len(self._homes) > self._responses_max or next(iter(self._homes.values()))[1] <= now:
            self._homes.popitem(last=False)

    def find(self, response_id: str) -> str | None:
        """The name of the engine that made it, if that is known."""
        engine, expires_at = self._homes.get(response_id, (None, 0.0))
        return engine if expires_at > self._clock() else None

    def forget(self, response_id: str) -> None:
        """It was deleted."""
        self._homes.pop(response_id, None)
        self.on_change(response_id, None)

    def engine_before(self, request: InferenceRequest) -> str | None:
        """The name of the engine that made the response that a request goes on from, if that is known."""
        previous = request.fields.get("previous_response_id") if request.endpoint == RESPONSES else None
        return self.find(previous) if isinstance(previous, str) else None

    def view_of(self, request: InferenceRequest, table: FleetTable) -> EngineView | None:
        """The engine that must have the request, if it is known, serves the model and isn't known to be unwell.

        One that is in doubt must have it, too: no other engine could do better.
        """
        view = table.engines.get(self.engine_before(request) or "")
        is_there = view is not None and (view.is_ready or view.state == FAILING) and request.model in view.models
        return view if is_there else None

    def watched(
        self, request: InferenceRequest, sink: Sink, engine: str, on_first_token: Callable[[], None] | None
    ) -> Sink:
        """The sink, or one before it that notes which response passes, and calls `on_first_token`, if it is given."""
        if request.endpoint != RESPONSES:
            return sink
        is_kept = request.fields.get("store") is not False

        def note(response_id: str) -> None:
            if is_kept:
                self.note(response_id, engine)

        return WatchedResponse(sink, note, on_first_token)


class WatchedResponse:
    """A `Sink` that passes everything on at once, and looks for the response's id and the first sign of a token.

    A stream begins with events that are sent before anything is computed.
    """

    def __init__(self, sink: Sink, note: Callable[[str], None], on_first_token: Callable[[], None] | None) -> None:
        self._sink, self._note, self._on_first_token = sink, note, on_first_token
        self._looks = True

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """See `Sink`."""
        self._looks = status == 200
        await self._sink.start(status, headers)

    async def write(self, piece: bytes) -> None:
        """See `Sink`."""
        self._look(piece)
        await self._sink.write(piece)

    def push(self, piece: bytes) -> bool:
        """See `Sink`."""
        self._look(piece)
        return self._sink.push(piece)

    async def finish(self) -> None:
        """See `Sink`."""
        await self._sink.finish()

    def _look(self, piece: bytes) -> None:
        """Repeating it changes nothing."""
        if self._on_first_token is not None and not are_early(piece):
            self._on_first_token()
            self._on_first_token = None
        if self._looks:
            response_id = read_response_id(piece)
            self._looks = response_id is None and self._on_first_token is not None
            if response_id is not None:
                self._note(response_id)


def read_response_id(piece: bytes) -> str | None:
    """The id of the response that this is, or whose first events these are; `None` where it can't be read."""
    data = next((line[5:] for line in piece.split(b"\n") if line.startswith(b"data:")), piece)
    try:
        decoded = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    if isinstance(decoded, dict) and isinstance(decoded.get("response"), dict):
        decoded = decoded["response"]
    response_id = decoded.get("id") if isinstance(decoded, dict) else None
    return response_id if isinstance(response_id, str) and 0 < len(response_id) <= ID_CHARS_MAX else None
