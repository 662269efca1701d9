"""Whatever happened, the directory comes to be the union of what live writers hold, and a walk tidies it up.

`WARMROUTE_SIMULATION_SEEDS` chooses the seeds: a count (60 by default), or `first:end`; a failing one tells its own.
"""

import asyncio
import os
import random

import pytest

from directory.members import TERM_S
from tests.nodeagent.lossy_fleet import (
    CALL_S,
    CALM,
    KEYS,
    LATE_MAX_S,
    ROUGH,
    SHARDS,
    STORM,
    Server,
    Weather,
    Writer,
    now,
)
from tests.virtual_time import run_in_virtual_time

SEEDS_VARIABLE = "WARMROUTE_SIMULATION_SEEDS"
REMEMBERED_S = 60.0
"""How long the server remembers whom it doesn't hear of, here: shorter than in life, and long for a heartbeat."""
STORM_S = 45.0
SLEEP_S = 1.5 * REMEMBERED_S
SETTLED_WITHIN_S = 200.0
DOUBTS_MAX = 6
LAST_CHANGES = 30
EVENTS = {
    "change": 30,
    "flood": 3,
    "flush": 1,
    "full": 1,
    "room": 3,
    "empty": 2,
    "roll back": 2,
    "shard down": 3,
    "shard up": 4,
    "weather": 4,
    "kill": 2,
    "end": 1,
    "start": 4,
    "suspend": 2,
    "resume": 3,
    "doubt": 1,
}


def chosen_seeds() -> range:
    first, _, end = os.environ.get(SEEDS_VARIABLE, "40").rpartition(":")
    return range(int(first or 0), int(end))


class Story:
    """One seed's fleet, from its start to the state it comes to."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.server = Server()
        self._last_lives: set[bytes] = set()
        self.writers = [Writer(f"host-{number}", self.server, self._chance) for number in range(4)]

    async def play(self) -> None:
        snapshots = asyncio.create_task(self.server.keep_snapshots())
        try:
            await self._storm()
            await self._sleep_through()
            await self._clear_up()
            self._compare_belief()
            await self._walk_once()
            self._compare_belief()
            self._compare_records()
        finally:
            snapshots.cancel()
            for writer in self.writers:
                await writer.close()

    async def _storm(self) -> None:
        until = now() + STORM_S
        while now() < until:
            await asyncio.sleep(self._chance.expovariate(2.0))
            await self._happen(self._chance.choices(list(EVENTS), list(EVENTS.values()))[0])

    async def _happen(self, event: str) -> None:
        chance, server = self._chance, self.server
        writer, shard = chance.choice(self.writers), chance.randrange(SHARDS)
        some_shards = chance.choice([{shard}, set(range(SHARDS))])
        if event in ("change", "flood"):
            self._change(writer, chance.randrange(1, 8) if event == "change" else 60)
        elif event == "flush":
            server.empty(set(range(SHARDS)))
        elif event == "empty":
            server.empty({shard})
        elif event == "roll back":
            server.roll_back(some_shards, chance.randrange(1, 4))
        elif event in ("full", "room"):
            server.is_full = event == "full"
        elif event == "shard down":
            server.down.add(shard)
        elif event == "shard up":
            server.down.discard(shard)
        elif event == "weather":
            writer.wire.weather = chance.choice([CALM, ROUGH, STORM])
        elif event == "kill" and writer.is_running:
            await writer.kill()
        elif event == "end" and writer.is_running and writer.is_awake:
            await writer.end()
        elif event == "start" and not writer.is_running:
            writer.start({})
        elif event == "suspend" and writer.is_running:
            writer.suspend()
        elif event == "resume":
            writer.resume()
        elif event == "doubt" and writer.is_running:
            writer.publisher.doubt("calendar")

    def _change(self, writer: Writer, changes: int) -> None:
        if writer.is_running and writer.is_awake:
            for _ in range(changes):
                writer.publisher.record(self._chance.choice(KEYS), self._chance.choice([0, 0, 2, 4, 6]))

    async def _sleep_through(self) -> None:
        """One, or nobody, is suspended for so long that it is forgotten; others change what it holds, too."""
        sleeper = self._chance.choice([*self.writers, None])
        if sleeper is not None:
            sleeper.suspend()
        until = now() + SLEEP_S
        while now() < until:
            await asyncio.sleep(self._chance.expovariate(0.5))
            self._change(self._chance.choice(self.writers), self._chance.randrange(1, 8))

    async def _clear_up(self) -> None:
        """The storm is over; some are gone for good, and forgotten. What was lost is noticed, and said again."""
        self.server.down.clear()
        self.server.is_full = False
        self._set_weather(ROUGH)
        for writer in self.writers:
            writer.resume()
        if not any(writer.is_running for writer in self.writers):
            self.writers[0].start({})
        for _ in range(DOUBTS_MAX):  # a loss may be noticed late, by a heartbeat
            lives = self._lives()
            await self._until_settled()
            await asyncio.sleep(REMEMBERED_S + LATE_MAX_S + TERM_S + CALL_S)
            if lives == self._lives():
                break
        else:
            raise AssertionError("there are doubts without end")
        await self._calm_down()

    async def _walk_once(self) -> None:
        self._last_lives = self._lives()
        self._set_weather(ROUGH)
        for writer in self._running():
            writer.publisher.doubt("the last")
        for _ in range(LAST_CHANGES):
            await asyncio.sleep(self._chance.expovariate(4.0))
            self._last_lives |= self._lives()
            self._change(self._chance.choice(self._running()), self._chance.randrange(1, 8))
        await self._until_settled()
        await self._calm_down()

    async def _calm_down(self) -> None:
        """Until what comes late has come, and who wasn't retired for want of an answer has lapsed."""
        self._set_weather(CALM)
        await asyncio.sleep(LATE_MAX_S + TERM_S + CALL_S)
        await self._until_settled()

    def _set_weather(self, weather: Weather) -> None:
        for writer in self.writers:
            writer.wire.weather = weather

    async def _until_settled(self) -> None:
        until = now() + SETTLED_WITHIN_S
        while not all(writer.publisher.is_settled for writer in self._running()):
            assert now() < until, "it doesn't come to rest"
            await asyncio.sleep(0.25)
            self._last_lives |= self._lives()

    def _running(self) -> list[Writer]:
        return [writer for writer in self.writers if writer.is_running]

    def _lives(self) -> set[bytes]:
        return {life for writer in self._running() for life in writer.publisher.lives.incarnations}

    def _compare_belief(self) -> None:
        live = self._live_rows()
        assert live == self._lives()
        assert len(live) == len(self._running()), "one life each"
        holders = self.server.holders()
        believed = {
            (key, life): mask for key, record in holders.items() for life, mask in record.items() if life in live
        }
        held = {
            (key, writer.publisher.lives.incarnations[0]): mask
            for writer in self._running()
            for key, mask in writer.held.items()
        }
        assert believed == held

    def _compare_records(self) -> None:
        holders = self.server.holders()
        for writer in self._running():
            (life,) = writer.publisher.lives.incarnations
            lives = self._lives_of(life) & self._last_lives
            for key in writer.held:
                record = holders[key].keys()
                assert record <= self._last_lives, "it holds who is live, or was left in the last walk"
                if len(lives) == 2:  # else a walk was begun again, and what it left half way is pruned later
                    assert record & lives == {life}, "a walk replaces the life before"

    def _lives_of(self, life: bytes) -> set[bytes]:
        """All that are remembered of the same host."""
        rows = self.server.directory._rows
        return {other for other, row in rows.items() if row.registration == rows[life].registration}

    def _live_rows(self) -> set[bytes]:
        rows = self.server.directory._rows
        return {life for life, row in rows.items() if row.retired_at is None and row.expires_at > now()}


async def play(seed: int) -> None:
    await Story(seed).play()


@pytest.mark.parametrize("seed", chosen_seeds())
def test_the_directory_comes_to_be_the_union_of_what_its_writers_hold(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = random.Random(seed)
    monkeypatch.setattr("nodeagent.registration.draw_incarnation", lambda: names.randbytes(8))
    monkeypatch.setattr("directory.memory.REMEMBERED_S", REMEMBERED_S)
    try:
        run_in_virtual_time(play(seed))
    except AssertionError as error:
        error.add_note(f"again: {SEEDS_VARIABLE}={seed}:{seed + 1} pytest {os.path.relpath(__file__)}")
        raise
