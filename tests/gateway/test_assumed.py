"""What engines without an agent are assumed to hold: from what they answered, corrected by what they report."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from directory.placements import PrefixMatch, Reach
from directory.tiers import Tier
from gateway.audit import Usage
from gateway.config import EngineConfig, RoutingConfig
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView
from gateway.openai_schema import COMPLETIONS
from gateway.routing.assumed import DISTRUST_S, MISSES_MAX, AssumedPlacements
from gateway.routing.overlay import Overlay
from gateway.sent_prompts import SentPrompts
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

KEYS = tuple(bytes([number]) * 16 for number in range(10))
OTHERS, MORE = (tuple(bytes([start + number]) * 16 for number in range(10)) for start in (20, 40))
"""Chunks of other prompts: a key names all before it, so prompts have their first ones in common or none."""
FILES = ModelFiles("reference", (("tokenizer.json", "a" * 64),))
EXPLAIN = {"x-warmroute-explain": "1"}
CHUNK = 256


def placements(lifetime_s: float = 100.0) -> AssumedPlacements:
    return AssumedPlacements(lifetime_s)


def test_a_prompt_that_was_answered_is_assumed_until_a_lifetime_after_its_last_use() -> None:
    assumed = placements()
    assumed.note_computed("a", KEYS[:4], 100, now=0.0)
    assert assumed.run("a", KEYS, now=99.0).chunks == 4
    assumed.note_computed("a", KEYS[:2], 100, now=99.0)
    assert assumed.run("a", KEYS, now=101.0).chunks == 2
    assert assumed.run("b", KEYS, now=1.0).chunks == 0
    assumed.expire(now=101.0)
    assert assumed.held("a") == (KEYS[1], KEYS[0]), "what has expired is forgotten"


def test_no_more_is_assumed_than_the_engine_has_room_for_the_longest_unused_goes_first() -> None:
    assumed = placements()
    assumed.note_computed("a", KEYS[:3], 4, now=0.0)
    assumed.note_computed("a", OTHERS[:2], 4, now=1.0)
    assert assumed.run("a", KEYS, now=1.0).chunks == 2, "a prompt's last chunk goes before its first"
    assumed.note_computed("a", KEYS, 4, now=2.0)
    assert set(assumed.held("a")) == set(KEYS[:4]), "of a longer prompt than there is room its beginning"


def test_a_missing_chunk_says_that_all_used_no_later_is_gone() -> None:
    assumed = placements()
    assumed.note_computed("a", OTHERS[:2], 100, now=0.0)
    assumed.note_computed("a", KEYS[:4], 100, now=1.0)
    assumed.note_computed("a", MORE[:1], 100, now=2.0)
    run = assumed.run("a", KEYS[:5], now=3.0)
    assumed.note_computed("a", KEYS[:5], 100, now=3.0)
    assumed.note_cached("a", run, run.chunks, 2, now=3.5)
    assert set(assumed.held("a")) == {*KEYS[:5], *MORE[:1]}, "what this prompt brought is there, what is older isn't"


def test_an_engine_that_never_has_anything_cached_is_not_believed_for_a_while() -> None:
    assumed = placements()
    now = 0.0
    for _ in range(MISSES_MAX + 1):
        run = assumed.run("a", KEYS[:2], now)
        assumed.note_computed("a", KEYS[:2], 100, now)
        assumed.note_cached("a", run, run.chunks, 0, now)
        now += 1.0
    assert assumed.held("a") == ()
    assumed.note_computed("a", KEYS[:2], 100, now)
    assert assumed.held("a") == ()
    later = now + DISTRUST_S
    assumed.note_computed("a", KEYS[:2], 100, later)
    assert assumed.run("a", KEYS, later).chunks == 2


def test_nothing_is_assumed_of_an_engine_that_is_gone_or_where_that_is_off() -> None:
    assumed = placements()
    assumed.note_computed("a", KEYS, 100, now=0.0)
    assumed.keep({"b"})
    assert assumed.run("a", KEYS, now=0.0).chunks == 0
    off = placements(0.0)
    assert not off.is_on
    off.note_computed("a", KEYS, 100, now=0.0)
    assert off.run("a", KEYS, now=0.0).chunks == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from([KEYS, OTHERS]),
        st.integers(0, 10),
        st.integers(0, 10),
        st.booleans(),
    ),
    max_size=30,
)


@given(STEPS, st.integers(1, 6))
def test_changes_tell_all_that_is_held_and_it_never_exceeds_the_capacity(
    steps: list[tuple[str, tuple[bytes, ...], int, int, bool]], capacity: int
) -> None:
    told: set[tuple[str, bytes]] = set()

    def hear(engine: str, key: bytes, is_there: bool) -> None:
        assert ((engine, key) in told) is not is_there, "only what changes is told"
        (told.add if is_there else told.discard)((engine, key))

    assumed = AssumedPlacements(10.0, hear)
    for moment, (engine, prompt, end, cached, is_kept) in enumerate(steps):
        run = assumed.run(engine, prompt[:end], moment)
        assumed.note_computed(engine, prompt[:end], capacity, moment)
        assumed.note_cached(engine, run, run.chunks, cached, moment)
        if not is_kept:
            assumed.keep({engine})
        assert told == {(name, key) for name in assumed.engines() for key in assumed.held(name)}
        assert len(assumed.held(engine)) <= capacity


def of_two_gateways(tokens: int) -> tuple[SentPrompts, EngineView]:
    """What this gateway knows of an engine with room for so many tokens, and the engine, which another uses, too."""
    view = EngineView(
        "a", "http://a:1", (MODEL,), None, "", Reach("a", frozenset({b"other"}), frozenset()), None, "ready"
    )
    return SentPrompts(Overlay(), AssumedPlacements(100.0), lambda: 1.0, 0.0, {"a": tokens}), view


def send(sent: SentPrompts, view: EngineView, told_chunks: int, cached_tokens: int | None) -> int:
    """Send a prompt of ten chunks, of which others say that so many are held; how many were counted on."""
    known = sent.match(view, PrefixMatch((Tier.GPU,) * told_chunks), KEYS)
    prompt = sent.send(view, KEYS, known, 0.0)
    prompt.first_byte(is_computed=True)
    prompt.note_usage(Usage(10 * CHUNK, cached_tokens))
    prompt.release()
    return known.match.chunks


def test_gateways_share_an_engines_room() -> None:
    sent, view = of_two_gateways(6 * CHUNK)
    assert send(sent, view, 0, None) == 0
    assert sent.assumed.held("a") == (KEYS[2], KEYS[1], KEYS[0])


def test_other_gateways_are_not_believed_of_an_engine_that_never_has_anything_cached() -> None:
    sent, view = of_two_gateways(6 * CHUNK)
    for _ in range(MISSES_MAX):
        assert send(sent, view, 4, 0) == 4
    assert send(sent, view, 4, 0) == 0
    trusting, view = of_two_gateways(6 * CHUNK)
    for _ in range(2 * MISSES_MAX):
        assert send(trusting, view, 4, None) == 4, "an engine that reports nothing of its cache says nothing of it"


def test_nothing_is_on_its_way_to_an_engine_that_never_has_anything_cached() -> None:
    _, view = of_two_gateways(60 * CHUNK)
    moments = count(1)
    sent = SentPrompts(Overlay(), AssumedPlacements(1e6), lambda: float(next(moments)), 1e6)
    assert send(sent, view, 0, 0) == 0
    for _ in range(MISSES_MAX):
        assert send(sent, view, 0, 0) == 10
    assert send(sent, view, 0, 0) == 0


class Engines:
    """Engines without an agent; each reports `cached` tokens, or nothing of a cache."""

    def __init__(self) -> None:
        self.cached: int | None = None
        self.shift_s = 0.0
        self.engines = [MockEngine(name, self._behave) for name in "abc"]

    async def _behave(self, engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
        answer = mock.completion_body(engine, self.cached or 0, mock.prompt_tokens(fields))
        if self.cached is None:
            answer["usage"]["prompt_tokens_details"] = None
        return web.json_response(answer)

    def clock(self) -> float:
        return time.monotonic() + self.shift_s


@asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[tuple[Engines, httpx.AsyncClient]]:
    engines = Engines()
    a, b, c = engines.engines
    async with a, b, c:
        static = [EngineConfig(url=each.url, name=each.name, **config) for each in engines.engines]
        routing = RoutingConfig(assumed_s=100.0)
        async with gateway_for([], static=static, static_files=FILES, routing=routing, clock=engines.clock) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20) as client:
                yield engines, client


async def served(client: httpx.AsyncClient, prompt: str, session: str = "", model: str = MODEL) -> tuple[str, int, str]:
    """Who served a prompt, how many cached tokens were counted on, and why it did."""
    headers = {**EXPLAIN, **({"x-session-id": session} if session else {})}
    answer = await client.post(COMPLETIONS, json={"model": model, "prompt": prompt}, headers=headers)
    assert answer.status_code == 200, answer.text
    said = answer.headers
    return said["x-warmroute-engine"], int(said["x-warmroute-matched-tokens"]), said["x-warmroute-reason"]


DOCUMENT = "The tide runs twice a day. " * 50
HELD = len(DOCUMENT) // CHUNK * CHUNK


async def test_an_engine_without_an_agent_is_counted_on_for_what_it_answered() -> None:
    async with serving() as (engines, client):
        home, matched, reason = await served(client, DOCUMENT + "first", "s1")
        assert (matched, reason) == (0, "load")
        engines.shift_s = 20.0  # nothing is on its way any more
        for session in ("s2", "s3", "s4"):
            assert await served(client, DOCUMENT + session, session) == (home, HELD, "prefix")
        engines.shift_s = 130.0
        assert (await served(client, DOCUMENT + "last"))[1] == 0


async def test_of_engines_whose_speed_is_not_known_the_one_that_has_the_prompt_serves_one_after_the_other() -> None:
    async with serving() as (engines, client):
        home, _, _ = await served(client, DOCUMENT + "first")
        for number in range(30):
            engines.shift_s += 1.0
            assert await served(client, DOCUMENT + f"{number:03}" * 100) == (home, HELD, "prefix")


async def test_what_an_engine_reports_corrects_what_is_assumed() -> None:
    async with serving() as (engines, client):
        other = "Another document. " * 50
        home = (await served(client, other + "1", "s"))[0]
        assert (await served(client, DOCUMENT + "1", "s"))[0] == home, "a session's turns stay together"
        engines.shift_s = 20.0
        engines.cached = CHUNK
        assert await served(client, DOCUMENT + "2", "s") == (home, HELD, "prefix")
        assert (await served(client, other + "2", "s"))[1] == 0, "it is older than what was gone already"


@pytest.mark.parametrize(("kv_tokens", "expected"), [(CHUNK * 3, CHUNK * 3), (CHUNK - 1, 0)])
async def test_no_more_is_counted_on_than_an_engine_has_room_for(kv_tokens: int, expected: int) -> None:
    async with serving(kv_tokens=kv_tokens) as (engines, client):
        await served(client, DOCUMENT + "1")
        engines.shift_s = 20.0
        assert (await served(client, DOCUMENT + "2"))[1] == expected


async def test_another_model_of_the_same_engines_shares_nothing() -> None:
    async with serving() as (engines, _):
        for engine in engines.engines:
            engine.models.append("adapter")
        async with gateway_for(
            [],
            static=[EngineConfig(url=each.url, name=each.name) for each in engines.engines],
            static_files=FILES,
        ) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=20) as client:
                await served(client, DOCUMENT + "1")
                assert (await served(client, DOCUMENT + "2"))[1] == HELD
                assert (await served(client, DOCUMENT + "3", model="adapter"))[1] == 0
