"""The demo's answers are those of a fleet without any cache."""

from pathlib import Path

import pytest

from tests.warmroute.fleets import play_demo

pytestmark = pytest.mark.timeout(900)


def test_the_demos_texts_equal_those_of_a_run_without_any_cache(tmp_path: Path) -> None:
    for name in ("warm", "cold"):
        (tmp_path / name).mkdir()
    warm, cold = play_demo(tmp_path / "warm"), play_demo(tmp_path / "cold", "--no-cache")
    assert warm[-1]["cached_tokens"] >= 2_048
    assert [row["cached_tokens"] for row in cold] == [0] * len(warm)
    assert [row["text"] for row in cold] == [row["text"] for row in warm]
