"""The file's header, byte by byte; and the folder's promises."""

import hashlib
import math
import os
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from nodeagent.errors import ChunkConflict, ChunkCorrupt, ChunkForeign
from nodeagent.labels import ChunkLabel
from nodeagent.tiers.chunk_file import (
    HEADER_BYTES,
    UNKNOWN_IDENTITY,
    FileHeader,
    decode_header,
    encode_header,
    file_bytes,
    name_of,
)
from nodeagent.tiers.chunk_folder import LOCK_NAME
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.running import label, payload, storage_key

KEYS = st.binary(min_size=32, max_size=32)
TAGS = st.none() | st.binary(min_size=16, max_size=16).filter(any)
U64 = st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    FileHeader,
    st.builds(ChunkLabel, KEYS, st.none() | st.binary(min_size=16, max_size=16), st.none() | KEYS, U64, TAGS),
    KEYS,
    U64,
    st.binary(min_size=16, max_size=16),
    st.floats(0, 1e12),
).filter(lambda header: header.label.is_sound())
GOLDEN = FileHeader(
    ChunkLabel(bytes(range(32)), bytes(range(100, 116)), bytes(range(40, 72)), 7), b"i" * 32, 1_000, b"c" * 16
)
GOLDEN_FIELDS = (
    "57524348554e4b0001000300001000000700000000000000e8030000000000000000000000000000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "28292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f4041424344454647"
    "6465666768696a6b6c6d6e6f70717273" + "69" * 32 + "63" * 16
)


def test_a_header_has_the_golden_bytes():
    data = encode_header(GOLDEN)
    fields = bytes.fromhex(GOLDEN_FIELDS)
    assert data[: len(fields)] == fields
    assert not any(data[len(fields) : 4_080])
    assert data[4_080:] == xxhash.xxh3_128_digest(data[:4_080])
    assert len(data) == 4_096


def test_a_salt_tag_and_a_date_follow_the_fields_that_earlier_releases_wrote():
    tagged = replace(GOLDEN, label=changed(GOLDEN.label, salt_tag=b"s" * 16), written_at_s=1.5)
    data, fields = encode_header(tagged), bytes.fromhex(GOLDEN_FIELDS)
    assert data[: len(fields) + 24] == fields + b"s" * 16 + bytes(6) + b"\xf8\x3f"
    assert decode_header(encode_header(GOLDEN)).label.salt_tag is None


@pytest.mark.parametrize("date", [math.nan, math.inf])
def test_a_date_that_is_none_is_refused(date):
    with pytest.raises(ChunkCorrupt, match="time"):
        decode_header(encode_header(replace(GOLDEN, written_at_s=date)))


@given(HEADERS)
def test_a_header_survives_its_bytes(header):
    assert decode_header(encode_header(header)) == header


@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 7))
def test_no_flipped_bit_of_a_header_goes_unseen(offset, bit):
    data = bytearray(encode_header(GOLDEN))
    data[offset] ^= 1 << bit
    with pytest.raises(ChunkCorrupt):
        decode_header(data)


@given(st.binary(max_size=5_000))
def test_garbage_is_corrupt(data):
    with pytest.raises(ChunkCorrupt):
        decode_header(data)


@pytest.mark.parametrize(("offset", "what"), [(8, "version"), (32, "encrypted")], ids=["version", "key"])
def test_another_version_and_an_encrypted_file_are_foreign(offset, what):
    data = bytearray(encode_header(GOLDEN))
    data[offset] = 9
    data[4_080:] = xxhash.xxh3_128_digest(data[:4_080])
    with pytest.raises(ChunkForeign, match=what):
        decode_header(data)


def test_a_chunk_that_claims_to_be_its_own_parent_is_corrupt():
    key = storage_key("a")
    with pytest.raises(ChunkCorrupt):
        decode_header(encode_header(FileHeader(ChunkLabel(key, None, key, 1), UNKNOWN_IDENTITY, 1, b"c" * 16)))


@pytest.fixture
def store(tmp_path):
    store = FolderStore(str(tmp_path / "nvme"))
    store.open()
    yield store
    store.close()


def header_of(name, length=5_000, chunk=None):
    return FileHeader(chunk or label(name), UNKNOWN_IDENTITY, length, xxhash.xxh3_128_digest(payload(name, length)))


def put(store, name, length=5_000):
    return store.put(header_of(name, length), payload(name, length))


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "nvme").rglob("*") if path.is_file() and path.name != LOCK_NAME)


def test_what_was_put_is_read_and_lies_where_the_format_says(store, tmp_path):
    assert put(store, "a")
    text = hashlib.sha256(storage_key("a")).hexdigest()
    path = tmp_path / "nvme" / text[:2] / text[2:4] / text
    assert path.stat().st_size == file_bytes(5_000) == 3 * 4_096
    target = bytearray(5_000)
    assert store.read_into(storage_key("a"), memoryview(target)) == header_of("a")
    assert target == payload("a", 5_000)


def test_the_same_bytes_are_had_and_others_refused(store):
    put(store, "a")
    assert not put(store, "a")
    with pytest.raises(ChunkConflict):
        store.put(FileHeader(label("a"), UNKNOWN_IDENTITY, 5_000, b"x" * 16), payload("b", 5_000))
    with pytest.raises(ChunkConflict):
        put(store, "a", 4_000)


def test_a_put_that_fails_leaves_nothing(store, tmp_path, monkeypatch):
    def full(fd, parts, offset):
        os.write(fd, bytes(parts[0]))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("os.pwritev", full)
        put(store, "a")
    assert files(tmp_path) == []
    assert put(store, "a")


def test_removal_is_idempotent(store, tmp_path):
    put(store, "a")
    store.remove(name_of(storage_key("a")))
    store.remove(name_of(storage_key("a")))
    assert files(tmp_path) == []


def test_the_listing_removes_leftovers_leaves_strangers_and_is_newest_first(store, tmp_path):
    for age, name in enumerate("abc"):
        put(store, name)
        place = tmp_path / "nvme" / store._place(name_of(storage_key(name)))
        os.utime(place, (1_000 - age, 1_000 - age))
    leftover = place.parent / (place.name + ".tmp")
    leftover.write_bytes(b"half")
    stranger = place.parent / "notes.txt"
    stranger.write_bytes(b"mine")
    listing = store.listing()
    assert [found.name for found in listing.files] == [name_of(storage_key(name)) for name in "abc"]
    assert (listing.temporaries_removed, listing.strangers) == (1, 1)
    assert not leftover.exists()
    assert stranger.exists()
