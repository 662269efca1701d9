"""The agent's HTTP: health, metrics, its state for a reader, tokenizer files by digest, hints to prefetch, and pins."""

import asyncio
import contextlib
import enum
import hmac
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import ClientDisconnect

from nodeagent.errors import HintRefused, PinsFull
from nodeagent.files import FileShelf
from nodeagent.hints import KEYS_MAX, PEERS_MAX, Hint, Hinted, Keys, decode_hint
from nodeagent.http_connection import HttpConnection
from nodeagent.tiers.write_policy import Pins

BACKLOG = 128
SHUTDOWN_S = 2
BODY_BYTES_MAX = 256 * 1_024
BODY_S = 5.0
CLIENT_GONE = 499


class ResetOutcome(enum.Enum):
    """What became of a reset."""

    DONE = "the engine's prefix cache is empty"
    UNKNOWN = "no engine of that name is attached"
    REFUSED = "the engine didn't reset its prefix cache; vLLM must be idle, and started with VLLM_SERVER_DEV_MODE=1"


RESET_STATUS = {ResetOutcome.UNKNOWN: 404, ResetOutcome.REFUSED: 502}


class KeysRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/pins`: directory keys in hex."""

    keys: Keys


def create_api(
    files: FileShelf,
    registry: CollectorRegistry,
    is_ready: Callable[[], bool],
    status: Callable[[], dict[str, Any]],
    hints: Hinted,
    reset: Callable[[str], Awaitable[ResetOutcome]],
    pins: Pins | None,
    forget_api: APIRouter | None = None,
    admin_token: str | None = None,
) -> FastAPI:
    """The application. `status` gives what `/status` shows; `hints` says how many keys of a hint it will try.

    `reset` empties the prefix cache of the engine of that name. `pins` is there where there is a tier to write to.
    With an `admin_token`, what changes anything but prefetch needs it.
    """
    admins = [Depends(partial(_check_token, admin_token))]
    app = FastAPI(title="warmroute node agent", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ClientDisconnect)
    async def leave(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, str]:
        if not is_ready():
            response.status_code = 503
            return {"status": "not ready"}
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/status")
    async def agent_status() -> dict[str, Any]:
        return {"version": version("warmroute"), "unix_time_s": time.time(), **status()}

    @app.get("/files/{sha256}")
    async def file(sha256: str) -> Response:
        content = files.get(sha256)
        if content is None:
            raise HTTPException(404, "no attached engine has brought a file with this sha256")
        return Response(content, media_type="application/octet-stream")

    app.include_router(_hints_api(hints))
    for router in (_pins_api(pins), _reset_api(reset), forget_api):
        if router is not None:
            app.include_router(router, dependencies=admins)
    return app


async def _check_token(token: str | None, request: Request) -> None:
    given = request.headers.get("authorization", "").encode("latin-1")
    if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise HTTPException(401, "this needs the agent's admin token", {"www-authenticate": "Bearer"})


def _reset_api(reset: Callable[[str], Awaitable[ResetOutcome]]) -> APIRouter:
    router = APIRouter()

    @router.post("/engines/{engine}/reset_prefix_cache")
    async def reset_prefix_cache(engine: str) -> dict[str, str]:
        outcome = await reset(engine)
        if outcome is not ResetOutcome.DONE:
            raise HTTPException(RESET_STATUS[outcome], outcome.value)
        return {"status": outcome.value}

    return router


def _hints_api(hints: Hinted) -> APIRouter:
    router = APIRouter()

    @router.post("/prefetch", status_code=202)
    async def prefetch(request: Request) -> dict[str, int]:
        return {"accepted": hints.prefetch(await _read_hint(request))}

    @router.delete("/prefetch")
    async def cancel(request: Request) -> dict[str, int]:
        return {"cancelled": hints.cancel(await _read_hint(request))}

    return router


def _pins_api(pins: Pins | None) -> APIRouter:
    router = APIRouter()

    def there_are() -> Pins:
        if pins is None:
            raise HTTPException(409, "this host has no nvme tier to which anything could be written")
        return pins

    @router.post("/pins")
    async def pin(request: Request) -> dict[str, int]:
        keys = await _read_keys(request)
        try:
            there_are().add(keys)
        except PinsFull as error:
            raise HTTPException(409, str(error)) from error
        return {"pinned": len(there_are())}

    @router.delete("/pins")
    async def unpin(request: Request) -> dict[str, int]:
        keys = await _read_keys(request)
        there_are().remove(keys)
        return {"pinned": len(there_are())}

    return router


async def bounded_body(request: Request, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The request's body, whole. Raises `HTTPException` for one that is too large or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > bytes_max:
                    raise HTTPException(413, f"the body exceeds {bytes_max} bytes")
    except TimeoutError:
        raise HTTPException(408, f"the body didn't arrive within {BODY_S:g} s") from None
    return bytes(body)


async def _read_keys(request: Request) -> list[bytes]:
    body = await bounded_body(request)
    try:
        keys = msgspec.json.decode(body, type=KeysRequest).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(
            400, f'the body must be {{"keys": [up to {KEYS_MAX} directory keys in hex]}}: {error}'
        ) from error
    return [bytes.fromhex(key) for key in keys]


async def _read_hint(request: Request) -> Hint:
    body = await bounded_body(request)
    try:
        return decode_hint(body)
    except HintRefused as error:
        raise HTTPException(
            400,
            f'the body must be {{"keys": [up to {KEYS_MAX} directory keys in hex]}}, with '
            f'"peers": [up to {PEERS_MAX} of {{"address": "host:port", "keys": [...]}}] if need be: {error}',
        ) from error


class HttpServer(uvicorn.Server):
    """Serves an application on a socket that is bound already, and leaves signals to the agent."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The agent handles signals itself."""
        yield

    async def run_until_stopped(self) -> None:
        """Until `should_exit` is set."""
        await self.serve(sockets=[self._listener])


def listen(bind: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.create_server((bind, port), family=family, backlog=BACKLOG)
    return socket.socket(fileno=listener.detach())  # now it knows its protocol, so asyncio sets TCP_NODELAY
