"""The process's two servers: what they listen on, and how they and the loops behind them run and end, in order."""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import uvicorn

from gateway.client_connection import ClientConnection
from gateway.config import ListenConfig
from gateway.drain import drained
from gateway.sibling_notes import Siblings

END_TIMEOUT_S = 1
"""What is left after the time to drain is cancelled, and has so long to clean up."""

logger = logging.getLogger(__name__)


class PortTaken(Exception):
    """A port can't be bound; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """The sockets that clients and operators reach the process by. `worker` is its number among several, from 1."""

    data: socket.socket
    admin: socket.socket
    worker: int | None = None
    siblings: Siblings | None = None


class Loop(Protocol):
    """What runs beside the servers, until cancelled."""

    async def run(self) -> None:
        """Run until cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class Doors:
    """The two servers, not yet running."""

    data: "Server"
    admin: "Server"


async def run_until_stopped(
    loops: Sequence[Loop],
    doors: Doors,
    listeners: Listeners,
    stop: asyncio.Event,
    drain_s: Callable[[], float],
    ready: Callable[[], None],
) -> None:
    """Run them all until `stop` is set; then leave running requests `drain_s()` seconds, and end servers and loops."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop.run()) for loop in loops]
        serving = [
            (server, tasks.create_task(server.serve(sockets=[listener])))
            for server, listener in ((doors.data, listeners.data), (doors.admin, listeners.admin))
        ]
        _freeze()
        ready()
        await stop.wait()
        left = await drained(lambda: len(doors.data.server_state.tasks), drain_s(), lambda: doors.data.force_exit)
        if left:
            logger.warning("%d requests are cut off: the time that they had is over", left)
        for server, task in serving:
            server.should_exit = True
            await task
        for task in running:
            task.cancel()


def _freeze() -> None:
    """What was imported stays: looking through it for garbage would hold every stream for 30 ms now and then."""
    gc.collect()
    gc.freeze()


def signalled(stop: asyncio.Event, data: uvicorn.Server) -> None:
    """A signal to end: the first begins the end, the second cuts it short."""
    if stop.is_set():
        data.force_exit = True
    stop.set()


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the composition root decides the order of the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def server(app: object) -> Server:
    """A server of the application, not yet running."""
    return Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            lifespan="off",
            http=ClientConnection,
            ws="none",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=END_TIMEOUT_S,
        )
    )


def listen_for(config: ListenConfig) -> Listeners:
    """The sockets of a gateway that is one process; raises `PortTaken`."""
    data = listen(config.bind, config.port)
    try:
        return Listeners(data, listen(config.bind, config.admin))
    except PortTaken:
        data.close()
        raise


def listen(bind: str, port: int) -> socket.socket:
    """A listening socket; raises `PortTaken`."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    # The protocol is spelled out: asyncio sets TCP_NODELAY only where it knows that this is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bind, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PortTaken(f"can't listen on {bind}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
