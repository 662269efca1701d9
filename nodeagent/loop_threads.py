"""The threads of asyncio's own, in which it resolves names: one that hangs keeps neither others nor the agent's end.

A resolver without an answer takes its time: five seconds for each try, server and search domain, in a container often
a minute and more. asyncio would wait for all of them before it ends, and so would the interpreter.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

THREADS_MAX = 64
"""More than names that are resolved at a time: peers' are few (`LOOKUPS_MAX`), and so are the directory's servers."""
END_WAIT_S = 0.5
NAME = "warmroute-loop"


class LoopThreads:
    """Gives the running loop threads, until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix=NAME)
        self._loop.set_default_executor(self._executor)

    def close(self) -> bool:
        """The loop is about to end. Returns `False` where threads hang: the interpreter's end would wait for them."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        # What the loop has in the end it waits for.
        self._loop.set_default_executor(ThreadPoolExecutor(1))
        deadline = time.monotonic() + END_WAIT_S
        ours = [each for each in threading.enumerate() if each.name.startswith(NAME)]
        for thread in ours:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in ours)
