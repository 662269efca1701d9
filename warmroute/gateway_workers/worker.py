"""One gateway process of several: started with sockets that outlive it, watched, started again when it dies."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import httpx

from gateway.servers import listen
from gateway.sibling_notes import Siblings
from warmroute.processes import die_with_parent

RESTART_PAUSE_MIN_S, RESTART_PAUSE_MAX_S = 0.2, 10.0
STEADY_S = 20.0
"""A worker that served for so long before it died is started again after the shortest pause."""
UP_POLL_S = 0.1
ASK_TIMEOUT_S = 2.0
CONFIGURATION_ERROR = 2
LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


class WorkerRefused(Exception):
    """A worker can't run as it is told to."""


class Worker:
    """A worker and its door for operators, on a port of the kernel's choice that stays its own over its lives.

    `on_death()` hears of every life that is over. All sockets stay open here, so that a client who comes between two
    lives waits for the next one, or another worker takes it.
    """

    def __init__(
        self,
        number: int,
        data: socket.socket,
        siblings: Siblings,
        arguments: Sequence[str],
        on_death: Callable[[], None],
    ) -> None:
        self.number, self._data, self._siblings = number, data, siblings
        self._arguments, self._on_death = arguments, on_death
        self._admin = listen(LOOPBACK, 0)
        self.url = f"http://{LOOPBACK}:{self._admin.getsockname()[1]}"
        self._process: asyncio.subprocess.Process | None = None
        self._is_reload_due = False
        self.is_up = False
        """Whether it has answered in this life."""
        self.restarts = 0
        self.is_ending = False

    @property
    def pid(self) -> int | None:
        """Its process, if there is one."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self, client: httpx.AsyncClient) -> None:
        """Keep it running until it is told to end. Raises `WorkerRefused` if it never served and can't."""
        pause_s, has_served = RESTART_PAUSE_MIN_S, False
        with self._admin:
            while not self.is_ending:
                started_at = time.monotonic()
                code, was_up = await self._live(client)
                has_served = has_served or was_up
                if self.is_ending:
                    return
                if code == CONFIGURATION_ERROR and not has_served:
                    raise WorkerRefused("a worker can't run; it said why")
                if time.monotonic() - started_at > STEADY_S:
                    pause_s = RESTART_PAUSE_MIN_S
                logger.error("worker %d ended (%s), it is started again in %g s", self.number, _said(code), pause_s)
                await asyncio.sleep(pause_s)
                self.restarts, pause_s = self.restarts + 1, min(RESTART_PAUSE_MAX_S, pause_s * 2)

    def signal(self, number: int) -> None:
        """Send a signal, if there is a process. SIGHUP waits until it is up: before that it would end it."""
        if number == signal.SIGHUP and not self.is_up:
            self._is_reload_due = True
        elif self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def end(self, number: int) -> None:
        """Send a signal that ends it for good."""
        self.is_ending = True
        self.signal(number)

    async def _live(self, client: httpx.AsyncClient) -> tuple[int, bool]:
        """One life: its exit code, and whether it ever answered."""
        given = (self._data, self._admin, self._siblings.inbox, *self._siblings.outboxes)
        sockets = [each.fileno() for each in given]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "warmroute.cli", "gateway", *self._arguments),
            *("--worker", ":".join(map(str, (self.number, *sockets)))),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=sockets,
            preexec_fn=partial(_begin, os.getpid()),
        )
        if self.is_ending:  # it was told between two lives
            self.signal(signal.SIGTERM)
        noticing = asyncio.create_task(self._notice_up(client))
        try:
            code = await self._process.wait()
        finally:
            noticing.cancel()
        was_up, self.is_up = self.is_up, False
        self._on_death()
        return code, was_up

    async def _notice_up(self, client: httpx.AsyncClient) -> None:
        while not self.is_up:
            with contextlib.suppress(httpx.HTTPError):
                await client.get(f"{self.url}/healthz", timeout=ASK_TIMEOUT_S)
                self.is_up = True
                break
            await asyncio.sleep(UP_POLL_S)
        if self._is_reload_due:
            self._is_reload_due = False
            self.signal(signal.SIGHUP)


def _begin(parent: int) -> None:
    """In the child: Ctrl-C reaches the parent alone, which passes it on; and no worker outlives it."""
    os.setpgid(0, 0)
    die_with_parent(parent)


def _said(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
