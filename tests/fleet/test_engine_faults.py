"""A slice of `bench/faults`: what must not follow from engines' faults, on real processes."""

import pytest

from bench.faults.__main__ import play
from bench.faults.cases import CASES, Case
from bench.gateway.site import WARMROUTE

SLICE = (
    "one dies",
    "one dies midstream",
    "one cuts its streams",
    "one answers 500",
    "one answers 429",
    "one answers 408",
    "clients' mistakes",
    "all answer 503 and are well again",
    "one hangs, its health doesn't",
    "one comes back",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SLICE], ids=lambda case: case.name)
async def test_a_fault_of_an_engine_breaks_no_promise(case: Case) -> None:
    seen = await play(WARMROUTE, case)
    assert seen.is_good, f"{case.promise}: {seen.text}"


def test_the_slice_is_of_the_matrix() -> None:
    assert set(SLICE) <= {case.name for case in CASES}
