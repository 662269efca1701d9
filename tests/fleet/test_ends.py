"""`warmroute up` leaves nothing behind, however and whenever it ends."""

import signal
from pathlib import Path

import pytest

from tests.warmroute.fleets import children, is_alive, left_behind, until, up

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_runs_on_when_it_is_ended_while_starting(tmp_path: Path, number: signal.Signals) -> None:
    process = up(tmp_path)
    until(lambda: len(children(process.pid)) >= 4, 30, "parts were started")
    pids = children(process.pid)
    process.send_signal(number)
    process.communicate(timeout=60)
    until(lambda: not any(is_alive(pid) for pid in pids), 30, "every part has ended")
    assert left_behind(tmp_path) == []
    if number is not signal.SIGKILL:
        assert process.returncode == 0


def test_twenty_starts_and_stops_leave_nothing_whether_ended_or_killed(tmp_path: Path) -> None:
    for number in range(20):
        process = up(tmp_path)
        wanted = 2 + number % 6
        until(lambda: len(children(process.pid)) >= wanted, 60, "parts were started")  # noqa: B023
        pids = children(process.pid)
        process.send_signal(signal.SIGKILL if number % 2 else signal.SIGINT)
        process.communicate(timeout=60)
        until(lambda: not any(is_alive(pid) for pid in pids), 60, "every part has ended")  # noqa: B023
    assert left_behind(tmp_path) == []
