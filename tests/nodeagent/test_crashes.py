"""Killed at every step of a write: the chunk is there whole, or not at all. `test_power_cuts.py` goes on from there."""

import os
import signal

import pytest
import xxhash

from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import UNKNOWN_IDENTITY, FileHeader, name_of
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.lone_drive import tier_on
from tests.nodeagent.running import label, payload, storage_key

LENGTHS = {"a": 5_000, "b": 12_288, "c": 1, "d": 40_000, "e": 4_096, "f": 9_999}


def data_of(name):
    return payload(name, LENGTHS[name])


def put(store, name, *, is_labelled=True):
    data = data_of(name)
    chunk = label(name) if is_labelled else ChunkLabel(storage_key(name), None, None, 0)
    return store.put(FileHeader(chunk, UNKNOWN_IDENTITY, len(data), xxhash.xxh3_128_digest(data)), data)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def dying_at(call, number, monkeypatch, *, after):
    """Killed before any call of `os.{call}`, or after the `number`th that went well."""
    real, calls = getattr(os, call), []

    def last(*arguments, **options):
        if not after:
            die()
        result = real(*arguments, **options)
        calls.append(1)
        if len(calls) == number:
            die()
        return result

    monkeypatch.setattr(os, call, last)


def half_written(monkeypatch):
    real = os.pwritev

    def half(fd, parts, offset):
        with parts[-2][: parts[-2].nbytes // 4_096 // 2 * 4_096] as some:
            real(fd, [*parts[:-2], some] if some.nbytes else parts[:1], offset)
        die()

    monkeypatch.setattr(os, "pwritev", half)


STEPS = {
    "no temporary yet": lambda patch: dying_at("open", 1, patch, after=False),
    "an empty temporary": lambda patch: dying_at("pwritev", 1, patch, after=False),
    "half a temporary": half_written,
    "a whole temporary": lambda patch: dying_at("pwritev", 1, patch, after=True),
    "synced": lambda patch: dying_at("fdatasync", 1, patch, after=True),
    "before the rename": lambda patch: dying_at("rename", 1, patch, after=False),
    "after the rename": lambda patch: dying_at("rename", 1, patch, after=True),
    "folder not synced": lambda patch: dying_at("fsync", 1, patch, after=False),
    "all of it": lambda patch: dying_at("fsync", 3, patch, after=True),
}
IS_THERE = {"after the rename", "folder not synced", "all of it"}


def killed_in_a_child(work):
    """`work` in a forked process, which must be killed in it."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("step", STEPS)
async def test_killed_in_a_put_the_chunk_is_there_whole_or_not_at_all(tmp_path, monkeypatch, step):
    store = FolderStore(str(tmp_path / "nvme"), fsync="data+dir")
    store.open()
    put(store, "a")
    with monkeypatch.context() as patch:

        def work():
            STEPS[step](patch)
            put(store, "d")

        killed_in_a_child(work)
    store.close()
    async with tier_on(store, files=100) as tier:
        assert {entry.label.storage_key for entry in tier.index.entries()} == {
            storage_key(name) for name in ("ad" if step in IS_THERE else "a")
        }
        check_all(store, {"a", "d"} if step in IS_THERE else {"a"})
        assert not list((tmp_path / "nvme").rglob("*.tmp"))
        assert put(store, "d") == (step not in IS_THERE)
        check_all(store, {"a", "d"})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_while_a_label_is_written_the_chunk_is_there_with_it_or_without(tmp_path, monkeypatch, after):
    store = FolderStore(str(tmp_path / "nvme"))
    store.open()
    put(store, "d", is_labelled=False)
    with monkeypatch.context() as patch:

        def work():
            dying_at("pwritev", 1, patch, after=after)
            dying_at("pwrite", 1, patch, after=after)
            store.update_label(label("d"))

        killed_in_a_child(work)
    header = store.header(name_of(storage_key("d")))
    assert header.label.directory_key == (storage_key("d")[:16] if after else None)
    check_all(store, {"d"})
    store.close()


def check_all(store, names):
    for name in names:
        target = bytearray(LENGTHS[name])
        store.read_into(storage_key(name), memoryview(target))
        assert target == data_of(name)
