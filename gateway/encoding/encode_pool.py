"""Threads for what would hold the event loop too long: texts of requests in two, loading and proving in a third."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

THREADS = 2
TEXTS_MAX = 64
"""Texts that are encoded or wait for it at once. More mean that requests come faster than they can be encoded."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PoolBusy(Exception):
    """So many texts wait already that another had better go without."""


class EncodePool:
    """Requests are never behind a tokenizer that is being loaded."""

    def __init__(self) -> None:
        self._requests = ThreadPoolExecutor(THREADS, thread_name_prefix="encode")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._texts = 0

    async def run(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """`function`'s result, for a request that waits for it. Raises `PoolBusy` where `TEXTS_MAX` wait already."""
        if self._texts >= TEXTS_MAX:
            raise PoolBusy
        self._texts += 1
        try:
            return await asyncio.wrap_future(self._requests.submit(function, *arguments, **named))
        finally:
            self._texts -= 1

    async def run_behind(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """`function`'s result, which no request waits for; one after another."""
        return await asyncio.wrap_future(self._background.submit(function, *arguments, **named))

    def close(self) -> None:
        """Let the threads go."""
        for executor in (self._requests, self._background):
            executor.shutdown(wait=False, cancel_futures=True)
