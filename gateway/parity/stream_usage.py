"""Asks an engine for the usage of a stream whose client didn't, and takes the event that comes of it out again.

What engines do with `stream_options: {"include_usage": true}`, read in their sources: vLLM 0.32, SGLang 0.5.23 and the
reference engine send one event more, behind all choices and before `[DONE]`, with `"choices":[]` and the usage. Nothing
else that a client reads changes, but that vLLM's `system_fingerprint` stands in that event alone, and that the
reference engine writes `"usage":null` into the others, as OpenAI does.

- The field is put in as text, after the opening brace: dumped again, large numbers would be others.
- A client that sends `stream_options` itself, whatever is in it, has decided: nothing is changed.
- An engine that reports usage in the first event, unasked, reports it always (vLLM's `--enable-force-include-usage`):
  its stream is left alone.
- An engine that answers 400 or 422 gets the request again as the client sent it, once; if it takes that, it isn't asked
  any more for as long as it lives. One that has taken the field before refuses something else.
- Whether an engine without an agent is still the one that was asked, nobody says: it always gets the request again, and
  is asked again `REMEMBERED_S` after it refused.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import orjson

from gateway.events import event_data, single_events
from gateway.fleet import EngineView
from gateway.openai_schema import CHAT, COMPLETIONS, InferenceRequest
from gateway.upstream import Answer

ASKED = b'"stream_options":{"include_usage":true},'
ENDPOINTS = (CHAT, COMPLETIONS)
REFUSALS = (400, 422)
ENGINES_MAX = 4_096
"""Engines of which it is remembered whether they take the field."""
REMEMBERED_S = 600.0
"""For so long a refusal is taken for that of an engine whose lives aren't known."""
_NO_CHOICES = (b'"choices":[]', b'"choices": []')
_USAGE = (b'"usage":{', b'"usage": {')

Send = Callable[[InferenceRequest], Awaitable[Answer]]


class StreamUsage:
    """Knows which engines can be asked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken: dict[tuple[str, frozenset[bytes]], tuple[bool, float]] = {}

    def body_for(self, request: InferenceRequest, view: EngineView) -> bytes:
        """The request's body, with usage asked for where that makes sense."""
        may_ask = request.stream and request.endpoint in ENDPOINTS and "stream_options" not in request.fields
        if not may_ask or self._takes(view) is False:
            return request.body
        opening = request.body.index(b"{") + 1
        return b"".join((request.body[:opening], ASKED, request.body[opening:]))

    async def send(self, request: InferenceRequest, view: EngineView, send: Send) -> tuple[Answer, bool]:
        """Send a request, and say whether usage was asked for in its client's stead. Raises as `send` does."""
        body = self.body_for(request, view)
        if body is request.body:
            return await send(request), False
        answer = await send(replace(request, body=body))
        if answer.status == 200:
            self._note(view, True)
        elif answer.status in REFUSALS and not (self._takes(view) and view.reach.own):
            answer.close()
            answer = await send(request)
            if answer.status == 200:
                self._note(view, False)
            return answer, False
        return answer, True

    def _takes(self, view: EngineView) -> bool | None:
        takes, noted_at = self._taken.get(_life(view), (None, 0.0))
        return takes if view.reach.own or self._clock() - noted_at < REMEMBERED_S else None

    def _note(self, view: EngineView, takes: bool) -> None:
        life = _life(view)
        if life not in self._taken and len(self._taken) >= ENGINES_MAX:
            del self._taken[next(iter(self._taken))]
        self._taken[life] = takes, self._clock()


class UsageFilter:
    """Takes the usage events out of one stream, and nothing else. For one stream."""

    def __init__(self) -> None:
        self._has_begun = self._is_usual = False

    def take(self, events: bytes) -> bytes:
        """The same events without those that only tell the usage; may be empty."""
        if not self._has_begun:
            first = next(filter(event_data, single_events(events)), b"")  # comments tell nothing
            self._has_begun = bool(first)
            self._is_usual = _any_in(_USAGE, first) and not _any_in(_NO_CHOICES, first)
        if self._is_usual or not _any_in(_NO_CHOICES, events):
            return events
        return b"".join(event for event in single_events(events) if not is_usage_event(event))


def is_usage_event(event: bytes) -> bool:
    """Whether an event tells the usage of a stream, right or wrong, and has no choices."""
    if not _any_in(_NO_CHOICES, event):  # within a text its quotes would be escaped
        return False
    try:
        decoded = orjson.loads(event_data(event))
    except orjson.JSONDecodeError:
        return False
    return isinstance(decoded, dict) and decoded.get("choices") == [] and isinstance(decoded.get("usage"), dict)


def _any_in(marks: tuple[bytes, bytes], data: bytes) -> bool:
    return marks[0] in data or marks[1] in data


def _life(view: EngineView) -> tuple[str, frozenset[bytes]]:
    return view.engine, view.reach.own
