"""`warmroute gateway --workers N`: processes that take their clients from one socket, and one that watches over them.

Whichever worker is free first takes a connection. They know of each other's load as gateways on different machines do,
through the directory.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial

import httpx

from gateway.config import GatewayConfig
from gateway.reload import Reload
from gateway.servers import Server, listen, server
from gateway.sibling_notes import Siblings
from warmroute.gateway_workers.front import Front
from warmroute.gateway_workers.merged_metrics import MergedMetrics
from warmroute.gateway_workers.worker import Worker, WorkerRefused

END_MARGIN_S = 10.0
"""What a worker may take to end beyond its time to drain, before it is killed."""
__all__ = ["WorkerRefused", "run_workers"]

WORKERS_OWN = ("limits", "timeouts", "engines", "hardware", "log_level")
"""What workers apply by themselves when the configuration is read again; this process needs the time to drain."""

logger = logging.getLogger(__name__)


async def run_workers(config: GatewayConfig, arguments: Sequence[str], reread: Callable[[], GatewayConfig]) -> int:
    """Serve with `config.workers` processes until SIGTERM or SIGINT; the exit code.

    That is 0 where all of them ended by themselves and 1 where one had to be killed. SIGHUP reaches all of them, and
    each reads and checks the configuration for itself; `reread` does it for this process. Raises `PortTaken`, and
    `WorkerRefused` where one can't start.
    """
    said = config.listen
    with contextlib.ExitStack() as stack, listen(said.bind, said.port) as data:
        admin = listen(said.bind, said.admin)
        metrics, stop = MergedMetrics(), asyncio.Event()
        reload = Reload(config, reread, dict.fromkeys(WORKERS_OWN, _leave_to_workers), count=lambda result: None)
        workers = [
            Worker(number, data, siblings, arguments, partial(metrics.bury, number))
            for number, siblings in enumerate(_siblings(config.workers, stack), 1)
        ]
        names = frozenset(f"{socket.gethostname()}:{said.port}/{worker.number}" for worker in workers)
        async with httpx.AsyncClient(trust_env=False) as client:
            front = Front(workers, client, metrics, names, stop.is_set)
            door = server(front.application())
            _listen_to_signals(workers, stop, reload)
            logger.info(
                "%d workers serve at %s:%d, admin at %s:%d", len(workers), said.bind, said.port, said.bind, said.admin
            )
            async with contextlib.AsyncExitStack() as running:
                tasks = [asyncio.create_task(door.serve(sockets=[admin])), asyncio.create_task(front.run())]
                running.push_async_callback(_cancelled, tasks[1:])
                running.push_async_callback(_closed, door, tasks[0])
                return await _watched(workers, client, stop, lambda: reload.config.limits.drain_s + END_MARGIN_S)


def _siblings(count: int, stack: contextlib.ExitStack) -> list[Siblings]:
    """For each worker the end where it hears, and the others' ends where they are told."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    for end in (end for pair in pairs for end in pair):
        stack.enter_context(end)
    tells = [tell for tell, _ in pairs]
    return [Siblings.of(hears, tells[:own] + tells[own + 1 :]) for own, (_, hears) in enumerate(pairs)]


async def _watched(
    workers: Sequence[Worker], client: httpx.AsyncClient, stop: asyncio.Event, end_s: Callable[[], float]
) -> int:
    running = [asyncio.create_task(worker.run(client)) for worker in workers]
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
        refused = next((task.exception() for task in running if task.done() and task.exception()), None)
        for worker in workers:
            if not worker.is_ending:
                worker.end(signal.SIGTERM)
        _, late = await asyncio.wait(running, timeout=end_s())
        for worker in workers:
            worker.end(signal.SIGKILL)
        await asyncio.wait(running)
        if refused is not None:
            raise refused
        return 1 if late else 0
    finally:
        await _cancelled([*running, stopping])


def _leave_to_workers(config: GatewayConfig) -> None:
    """Nothing to do here."""


def _listen_to_signals(workers: Sequence[Worker], stop: asyncio.Event, reload: Reload) -> None:
    loop = asyncio.get_running_loop()

    def end(number: int) -> None:
        stop.set()
        for worker in workers:
            worker.end(number)

    def read_again() -> None:
        reload.run()
        for worker in workers:
            worker.signal(signal.SIGHUP)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, signal.SIGTERM)
    loop.add_signal_handler(signal.SIGHUP, read_again)


async def _closed(door: Server, serving: asyncio.Task[None]) -> None:
    door.should_exit = True
    await serving


async def _cancelled(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
