"""Child processes of the local fleet: started, watched, restarted with a growing pause, ended in order.

A part leads a process group: what it started ends with it. A child dies with its parent, even when that is killed: the
kernel is asked for it (`PR_SET_PDEATHSIG`).
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from warmroute.process_group import GroupRemains, end_group, remains

logger = logging.getLogger(__name__)

RESTART_PAUSE_MIN_S, RESTART_PAUSE_MAX_S = 0.5, 30.0
STEADY_S = 20.0
"""A part that ran this long before it died is restarted after the shortest pause again."""
STOP_TIMEOUT_S = 10.0
CONFIGURATION_ERROR = 2
LOG_TAIL_BYTES = 4096
_PR_SET_PDEATHSIG = 1


class PartFailed(Exception):
    """A part can't run as it was told to; the message is what it said."""


@dataclass(eq=False, slots=True)
class Part:
    """One child process: its name, how to start it, and where its output goes.

    `leftovers` are files of its own that are removed whenever it has ended, however it went.
    """

    name: str
    arguments: Sequence[str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    leftovers: Sequence[Path] = ()
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0

    @property
    def pid(self) -> int | None:
        """The running process, if there is one."""
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    def last_words(self) -> str:
        """The last line of its log."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
        return ""


class Supervisor:
    """Keeps parts running until it is closed; `say` gets a line for the user when one is restarted."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._parts: list[Part] = []
        self._watchers: dict[Part, asyncio.Task[None]] = {}
        self._is_closing = False

    async def start(self, part: Part) -> None:
        """Start a part and watch it from now on."""
        await self._spawn(part)
        self._parts.append(part)
        self._watchers[part] = asyncio.create_task(self._watch(part), name=f"watch {part.name}")

    def check(self) -> None:
        """Raise `PartFailed` if a part gave up because of how it was started."""
        for part in self._parts:
            if part.process is not None and part.process.returncode == CONFIGURATION_ERROR:
                raise PartFailed(part.last_words() or f"{part.name} refused to start")

    async def close(self) -> None:
        """End all parts, the last started first; what doesn't end in time is killed. Safe to call twice."""
        self._is_closing = True
        for part in reversed(self._parts):
            watcher = self._watchers.pop(part, None)
            if watcher is not None:
                watcher.cancel()
                await asyncio.wait({watcher})
            await _end(part)

    async def _spawn(self, part: Part) -> None:
        with _log_of(part) as log:
            part.process = await asyncio.create_subprocess_exec(
                *part.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_inherited(), **part.environment},
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the parts in order
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    async def _watch(self, part: Part) -> None:
        pause_s = RESTART_PAUSE_MIN_S
        while True:
            started_at = time.monotonic()
            assert part.process is not None, "spawned"
            code = await part.process.wait()
            await _clear(part, GroupRemains(part.process.pid))
            if code == CONFIGURATION_ERROR:
                self._tell(f"{part.name} can't run: {part.last_words()}")
                return
            if time.monotonic() - started_at > STEADY_S:
                pause_s = RESTART_PAUSE_MIN_S
            self._tell(f"{part.name} ended ({_reason(code)}); starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(RESTART_PAUSE_MAX_S, pause_s * 2)
            part.restarts += 1
            await self._spawn_again(part)

    async def _spawn_again(self, part: Part) -> None:
        while True:
            try:
                await self._spawn(part)
                return
            except OSError as error:
                logger.error("%s can't be started again, trying on: %s", part.name, error)
                await asyncio.sleep(RESTART_PAUSE_MAX_S)

    def _tell(self, text: str) -> None:
        """Who reads this may have gone; the parts are kept running all the same."""
        with contextlib.suppress(OSError, ValueError):
            self._say(text)


def _log_of(part: Part) -> IO[bytes]:
    """Its log; where that can't be had any more (its folder was removed), nothing is kept."""
    try:
        part.log_path.parent.mkdir(parents=True, exist_ok=True)
        return part.log_path.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


async def _end(part: Part) -> None:
    process = part.process
    if process is None:
        return
    seen = remains(process.pid)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            logger.warning("%s didn't end in %g s and is killed", part.name, STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    await _clear(part, seen)


async def _clear(part: Part, seen: GroupRemains) -> None:
    """End what a part that has ended left running, and remove what it left lying."""
    for pause_s in end_group(seen):
        await asyncio.sleep(pause_s)
    for path in part.leftovers:
        with contextlib.suppress(OSError):
            path.unlink()


def die_with_parent(parent: int) -> None:
    """In the child, before it becomes the part: be told to end when the parent is gone, and end now if it is."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _reason(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _inherited() -> dict[str, str]:
    """The parent's environment without `WARMROUTE_*`: what configures one kind of part is an error for another."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
