"""The replay: its engine model at figures by hand, what must add up, and the command."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from directory.costs import ModelShape
from directory.tiers import Tier
from gateway.routing.policies import POLICIES
from warmroute.cli import main
from warmroute.replay.engine_model import EngineModel, Job
from warmroute.replay.hardware import FleetPlan, Imperfection, Model, TierBlocks
from warmroute.replay.report import report
from warmroute.replay.simulation import replay
from warmroute.replay.trace import TracedRequest, TraceError, block_key, from_zero, read_trace, spread_out
from warmroute.replay.world import Outcome

SECOND_A_BLOCK = Model(ModelShape(0.5, 0, 1, 25e9 / 2048), flops=512.0, step_s=0.5)  # type: ignore[arg-type]
"""Computes a block in a second, loads one from DRAM in a quarter, and replies with two tokens a second."""
LINE = b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}'
PERFECT = Imperfection(service_error=0.0, engine_spread=0.0)


def plan(nodes: int = 1, gpu: int = 100, dram: int = 0, nvme: int = 0, **other: object) -> FleetPlan:
    blocks, imperfection = TierBlocks(gpu, dram, nvme), other.pop("imperfection", PERFECT)
    return FleetPlan(nodes, SECOND_A_BLOCK, blocks, imperfection, interference=0.1, **other)  # type: ignore[arg-type]


def asked(arrival_s: float, prompt_tokens: int, output_tokens: int, first_id: int) -> TracedRequest:
    full = range(first_id, first_id + prompt_tokens // 512)
    return TracedRequest(arrival_s, prompt_tokens, output_tokens, tuple(map(block_key, full)))


def run_alone(requests: Sequence[TracedRequest], of: FleetPlan) -> list[Job]:
    engine = EngineModel(of)
    jobs = [Job(number, request) for number, request in enumerate(requests)]
    for job in jobs:
        engine.submit(job, job.request.arrival_s)
    while engine.next_at() < float("inf"):
        engine.advance(engine.next_at())
    return jobs


def test_a_lone_request_takes_its_prefill_then_a_step_a_token() -> None:
    (job,) = run_alone([asked(0.0, 1024, 3, 0)], plan())
    assert (job.started_at, job.first_token_at, job.ended_at) == (0.0, 2.0, 3.0)
    assert job.missed_tokens == 1024


def test_a_running_reply_slows_the_next_prefill_and_gets_one_token_a_chunk_of_it() -> None:
    first, second = run_alone([asked(0.0, 1024, 3, 0), asked(0.0, 512, 1, 10)], plan())
    assert second.started_at == 2.0
    assert second.first_token_at == pytest.approx(3.1)  # a second, and a tenth for one running reply
    assert first.ended_at == pytest.approx(3.6)  # a token at 3.1 with the chunk, the other half a second later


def test_smaller_chunks_let_replies_through_sooner() -> None:
    requests = [asked(0.0, 1024, 3, 0), asked(0.0, 512, 1, 10)]
    first, _ = run_alone(requests, plan(prefill_chunk_tokens=256))
    assert first.ended_at == pytest.approx(3.1)  # two chunks of 0.55 s, a token with each


def test_what_is_in_gpu_is_used_in_place_but_for_the_last_token() -> None:
    _, again = run_alone([asked(0.0, 1024, 1, 0), asked(5.0, 1024, 1, 0)], plan())
    assert again.first_token_at == 6.0
    assert again.tier_tokens == {Tier.GPU: 512}
    assert again.missed_tokens == 512


def test_a_sibling_that_waits_finds_what_was_computed_meanwhile() -> None:
    _, sibling = run_alone([asked(0.0, 1024, 1, 0), asked(0.5, 1024, 1, 0)], plan())
    assert (sibling.started_at, sibling.first_token_at) == (2.0, 3.0)


def test_victims_of_gpu_are_loaded_from_dram() -> None:
    requests = [asked(0.0, 1024, 1, 0), asked(5.0, 1024, 1, 10), asked(10.0, 1025, 1, 0)]
    *_, last = run_alone(requests, plan(gpu=3, dram=10))
    assert last.tier_tokens == {Tier.DRAM: 1024}
    assert last.first_token_at == pytest.approx(10.0 + 2 * 0.25 + 1 / 512)


def test_a_prompt_waits_until_its_kv_fits_beside_what_runs() -> None:
    requests = [asked(0.0, 1024, 101, 0), asked(0.0, 512, 1, 10)]
    first, second = run_alone(requests, plan(gpu=4))
    assert first.ended_at == pytest.approx(52.0)
    assert second.first_token_at == pytest.approx(53.0)
    assert run_alone(requests, plan(gpu=5))[1].first_token_at == pytest.approx(3.1)


def test_round_robin_over_two_nodes_by_hand() -> None:
    requests = [asked(0.0, 512, 1, 10 * number) for number in range(5)]
    figures = report("round-robin", replay(requests, plan(nodes=2), "round-robin"), slo_ttft_s=2.0)
    assert figures.ttft.mean == pytest.approx((1 + 1 + 2 + 2 + 3) / 5)
    assert (figures.ttft.p50, figures.ttft.p99) == (2.0, 3.0)
    assert figures.balance == pytest.approx(3 / 2.5)
    assert figures.goodput_share == 0.8
    assert figures.goodput == pytest.approx(4 / 3)


def test_a_prompt_follows_its_prefix_and_leaves_it_where_waiting_costs_more() -> None:
    long_ago, at_once = asked(0.0, 1024, 1, 0), asked(20.0, 2048, 1, 10)
    outcome = replay([long_ago, asked(10.0, 1024, 1, 0)], plan(nodes=2), "seconds")
    assert outcome.engines[0] == outcome.engines[1]
    holder = outcome.engines[0]
    busy = replay([long_ago, *[at_once] * 2, asked(20.0, 1024, 1, 0)], plan(nodes=2), "least-load")
    assert sorted(busy.engines[1:3]) == [0, 1]
    crowd = [asked(10.0 + number / 100, 1024, 1, 0) for number in range(9)]
    spilled = replay([long_ago, *crowd], plan(nodes=2), "seconds")
    assert spilled.engines.count(holder) < 10
    assert spilled.spills


def test_a_placement_is_seen_after_the_announcer_s_delay() -> None:
    # Far apart in time, so that nothing is on its way; the delay alone hides what the first request left.
    requests = [asked(0.0, 1024, 1, 0), asked(30.0, 1024, 1, 0), asked(60.0, 1024, 1, 0)]
    slow = plan(nodes=8, imperfection=Imperfection(0.0, 0.0, announce_delay_s=1000.0))
    quick = plan(nodes=8)
    assert len(set(replay(requests, quick, "prefix").engines)) == 1
    moved = [replace_affinity(each, number) for number, each in enumerate(requests)]
    assert hits(replay(moved, quick, "prefix")) == 1024
    assert hits(replay(moved, slow, "prefix")) < 1024


def replace_affinity(request: TracedRequest, number: int) -> TracedRequest:
    """The same first block, and a second one of its own, by which ties are broken."""
    keys = (request.keys[0], block_key(1000 + number))
    return TracedRequest(request.arrival_s, request.prompt_tokens, request.output_tokens, keys)


def hits(outcome: Outcome) -> int:
    return sum(job.tier_tokens.total() for job in outcome.jobs)


def random_trace(count: int) -> list[TracedRequest]:
    drawn = random.Random(7)
    requests, arrival_s = [], 0.0
    for _ in range(count):
        arrival_s += drawn.expovariate(1.0)
        family = drawn.randrange(8)
        blocks = drawn.randrange(1, 12)
        keys = tuple(block_key(100 * family + block) for block in range(blocks))
        requests.append(TracedRequest(arrival_s, 512 * blocks + drawn.randrange(512), drawn.randrange(1, 20), keys))
    return requests


@pytest.mark.parametrize("policy", POLICIES)
def test_all_requests_end_and_tokens_add_up_alike_for_a_seed(policy: str) -> None:
    trace = random_trace(80)
    small = plan(nodes=3, gpu=16, dram=24, nvme=60, imperfection=Imperfection(), write_policy="through")
    first, second = (report(policy, replay(trace, small, policy, seed=3), 2.0) for _ in range(2))
    assert first == second
    tokens = first.tokens
    assert first.requests == 80
    assert tokens["requested"] == sum(each.prompt_tokens for each in trace)
    assert tokens["requested"] == tokens["gpu"] + tokens["dram"] + tokens["nvme"] + tokens["missed"]
    assert min(tokens.values()) > 0
    assert report(policy, replay(trace, small, policy, seed=4), 2.0) != first


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "isn't JSON"),
        ("[]", "must be an object"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": -1, "input_length": 9, "output_length": 1, "hash_ids": []}', "timestamp"),
        ('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1]}', "2 full blocks"),
        ('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 1]}', "twice"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, says: str) -> None:
    good = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}'
    with pytest.raises(TraceError, match=f"line 2.*{says}"):
        read_trace([good, line])


def test_prompts_share_the_keys_of_blocks_that_they_share() -> None:
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [7, %d]}'
    first, second = read_trace([line % 8, line % 9])
    assert first.keys[0] is second.keys[0]
    assert first.keys == (block_key(7), block_key(8))


def test_speed_shortens_the_times_between_arrivals() -> None:
    late = [asked(100.0, 9, 1, 0), asked(104.0, 9, 1, 0)]
    assert [each.arrival_s for each in from_zero(late, 8.0)] == [0.0, 0.5]


def test_arrivals_of_one_tick_are_spread_over_it() -> None:
    together = [asked(3.0, 9, 1, 0)] * 50 + [asked(6.0, 9, 1, 0)] * 50
    moments = [each.arrival_s for each in spread_out(together, 3.0)]
    assert moments == sorted(moments)
    assert [sum(start <= each < start + 3 for each in moments) for start in (3, 6)] == [50, 50]
    assert len(set(moments)) == 100


def test_the_command_compares_policies_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "timestamp": 100 * n,
            "input_length": 2000,
            "output_length": 5,
            "hash_ids": [9 * (n % 3) + m for m in range(4)],
        }
        for n in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert (
        main(["replay", str(trace), "--nodes", "2", "--compare", "seconds,sticky", "--half", "second", "--json"]) == 0
    )
    seconds, sticky = map(json.loads, capsys.readouterr().out.splitlines())
    assert (seconds["policy"], sticky["policy"], seconds["requests"]) == ("seconds", "sticky", 10)
    assert set(seconds["ttft"]) == {"mean", "p50", "p90", "p99"}
    assert main(["replay", str(trace), "--speed", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("seconds ")


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("", encoding="utf-8")
    assert main(["replay", str(trace)]) == 2
    assert "holds no request" in capsys.readouterr().err
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}', encoding="utf-8")
    assert main(["replay", str(trace), "--compare", "second"]) == 2
    assert "second" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("written", "options", "says"),
    [
        (b"\x1f\x8b\x08", [], "trace.jsonl isn't text in UTF-8"),
        (b"[" * 100_000, [], "trace.jsonl: line 1 isn't JSON"),
        (LINE, ["--devices", "8"], "8b is on H100s"),
        (LINE, ["--accelerator", "l40s", "--model", "70b"], "70b is on H100s"),
        (LINE, ["--plot", "folder.png"], "can't write to"),
    ],
)
def test_trouble_is_one_sentence(
    written: bytes,
    options: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    Path("trace.jsonl").write_bytes(written)
    assert main(["replay", "trace.jsonl", *options]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("warmroute replay: ")
    assert says in sentence


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--speed", "1e-300", "a number from 0.001 to 1000000, not 1e-300"),
        ("--nodes", "1e3", "a whole number, not '1e3'"),
        ("--engine-spread", "1e6", "from 0 to 3"),
        ("--slo-ttft", "nan", "not nan"),
    ],
)
def test_an_option_out_of_bounds_is_told_them(
    option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "trace.jsonl", option, value])
    assert says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "status"), [(BrokenPipeError(), 0), (OSError(28, "full"), 2), (KeyboardInterrupt(), 130)]
)
def test_who_reads_no_more_or_interrupts_sees_no_traceback(
    error: BaseException,
    status: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: object) -> str:
        raise error

    monkeypatch.setattr("warmroute.replay_command.table", broken)
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(LINE)
    assert main(["replay", str(trace)]) == status
    assert len(capfd.readouterr().err.splitlines()) == (status == 2)


def test_a_plot_without_its_library_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}', encoding="utf-8")
    assert main(["replay", str(trace), "--plot", str(tmp_path / "a.png")]) == 2
    assert "warmroute[plot]" in capsys.readouterr().err
    assert main(["replay", str(trace), "--plot", str(tmp_path / "a.txt")]) == 2
    assert ".svg" in capsys.readouterr().err


def test_a_block_is_fetched_from_the_host_that_holds_it_while_its_prompt_waits() -> None:
    # One engine holds the prefix and is busy; the prompt goes to the other, and waits there.
    requests = [asked(0.0, 4096, 1, 0), asked(20.0, 8192, 1, 100), asked(20.0, 8192, 1, 200), asked(20.1, 4608, 1, 0)]
    alone = replay(requests, plan(nodes=2, dram=100), "round-robin")
    assert (alone.fetched, alone.jobs[3].missed_tokens) == (0, 4608)
    helped = replay(requests, plan(nodes=2, dram=100, peers=True, peer_bytes_per_s=12.5e9), "round-robin")
    assert helped.fetched == 8
    assert helped.jobs[3].tier_tokens == {Tier.DRAM: 4096}
    late = replay(requests, plan(nodes=2, dram=100, peers=True, peer_bytes_per_s=1e9), "round-robin")
    assert late.fetched == 0, "it takes longer than computing"
