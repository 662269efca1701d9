"""What a soak takes for left over."""

from dataclasses import replace

import pytest

from bench.gateway_soak import DESCRIPTORS_SLACK, TASKS_SLACK, Look, left_over

CLEAN = Look(1, 100 * 2**20, 50, 36, 0, 0.0, 0, {})


def test_what_warms_up_first_is_not_left_over() -> None:
    cold = replace(CLEAN, rss_bytes=1, descriptors=1, tasks=1)
    assert left_over([cold, cold, CLEAN, CLEAN, CLEAN]) == []


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (replace(CLEAN, inflight=1), "1 requests in the ledger"),
        (replace(CLEAN, booked_s=0.5), "0.5 s of booked work"),
        (replace(CLEAN, descriptors=51 + DESCRIPTORS_SLACK), f"{DESCRIPTORS_SLACK + 1} more file descriptors"),
        (replace(CLEAN, tasks=37 + TASKS_SLACK), f"{TASKS_SLACK + 1} more tasks"),
        (replace(CLEAN, rss_bytes=130 * 2**20), "30 MiB more memory"),
    ],
    ids=["ledger", "booked", "descriptors", "tasks", "memory"],
)
def test_what_there_is_more_of_is_said(last: Look, said: str) -> None:
    assert left_over([CLEAN, CLEAN, CLEAN, CLEAN, last]) == [said]
