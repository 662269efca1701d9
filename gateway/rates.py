"""How fast engines compute, as their first tokens show it: what they registered, corrected by what was observed.

An engine's prefills are seen as *stretches*: a stretch begins when a prefill is sent to an engine that has none
outstanding, or where the stretch before it was cut, and it ends when none is outstanding, or after `STRETCH_PREFILLS`
first tokens. Within it the engine has work all the time, so the operations of the prefills that ended, over its seconds
less those of loading, are the engine's rate. In what order it took them, and whether it took several at once, makes no
difference: prefills that a batch ends together are never parted, and what a cut leaves half done is missing on one side
and too much on the other. Nothing that was expected of the wait goes into it, so a wrong wait is never taken for a slow
engine. A stretch with work in it that can't be seen doesn't count: other gateways' prefills, whole answers (which show
their end alone), requests that failed or left, hits that weren't what was expected; nor one that was mostly loading, or
mostly of prompts so short that they show the engine's overheads.

The rate is the middle of the last stretches', weighted: by tokens, as overheads are a smaller share of more work, and
by age, so that a change is followed. It is trusted by how many there were lately; an engine without any is as it was
registered.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from directory.costs import Rates

CORRECTION_MAX = 4.0
"""A registered rate is believed to within this factor."""
STRETCH_PREFILLS = 4
BATCH_S = 0.01
"""First tokens that come closer together may be of one step of the engine: a stretch isn't cut between them."""
BATCH_PREFILLS_MAX = 16
"""But after so many it is."""
TOKENS_MIN = 512
"""New tokens a prefill, on average, of a stretch that counts: with fewer, fixed overheads show as slowness."""
TOKENS_COUNTED_MAX = 8192
"""A stretch weighs by its tokens, up to here."""
LOAD_SHARE_MAX = 0.25
SECONDS_MIN, SECONDS_MAX = 1e-4, 3600.0
SAMPLES_MAX = 32
MIDDLE_SHARE = 0.4
"""Of the samples' weight, the share in the middle that is averaged: nearly a third may be far off on one side."""
NEWER_WEIGHS = 1.07
"""Each sample weighs so many times what the one before it does: the last ten have half of all weight."""
HALF_LIFE_S = 300.0
SAMPLES_TRUSTED = 8.0
"""Fresh samples after which the correction counts in full; before, in proportion (of its logarithm)."""
SAMPLES_NEEDED = 3.0
"""Fresh samples after which the rate of an engine that registered none is believed."""
ERRORS_MAX = 64
"""First tokens whose expectation is kept for an engine's median error."""
CURRENT_S = 0.25
"""How long a corrected rate is used until its samples, and their age, are looked at again."""
FLOPS_MIN, FLOPS_MAX = 1.0, 1e19


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What a request was expected to take: operations to compute `new_tokens`, seconds of loading the others.

    `expected_ttft_s` is all of it with the wait; only errors of expectations are made of it.
    """

    flop: float
    new_tokens: int
    load_s: float
    expected_ttft_s: float


@dataclass(frozen=True, slots=True)
class EngineLife:
    """Who an engine is: another URL, or lives of which none was known, make it another engine."""

    url: str
    incarnations: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class RateReport:
    """What is known of an engine's rate. `flops` is in use, `None` where nothing is known.

    `correction`: how many times the registered rate that is; `samples`: stretches that were observed and not yet
    forgotten, whole and in part. `error_factor`: half of the last expectations of the time to the first token were off
    by no more than this factor, and `took_over_expected` is the median of the times over what was expected.
    """

    flops: float | None
    correction: float
    samples: float
    error_factor: float | None
    took_over_expected: float | None


@dataclass(eq=False, slots=True)
class _Sample:
    log_flops: float
    tokens: float
    at: float


@dataclass(eq=False, slots=True)
class _Stretch:
    began_at: float
    flop: float = 0.0
    load_s: float = 0.0
    tokens: int = 0
    prefills: int = 0
    last_at: float = 0.0
    is_clean: bool = True
    sample: _Sample | None = None


@dataclass(eq=False, slots=True)
class _Engine:
    life: EngineLife
    outstanding: int = 0
    unseen: int = 0
    stretch: _Stretch | None = None
    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    log_errors: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS_MAX))
    registered: Rates | None = None
    corrected: Rates | None = None
    current_until: float = -math.inf


@dataclass(eq=False, slots=True)
class Sending:
    """One request on its way to an engine; the observer's, not to be changed by others."""

    engine: _Engine
    work: PrefillWork
    sent_at: float
    is_seen: bool
    is_outstanding: bool = True
    stretch: _Stretch | None = None


class ObservedRates:
    """Follows requests, and says how fast engines are. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._engines: dict[str, _Engine] = {}

    def see(self, lives: Mapping[str, EngineLife]) -> None:
        """These engines are in the fleet. What was observed of others is dropped; a new life begins anew.

        A life with more incarnations than were known, one of them among those, goes on: a walk registers another.
        """
        for name in self._engines.keys() - lives.keys():
            del self._engines[name]
        for name, life in lives.items():
            engine = self._engines.get(name)
            if engine is None:
                continue
            was = engine.life
            is_other = was.url not in ("", life.url)
            is_reborn = bool(was.incarnations and life.incarnations) and not was.incarnations & life.incarnations
            if is_other or is_reborn:
                self._engines[name] = _Engine(life)
            elif life.incarnations or not was.url:
                engine.life = EngineLife(life.url, life.incarnations or was.incarnations)

    def sent(self, name: str, work: PrefillWork, is_streamed: bool, others_prefills: int = 0) -> Sending:
        """A request goes to an engine, on which other gateways have `others_prefills` outstanding."""
        engine = self._engines.setdefault(name, _Engine(EngineLife("")))
        now = self._clock()
        sending = Sending(engine, work, now, is_streamed and not others_prefills)
        if engine.stretch is None:
            engine.stretch = _Stretch(now)
        engine.outstanding += 1
        engine.unseen += not sending.is_seen
        engine.stretch.is_clean &= sending.is_seen
        return sending

    def first_token(self, sending: Sending) -> float | None:
        """Its prefill is done. How many times as long as expected it took; `None` where that was told before."""
        if not sending.is_outstanding:
            return None
        engine, work, now = sending.engine, sending.work, self._clock()
        stretch = engine.stretch
        assert stretch is not None, "a stretch lasts as long as a prefill is outstanding"
        gap_s = now - stretch.last_at
        if stretch.prefills >= (STRETCH_PREFILLS if gap_s > BATCH_S else BATCH_PREFILLS_MAX):
            self._cut(engine, stretch, stretch.last_at)
            stretch = engine.stretch = _Stretch(stretch.last_at, is_clean=not engine.unseen)
        stretch.flop += work.flop
        stretch.load_s += work.load_s
        stretch.tokens += work.new_tokens
        stretch.prefills += 1
        stretch.last_at = now
        sending.stretch = stretch
        self._settle(sending)
        took = min(max(now - sending.sent_at, SECONDS_MIN), SECONDS_MAX) / max(work.expected_ttft_s, SECONDS_MIN)
        engine.log_errors.append(math.log(took))
        return took

    def ended(self, sending: Sending) -> None:
        """It is over; without a first token, what it took of the engine isn't known."""
        if sending.is_outstanding:
            assert sending.engine.stretch is not None, "a stretch lasts as long as a prefill is outstanding"
            sending.engine.stretch.is_clean = False
            self._settle(sending)

    def mistaken(self, sending: Sending) -> None:
        """The engine had more or less of the prompt than was expected: its stretch says nothing of its rate."""
        stretch = sending.stretch
        if stretch is not None:
            stretch.is_clean = False
            if stretch.sample is not None and stretch.sample in sending.engine.samples:
                sending.engine.samples.remove(stretch.sample)

    def rates(self, name: str, registered: Rates | None) -> Rates | None:
        """What to believe of an engine that registered `registered`."""
        engine = self._engines.get(name)
        if engine is None:
            return registered
        now = self._clock()
        if registered is not engine.registered or now >= engine.current_until:
            engine.registered, engine.current_until = registered, now + CURRENT_S
            engine.corrected = _corrected(engine, registered, now)
        return engine.corrected

    def report(self, name: str, registered: Rates | None) -> RateReport:
        """What is known of an engine, for people."""
        rates = self.rates(name, registered)
        flops = rates.flops if rates else None
        engine = self._engines.get(name)
        if engine is None:
            return RateReport(flops, 1.0, 0.0, None, None)
        errors = engine.log_errors
        return RateReport(
            flops,
            correction=flops / registered.flops if flops and registered else 1.0,
            samples=_fresh(engine, self._clock()),
            error_factor=math.exp(statistics.median(map(abs, errors))) if errors else None,
            took_over_expected=math.exp(statistics.median(errors)) if errors else None,
        )

    def _settle(self, sending: Sending) -> None:
        engine = sending.engine
        sending.is_outstanding = False
        engine.outstanding -= 1
        engine.unseen -= not sending.is_seen
        if not engine.outstanding:
            assert engine.stretch is not None, "a stretch lasts as long as a prefill is outstanding"
            self._cut(engine, engine.stretch, self._clock())
            engine.stretch = None

    def _cut(self, engine: _Engine, stretch: _Stretch, ended_at: float) -> None:
        """Make a sample of a stretch that is over, if it shows how fast the engine computes."""
        seconds = ended_at - stretch.began_at
        is_short = stretch.tokens < TOKENS_MIN * stretch.prefills
        if not stretch.is_clean or not stretch.prefills or is_short or not SECONDS_MIN <= seconds <= SECONDS_MAX:
            return
        if stretch.load_s > LOAD_SHARE_MAX * seconds or stretch.flop <= 0:
            return
        flops = min(max(stretch.flop / (seconds - stretch.load_s), FLOPS_MIN), FLOPS_MAX)
        stretch.sample = _Sample(math.log(flops), min(stretch.tokens, TOKENS_COUNTED_MAX), ended_at)
        engine.samples.append(stretch.sample)


def _fresh(engine: _Engine, now: float) -> float:
    return sum(_freshness(sample, now) for sample in engine.samples)


def _freshness(sample: _Sample, now: float) -> float:
    return float(0.5 ** (max(0.0, now - sample.at) / HALF_LIFE_S))


def _corrected(engine: _Engine, registered: Rates | None, now: float) -> Rates | None:
    fresh = _fresh(engine, now)
    if registered is None:
        return Rates(math.exp(_middle(engine, now))) if fresh >= SAMPLES_NEEDED else None
    if not engine.samples:
        return registered
    bound = math.log(CORRECTION_MAX)
    off = min(bound, max(-bound, _middle(engine, now) - math.log(registered.flops)))
    return replace(registered, flops=registered.flops * math.exp(off * min(1.0, fresh / SAMPLES_TRUSTED)))


def _middle(engine: _Engine, now: float) -> float:
    """The mean of the middle of the samples' weight, of which there is some: a median that moves in small steps."""
    weighed = sorted(
        (sample.log_flops, sample.tokens * NEWER_WEIGHS**order * _freshness(sample, now))
        for order, sample in enumerate(engine.samples)
    )
    total = sum(weight for _, weight in weighed)
    if not total:  # so old that nothing is left of any
        return weighed[-1][0]
    low, high = total * (1 - MIDDLE_SHARE) / 2, total * (1 + MIDDLE_SHARE) / 2
    passed = summed = 0.0
    for value, weight in weighed:
        summed += value * max(0.0, min(passed + weight, high) - max(passed, low))
        passed += weight
    return summed / (high - low)
