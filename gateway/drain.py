"""The end of a gateway: running requests are left to finish, new ones are told to go elsewhere.

Connections are still taken meanwhile: who was told of this gateway a moment ago gets an answer at once, not a refusal
of the connection, and probes go on.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.error_shapes import error_answer
from gateway.errors import GatewayDraining

PROBES = frozenset({"/healthz", "/readyz"})
LOOK_INTERVAL_S = 0.05

Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


class DrainingDoor:
    """The ASGI application before another: refuses requests while `is_draining()`, but for probes."""

    def __init__(self, application: Application, is_draining: Callable[[], bool]) -> None:
        self._application, self._is_draining = application, is_draining

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """See the class."""
        if scope["type"] != "http" or not self._is_draining() or scope["path"] in PROBES:
            await self._application(scope, receive, send)
            return
        refusal = GatewayDraining("this gateway is ending; send the request again, on a new connection")
        body = error_answer(refusal, scope["path"])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", str(refusal.retry_after_s).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def drained(running: Callable[[], int], drain_s: float, is_cut_short: Callable[[], bool]) -> int:
    """Wait until nothing runs, at most `drain_s` seconds, or until that is cut short; how many still run then."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + drain_s
    while True:
        left = running()
        if not left or loop.time() >= deadline or is_cut_short():
            return left
        await asyncio.sleep(LOOK_INTERVAL_S)
