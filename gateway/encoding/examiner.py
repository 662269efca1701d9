"""Examines a tokenizer in a process of its own: `python -m gateway.encoding.examiner`, its content on standard input.

Loading the reference holds the GIL, for seconds with a large vocabulary, and an event loop with it. The verdict is
pickled: both sides are this program.
"""

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import sys
from pathlib import Path

import gateway
from gateway.encoding.examination import Examination, examine

TIMEOUT_S = 300.0
REFUSED = 3
"""The exit status where the content isn't a tokenizer; the reason is on standard output."""
_PR_SET_PDEATHSIG = 1


async def examine_apart(content: bytes) -> Examination:
    """See `examine`. Raises `ValueError` if the content can't be used, and says why."""
    # The child must find this very program, wherever it was started, and nothing that lies about in its folder.
    root = str(Path(gateway.__file__).parent.parent)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "gateway.encoding.examiner",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
        start_new_session=True,  # Ctrl-C reaches the gateway alone, which ends its child
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            answer, _ = await child.communicate(content)
    except TimeoutError:
        raise ValueError(f"a tokenizer.json that takes longer than {TIMEOUT_S:g} s to examine") from None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode == REFUSED:
        raise ValueError(answer.decode(errors="replace"))
    if child.returncode:
        raise ValueError(f"a tokenizer.json whose examination ended with status {child.returncode}")
    verdict = pickle.loads(answer)
    assert isinstance(verdict, Examination)
    return verdict


def main() -> int:
    """Zero when the verdict was written."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # nobody would read it
    try:
        verdict = examine(sys.stdin.buffer.read())
    except ValueError as error:
        print(error, end="")
        return REFUSED
    sys.stdout.buffer.write(pickle.dumps(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
