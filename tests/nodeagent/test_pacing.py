"""A fleet that walks at once leaves a short queue in front of the server, and lives are spaced out."""

import asyncio
import statistics

import pytest

from nodeagent.pacing import NEW_LIFE_MAX_S, NEW_LIFE_MIN_S, REST_MAX_S, LifeSpacing, rest_s
from tests.virtual_time import run_in_virtual_time

BATCH_S = 0.00043
"""What a batch of 64 costs a server that takes 150,000 placements a second."""
NETWORK_S = 0.0004
BATCHES = 60


class OneCore:
    """A server that does one thing after the other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.busy_s = 0.0
        self.waits_s: list[float] = []

    async def place(self) -> None:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(NETWORK_S)
        came_at = now()
        async with self._lock:
            self.waits_s.append(now() - came_at)
            await asyncio.sleep(BATCH_S)
            self.busy_s += BATCH_S


async def walks(walkers: int, rests: bool) -> tuple[float, float]:
    """Mean seconds in the queue, and the share of the time that the server was busy."""
    server, now = OneCore(), asyncio.get_running_loop().time
    began_at = now()

    async def walk() -> None:
        for _ in range(BATCHES):
            asked_at = now()
            await server.place()
            await asyncio.sleep(rest_s(now() - asked_at) if rests else 0)

    await asyncio.gather(*(walk() for _ in range(walkers)))
    waits_s = server.waits_s[len(server.waits_s) // 4 : -len(server.waits_s) // 4]
    return statistics.fmean(waits_s), server.busy_s / (now() - began_at)


@pytest.mark.parametrize(("walkers", "queue_s"), [(8, 0.003), (64, 0.010)])
def test_walkers_leave_a_short_queue_and_a_busy_server(walkers: int, queue_s: float) -> None:
    wait_s, busy = run_in_virtual_time(walks(walkers, rests=True))
    assert wait_s < queue_s
    assert busy > 0.8


def test_without_a_rest_the_queue_is_as_long_as_the_fleet() -> None:
    wait_s, _ = run_in_virtual_time(walks(64, rests=False))
    assert wait_s > 60 * BATCH_S


def test_a_rest_is_bounded() -> None:
    assert rest_s(0.0) == 0.0
    assert rest_s(0.002) == pytest.approx(0.001)
    assert rest_s(1.0) == REST_MAX_S


def test_lives_that_follow_each_other_are_ever_further_apart_and_rest_is_forgotten() -> None:
    spacing, now, gaps = LifeSpacing(), 1_000.0, []
    assert spacing.next_at < now
    for _ in range(7):
        spacing.note_begun(now)
        gaps.append(spacing.next_at - now)
        now = spacing.next_at
    assert gaps[0] == NEW_LIFE_MIN_S
    assert gaps == sorted(gaps)
    assert gaps[-1] == NEW_LIFE_MAX_S
    spacing.note_begun(now + 3 * NEW_LIFE_MAX_S)
    assert spacing.next_at == now + 3 * NEW_LIFE_MAX_S + NEW_LIFE_MIN_S
