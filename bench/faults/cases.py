"""The faults, each with what must not follow from it. A case has a fleet of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from bench.faults.fleet import Fleet
from bench.gateway.client import Outcome
from bench.gateway.engine import Behaviour

RECOVERY_S_MAX = 2.0
RECOVERY_LOOKS = 60
RECOVERY_POLL_S = 0.1
LEFT_AFTER_S = 0.5
"""After its client has gone an engine may be at work on a request for so long."""


@dataclass(frozen=True, slots=True)
class Seen:
    """In few words, and whether it is as it should be."""

    text: str
    is_good: bool


@dataclass(frozen=True, slots=True)
class Case:
    """`promise` is what should come of it."""

    name: str
    promise: str
    play: Callable[[Fleet], Awaitable[Seen]]


async def one_dies(fleet: Fleet) -> Seen:
    """kill -9 in the middle of whole answers."""
    await fleet.behave(Behaviour(ttft_s=0.02))
    killing = asyncio.create_task(_later(1.0, fleet.victim.kill))
    outcome = await fleet.ask(12, lasts_s=3.0)
    await killing
    return _none_failed(outcome)


async def one_dies_midstream(fleet: Fleet) -> Seen:
    """kill -9 with ten of thirty streams on it; then it goes on."""
    await fleet.behave(Behaviour(ttft_s=0.02, token_s=0.02))
    killing = asyncio.create_task(_later(1.0, fleet.victim.kill))
    first = await fleet.ask(30, 30, tokens=100, is_streamed=True)
    await killing
    later = await fleet.ask(15, 30, tokens=10, is_streamed=True)
    told = first.errors["error event"]
    cut = first.total - first.good
    text = f"{cut} of 30 broke off, {told} with an error event; later {_failed(later)} of {later.total} failed"
    return Seen(text, cut == told and not _failed(later))


async def one_cuts(fleet: Fleet) -> Seen:
    """Each of its streams ends after 20 tokens."""
    await fleet.behave(Behaviour(ttft_s=0.005, token_s=0.002))
    await fleet.victim.behave(Behaviour(ttft_s=0.005, token_s=0.002, cuts_after=20))
    outcome = await fleet.ask(6, 60, tokens=60, is_streamed=True)
    cut, told = outcome.total - outcome.good, outcome.errors["error event"]
    return Seen(f"{cut} of 60 broke off, {told} with an error event", cut == told)


async def one_drops(fleet: Fleet) -> Seen:
    """It closes connections without an answer."""
    await fleet.victim.behave(Behaviour(drops=True))
    return _none_failed(await fleet.ask(6, 120))


async def one_answers(status: int, is_streamed: bool, fleet: Fleet) -> Seen:
    """It says the same to everything."""
    await fleet.victim.behave(Behaviour(status=status, retry_after_s=7))
    outcome = await fleet.ask(6, 240, is_streamed=is_streamed, tokens=4)
    seen, calls = _none_failed(outcome), (await fleet.victim.told()).requests
    return Seen(f"{seen.text}; {calls} calls to it", seen.is_good)


async def bad_clients(fleet: Fleet) -> Seen:
    """All engines refuse sixty requests, which are their clients' mistakes; then come good ones."""
    await fleet.behave(Behaviour(status=400))
    bad = await fleet.ask(6, 60)
    await fleet.behave(Behaviour())
    good = await fleet.ask(6, 60)
    is_passed_on = bad.statuses[400] == 60
    return Seen(
        f"{bad.statuses[400]} of 60 told so; of 60 good ones then {_failed(good)} failed",
        is_passed_on and not _failed(good),
    )


async def all_are_down(fleet: Fleet) -> Seen:
    """All say 503, then all are well again."""
    await fleet.behave(Behaviour(status=503, retry_after_s=1))
    await fleet.ask(6, 60)
    await fleet.behave(Behaviour())
    return await _recovery(fleet)


async def one_hangs(fleet: Fleet) -> Seen:
    """It accepts and never answers, while its health is fine; clients wait for 15 s."""
    await fleet.behave(Behaviour(ttft_s=0.005))
    await fleet.victim.behave(Behaviour(is_hung=True))
    outcome = await fleet.ask(12, lasts_s=8.0, timeout_s=15.0)
    return _none_failed(outcome)


async def one_hangs_with_its_health(fleet: Fleet) -> Seen:
    """The same, and its health doesn't answer either."""
    await fleet.behave(Behaviour(ttft_s=0.005))
    await fleet.victim.behave(Behaviour(is_hung=True, is_health_hung=True))
    outcome = await fleet.ask(12, lasts_s=8.0, timeout_s=15.0)
    return _none_failed(outcome)


async def long_streams(fleet: Fleet) -> Seen:
    """Healthy ones of five seconds."""
    await fleet.behave(Behaviour(ttft_s=0.02, token_s=0.05))
    return _none_failed(await fleet.ask(6, 6, tokens=100, is_streamed=True))


async def clients_leave(is_streamed: bool, fleet: Fleet) -> Seen:
    """Twelve of them, after a second."""
    await fleet.behave(Behaviour(ttft_s=0.02 if is_streamed else 4.0, token_s=0.05))
    await fleet.ask(12, 12, tokens=100, is_streamed=is_streamed, timeout_s=1.0)
    await asyncio.sleep(LEFT_AFTER_S)
    still = await fleet.open()
    return Seen(f"engines at work on {still} of 12 half a second later", not still)


async def one_comes_back(fleet: Fleet) -> Seen:
    """It is killed, and started again four seconds later."""
    await fleet.behave(Behaviour(ttft_s=0.02))
    await fleet.victim.kill()
    gone = await fleet.ask(12, lasts_s=4.0)
    await fleet.victim.start()
    well_at, failed = asyncio.get_running_loop().time(), _failed(gone)
    for _ in range(RECOVERY_LOOKS):
        failed += _failed(await fleet.ask(6, 12))
        if (await fleet.victim.told()).requests:
            took_s = asyncio.get_running_loop().time() - well_at
            return Seen(f"{failed} failed; asked again after {took_s:.1f} s", not failed and took_s <= RECOVERY_S_MAX)
        await asyncio.sleep(RECOVERY_POLL_S)
    took_s = asyncio.get_running_loop().time() - well_at
    return Seen(f"{failed} failed; not asked again for {took_s:.0f} s", False)


async def _recovery(fleet: Fleet) -> Seen:
    well_at = asyncio.get_running_loop().time()
    for _ in range(RECOVERY_LOOKS):
        outcome = await fleet.ask(1, 3)
        if not _failed(outcome):
            took_s = asyncio.get_running_loop().time() - well_at
            return Seen(f"served again after {took_s:.1f} s", took_s <= RECOVERY_S_MAX)
        await asyncio.sleep(RECOVERY_POLL_S)
    return Seen(f"not served for {asyncio.get_running_loop().time() - well_at:.0f} s", False)


def _none_failed(outcome: Outcome) -> Seen:
    failed, slowest_s = _failed(outcome), max(outcome.seconds, default=0.0)
    kinds = {**outcome.errors, **{str(status): count for status, count in outcome.statuses.items() if status != 200}}
    said = f" ({', '.join(f'{count} x {kind}' for kind, count in kinds.items())})" if kinds else ""
    return Seen(f"{failed} of {outcome.total} failed{said}; slowest {slowest_s:.2f} s", not failed)


def _failed(outcome: Outcome) -> int:
    return outcome.total - outcome.good


async def _later(wait_s: float, do: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(wait_s)
    await do()


NONE_FAILS = "none fails"
TOLD = "each break is told by an error event"
CASES = (
    Case("one dies", NONE_FAILS, one_dies),
    Case("one dies midstream", TOLD, one_dies_midstream),
    Case("one cuts its streams", TOLD, one_cuts),
    Case("one closes without an answer", NONE_FAILS, one_drops),
    *(
        Case(f"one answers {status}", NONE_FAILS, partial(one_answers, status, False))
        for status in (500, 502, 503, 429, 408)
    ),
    Case("one answers 503, streams", NONE_FAILS, partial(one_answers, 503, True)),
    Case("clients' mistakes", "they are told, and no good request fails", bad_clients),
    Case("all answer 503 and are well again", f"served within {RECOVERY_S_MAX:g} s", all_are_down),
    Case("one hangs, its health doesn't", NONE_FAILS, one_hangs),
    Case("one hangs with its health", NONE_FAILS, one_hangs_with_its_health),
    Case("long streams", NONE_FAILS, long_streams),
    Case("clients leave streams", "engines stop", partial(clients_leave, True)),
    Case("clients leave whole answers", "engines stop", partial(clients_leave, False)),
    Case("one comes back", f"none fails, asked within {RECOVERY_S_MAX:g} s", one_comes_back),
)
