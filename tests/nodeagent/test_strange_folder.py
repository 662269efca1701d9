"""Others put into the NVMe folder what doesn't belong there: it costs the chunk whose place it takes, and no more."""

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest
import xxhash

from nodeagent.errors import ChunkCorrupt, TierUnavailable
from nodeagent.tiers.chunk_file import HEADER_BYTES, UNKNOWN_IDENTITY, FileHeader, name_of
from nodeagent.tiers.chunk_folder import LOCK_NAME
from nodeagent.tiers.file_store import FolderStore
from nodeagent.tiers.machine_memory import PAGE_BYTES
from tests.nodeagent.lone_drive import FaultyStore, count, read_back, soon, tier_on, write
from tests.nodeagent.running import label, open_fds, payload, storage_key

LENGTH = 5_000


@pytest.fixture
def store(tmp_path):
    before = open_fds()
    store = FolderStore(str(tmp_path / "nvme"))
    store.open()
    yield store
    store.close()
    assert open_fds() == before


def place_of(store, name="a"):
    place = Path(store._place(name_of(storage_key(name))))
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def leftover_of(store, name="a"):
    place = place_of(store, name)
    return place.with_name(place.name + ".tmp")


def put(store, name="a"):
    data = payload(name, LENGTH)
    return store.put(FileHeader(label(name), UNKNOWN_IDENTITY, LENGTH, xxhash.xxh3_128_digest(data)), data)


def read(store, name="a"):
    target = bytearray(LENGTH)
    store.read_into(storage_key(name), memoryview(target))
    return target


def make_socket(path):
    # A socket's path is short; the folder's isn't.
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/{path.name[:40]}")
        os.rename(path.parent / path.name[:40], path)
        os.close(folder)


def make_link(path):
    target = path.parent.parent.parent.parent / "elsewhere"
    target.write_bytes(b"mine")
    path.symlink_to(target)


STRANGE = {"pipe": os.mkfifo, "socket": make_socket, "link": make_link, "folder": os.mkdir}
REPLACED = {how: STRANGE[how] for how in ("pipe", "socket", "link")}


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_what_is_no_file_is_never_waited_for_and_is_corrupt(store, make):
    make(place_of(store))
    with pytest.raises(ChunkCorrupt):
        read(store)
    with pytest.raises(ChunkCorrupt):
        store.header(name_of(storage_key("a")))
    with pytest.raises(ChunkCorrupt):
        store.update_label(label("a"))
    assert store.listing().strangers == 1


def test_a_link_to_a_good_file_is_not_followed(store, tmp_path):
    put(store)
    place_of(store).rename(tmp_path / "moved")
    place_of(store).symlink_to(tmp_path / "moved")
    with pytest.raises(ChunkCorrupt):
        read(store)
    assert put(store), "the quota counts a file, not a link"
    assert not place_of(store).is_symlink()


@pytest.mark.parametrize("make", REPLACED.values(), ids=REPLACED)
def test_what_is_no_file_is_replaced_by_a_put(store, tmp_path, make):
    make(place_of(store))
    assert put(store)
    assert read(store) == payload("a", LENGTH)
    assert not place_of(store).is_symlink()
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_a_file_whose_payload_was_found_bad_is_written_again(store):
    put(store)
    data = bytearray(place_of(store).read_bytes())
    data[HEADER_BYTES + 7] ^= 1
    place_of(store).write_bytes(data)
    with pytest.raises(ChunkCorrupt):
        read(store)
    assert put(store)
    assert read(store) == payload("a", LENGTH)
    assert not put(store)


def test_a_folder_at_a_chunks_place_refuses_the_put_and_leaves_nothing_else(store):
    place_of(store).mkdir()
    with pytest.raises(IsADirectoryError):
        put(store)
    assert os.listdir(place_of(store).parent) == [place_of(store).name]


@pytest.mark.parametrize("make", REPLACED.values(), ids=REPLACED)
def test_what_stands_at_a_temporary_name_is_removed_and_not_followed(store, tmp_path, make):
    make(leftover_of(store))
    assert put(store)
    assert read(store) == payload("a", LENGTH)
    assert not leftover_of(store).exists()
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_a_folder_named_like_a_leftover_does_not_end_the_listing(store):
    put(store, "a")
    leftover_of(store, "b").mkdir()
    leftover_of(store, "c").write_bytes(b"half")
    listing = store.listing()
    assert [found.name for found in listing.files] == [name_of(storage_key("a"))]
    assert (listing.temporaries_removed, listing.strangers) == (1, 1)
    with pytest.raises(IsADirectoryError):
        put(store, "b")


@pytest.mark.parametrize("level", [1, 2])
def test_a_link_in_the_place_of_a_fan_out_folder_is_refused(store, tmp_path, level):
    put(store)
    fan = place_of(store).parents[2 - level]
    fan.rename(tmp_path / "moved")
    fan.symlink_to(tmp_path / "moved")
    with pytest.raises(NotADirectoryError):
        put(store)
    with pytest.raises(ChunkCorrupt):
        read(store)
    assert list(store.listing().files) == []
    store.remove(name_of(storage_key("a")))
    assert place_of(store).exists(), "nothing is removed through a link"


def test_a_folder_that_is_removed_is_not_made_anew(store, tmp_path):
    put(store)
    place_of(store).unlink()
    for folder in [*place_of(store, "a").parents][:2]:
        folder.rmdir()
    (tmp_path / "nvme" / LOCK_NAME).unlink()
    (tmp_path / "nvme").rmdir()
    with pytest.raises(FileNotFoundError):
        put(store)
    assert not (tmp_path / "nvme").exists()


def test_a_folder_that_is_replaced_is_left_alone(store, tmp_path):
    (tmp_path / "nvme").rename(tmp_path / "moved")
    (tmp_path / "nvme").mkdir(mode=0o700)
    put(store)
    assert os.listdir(tmp_path / "nvme") == []
    assert read(store) == payload("a", LENGTH)


def test_a_link_to_a_folder_of_ours_is_a_fine_folder(tmp_path):
    (tmp_path / "drive").mkdir(mode=0o700)
    (tmp_path / "nvme").symlink_to(tmp_path / "drive")
    store = FolderStore(str(tmp_path / "nvme"))
    store.open()
    put(store)
    assert read(store) == payload("a", LENGTH)
    store.close()


def given_away(path):
    path.mkdir(mode=0o700)
    try:
        os.chown(path, 12_345, -1)
    except PermissionError:
        pytest.skip("giving a folder away needs privileges")


def open_to(mode):
    def make(path):
        path.mkdir()
        path.chmod(mode)

    return make


def with_a_lock_that_is(make_lock):
    def make(path):
        path.mkdir(mode=0o700)
        make_lock(path / LOCK_NAME)

    return make


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (given_away, "belongs to user 12345"),
        (open_to(0o777), "mode 777"),
        (open_to(0o720), "mode 720"),
        (lambda path: path.write_bytes(b""), "Not a directory"),
        (lambda path: path.symlink_to("nowhere"), "No such file"),
        (with_a_lock_that_is(lambda path: path.symlink_to("nowhere")), "can't be used"),
    ],
    ids=[
        "another's",
        "everybody's",
        "the group's",
        "a file",
        "a dangling link",
        "a link as its lock",
    ],
)
def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path, make, sentence):
    make(tmp_path / "nvme")
    before = open_fds()
    with pytest.raises(TierUnavailable, match=sentence):
        FolderStore(str(tmp_path / "nvme")).open()
    assert open_fds() == before


async def test_a_strange_place_costs_its_chunk_and_the_others_are_written(tmp_path):
    store = FolderStore(str(tmp_path / "nvme"))
    async with tier_on(store, write_pause_s=100.0) as tier:
        place_of(store, "a").mkdir()
        fan = place_of(store, "b").parent
        fan.rmdir()
        fan.symlink_to(tmp_path)
        for name in "abc":
            await write(tier, name)
        assert count(tier, "admission_refused_total", reason="nvme_strange") == 2
        assert count(tier, "degraded_total", reason="nvme_write_failed") == 0
        assert not tier.is_paused
        assert [await read_back(tier, name) for name in "abc"] == [None, None, payload("c", PAGE_BYTES)]


@pytest.mark.parametrize(
    ("number", "is_pause"),
    [
        *((number, False) for number in (errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)),
        *((number, True) for number in (errno.EIO, errno.EDQUOT, errno.ENXIO, errno.ENODEV, errno.EMFILE)),
    ],
    ids=lambda value: errno.errorcode.get(value) if value is not True and value else "",
)
async def test_only_errors_of_the_drive_pause_writing(tmp_path, number, is_pause):
    store = FaultyStore(str(tmp_path / "nvme"))
    async with tier_on(store, write_pause_s=100.0) as tier:
        store.write_error = number
        await write(tier, "a")
        assert tier.is_paused == is_pause
        reason = "nvme_error" if is_pause else "nvme_strange"
        assert count(tier, "admission_refused_total", reason=reason) == 1


async def test_a_folder_that_goes_away_pauses_writing(tmp_path):
    store = FolderStore(str(tmp_path / "nvme"))
    async with tier_on(store, write_pause_s=100.0) as tier:
        shutil.rmtree(tmp_path / "nvme")
        await write(tier, "a")
        assert tier.is_paused
        assert count(tier, "degraded_total", reason="nvme_write_failed") == 1
        assert not (tmp_path / "nvme").exists()


async def test_a_pipe_in_a_chunks_place_is_a_miss_and_goes(tmp_path):
    store = FolderStore(str(tmp_path / "nvme"))
    async with tier_on(store) as tier:
        await write(tier, "a")
        place_of(store).unlink()
        os.mkfifo(place_of(store))
        assert await read_back(tier, "a") is None
        await soon(lambda: not os.path.lexists(place_of(store)))
        await write(tier, "a")
        assert await read_back(tier, "a") == payload("a", PAGE_BYTES)
