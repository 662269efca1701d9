"""What is learned of engines' speeds from their first tokens, at simulated engines in virtual time."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.costs import ModelShape, Rates, prefill_flop, prefill_s
from directory.tiers import Tier
from gateway.rates import CORRECTION_MAX, HALF_LIFE_S, EngineLife, ObservedRates, PrefillWork, Sending

SHAPE = ModelShape(8e9, 32, 4096, 131_072)
REGISTERED = Rates(4e14, {Tier.DRAM: 2.5e10}, {Tier.DRAM: 0.001})
ENGINE = "engine"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SimulatedEngine:
    """Computes prompts one after the other (or `batch` at once), `slowness` times as slowly as `REGISTERED` says."""

    def __init__(self, slowness: float = 1.0, noise: float = 0.0, batch: int = 1, seed: int = 0) -> None:
        self.clock = Clock()
        self.observed = ObservedRates(self.clock)
        self.slowness, self.noise, self.batch, self.registered = slowness, noise, batch, REGISTERED
        self._random = random.Random(seed)

    def serve(self, prompts: int, at_once: int = 1, load_s: float = 0.0, tokens: int | None = None) -> None:
        """Serve `prompts` prompts, of which `at_once` are outstanding together."""
        waiting: list[tuple[Sending, float]] = []
        sent = 0
        while sent < prompts or waiting:
            while sent < prompts and len(waiting) < at_once:
                waiting.append(self._send(load_s, tokens))
                sent += 1
            together, waiting = waiting[: self.batch], waiting[self.batch :]
            self.clock.now += sum(service_s for _, service_s in together)
            for sending, _ in together:
                self.observed.first_token(sending)
                self.observed.ended(sending)
            if not waiting:
                self.clock.now += 0.5  # idle

    def _send(self, load_s: float, tokens: int | None) -> tuple[Sending, float]:
        tokens = tokens or self._random.randint(600, 20_000)
        compute_s = prefill_s(SHAPE, REGISTERED, tokens) * self.slowness * math.exp(self._random.gauss(0, self.noise))
        sending = self.observed.sent(ENGINE, work_of(tokens, load_s=load_s), is_streamed=True)
        return sending, load_s + compute_s

    @property
    def correction(self) -> float:
        return self.observed.report(ENGINE, self.registered).correction


def work_of(tokens: int, expected_ttft_s: float = 1.0, load_s: float = 0.0) -> PrefillWork:
    return PrefillWork(prefill_flop(SHAPE, tokens), tokens, load_s, expected_ttft_s)


@pytest.mark.parametrize("slowness", [0.5, 0.67, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(("at_once", "batch"), [(1, 1), (6, 1), (12, 6)], ids=["paced", "queued", "in batches"])
def test_a_speed_that_is_off_by_half_is_found_within_48_prompts(slowness: float, at_once: int, batch: int) -> None:
    engine = SimulatedEngine(slowness, noise=0.25, batch=batch)
    engine.serve(48, at_once)
    assert engine.correction == pytest.approx(1 / slowness, rel=0.15)


def test_an_exact_engine_is_found_exactly_however_its_queue_is_cut() -> None:
    engine = SimulatedEngine(2.0)
    engine.serve(40, at_once=7, tokens=4096)
    assert engine.correction == pytest.approx(0.5, rel=1e-9)


def test_a_sudden_slowdown_is_found_within_15_prompts_and_a_recovery_too() -> None:
    engine = SimulatedEngine(1.0, noise=0.2)
    engine.serve(60)
    for slowness in (2.0, 1.0):
        engine.slowness = slowness
        engine.serve(15)
        assert engine.correction == pytest.approx(1 / slowness, rel=0.25)


def test_noise_does_not_make_it_swing() -> None:
    engine = SimulatedEngine(1.0, noise=0.3)
    engine.serve(40)
    seen = []
    for _ in range(100):
        engine.serve(1)
        seen.append(engine.correction)
    assert max(seen) / min(seen) < 1.45
    assert max(max(a, b) / min(a, b) for a, b in itertools.pairwise(seen)) < 1.2


def test_one_hanging_prompt_in_four_changes_little() -> None:
    engine = SimulatedEngine(1.0, noise=0.1)
    for number in range(40):
        engine.slowness = 20.0 if number % 4 == 0 else 1.0
        engine.serve(1)
    assert engine.correction == pytest.approx(1.0, rel=0.15)


def test_an_engine_without_data_is_as_it_registered_and_few_samples_count_in_part() -> None:
    engine = SimulatedEngine(2.0)
    assert engine.observed.rates(ENGINE, REGISTERED) is REGISTERED
    assert engine.observed.rates(ENGINE, None) is None
    engine.serve(2)
    assert 0.5 < engine.correction < 1.0


def test_the_tiers_bandwidths_stay_as_registered_and_loading_is_no_slowness() -> None:
    engine = SimulatedEngine(1.0)
    engine.serve(20, load_s=0.02, tokens=8192)
    corrected = engine.observed.rates(ENGINE, REGISTERED)
    assert corrected is not None
    assert (corrected.bytes_per_s, corrected.fixed_s) == (REGISTERED.bytes_per_s, REGISTERED.fixed_s)
    assert corrected.flops == pytest.approx(REGISTERED.flops)
    slower = replace(REGISTERED, bytes_per_s={Tier.DRAM: 1e9})
    learned_since = engine.observed.rates(ENGINE, slower)
    assert learned_since is not None
    assert learned_since.bytes_per_s == slower.bytes_per_s


def test_what_was_observed_is_forgotten_by_and_by() -> None:
    engine = SimulatedEngine(2.0)
    engine.serve(10)
    engine.clock.now += 4 * HALF_LIFE_S
    assert engine.correction == pytest.approx(0.5 ** (10 / 16 / 8), rel=0.02)
    engine.clock.now += 100 * HALF_LIFE_S
    assert engine.correction == pytest.approx(1.0)


def test_what_the_agent_learns_meanwhile_is_not_counted_twice() -> None:
    engine = SimulatedEngine(2.0)
    engine.serve(20)
    engine.registered = Rates(2e14)
    assert engine.correction == pytest.approx(1.0)


def test_an_engine_that_registered_no_rate_gets_the_observed_one_after_a_few_prompts() -> None:
    engine = SimulatedEngine(1.0)
    engine.serve(2)
    assert engine.observed.rates(ENGINE, None) is None
    engine.serve(2)
    learned = engine.observed.rates(ENGINE, None)
    assert learned is not None
    assert learned.flops == pytest.approx(REGISTERED.flops)


@pytest.mark.parametrize("hides", ["others", "whole answer", "failure", "wrong hit", "short prompts", "mostly loading"])
def test_what_does_not_show_the_prefill_alone_teaches_nothing(hides: str) -> None:
    clock = Clock()
    observed = ObservedRates(clock)
    for _ in range(20):
        work = work_of(100 if hides == "short prompts" else 4096, load_s=0.9 if hides == "mostly loading" else 0.0)
        sending = observed.sent(ENGINE, work, hides != "whole answer", 1 if hides == "others" else 0)
        failed = observed.sent(ENGINE, work, is_streamed=True) if hides == "failure" else None
        clock.now += 2.0
        if failed is not None:
            observed.ended(failed)
        observed.first_token(sending)
        if hides == "wrong hit":
            observed.mistaken(sending)
    assert observed.rates(ENGINE, REGISTERED) == REGISTERED
    assert observed.report(ENGINE, REGISTERED).samples == 0


def test_streams_beside_a_whole_answer_that_lasts_teach_nothing() -> None:
    engine = SimulatedEngine(1.0)
    whole = engine.observed.sent(ENGINE, work_of(4096), is_streamed=False)
    engine.serve(20)
    assert engine.observed.report(ENGINE, REGISTERED).samples == 0
    engine.observed.ended(whole)
    engine.serve(20)
    assert engine.observed.report(ENGINE, REGISTERED).samples > 10


def test_a_wait_that_was_expected_wrongly_is_no_slowness() -> None:
    engine = SimulatedEngine(1.0)
    engine.serve(30, at_once=10)  # each was expected after a second, and took up to ten prefills
    report = engine.observed.report(ENGINE, REGISTERED)
    assert report.correction == pytest.approx(1.0)
    assert report.took_over_expected is not None
    assert report.took_over_expected > 1.5


def test_a_walk_goes_on_with_what_is_known_and_a_new_life_begins_anew() -> None:
    engine = SimulatedEngine(2.0)
    a, b, c = (bytes([number]) * 8 for number in range(3))
    engine.observed.see({ENGINE: EngineLife("http://e:1", frozenset({a}))})
    engine.serve(10)
    for lives in ({a}, {a, b}, {b}, set()):
        engine.observed.see({ENGINE: EngineLife("http://e:1", frozenset(lives))})
        assert engine.correction == pytest.approx(0.5)
    engine.observed.see({ENGINE: EngineLife("http://e:1", frozenset({c}))})
    assert engine.correction == 1.0


@pytest.mark.parametrize("lives", [{}, {ENGINE: EngineLife("http://other:1")}], ids=["gone", "elsewhere"])
def test_an_engine_that_went_or_moved_is_forgotten(lives: dict[str, EngineLife]) -> None:
    engine = SimulatedEngine(2.0)
    engine.observed.see({ENGINE: EngineLife("http://e:1")})
    engine.serve(10)
    engine.observed.see({ENGINE: EngineLife("http://e:1")})
    assert engine.correction == pytest.approx(0.5)
    engine.observed.see(lives)
    assert engine.correction == 1.0


def test_a_request_that_outlives_its_engines_life_does_no_harm() -> None:
    clock = Clock()
    observed = ObservedRates(clock)
    sending = observed.sent(ENGINE, work_of(4096), is_streamed=True)
    observed.see({})
    clock.now += 1.0
    assert observed.first_token(sending) == pytest.approx(1.0)
    assert observed.rates(ENGINE, REGISTERED) is REGISTERED


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send whole", "send among others", "token", "end", "mistake", "wait"]),
        st.integers(0, 10**6),
        st.floats(0, 1e7, allow_nan=False),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, flops=st.floats(1e6, 1e18))
def test_whatever_happens_the_correction_is_finite_and_within_its_bounds(
    events: list[tuple[str, int, float]], flops: float
) -> None:
    clock = Clock()
    observed = ObservedRates(clock)
    registered = Rates(flops)
    sendings: list[Sending] = []
    for kind, number, seconds in events:
        chosen = sendings[number % len(sendings)] if sendings else None
        if kind.startswith("send"):
            work = work_of(number, expected_ttft_s=seconds, load_s=seconds / 100)
            sendings.append(observed.sent(ENGINE, work, kind != "send whole", int(kind == "send among others")))
        elif kind == "wait":
            clock.now += seconds / 1000
        elif chosen is not None:
            {"token": observed.first_token, "end": observed.ended, "mistake": observed.mistaken}[kind](chosen)
        corrected, learned = observed.rates(ENGINE, registered), observed.rates(ENGINE, None)
        assert corrected is not None
        assert corrected.flops / flops * (1 + 1e-9) >= 1 / CORRECTION_MAX
        assert corrected.flops / flops <= CORRECTION_MAX * (1 + 1e-9)
        assert learned is None or 0 < learned.flops < math.inf
    for sending in sendings:
        observed.ended(sending)
    assert all(not each.engine.outstanding and not each.engine.unseen for each in sendings)
