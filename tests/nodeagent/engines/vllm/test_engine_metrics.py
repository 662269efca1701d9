"""vLLM's metrics, as captured from 0.32, and what is made of them."""

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.engines.vllm.engine_metrics import EngineMetrics, MetricsUnreadable, PrefillRate, read_metrics

VECTORS = Path(__file__).parents[3] / "vectors"


@pytest.mark.parametrize(
    ("name", "seconds", "tokens"),
    [("vllm_metrics.txt", 25.729473520000283, 1720.0), ("vllm_metrics_offloading.txt", 3.5063037169998097, 230.0)],
)
def test_captured_metrics_are_read(name: str, seconds: float, tokens: float) -> None:
    seen = read_metrics((VECTORS / name).read_text())
    assert seen == EngineMetrics(prefill_s=seconds, prefill_tokens=tokens)


def test_values_are_summed_over_series_and_sleep_is_seen() -> None:
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 4.0
# TYPE vllm:engine_sleep_state gauge
vllm:engine_sleep_state{sleep_state="awake"} 0.0
vllm:engine_sleep_state{sleep_state="discard_all"} 1.0
"""
    seen = read_metrics(text)
    assert (seen.running, seen.waiting, seen.is_asleep) == (5, 4, True)


def test_an_engine_that_tells_nothing_of_itself_is_idle_and_awake() -> None:
    assert read_metrics("# TYPE other gauge\nother 1\n") == EngineMetrics()


@given(st.text())
def test_whatever_is_served_is_metrics_or_unreadable(text: str) -> None:
    with contextlib.suppress(MetricsUnreadable):
        read_metrics(text)


NAMES = st.sampled_from(
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:engine_sleep_state",
    ]
)
LABELS = st.sampled_from(["", '{engine="0"}', '{sleep_state="awake"}', "{", '{a="\\', '{a="}"}', "{}", "{,}"])
VALUES = st.floats().map(str) | st.sampled_from(["NaN", "+Inf", "-Inf", "1e999", "1_0", "0x1", "", "é", "1 2 3"])


@given(st.lists(st.builds("{}{} {}".format, NAMES, LABELS, VALUES | st.text(max_size=3)), max_size=4).map("\n".join))
def test_whatever_number_or_label_is_served_is_a_bounded_load_or_unreadable(text: str) -> None:
    with contextlib.suppress(MetricsUnreadable):
        seen = read_metrics(text)
        assert 0 <= seen.running < 2**31
        assert 0 <= seen.waiting < 2**31
        assert math.isfinite(seen.kv_use + seen.prefill_s + seen.prefill_tokens)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300"])
def test_a_number_that_cannot_be_true_is_unreadable(value: str) -> None:
    with pytest.raises(MetricsUnreadable, match="num_requests_waiting"):
        read_metrics(f"vllm:num_requests_running 1\nvllm:num_requests_waiting {value}\n")


def test_series_are_bounded_and_those_that_are_not_read_cost_nothing() -> None:
    others = "".join(f'vllm:other{{a="{number}"}} 1\n' for number in range(50_000))
    assert read_metrics(others + "vllm:num_requests_running 2\n").running == 2
    with pytest.raises(MetricsUnreadable, match="series"):
        read_metrics("vllm:num_requests_running 2\n" * 2_000)


def test_a_prefill_rate_needs_enough_tokens_and_survives_a_restart() -> None:
    rate = PrefillRate()
    assert rate.note(EngineMetrics(prefill_s=1, prefill_tokens=1_000)) is None
    assert rate.note(EngineMetrics(prefill_s=1.1, prefill_tokens=1_100)) is None, "too few"
    assert rate.note(EngineMetrics(prefill_s=3, prefill_tokens=2_000)) == 500
    assert rate.note(EngineMetrics(prefill_s=0.5, prefill_tokens=400)) is None, "another process"
    assert rate.note(EngineMetrics(prefill_s=1.5, prefill_tokens=1_400)) == 1_000
