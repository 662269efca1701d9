"""What one gateway has booked reaches the others through the directory, and goes with it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client import CollectorRegistry

from directory.errors import DirectoryUnavailable
from directory.members import (
    REMEMBERED_S,
    RENEW_INTERVAL_S,
    TERM_S,
    GatewayRegistration,
    Load,
    Member,
    Registration,
    Renewal,
)
from directory.memory import MemoryDirectory
from gateway.ledger import Ledger
from gateway.load_publisher import LoadPublisher
from gateway.metrics import EngineGauges
from gateway.shared_load import SHARE_INTERVAL_S, EngineLoad, EngineLoads
from tests.gateway.assembly import gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Watched(MemoryDirectory):
    """Counts what is written, and can be away."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.written: list[str] = []
        self.is_away = False
        self.loses_answers = False

    async def register(
        self, incarnation: bytes, registration: Registration, load: Load, term_s: float = TERM_S
    ) -> None:
        self._note("register")
        await super().register(incarnation, registration, load, term_s)
        if self.loses_answers:
            raise DirectoryUnavailable("no answer")

    async def renew(self, incarnation: bytes, load: Load, term_s: float = TERM_S) -> Renewal:
        self._note("renew")
        return await super().renew(incarnation, load, term_s)

    async def retire(self, incarnation: bytes) -> None:
        self._note("retire")
        await super().retire(incarnation)

    def _note(self, call: str) -> None:
        if self.is_away:
            raise DirectoryUnavailable("it is away")
        self.written.append(call)


class Gateway:
    """What a gateway has of all this, with errors it counted."""

    def __init__(self, name: str, directory: Watched, clock: Clock) -> None:
        self.directory, self.clock = directory, clock
        self.ledger = Ledger(clock)
        self.loads = EngineLoads(self.ledger, clock)
        self.errors: list[str] = []
        registration = GatewayRegistration(name, "http://127.0.0.1:1")
        self.publisher = LoadPublisher(
            directory, registration, self.ledger, self.loads, clock, self.sleep, self.errors.append
        )
        self.slept: list[float] = []
        self.wakes = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.wakes.acquire()

    async def read(self) -> None:
        members = await self.directory.members()
        self.loads.take([row for row in members if isinstance(row.registration, GatewayRegistration)])


class Fleet:
    def __init__(self, gateways: int = 2) -> None:
        self.clock = Clock()
        self.directory = Watched(self.clock)
        self.gateways = [Gateway(f"g{number}", self.directory, self.clock) for number in range(gateways)]

    async def turn(self) -> None:
        """Everybody reports and reads, as in one interval."""
        for each in self.gateways:
            await each.publisher.report()
        for each in self.gateways:
            await each.read()

    async def rows(self) -> tuple[Member, ...]:
        return await self.directory.members()


@pytest.fixture
async def fleet() -> Fleet:
    fleet = Fleet()
    await fleet.turn()
    return fleet


async def test_each_gateway_hears_of_the_others_and_not_of_itself(fleet: Fleet) -> None:
    one, other = fleet.gateways
    one.ledger.book("a", 2.0, new_tokens=10, held_tokens=30)
    await fleet.turn()
    assert one.loads.of_others("a") == EngineLoad()
    assert other.loads.of("a") == EngineLoad(2.0, 1, 1, 10, 30, recent_s=2.0)
    assert [each.registration for each in one.loads.gateways] == [GatewayRegistration("g1", "http://127.0.0.1:1")]
    assert (one.publisher.state, one.errors) == ("ok", [])


async def test_what_changed_is_reported_at_once_and_what_did_not_with_the_renewal(fleet: Fleet) -> None:
    one, _ = fleet.gateways
    written = len(fleet.directory.written)
    await one.publisher.report()
    assert len(fleet.directory.written) == written
    one.ledger.book("a", 2.0)
    await one.publisher.report()
    await one.publisher.report()
    assert len(fleet.directory.written) == written + 1
    fleet.clock.now += RENEW_INTERVAL_S
    await one.publisher.report()
    assert fleet.directory.written[written:] == ["renew", "renew"]


async def test_news_are_told_as_they_come_but_not_sooner_than_may_be(fleet: Fleet) -> None:
    one, other = fleet.gateways
    fleet.clock.now += RENEW_INTERVAL_S
    running = asyncio.ensure_future(one.publisher.run())

    async def waits(sleeps: int) -> None:
        while len(one.slept) < sleeps:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)

    await waits(1)
    written = len(fleet.directory.written)
    one.ledger.book("a", 1.0)
    one.ledger.book("a", 1.0)
    await waits(1)
    assert len(fleet.directory.written) == written, "the interval isn't over"
    one.wakes.release()
    await waits(2)
    assert len(fleet.directory.written) == written + 1
    await other.read()
    assert other.loads.of("a").running == 2
    one.wakes.release()
    await waits(2)
    assert len(fleet.directory.written) == written + 1, "there is no news"
    one.ledger.book("a", 1.0)
    await waits(3)
    assert len(fleet.directory.written) == written + 2
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_gateway_that_is_alone_only_renews() -> None:
    fleet = Fleet(gateways=1)
    (alone,) = fleet.gateways
    await fleet.turn()
    alone.ledger.book("a", 2.0)
    await fleet.turn()
    assert fleet.directory.written == ["register"]
    fleet.clock.now += RENEW_INTERVAL_S
    await fleet.turn()
    assert fleet.directory.written == ["register", "renew"]


async def test_without_a_directory_the_own_account_counts_and_it_is_said(fleet: Fleet) -> None:
    one, other = fleet.gateways
    other.ledger.book("a", 100.0)
    one.ledger.book("a", 1.0)
    await fleet.turn()
    fleet.directory.is_away = True
    fleet.clock.now += TERM_S
    for _ in range(3):
        await one.publisher.report()
        fleet.clock.now += RENEW_INTERVAL_S
    assert one.publisher.state == "unavailable: it is away"
    assert one.errors == ["renew"] * 3
    assert one.loads.of("a") == one.loads.of_own("a")
    fleet.directory.is_away = False
    await fleet.turn()
    assert one.publisher.state == "ok"
    assert one.loads.of("a").running == 2


async def test_a_directory_that_is_away_is_asked_once_a_renewal(fleet: Fleet) -> None:
    one, _ = fleet.gateways
    fleet.directory.is_away = True
    for _ in range(round(2 * RENEW_INTERVAL_S / SHARE_INTERVAL_S)):
        one.ledger.book("a", 0.1)
        fleet.clock.now += SHARE_INTERVAL_S
        await one.publisher.report()
    assert one.errors == ["renew"] * 2


@pytest.mark.parametrize("forgets", [True, False], ids=["retired by an operator", "forgotten"])
async def test_a_life_that_is_unknown_is_followed_by_a_new_one(fleet: Fleet, forgets: bool) -> None:
    one, other = fleet.gateways
    one.ledger.book("a", 2.0)
    if forgets:
        for row in await fleet.rows():
            await fleet.directory.retire(row.incarnation)
    else:
        fleet.clock.now += TERM_S + REMEMBERED_S + 1
    fleet.clock.now += RENEW_INTERVAL_S
    await fleet.turn()
    assert other.loads.of_others("a").running == 1
    assert one.loads.of_others("a").running == 0
    assert sum(row.is_live for row in await fleet.rows()) == 2


async def test_a_registration_whose_answer_is_lost_is_not_taken_for_another_gateways(fleet: Fleet) -> None:
    newcomer = Gateway("g2", fleet.directory, fleet.clock)
    newcomer.ledger.book("a", 2.0)
    fleet.directory.loses_answers = True
    await newcomer.publisher.report()
    assert newcomer.errors == ["register"]
    fleet.directory.loses_answers = False
    fleet.clock.now += RENEW_INTERVAL_S
    await newcomer.publisher.report()
    await newcomer.read()
    assert newcomer.loads.of_others("a") == EngineLoad()


async def test_a_gateway_that_crashed_is_believed_for_a_term_and_one_that_ended_no_longer(fleet: Fleet) -> None:
    one, other = fleet.gateways
    one.ledger.book("a", 60.0)
    running = asyncio.ensure_future(one.publisher.run())
    fleet.clock.now += RENEW_INTERVAL_S
    while not one.slept:
        await asyncio.sleep(0)
    assert one.slept == [SHARE_INTERVAL_S]
    await other.read()
    assert other.loads.of("a").running == 1
    fleet.clock.now += TERM_S - 0.1
    await other.read()
    assert other.loads.of("a").running == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fleet.directory.written[-1] == "retire"
    await other.read()
    assert other.loads.of("a") == EngineLoad()


async def test_a_gateways_end_does_not_wait_for_a_directory_that_is_away(fleet: Fleet) -> None:
    one, _ = fleet.gateways
    running = asyncio.ensure_future(one.publisher.run())
    while not one.slept:
        await asyncio.sleep(0)
    fleet.directory.is_away = True
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_fault_of_its_own_is_logged_and_the_next_report_goes_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, _ = fleet.gateways

    async def fail(incarnation: bytes, load: Load, term_s: float = TERM_S) -> Renewal:
        raise RuntimeError("a bug")

    monkeypatch.setattr(fleet.directory, "renew", fail)
    fleet.clock.now += RENEW_INTERVAL_S
    running = asyncio.ensure_future(one.publisher.run())
    while not one.slept:
        await asyncio.sleep(0)
    assert one.publisher.state.startswith("unavailable")
    assert "met a fault" in caplog.text
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_gateway_routes_by_what_another_booked_and_shows_it() -> None:
    async with MockEngine("a") as a, MockEngine("b") as b, gateway_for([a, b]) as gateway:
        other = Ledger(time.monotonic)
        loads = EngineLoads(other, time.monotonic)
        registration = GatewayRegistration("other", "http://127.0.0.1:2")
        publisher = LoadPublisher(gateway.directory, registration, other, loads, time.monotonic)
        async with httpx.AsyncClient(trust_env=False) as client:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
            chosen = (await client.post(f"{gateway.url}/v1/chat/completions", json=body)).headers["x-engine"]
            other.book(chosen, 500.0)
            await publisher.report()
            await gateway.publisher.report()
            await gateway.fleet.refresh()
            assert sorted(gateway.fleet.table.engines) == ["a", "b"], "gateways serve nobody"
            assert (await client.post(f"{gateway.url}/v1/chat/completions", json=body)).headers["x-engine"] != chosen
        transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            shown = (await client.get("/fleet")).json()
        (row,) = [row for row in shown["engines"] if row["engine"] == chosen]
        assert (row["inflight_requests"], row["booked_seconds"], row["others_inflight_requests"]) == (0, 0, 1)
        assert 400 < row["others_booked_seconds"] <= 500
        assert shown["reports"] == "ok"
        assert [(each["gateway"], each["inflight_requests"]) for each in shown["other_gateways"]] == [("other", 1)]


async def test_the_own_account_and_the_others_are_metrics_of_their_own(fleet: Fleet) -> None:
    one, other = fleet.gateways
    one.ledger.book("a", 1.0)
    other.ledger.book("a", 2.0)
    await fleet.turn()
    registry = CollectorRegistry()
    registry.register(EngineGauges(lambda: [("a", one.loads.of_own("a"), one.loads.of_others("a"))]))
    names = ("booked_seconds", "inflight_requests", "others_booked_seconds", "others_inflight_requests")
    found = [registry.get_sample_value(f"warmroute_{name}", {"engine": "a"}) for name in names]
    assert found == [1.0, 1, 2.0, 1]
