"""One question to a module of this program in a process of its own: what holds the GIL for seconds holds no stream.

The module reads standard input and writes its answer; where it can't, its reason, and ends with the status `REFUSED`.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import gateway

REFUSED = 3
"""The exit status where there is no answer; the reason is on standard output."""
_PR_SET_PDEATHSIG = 1


async def ask(
    module: str, arguments: Sequence[str], content: bytes, timeout_s: float, python: str = sys.executable
) -> bytes:
    """The answer of `module` to `content`. Raises `ValueError` with its reason, or with how it ended."""
    # The child must find this very program, wherever it was started, and nothing that lies about in its folder.
    root = str(Path(gateway.__file__).parent.parent)
    child = await asyncio.create_subprocess_exec(
        python,
        "-P",
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
        start_new_session=True,  # Ctrl-C reaches the gateway alone, which ends its child
    )
    try:
        async with asyncio.timeout(timeout_s):
            answer, _ = await child.communicate(content)
    except TimeoutError:
        raise ValueError(f"it takes longer than {timeout_s:g} s") from None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode == REFUSED:
        raise ValueError(answer.decode(errors="replace"))
    if child.returncode:
        raise ValueError(f"its process ended with status {child.returncode}")
    return answer


def end_with_parent() -> None:
    """In the child: die with who asked, as nobody would read the answer."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
