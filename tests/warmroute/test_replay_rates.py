"""Engines' rates in replays: what correcting them is worth, and where they come from."""

import json
import random
from pathlib import Path

import pytest

from warmroute.cli import main
from warmroute.replay.hardware import MODELS, FleetPlan, Imperfection, model_named
from warmroute.replay.report import report
from warmroute.replay.simulation import replay
from warmroute.replay.trace import TracedRequest, block_key

REQUESTS = 250


def unique_prompts(seed: int) -> list[TracedRequest]:
    """Prompts of 2 to 16 thousand tokens that have nothing in common, for about 0.7 of four engines' time."""
    drawn, at, requests = random.Random(seed), 0.0, []
    for number in range(REQUESTS):
        at += drawn.expovariate(6.0)
        tokens = drawn.randint(2_000, 16_000)
        keys = tuple(block_key(1000 * number + block) for block in range(tokens // 512))
        requests.append(TracedRequest(at, tokens, 20, keys))
    return requests


def mean_ttft_s(spread: float, corrects_rates: bool, seed: int) -> float:
    """Of the policy that goes by the account of waits alone, so that nothing else is compared."""
    plan = FleetPlan(4, imperfection=Imperfection(engine_spread=spread), corrects_rates=corrects_rates)
    return report("least-load", replay(unique_prompts(seed), plan, "least-load", seed), 2.0).ttft.mean


@pytest.mark.parametrize("seed", [1, 2])
def test_waits_are_shorter_where_unequal_engines_are_known_as_they_are(seed: int) -> None:
    assert mean_ttft_s(0.5, True, seed) < 0.97 * mean_ttft_s(0.5, False, seed)


def test_correction_costs_nothing_where_engines_are_as_fast_as_they_say() -> None:
    assert mean_ttft_s(0.0, True, 1) < 1.02 * mean_ttft_s(0.0, False, 1)


def test_the_tables_8b_is_about_as_fast_as_the_replays_own() -> None:
    own, named = MODELS["8b"], model_named("llama-3.1-8b", "h100", 1)
    assert named.flops == pytest.approx(own.flops, rel=0.02)
    assert named.step_s == pytest.approx(own.step_s, rel=0.05)
    assert model_named("llama-3.1-8b", "h100", 2).step_s == pytest.approx(named.step_s / 2)
    assert model_named("8b", "t4", 7) is own


def test_a_model_of_the_table_is_replayed_and_an_unknown_one_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    ttfts = []
    for model in ("qwen3-32b", "gpt-oss-20b"):
        assert main(["replay", str(trace), "--model", model, "--accelerator", "l40s", "--json"]) == 0
        ttfts.append(json.loads(capsys.readouterr().out)["ttft"]["mean"])
    assert ttfts[0] > 8 * ttfts[1], "nine times as many active parameters"
    assert main(["replay", str(trace), "--model", "qwen3-32"]) == 2
    assert capsys.readouterr().err == "warmroute replay: no model is known as 'qwen3-32'; did you mean qwen3-32b?\n"
