"""File descriptors: as many as may be, and a sentence where they are scarce."""

import subprocess
import sys

from gateway.descriptors import RESERVED, room, shortfall


def test_room_is_two_descriptors_a_request() -> None:
    assert [room(limit) for limit in (0, RESERVED, RESERVED + 1, RESERVED + 2, RESERVED + 200)] == [0, 0, 0, 1, 100]


def test_scarcity_is_a_sentence_with_numbers() -> None:
    assert shortfall(RESERVED + 200, 100) is None
    said = shortfall(RESERVED + 199, 100)
    assert said == (
        "at most 327 file descriptors may be open (ulimit -n), enough for 99 requests at once; 100 need 328"
    )


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    program = (
        "import resource as r; from gateway.descriptors import raise_limit;"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, 300)); print(raise_limit(), r.getrlimit(r.RLIMIT_NOFILE), raise_limit())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "300 (300, 300) 300"
