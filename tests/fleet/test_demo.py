"""The demo on a real fleet, as a user runs it; its answers are those of a fleet without any cache."""

from pathlib import Path
from typing import Any

import pytest

from tests.warmroute.fleets import play_demo

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return play_demo(tmp_path_factory.mktemp("demo"))


def test_a_second_turn_computes_only_what_is_new(demo: list[dict[str, Any]]) -> None:
    first, second = demo[0], demo[1]
    assert first["prompt_tokens"] > 2_400
    assert first["cached_tokens"] == 0
    assert second["engine"] == first["engine"]
    assert second["prompt_tokens"] - second["cached_tokens"] < 2 * 256


def test_a_second_reader_goes_to_the_engine_that_holds_the_document(demo: list[dict[str, Any]]) -> None:
    assert demo[2]["engine"] == demo[0]["engine"]
    assert demo[2]["reason"] == "prefix"
    assert demo[2]["cached_tokens"] >= 2_048


def test_a_restarted_engine_hits_its_hosts_dram(demo: list[dict[str, Any]]) -> None:
    assert demo[3]["engine"] == demo[0]["engine"]
    assert demo[3]["tier_tokens"].startswith("dram=")
    assert demo[3]["cached_tokens"] >= 2_048


def test_the_prediction_is_what_the_engine_reports(demo: list[dict[str, Any]]) -> None:
    for row in demo:
        tiers = [] if row["tier_tokens"] == "none" else row["tier_tokens"].split(",")
        assert sum(int(tier.split("=")[1]) for tier in tiers) == row["cached_tokens"], row


def test_its_texts_equal_those_of_a_run_without_any_cache(demo: list[dict[str, Any]], tmp_path: Path) -> None:
    cold = play_demo(tmp_path, "--no-cache")
    assert demo[-1]["cached_tokens"] >= 2_048
    assert [row["cached_tokens"] for row in cold] == [0] * len(demo)
    assert [row["text"] for row in cold] == [row["text"] for row in demo]
