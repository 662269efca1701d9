"""An API server that injects faults: lists what it has, and plays watches from a script."""

import asyncio
from typing import Any, Self

import orjson
from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"


def event(kind: str, slice_: dict[str, Any], version: str = "2") -> bytes:
    """A line of a watch."""
    described = {**slice_, "metadata": {**slice_["metadata"], "resourceVersion": version}}
    return orjson.dumps({"type": kind, "object": described}) + b"\n"


class ScriptedApi:
    """`watches` are played in turn: the lines of each, or a status; a watch beyond them says nothing and stays open.

    `lists` are statuses that the next lists are answered with.
    """

    def __init__(self, *slices: dict[str, Any]) -> None:
        self.slices = list(slices)
        self.version = "1"
        self.watches: list[list[bytes] | int] = []
        self.lists: list[int] = []
        self.listed = 0
        self.watched_from: list[str] = []
        self.tokens: list[str] = []
        self._open: list[asyncio.Queue[bytes]] = []
        self.url = ""

    def play(self, line: bytes) -> None:
        """Tell every watch that is open; an empty line ends it."""
        for each in self._open:
            each.put_nowait(line)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("authorization", ""))
        return await (self._watch(request) if request.query.get("watch") else self._list(request))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self.listed += 1
        if self.lists:
            return web.json_response({"kind": "Status", "message": "not now"}, status=self.lists.pop(0))
        first = int(request.query.get("continue", "0"))
        metadata = {"resourceVersion": self.version}
        if first + 1 < len(self.slices):
            metadata["continue"] = str(first + 1)
        return web.json_response({"metadata": metadata, "items": self.slices[first : first + 1]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watched_from.append(request.query["resourceVersion"])
        script = self.watches.pop(0) if self.watches else None
        if isinstance(script, int):
            return web.json_response({"kind": "Status", "message": "not now"}, status=script)
        response = web.StreamResponse()
        await response.prepare(request)
        for line in script or ():
            await response.write(line)
        if script is None:
            told: asyncio.Queue[bytes] = asyncio.Queue()
            self._open.append(told)
            while line := await told.get():
                await response.write(line)
            self._open.remove(told)
        return response
