"""Between polls of the table a gateway hears what the others report, as often as that may cost."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from directory.errors import DirectoryUnavailable
from directory.members import RENEW_INTERVAL_S, TERM_S, GatewayRegistration, Load, Member
from directory.memory import MemoryDirectory
from gateway.ledger import Ledger
from gateway.load_reader import LoadReader
from gateway.shared_load import ACCOUNTS_PER_S_MAX, SHARE_INTERVAL_S, EngineLoads, published
from tests.gateway.gateway_rows import gateway_row

LIFE, OTHER = b"gateway1", b"gateway2"
URL = "http://127.0.0.1:1"


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Watched(MemoryDirectory):
    """Counts what is read, can be away, or meet a fault."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.reads = 0
        self.fault: Exception | None = None
        self.on_read = lambda: None

    async def refreshed(self, members: Sequence[Member]) -> tuple[Member, ...]:
        self.reads += 1
        if self.fault is not None:
            raise self.fault
        rows = await super().refreshed(members)
        self.on_read()
        return rows


class Stand:
    """A gateway that reads, and the ledger of another one."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.directory = Watched(self.clock)
        self.other = Ledger(self.clock)
        self.loads = EngineLoads(Ledger(self.clock), self.clock)
        self.errors: list[str] = []
        self.slept: list[float] = []
        self.reader = LoadReader(self.directory, self.loads, self.sleep, self.errors.append)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.Event().wait()

    async def poll(self) -> None:
        self.loads.take(await self.directory.members())

    async def report(self, life: bytes = LIFE) -> None:
        load = Load(booked=published(self.other, self.clock.now))
        if not (await self.directory.renew(life, load)).known:
            await self.directory.register(life, GatewayRegistration("another", URL), load)

    async def turn(self) -> float:
        """What the loop sleeps after its first turn."""
        running = asyncio.ensure_future(self.reader.run())
        while not self.slept:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return self.slept.pop()


@pytest.fixture
async def stand() -> Stand:
    """The other gateway is known, with nothing booked."""
    stand = Stand()
    await stand.report()
    await stand.poll()
    return stand


async def test_what_another_gateway_reports_is_heard_without_a_poll_of_the_table(stand: Stand) -> None:
    stand.other.book("a", 2.0)
    await stand.report()
    assert stand.loads.of("a").running == 0
    await stand.reader.read()
    assert (stand.loads.of("a").running, stand.loads.of("a").wait_s) == (1, 2.0)


async def test_a_gateway_that_is_alone_reads_nothing() -> None:
    stand = Stand()
    await stand.poll()
    assert await stand.turn() == SHARE_INTERVAL_S
    assert stand.directory.reads == 0


async def test_a_gateway_that_ended_or_lapsed_counts_from_the_next_look(stand: Stand) -> None:
    stand.other.book("a", 2.0)
    await stand.report()
    await stand.report(OTHER)
    await stand.poll()
    assert stand.loads.of("a").running == 2
    await stand.directory.retire(LIFE)
    await stand.reader.read()
    assert stand.loads.of("a").running == 1
    stand.clock.now += TERM_S - 0.01
    await stand.reader.read()
    assert len(stand.loads.gateways) == 1
    stand.clock.now += 0.01
    await stand.reader.read()
    assert stand.loads.gateways == ()


async def test_where_it_cannot_be_read_only_the_age_changes(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    stand.other.book("a", 2.0)
    await stand.report()
    await stand.poll()
    before = stand.loads.of("a")
    stand.directory.fault = DirectoryUnavailable("it is away")
    for _ in range(3):
        assert await stand.turn() == RENEW_INTERVAL_S
    assert stand.loads.of("a") == before
    assert stand.errors == ["refreshed"] * 3
    assert len(caplog.records) == 1, "it is said once"
    stand.directory.fault = None
    assert await stand.turn() == SHARE_INTERVAL_S


async def test_a_fault_of_its_own_is_logged_and_it_reads_on(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    stand.directory.fault = RuntimeError("a bug")
    assert await stand.turn() == RENEW_INTERVAL_S
    assert "met a fault" in caplog.text
    stand.directory.fault = None
    assert await stand.turn() == SHARE_INTERVAL_S


async def test_who_came_while_it_was_read_is_not_lost(stand: Stand) -> None:
    newcomer = gateway_row(stand.other, stand.clock.now, stand.clock.now, OTHER)
    stand.directory.on_read = lambda: stand.loads.take([*stand.loads.gateways, newcomer])
    await stand.reader.read()
    assert [each.incarnation for each in stand.loads.gateways] == [LIFE, OTHER]


@pytest.mark.parametrize(("gateways", "engines"), [(2, 8), (8, 16), (16, 64), (64, 256), (2, 1000)])
async def test_the_work_of_hearing_of_each_other_is_bounded_for_any_fleet(gateways: int, engines: int) -> None:
    stand = Stand()
    for number in range(engines):
        stand.other.book(f"e{number}", 1.0)
    row = gateway_row(stand.other, stand.clock.now, stand.clock.now)
    lives = [number.to_bytes(8, "big") for number in range(1, gateways)]
    stand.loads.take([Member(life, row.registration, row.load, row.remaining_s) for life in lives])
    read_and_told = (gateways - 1) * engines + engines
    assert stand.loads.interval_s >= SHARE_INTERVAL_S
    assert read_and_told / stand.loads.interval_s <= ACCOUNTS_PER_S_MAX
    assert stand.loads.interval_s == max(SHARE_INTERVAL_S, read_and_told / ACCOUNTS_PER_S_MAX), "and no longer"
