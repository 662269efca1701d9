"""An event loop whose time passes only when nothing else is left to do: minutes of waiting in no time, repeatably."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

STARTED_AT_S = 1_000.0

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


def run_in_virtual_time(story: Coroutine[Any, Any, Value]) -> Value:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(story)
