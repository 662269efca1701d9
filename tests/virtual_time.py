"""Event loops whose time passes only when nothing else is left to do: minutes of waiting in no time, repeatably."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

STARTED_AT_S = 1_000.0
QUIET_S = 0.03
"""How long, on the wall, nothing may come before virtual time passes. Bytes between sockets need far less."""

Value = TypeVar("Value")


class _Selector(selectors.SelectSelector):
    """Instead of waiting for files, lets the time pass that the loop would have waited."""

    now = STARTED_AT_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for somebody, and nobody for time"
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` and every sleep and timeout are virtual. It hears of no sockets, threads or signals."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class _ListeningSelector(selectors.DefaultSelector):
    """Waits for files, but lets virtual time pass where none has anything to say."""

    now = STARTED_AT_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()
        ready = super().select(min(timeout, QUIET_S))
        if not ready:
            self.now += max(0.0, timeout)
        return ready


class QuietTimeLoop(asyncio.SelectorEventLoop):
    """`time()`, sleeps and timeouts are virtual: time passes only while no socket has anything to say.

    For servers, clients and what stands between them in one loop, without threads or other processes: a peer that
    stalls is given up at once, and however busy the machine is, none that is at work is taken for one that stalls.
    """

    def __init__(self) -> None:
        self._listening = _ListeningSelector()
        super().__init__(self._listening)

    def time(self) -> float:
        return self._listening.now


def in_quiet_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, run in a `QuietTimeLoop`. What its fixtures open is another loop's."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=QuietTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    return run


def run_in_virtual_time(story: Coroutine[Any, Any, Value]) -> Value:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(story)
