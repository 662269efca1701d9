"""The comparison of policies counts load as it says, and names what the default falls short of."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.replay import LOAD_TOLERANCE, Cell, capacity, compare, main, offered_load
from tests.warmroute.worlds import EXACT, fleet, prompt
from warmroute.replay.simulation import replay
from warmroute.replay.trace import TracedRequest, from_zero


def strangers(count: int) -> list[TracedRequest]:
    """Prompts that share nothing: their work doesn't depend on who serves them."""
    drawn = random.Random(5)
    return [prompt(number / 10, (), drawn.randrange(2, 12), number, 1) for number in range(count)]


def test_the_load_is_the_work_of_the_busiest_third_over_the_time_engines_have_then() -> None:
    requests = [prompt(at, (), 8, number, 1) for number, at in enumerate((0.0, 1.0, 1.5, 2.5, 3.0))]
    outcome = replay(requests, fleet(2, imperfection=EXACT), "weighted")
    service_s = outcome.jobs[0].first_token_at  # the busiest are the two after 1 s; a third is a second
    assert offered_load(outcome, 2) == pytest.approx(2 * service_s / 2, rel=0.05)


def test_at_the_capacity_the_load_is_one() -> None:
    requests, plan = strangers(150), fleet(2)
    speed = capacity(requests, plan, seed=0)
    load = offered_load(replay(from_zero(requests, speed), plan, "weighted"), 2)
    assert load == pytest.approx(1.0, abs=4 * LOAD_TOLERANCE)


def test_what_falls_short_is_named_and_what_does_not_is_not() -> None:
    seconds = compare(strangers(30), fleet(2), ["seconds"], seed=0)["seconds"]

    def other(factor: float) -> tuple:  # type: ignore[type-arg]
        spread = replace(seconds[0].ttft, mean=seconds[0].ttft.mean * factor, p99=seconds[0].ttft.p99 * factor)
        return tuple(replace(each, ttft=spread, goodput=each.goodput / factor) for each in seconds)

    def misses(load: str, policy: str, factor: float) -> list[str]:
        return Cell("t", 2, load, 1.0, {"seconds": seconds, policy: other(factor)}).misses()

    assert not misses("busy", "weighted", 1.5)
    assert misses("busy", "weighted", 1.3) == ["t, 2 nodes, busy: mean TTFT is 0.77 of weighted's, not 0.7"]
    assert not misses("busy", "product", 1.1)
    assert len(misses("busy", "product", 1.0)) == 1
    assert len(misses("busy", "prefix", 0.8)) == 2, "mean and p99"
    assert len(misses("light", "prefix", 0.97)) == 1
    assert not misses("light", "prefix", 0.99)
    assert not misses("over", "sticky", 1.1)
    assert len(misses("over", "sticky", 0.9)) == 2, "goodput under both bounds"


def test_the_command_prints_every_cell_and_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "timestamp": 100 * n,
            "input_length": 2000,
            "output_length": 3,
            "hash_ids": [9 * (n % 7) + m for m in range(4)],
        }
        for n in range(40)
    ]
    for trace in ("conversation", "synthetic"):
        (tmp_path / f"{trace}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    main([str(tmp_path), "--quick", "--policies", "least-load"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in printed if line.startswith("synthetic")][:3] == [
        "synthetic, 4 nodes, light (0.5)",
        "synthetic, 4 nodes, busy (0.85)",
        "synthetic, 4 nodes, over (1.1)",
    ]
    assert sum(line.startswith("  seconds ") for line in printed) == 6
    assert sum(line.startswith("  least-load ") for line in printed) == 6
    assert any(line.startswith("seconds falls short") for line in printed)
