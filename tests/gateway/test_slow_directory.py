"""A directory that answers late, never, or with garbage: requests are served, what is stale is said, and it passes."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import redis

from directory.members import TERM_S
from directory.redis_directory import RedisDirectory
from directory.tiers import Tier
from gateway.lookup_breaker import FAILURES_MAX, PAUSE_S
from gateway.openai_schema import COMPLETIONS
from tests.directory.stands import running_valkey
from tests.faulty_proxy import Cut, FaultyProxy
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL

TEXT = "a long shared prefix " * 50
EXPLAIN = {"x-warmroute-explain": "1"}


class HeldClock:
    """Stands still, and is put ahead when the test says so."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self.began_s + self.ahead_s


@dataclass
class Setting:
    """Two engines, the second holding `TEXT`; the gateway reads the directory through `proxy`."""

    gateway: TestGateway
    proxy: FaultyProxy
    clock: HeldClock
    client: httpx.AsyncClient

    async def ask(self) -> httpx.Response:
        body = {"model": MODEL, "prompt": TEXT + "?"}
        answer = await self.client.post(self.gateway.url + COMPLETIONS, json=body, headers=EXPLAIN)
        assert answer.status_code == 200, answer.text
        return answer

    def degraded(self) -> float:
        reasons = ("directory_unavailable", "directory_paused", "partial_directory")
        return sum(self.gateway.count("warmroute_degraded_total", reason=reason) for reason in reasons)

    async def fleet(self) -> dict[str, Any]:
        transport = httpx.ASGITransport(app=self.gateway.admin)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            shown: dict[str, Any] = (await client.get("/fleet")).json()
            return shown

    async def check_well(self) -> None:
        """Reads the table, finds the prefix, and says that all is fresh; a busy machine may need more than one try."""
        async with asyncio.timeout(20):
            while True:
                await self.gateway.fleet.refresh()
                before = self.degraded()
                answer = await self.ask()
                if answer.headers["x-warmroute-reason"] == "prefix" and self.degraded() == before:
                    break
                self.clock.ahead_s += PAUSE_S
        assert answer.headers["x-warmroute-engine"] == "b"
        shown = await self.fleet()
        assert (shown["directory"], shown["lookups"]) == ("ok", "ok")
        assert {row["placements"] for row in shown["engines"]} == {"believed"}

    async def check_recovered(self) -> None:
        """As soon as the pause after failed lookups is over, all is as before; nothing was restarted."""
        self.clock.ahead_s += PAUSE_S
        await self.check_well()


@pytest.fixture(scope="module")
def valkey_port() -> Iterator[int]:
    with running_valkey() as server:
        yield server.port


@pytest.fixture
async def setting(valkey_port: int) -> AsyncIterator[Setting]:
    with redis.Redis(port=valkey_port, protocol=2) as raw:
        raw.flushall()
    clock = HeldClock()
    writer = RedisDirectory.connect(f"redis://127.0.0.1:{valkey_port}")
    async with MockEngine("a") as a, MockEngine("b") as b, FaultyProxy(valkey_port, subject=b"*") as proxy:
        reader = RedisDirectory.connect(f"redis://127.0.0.1:{proxy.port}", clock=clock)
        async with gateway_for([a, b], clock=clock, writer=writer, reader=reader) as gateway:
            await gateway.hold(TEXT, "host-b", Tier.DRAM)
            async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
                made = Setting(gateway, proxy, clock, client)
                await made.check_well()
                yield made
        await reader.aclose()
    await writer.aclose()


async def test_a_late_directory_costs_hits_and_no_request(setting: Setting) -> None:
    setting.proxy.delay_s = 0.15  # beyond any lookup's deadline, and within a poll's
    for number in range(1, FAILURES_MAX + 3):
        before = setting.degraded()
        assert (await setting.ask()).headers["x-warmroute-reason"] == "directory-unavailable"
        assert setting.degraded() == before + 1
        shown = await setting.fleet()
        assert shown["lookups"].startswith(f"{min(number, FAILURES_MAX)} in a row had no answer in time")
    assert "none is tried" in shown["lookups"]
    await setting.gateway.fleet.refresh()
    shown = await setting.fleet()
    assert shown["directory"] == "ok", "the table still comes"
    setting.proxy.delay_s = 0.0
    await setting.check_recovered()


async def test_a_directory_that_never_answers_is_waited_for_no_longer_than_a_lookup_may_take(setting: Setting) -> None:
    setting.proxy.is_silent = True
    before = setting.degraded()
    for _ in range(FAILURES_MAX + 2):
        await setting.ask()
    assert setting.degraded() == before + FAILURES_MAX + 2
    assert setting.gateway.count("warmroute_degraded_total", reason="directory_unavailable") == FAILURES_MAX
    assert setting.gateway.count("warmroute_degraded_total", reason="directory_paused") == 2
    await setting.gateway.fleet.refresh()
    shown = await setting.fleet()
    assert shown["directory"].startswith("unavailable: no answer")
    assert {row["placements"] for row in shown["engines"]} == {"believed"}, "for one term more"
    setting.clock.ahead_s += TERM_S
    shown = await setting.fleet()
    assert shown["directory_age_seconds"] >= TERM_S
    assert {row["placements"] for row in shown["engines"]} == {"not believed"}
    assert (await setting.ask()).headers["x-warmroute-reason"] == "directory-unavailable"
    assert {row["state"] for row in shown["engines"]} == {"ready"}, "the engines serve on"
    setting.proxy.is_silent = False
    await setting.check_recovered()


GARBAGE = {
    "no protocol": b"\xff\x00\x01garbage\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nserver: x\r\n\r\n",
    "a word": b"+OK\r\n",
    "a number": b":7\r\n",
    "nothing": b"$-1\r\n",
    "another list": b"*2\r\n$1\r\na\r\n*0\r\n",
    "numbers": b"*3\r\n:1\r\n:2\r\n:3\r\n",
    "an error": b"-ERR unknown\r\n",
    "loading": b"-LOADING the dataset\r\n",
    "an endless text": b"$536870912\r\nx",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_directory_that_answers_garbage_costs_hits_and_no_request(setting: Setting, garbage: bytes) -> None:
    setting.proxy.garbage = garbage
    before = setting.degraded()
    for _ in range(FAILURES_MAX + 1):
        await setting.ask()
    assert setting.degraded() == before + FAILURES_MAX + 1
    await setting.gateway.fleet.refresh()
    shown = await setting.fleet()
    assert shown["directory"].startswith("unavailable")
    assert {row["state"] for row in shown["engines"]} == {"ready"}
    setting.proxy.garbage = None
    await setting.check_recovered()


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("after", [0, 20])
async def test_a_directory_that_hangs_up_costs_hits_and_no_request(setting: Setting, how: Any, after: int) -> None:
    setting.proxy.cuts = [Cut(how, after)] * 50
    for _ in range(FAILURES_MAX + 1):
        await setting.ask()
    assert setting.degraded() >= 1
    await setting.gateway.fleet.refresh()
    assert (await setting.fleet())["directory"].startswith("unavailable")
    setting.proxy.cuts = []
    await setting.check_recovered()
