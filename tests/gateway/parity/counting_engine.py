"""An engine that renders and counts by itself, apart from the gateway, and can be told to do it in another way."""

import asyncio
from typing import Any

import orjson

from tests.gateway import mock_engine as mock
from tests.gateway.mock_engine import MockEngine


class Counting:
    """Renders as `assembly.TEMPLATE` says, one token a byte; with a template argument that is set in its launch line,
    it puts something before all messages that the gateway doesn't know of. Answers only while it `may_answer`.
    """

    def __init__(self) -> None:
        self.argument = ""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.waiting = 0

    def rendered(self, fields: dict[str, Any]) -> str:
        if "prompt" in fields:
            return "".join(map(str, fields["prompt"]))
        turns = "".join(f"{message['role']}:{message['content']};" for message in fields["messages"])
        return self.argument + turns

    async def __call__(self, engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
        self.waiting += 1
        await self.may_answer.wait()
        self.waiting -= 1
        usage = {"prompt_tokens": len(self.rendered(fields).encode()), "completion_tokens": 1}
        if not fields.get("stream"):
            message = {"role": "assistant", "content": "ok"}
            return mock.web.json_response({"choices": [{"message": message}], "usage": usage})
        response = await mock.start_stream(request)
        await response.write(mock.event(0))
        if fields.get("stream_options"):
            await response.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response
