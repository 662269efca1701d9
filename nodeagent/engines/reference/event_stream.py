"""An answer as server-sent events. It ends its generation when the client goes, even before the first token."""

import asyncio

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nodeagent.engines.reference.errors import EngineError, Overloaded
from nodeagent.engines.reference.openai_answers import STREAM_END, Answer, error_body, error_event, error_status
from nodeagent.engines.reference.service import Steps

MEDIA_TYPE = "text/event-stream; charset=utf-8"


class EventStream(Response):
    """Sends steps as they come. The response starts with the first one; a failure before it is a plain error."""

    def __init__(self, answer: Answer, steps: Steps, *, include_usage: bool) -> None:
        super().__init__(media_type=MEDIA_TYPE, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._answer = answer
        self._steps = steps
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end or until the client goes."""
        gone = asyncio.ensure_future(until_gone(receive))
        sent = asyncio.ensure_future(self._send_all(scope, receive, send))
        try:
            await asyncio.wait((gone, sent), return_when=asyncio.FIRST_COMPLETED)
            if sent.done():
                sent.result()
        finally:
            self._steps.cancel()
            gone.cancel()
            sent.cancel()
            await asyncio.gather(gone, sent, return_exceptions=True)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            step = await self._steps.next()
        except Overloaded as error:
            failure = Response(
                orjson.dumps(error_body(error)), status_code=error_status(error), media_type="application/json"
            )
            await failure(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        events = self._answer.opening(include_usage=self._include_usage)
        try:
            while True:
                if step.text or step.finish_reason is not None:
                    events += self._answer.piece(step.text, step.finish_reason, include_usage=self._include_usage)
                if step.finish_reason is not None:
                    break
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    events = b""
                step = await self._steps.next()
            if self._include_usage:
                events += self._answer.usage_event(step.completion_tokens, step.cached_tokens)
        except EngineError as error:
            events += error_event(error)
        await send({"type": "http.response.body", "body": events + STREAM_END, "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        continue
