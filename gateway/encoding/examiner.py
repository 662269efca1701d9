"""Examines a tokenizer in a process of its own: `python -m gateway.encoding.examiner`, its content on standard input.

Loading the reference holds the GIL, for seconds with a large vocabulary, and an event loop with it. The verdict is
pickled: both sides are this program.
"""

import pickle
import sys

from gateway.encoding.child_process import REFUSED, ask, end_with_parent
from gateway.encoding.examination import Examination, examine

TIMEOUT_S = 300.0


async def examine_apart(content: bytes) -> Examination:
    """See `examine`. Raises `ValueError` if the content can't be used, and says why."""
    verdict = pickle.loads(await ask("gateway.encoding.examiner", (), content, TIMEOUT_S))
    assert isinstance(verdict, Examination)
    return verdict


def main() -> int:
    """Zero when the verdict was written."""
    end_with_parent()
    try:
        verdict = examine(sys.stdin.buffer.read())
    except ValueError as error:
        print(error, end="")
        return REFUSED
    sys.stdout.buffer.write(pickle.dumps(verdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
