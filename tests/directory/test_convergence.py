"""Writers whose batches are lost, doubled and overtaken, a server that forgets: in the end all is true.

A small seeded simulation of the write path's rules over each directory. Every writer keeps the interface's rules and
nothing else: newest states, rising attempts, one batch in flight a partition, a walk when a partition lost writes.
"""

import random
from collections import defaultdict

import pytest

from directory.interface import BATCH_PLACEMENTS_MAX, LOST, Batch
from directory.members import Load
from directory.placements import partition_of
from tests.directory.fleet_samples import HOST, TTL_S, holders, key
from tests.directory.stands import Stand

WRITERS = 4
KEYS = [key(number, partition) for partition in (0, 5, 15) for number in range(30)]
ROUNDS = 120
LOST_SHARE, UNANSWERED_SHARE, LATE_SHARE = 0.15, 0.15, 0.15
DEADLINE_S = 5.0


class FateUnknownError(Exception):
    """The sender got no answer: the batch arrived, didn't, or will yet."""


class LossyWire:
    """Delivers a batch, loses it, loses its answer, or holds it back and delivers it any number of batches later."""

    def __init__(self, stand: Stand, chance: random.Random) -> None:
        self._stand = stand
        self._chance = chance
        self._late: list[Batch] = []
        self.perfect = False

    async def send(self, batch: Batch) -> int:
        draw = self._chance.random()
        if self.perfect or draw > LOST_SHARE + UNANSWERED_SHARE + LATE_SHARE:
            return await self._deliver(batch)
        if draw > LOST_SHARE + UNANSWERED_SHARE:
            self._late.append(batch)
        elif draw > LOST_SHARE:
            await self._deliver(batch)
        raise FateUnknownError

    async def deliver_late(self, share: float) -> None:
        self._chance.shuffle(self._late)
        due = [self._late.pop() for _ in range(round(len(self._late) * share))]
        for batch in due:
            await self._deliver(batch)

    async def _deliver(self, batch: Batch) -> int:
        if all(mask == 0 for _, mask in batch.states):
            return await self._stand.directory.withdraw(batch)
        return await self._stand.directory.place(batch)


class Writer:
    def __init__(self, stand: Stand, wire: LossyWire, chance: random.Random) -> None:
        self._stand, self._wire, self._chance = stand, wire, chance
        self.inventory: dict[bytes, int] = {}
        self.walks = 0

    async def begin(self) -> None:
        self.life = self._chance.randbytes(8)
        self._unsent: dict[int, set[bytes]] = defaultdict(set)
        self._attempts: dict[int, int] = defaultdict(int)
        self._acknowledged: dict[int, int] = defaultdict(lambda: LOST)
        await self._stand.directory.register(self.life, HOST, Load(), term_s=TTL_S)  # nobody renews here

    def change(self) -> None:
        for changed in self._chance.sample(KEYS, 6):
            mask = self._chance.choice((0, 0, 2, 4, 6))
            if mask:
                self.inventory[changed] = mask
            else:
                self.inventory.pop(changed, None)
            self._unsent[partition_of(changed)].add(changed)

    def touch(self) -> None:
        """Say one thing again in each partition, to hear from all of them."""
        for said in KEYS[:: len(KEYS) // 3]:
            self._unsent[partition_of(said)].add(said)

    async def publish(self) -> None:
        """One try for each partition; what isn't acknowledged stays to be sent, in its newest state."""
        for partition in [partition for partition, keys in self._unsent.items() if keys]:
            try:
                lost_writes = not await self._send(partition)
            except FateUnknownError:
                continue
            if lost_writes:
                await self.walk()
                return

    async def _send(self, partition: int, replaces: bytes | None = None) -> bool:
        """Whether the partition still held what it had acknowledged."""
        keys = sorted(self._unsent[partition])[:BATCH_PLACEMENTS_MAX]
        states = tuple((each, self.inventory.get(each, 0)) for each in keys)
        attempt = self._attempts[partition]
        self._attempts[partition] += 1
        acknowledged = self._acknowledged[partition]
        held = await self._wire.send(Batch(self.life, partition, attempt, states, TTL_S, replaces, acknowledged))
        intact = held >= acknowledged
        self._acknowledged[partition] = attempt
        self._unsent[partition] -= set(keys)
        return intact

    async def walk(self) -> None:
        self.walks += 1
        left_behind = self.life
        await self.begin()
        for held in (*self.inventory, *KEYS):
            self._unsent[partition_of(held)].add(held)
        while any(self._unsent.values()):
            for partition in [partition for partition, keys in self._unsent.items() if keys]:
                try:
                    await self._send(partition, replaces=left_behind)
                except FateUnknownError:
                    continue
        await self._stand.directory.retire(left_behind)


async def believed(stand: Stand) -> dict[bytes, dict[bytes, int]]:
    """What a reader believes: holders of each key that are live."""
    live = {member.incarnation for member in await stand.directory.members() if not member.retired}
    records = (await stand.directory.lookup(KEYS, DEADLINE_S)).records
    return {
        of: {life: mask for life, mask in holders(record).items() if life in live}
        for of, record in zip(KEYS, records, strict=True)
    }


@pytest.mark.parametrize("seed", range(3))
async def test_the_directory_converges_to_the_union_of_the_inventories(stand: Stand, seed: int) -> None:
    chance = random.Random(seed)
    wire = LossyWire(stand, chance)
    writers = [Writer(stand, wire, chance) for _ in range(WRITERS)]
    for writer in writers:
        await writer.begin()
    for number in range(ROUNDS):
        for writer in writers:
            writer.change()
            await writer.publish()
        await wire.deliver_late(share=chance.random())
        if number == ROUNDS // 2:
            stand.flush()
    assert [writer.walks for writer in writers] == [1] * WRITERS, "who had a part in what was lost walks, once"

    wire.perfect = True
    await wire.deliver_late(share=1.0)
    for writer in writers:
        writer.touch()
        await writer.publish()

    expected: dict[bytes, dict[bytes, int]] = {each: {} for each in KEYS}
    for writer in writers:
        for held, mask in writer.inventory.items():
            expected[held][writer.life] = mask
    assert await believed(stand) == expected


@pytest.mark.parametrize("seed", range(2))
async def test_without_a_walk_resending_alone_keeps_the_directory_true(stand: Stand, seed: int) -> None:
    chance = random.Random(seed)
    wire = LossyWire(stand, chance)
    writers = [Writer(stand, wire, chance) for _ in range(WRITERS)]
    for writer in writers:
        await writer.begin()
    for _ in range(ROUNDS // 2):
        for writer in writers:
            writer.change()
            await writer.publish()
        await wire.deliver_late(share=chance.random())
    wire.perfect = True
    for writer in writers:
        await writer.publish()
    await wire.deliver_late(share=1.0)
    found = await believed(stand)
    for writer in writers:
        assert writer.walks == 0
        assert {of: held[writer.life] for of, held in found.items() if writer.life in held} == writer.inventory
