"""200 lives of a folder: killed at any system call of puts, labels and removals; then a power cut; then a start.

What a power cut does to files is done to them by hand, since a kill alone leaves every write in the page cache. After
each of these the tier starts as an agent's does. Never a wrong byte, never a start that fails, and what neither the
kill nor the cut has touched is still there.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import xxhash

from nodeagent.errors import ChunkConflict, ChunkCorrupt
from nodeagent.labels import ChunkLabel
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers import self_test
from nodeagent.tiers.arena import Arena
from nodeagent.tiers.chunk_file import BLOCK_BYTES, HEADER_BYTES, UNKNOWN_IDENTITY, FileHeader, encode_header, name_of
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.machine_memory import PAGE_BYTES
from nodeagent.tiers.restore import restore
from tests.nodeagent.lone_drive import no_wait
from tests.nodeagent.running import label, payload, storage_key
from tests.nodeagent.tiers_by_hand import ByHand

ROUNDS = 200
REAL_EVERY = 10
SEED = 20_261_201
LENGTHS = {"a": 5_000, "b": 12_288, "c": 1, "d": 40_000, "e": 4_096, "f": 9_999}
NAMES = sorted(LENGTHS)
VARIANTS = 2
CALLS = ["open", "pwritev", "pwrite", "close", "rename", "unlink", "fdatasync", "fsync"]
CALLS_MAX = 60
"""About what a child's work takes; a kill that comes later is one after all of it."""
QUOTA_BYTES = 1 << 20


def data_of(name, variant):
    return payload(f"{name}, variant {variant}", LENGTHS[name])


def header_of(name, variant, *, is_labelled=True):
    data = data_of(name, variant)
    chunk = label(name) if is_labelled else ChunkLabel(storage_key(name), None, None, 0)
    return FileHeader(chunk, UNKNOWN_IDENTITY, len(data), xxhash.xxh3_128_digest(data))


def content_of(name, variant):
    """What the whole file holds."""
    data = bytes(data_of(name, variant))
    return encode_header(header_of(name, variant)) + data + bytes(-len(data) % BLOCK_BYTES)


class Gone(BaseException):
    """This process is as good as dead: nothing that it calls has an effect any more."""


class Killed:
    """Ends the process at the `number`th of the calls that touch files: before it, after it, or in the midst of it.

    A real kill costs a fork of everything. So most are acted: from then on no call does anything but close.
    """

    def __init__(self, number, when, *, is_real):
        self.left, self.when, self.is_real = number, when, is_real
        self.real = {call: getattr(os, call) for call in CALLS}

    def __enter__(self):
        for call, real in self.real.items():
            setattr(os, call, partial(self.act, call, real))
        return self

    def __exit__(self, *_):
        for call, real in self.real.items():
            setattr(os, call, real)

    @property
    def is_dead(self):
        return self.left <= 0

    def act(self, call, real, *arguments, **options):
        self.left -= 1
        if self.left > 0:
            return self.do(call, real, arguments, options)
        if self.left == 0 and self.when == "half" and call == "pwritev":
            fd, parts, offset = arguments
            with parts[0][: parts[0].nbytes // BLOCK_BYTES // 2 * BLOCK_BYTES or BLOCK_BYTES] as some:
                real(fd, [some], offset)
        elif self.left == 0 and self.when == "after" and call != "open":
            self.do(call, real, arguments, options)
        elif call == "close":
            real(*arguments)
        if self.is_real:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Gone

    def do(self, call, real, arguments, options):
        # What is on the drive itself doesn't matter to a kill, and the power cut is done by hand.
        return None if call in ("fdatasync", "fsync") else real(*arguments, **options)


def work(store, steps):
    for what, name, variant in steps:
        try:
            if what == "put":
                store.put(header_of(name, variant), data_of(name, variant))
            elif what == "put, unlabelled":
                store.put(header_of(name, variant, is_labelled=False), data_of(name, variant))
            elif what == "label":
                store.update_label(label(name))
            else:
                store.remove(name_of(storage_key(name)))
        except (ChunkConflict, ChunkCorrupt, FileNotFoundError):
            continue


def killed_at_work(store, steps, killed):
    """Whether the kill came before all was done."""
    if not killed.is_real:
        with killed, contextlib.suppress(Gone):
            work(store, steps)
        return killed.is_dead
    child = os.fork()
    if not child:
        status = 3
        try:
            with killed:
                work(store, steps)
            status = 0
        finally:
            os._exit(status)
    return {-signal.SIGKILL: True, 0: False}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def truncate(place, draw):
    os.truncate(place, draw.randrange(place.stat().st_size + 1))


def flip(place, draw):
    data = bytearray(place.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    place.write_bytes(data)


def zero_blocks(place, draw):
    data = bytearray(place.read_bytes())
    for start in range(0, len(data), BLOCK_BYTES):
        if draw.random() < 0.5:
            data[start : start + BLOCK_BYTES] = bytes(len(data[start : start + BLOCK_BYTES]))
    place.write_bytes(data)


def lose_data(place, draw):
    """The rename is on the drive, and the length, but no block of the data."""
    size = place.stat().st_size
    place.write_bytes(bytes(size))


def lose_all(place, draw):
    """The rename is on the drive, and nothing else."""
    place.write_bytes(b"")


def lose_rename(place, draw):
    """The data are on the drive, and the rename isn't."""
    place.rename(place.with_name(place.name + ".tmp"))


def swap(place, draw):
    """Two names lead to each other's data."""
    others = [other for other in files_below(place.parents[2]) if other != place]
    if others:
        other = draw.choice(others)
        data = place.read_bytes()
        place.write_bytes(other.read_bytes())
        other.write_bytes(data)


def mix_variants(place, draw):
    """An old header before new bytes, or the other way round."""
    name = next(name for name in NAMES if name_of(storage_key(name)).hex() == place.name)
    first, second = draw.sample(range(VARIANTS), 2)
    place.write_bytes(content_of(name, first)[:HEADER_BYTES] + content_of(name, second)[HEADER_BYTES:])


DAMAGES = [truncate, flip, zero_blocks, lose_data, lose_all, lose_rename, swap, mix_variants]


def files_below(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64)


async def start(store, untouched):
    """An agent's start, and a read of every chunk it may have. Returns which were served."""
    metrics = AgentMetrics()
    store.open()
    drive = Drive(store, QUOTA_BYTES, lambda key, mask: None, no_wait, metrics, min_free_bytes=0)
    for threads in (drive.reads, drive.writes, drive.listing):
        threads.executor = ByHand(is_inline=True)
    writer = FileWriter(drive, metrics)
    arena = Arena(PAGE_BYTES * 12, PAGE_BYTES * 10)
    writing = asyncio.get_running_loop().create_task(writer.run())
    served = {}
    try:
        await restore(drive, metrics, sleep=lambda _: asyncio.sleep(0))
        for name in NAMES:
            entry = drive.index.get(storage_key(name))
            slot, _ = arena.take()
            if entry is not None and await drive.read(entry, arena, slot):
                with arena.view(slot, entry.length) as view:
                    served[name] = bytes(view)
            arena.free(slot)
        while drive.room.doomed:
            await asyncio.sleep(0)
    finally:
        assert await drive.close(writing)
        arena.close()
    on_disk = files_below(Path(store._folder.path))
    assert drive.used_bytes == sum(path.stat().st_size for path in on_disk)
    assert len(on_disk) == len(served), "what isn't good has gone"
    assert untouched <= set(served)
    return served


def test_whatever_a_kill_and_a_power_cut_leave_no_byte_is_wrong_and_every_start_works(tmp_path, monkeypatch):
    # 200 starts: the self-test's file needn't be large.
    monkeypatch.setattr(self_test, "TEST_BYTES", 4 * BLOCK_BYTES)
    draw, seen = random.Random(SEED), Counter()
    folder = tmp_path / "nvme"
    store = FolderStore(str(folder), fsync="data+dir")
    goods = {name: {bytes(data_of(name, variant)) for variant in range(VARIANTS)} for name in NAMES}
    served = {}
    store.open()
    for number in range(ROUNDS):
        steps = [
            (
                draw.choice(["put", "put", "put", "put", "put, unlabelled", "label", "remove"]),
                name,
                draw.randrange(VARIANTS),
            )
            for name in draw.choices(NAMES, k=6)
        ]
        killed = Killed(
            draw.randrange(1, CALLS_MAX), draw.choice(["before", "after", "half"]), is_real=number % REAL_EVERY == 0
        )
        seen["killed" if killed_at_work(store, steps, killed) else "done"] += 1
        touched = {name for _, name, _ in steps}
        if draw.random() < 0.5:
            places = files_below(folder)
            for place in draw.sample(places, min(len(places), draw.randrange(1, 3))):
                damage, before = draw.choice(DAMAGES), {path: path.read_bytes() for path in places if path.exists()}
                if place.exists():
                    damage(place, draw)
                    seen[damage.__name__] += 1
                changed = {path.name for path, data in before.items() if not path.exists() or path.read_bytes() != data}
                touched |= {name for name in NAMES if name_of(storage_key(name)).hex() in changed}
        store.close()
        served = asyncio.run(start(store, set(served) - touched))
        assert all(data in goods[name] for name, data in served.items())
        assert not list(folder.rglob("*.tmp"))
        seen["served"] += len(served)
    store.close()
    assert seen.keys() == {"killed", "done", "served", *(damage.__name__ for damage in DAMAGES)}, seen
    assert seen["killed"] > ROUNDS // 2
    assert seen["served"] > ROUNDS
