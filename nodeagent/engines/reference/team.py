"""Threads that share one computation, part by part.

NumPy lets go of the interpreter inside large operations, so parts run side by side. The linear algebra library itself
is kept to one thread: its own threads spin while they wait, and on a busy machine that made prefill four times slower
than a single thread. Here a thread that waits sleeps.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait


class Team:
    """The caller and `threads - 1` others."""

    def __init__(self, threads: int) -> None:
        self._others = ThreadPoolExecutor(threads - 1, thread_name_prefix="model-part") if threads > 1 else None

    def run(self, work: Callable[[int], None], parts: int) -> None:
        """Call `work` with 0 .. parts - 1 and return when all are done; raises what one of them raised."""
        if self._others is None or parts == 1:
            for part in range(parts):
                work(part)
            return
        futures = [self._others.submit(work, part) for part in range(1, parts)]
        try:
            work(0)
        finally:
            wait(futures)
        for future in futures:
            future.result()
