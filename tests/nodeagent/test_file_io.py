"""Bytes of files, around the page cache and through it; and what a drive must show before it is trusted."""

import fcntl
import mmap
import os

import pytest
import xxhash

from nodeagent.errors import ChunkCorrupt
from nodeagent.tiers import self_test as self_testing
from nodeagent.tiers.chunk_file import HEADER_BYTES, UNKNOWN_IDENTITY, FileHeader, file_bytes
from nodeagent.tiers.file_io import BufferedIo, DirectIo
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.self_test import self_test
from tests.nodeagent.mounts import mounted
from tests.nodeagent.running import label, payload, storage_key

WAYS = {"direct": DirectIo, "buffered": BufferedIo}
LENGTHS = [1, 4_095, 4_096, 4_097, 70_000, 1 << 20]
HEADER = os.urandom(HEADER_BYTES)


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def io(request):
    return request.param()


@pytest.fixture
def folder(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def memory(length, *, is_aligned=True):
    start = 0 if is_aligned else 8
    return memoryview(mmap.mmap(-1, length + start))[start:]


def write(path, io, data):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | io.flags, 0o600)
    try:
        io.write_file(fd, HEADER, data)
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    finally:
        os.close(fd)


def read(path, io, length, *, is_aligned=True):
    target = memory(length, is_aligned=is_aligned)
    fd = os.open(path, os.O_RDONLY | io.flags)
    try:
        return io.read_file(fd, target), bytes(target), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    finally:
        os.close(fd)


@pytest.mark.parametrize("is_aligned", [True, False], ids=["aligned", "odd memory"])
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_written_either_way_is_read_either_way(tmp_path, io, length, is_aligned):
    source = memory(length, is_aligned=is_aligned)
    source[:] = data = bytes(payload("a", length))
    write(tmp_path / "before", io, memoryview(b"\xff" * 8_191))
    flags = write(tmp_path / "file", io, source)
    assert (tmp_path / "file").read_bytes() == HEADER + data + bytes(file_bytes(length) - HEADER_BYTES - length)
    for other in (DirectIo(), BufferedIo()):
        header, found, read_flags = read(tmp_path / "file", other, length, is_aligned=is_aligned)
        assert (header, found) == (HEADER, data)
        assert not is_aligned or read_flags == other.flags, "aligned memory stays around the page cache"
    assert not is_aligned or flags == io.flags


@pytest.mark.parametrize("at_most", [4_096, 1_000], ids=["blocks", "odd bytes"])
def test_calls_that_move_less_than_asked_go_on_where_they_stopped(tmp_path, io, monkeypatch, at_most):
    def short(call):
        def move(fd, parts, offset):
            return call(fd, [parts[0][:at_most]], offset)

        return move

    monkeypatch.setattr(os, "preadv", short(os.preadv))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    data = memory(20_000)
    data[:] = payload("a", 20_000)
    write(tmp_path / "file", io, data)
    header, found, _ = read(tmp_path / "file", io, 20_000)
    assert (header, found) == (HEADER, bytes(data))


@pytest.mark.parametrize("kept", [0, 100, HEADER_BYTES, HEADER_BYTES + 4_096])
def test_a_file_that_ends_early_is_corrupt(tmp_path, io, kept):
    write(tmp_path / "file", io, memory(20_000))
    os.truncate(tmp_path / "file", kept)
    with pytest.raises(ChunkCorrupt):
        read(tmp_path / "file", io, 20_000)


def test_a_header_is_overwritten_in_place(tmp_path, io):
    data = memory(5_000)
    data[:] = payload("a", 5_000)
    write(tmp_path / "file", io, data)
    fd = os.open(tmp_path / "file", os.O_RDWR | io.flags)
    io.write_header(fd, HEADER[::-1])
    assert io.read_header(fd) == HEADER[::-1]
    os.close(fd)
    assert read(tmp_path / "file", io, 5_000)[:2] == (HEADER[::-1], bytes(data))


def test_a_drive_that_keeps_what_it_was_given_is_believed_and_left_as_it_was(tmp_path, folder):
    tested = self_test(folder, "here")
    assert tested.read_bytes_per_s > 0
    assert os.listdir(tmp_path) == []


def test_a_drive_that_gives_back_other_bytes_is_an_error(tmp_path, folder, monkeypatch):
    real = DirectIo.read_file

    def flipping(self, fd, target):
        header = real(self, fd, target)
        target[77] ^= 1
        return header

    monkeypatch.setattr(DirectIo, "read_file", flipping)
    with pytest.raises(OSError, match="other bytes"):
        self_test(folder, "here")
    assert os.listdir(tmp_path) == []


def test_blocks_that_are_larger_than_ours_are_not_taken_for_direct_io(folder, monkeypatch, caplog):
    real = os.pwritev

    def picky(fd, parts, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", picky)
    assert not self_test(folder, "here").is_direct
    assert "errno 22, EINVAL" in caplog.text


def test_a_file_system_without_direct_io_is_used_through_the_page_cache_and_the_errno_logged(tmp_path, caplog):
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as ram:
        store = FolderStore(str(ram / "nvme"))
        assert not store.open().is_direct
        data = payload("a", 5_000)
        store.put(FileHeader(label("a"), UNKNOWN_IDENTITY, 5_000, xxhash.xxh3_128_digest(data)), data)
        target = bytearray(5_000)
        store.read_into(storage_key("a"), memoryview(target))
        assert target == data
        store.close()
    assert "takes no direct I/O (errno 22, EINVAL)" in caplog.text


def test_a_full_drive_can_not_be_measured_and_is_used(tmp_path):
    with mounted(tmp_path / "full", "-t", "tmpfs", "-o", "size=8k", "tmpfs") as full:
        (full / "all").write_bytes(bytes(8_192))
        fd = os.open(full, os.O_RDONLY)
        tested = self_test(fd, "here")
        os.close(fd)
        assert tested.read_bytes_per_s is None
        assert os.listdir(full) == ["all"]


@pytest.mark.parametrize(
    ("policy", "kept"), [("none", []), ("data", ["data"]), ("data+dir", ["data", "dir", "dir", "dir"])]
)
def test_the_fsync_policy_says_what_a_put_waits_for(tmp_path, monkeypatch, policy, kept):
    synced = []
    store = FolderStore(str(tmp_path / "nvme"), fsync=policy)
    store.open()
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append("data"))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append("dir" if os.path.isdir(f"/proc/self/fd/{fd}") else "?"))
    data = payload("a", 5_000)
    store.put(FileHeader(label("a"), UNKNOWN_IDENTITY, 5_000, xxhash.xxh3_128_digest(data)), data)
    store.close()
    assert synced == kept


def test_the_self_test_takes_a_small_part_of_what_is_free(tmp_path, monkeypatch):
    sizes = []
    real = DirectIo.write_file
    monkeypatch.setattr(
        DirectIo, "write_file", lambda self, fd, header, data: sizes.append(data.nbytes) or real(self, fd, header, data)
    )
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=256k", "tmpfs") as small:
        fd = os.open(small, os.O_RDONLY)
        self_test(fd, "here")
        os.close(fd)
    assert sizes == [(256 << 10) // self_testing.FREE_FRACTION - 24]
