"""A few threads that touch one drive, and the bounded queue before them.

A thread that waits for a drive can't be ended. So each drive has threads of its own, what waits for one of them can be
dropped, and how long the oldest job has been at it is known: a drive that hangs costs its own threads and no more.

An executor begins its threads when they are needed first. Where the machine gives none, it refuses a job that it has
queued already, and a thread that comes later would do it: fill a slot that is another chunk's by then. So no job begins
before it is known that somebody waits for it.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar, TypeVarTuple

from nodeagent.errors import DriveAway

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class _Gate:
    """Where a job waits until it is known whether it was accepted; one that wasn't finds it closed."""

    __slots__ = ("is_open", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_open = True


class DriveThreads:
    """`executor`'s threads, with at most `jobs_max` jobs in them and before them."""

    def __init__(self, executor: Executor, jobs_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.executor = executor
        self._jobs_max = jobs_max
        self._clock = clock
        self._jobs: set[Future[Any]] = set()
        self._dropped: set[Future[Any]] = set()
        self._begun: dict[int, float] = {}

    @property
    def jobs(self) -> set[Future[Any]]:
        """Jobs under way or waiting, also those that nobody waits for any more."""
        return set(self._jobs)

    def oldest_s(self) -> float:
        """For how long the oldest job has been at its present step; 0 where none has begun."""
        # A copy in one step: threads add and remove.
        begun = list(self._begun.values())
        return self._clock() - min(begun) if begun else 0.0

    async def do(self, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """Have a job done. Raises `DriveAway` where too many wait, the queue was dropped, or there is no thread."""
        if len(self._jobs) >= self._jobs_max:
            raise DriveAway("too many jobs wait for the drive")
        gate = _Gate()
        with gate.lock:
            try:
                job = self.executor.submit(lambda: self._run(gate, function, *arguments))
            except RuntimeError as error:
                gate.is_open = False
                raise DriveAway(f"no thread can be had for the drive: {error}") from error
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if job in self._dropped:
                raise DriveAway("the drive has been put into quarantine") from None
            raise
        finally:
            self._dropped.discard(job)
            # A failed job refers to this frame by its error's traceback; the frame mustn't refer to the job.
            del job

    def note_step(self) -> None:
        """A job of many steps has done one: it doesn't hang. Called in its thread."""
        self._begun[threading.get_ident()] = self._clock()

    def drop_queued(self) -> None:
        """Give up what hasn't begun: whoever waits for it is told so."""
        for job in self.jobs:
            self._dropped.add(job)
            if not job.cancel():
                self._dropped.discard(job)

    def shutdown(self) -> None:
        """Begin nothing more. Doesn't wait."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, gate: "_Gate", function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        with gate.lock:
            if not gate.is_open:
                raise DriveAway("nobody waits for it")
        self.note_step()
        try:
            return function(*arguments)
        finally:
            del self._begun[threading.get_ident()]


def hanging_after(jobs: set[Future[Any]], timeout_s: float) -> set[Future[Any]]:
    """Wait for jobs, at most so long; returns those that didn't end. Blocks."""
    return set(wait(jobs, timeout_s).not_done)
