"""One chunk in one file: a header of 4 KiB, then the payload, padded with zeros to a multiple of 4 KiB.

The header, little-endian, without gaps; what follows its fields is zero up to its own checksum:

    offset  bytes
         0      8  magic "WRCHUNK" and a zero
         8      2  version (1)
        10      2  flags: 1 the directory key is known, 2 the chunk has a parent
        12      4  header's length (4096)
        16      8  position in the chain
        24      8  payload's length
        32      8  key id: 0 where the payload isn't encrypted
        40     32  storage key
        72     32  parent's storage key, or zeros
       104     16  directory key, or zeros
       120     32  identity digest: the shard's, or the fleet's where one file holds every rank; zeros where unknown
       152     16  xxh3-128 of the payload
       168     16  salt tag, or zeros where unknown: files of earlier releases have none
       184      8  when the chunk was put, a double of seconds since 1970; 0 where unknown, as in those files
      4080     16  xxh3-128 of the 4080 bytes before

The name is the sha256 of the storage key in hex, two levels down: `aa/bb/aabb...`. Keys may be of any length one day;
names never are. A file is written under a temporary name beside its place and then renamed.
"""

import hashlib
import math
import struct
from dataclasses import dataclass

import xxhash

from directory.identity import SALT_TAG_BYTES
from nodeagent.errors import ChunkCorrupt, ChunkForeign
from nodeagent.labels import ChunkLabel

MAGIC = b"WRCHUNK\0"
VERSION = 1
BLOCK_BYTES = 4096
HEADER_BYTES = BLOCK_BYTES
IDENTITY_BYTES = 32
NAME_BYTES = 32
UNKNOWN_IDENTITY = bytes(IDENTITY_BYTES)
CHECKSUM_BYTES = 16

_FIELDS = struct.Struct("<8sHHIQQQ32s32s16s32s16s16sd")
_HAS_DIRECTORY_KEY = 1
_HAS_PARENT = 2
_NO_TAG = bytes(SALT_TAG_BYTES)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What a file says of its chunk. `length` counts the payload's bytes; `checksum` is the payload's xxh3-128.

    `written_at_s` is when it was put first, in wall time: the file's own time changes with each use. 0: unknown.
    """

    label: ChunkLabel
    identity: bytes
    length: int
    checksum: bytes
    written_at_s: float = 0.0


def name_of(storage_key: bytes) -> bytes:
    """The 32 bytes whose hex is the file's name."""
    return hashlib.sha256(storage_key).digest()


def file_bytes(length: int) -> int:
    """What a payload of `length` bytes takes on disk: its header, and its last block in full."""
    return HEADER_BYTES + length + padding_bytes(length)


def padding_bytes(length: int) -> int:
    """How many zeros follow a payload of `length` bytes."""
    return -length % BLOCK_BYTES


def encode_header(header: FileHeader) -> bytes:
    """The 4,096 bytes in front of a payload."""
    label = header.label
    flags = (label.directory_key is not None) * _HAS_DIRECTORY_KEY | (label.parent is not None) * _HAS_PARENT
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        flags,
        HEADER_BYTES,
        label.position,
        header.length,
        0,
        label.storage_key,
        label.parent or b"",
        label.directory_key or b"",
        header.identity,
        header.checksum,
        label.salt_tag or _NO_TAG,
        header.written_at_s,
    )
    body = fields.ljust(HEADER_BYTES - CHECKSUM_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def decode_header(data: bytes | bytearray) -> FileHeader:
    """The header in `data`. Raises `ChunkCorrupt`; `ChunkForeign` where another version or a key is needed."""
    if len(data) != HEADER_BYTES or not data.startswith(MAGIC):
        raise ChunkCorrupt("a file doesn't begin as a chunk's")
    (
        _,
        version,
        flags,
        header_bytes,
        position,
        length,
        key_id,
        storage_key,
        parent,
        directory_key,
        identity,
        checksum,
        salt_tag,
        written_at_s,
    ) = _FIELDS.unpack_from(data)
    if version != VERSION:
        raise ChunkForeign(f"a file has version {version}; this agent reads version {VERSION}")
    if xxhash.xxh3_128_digest(data[:-CHECKSUM_BYTES]) != data[-CHECKSUM_BYTES:] or header_bytes != HEADER_BYTES:
        raise ChunkCorrupt("a file's header doesn't match its checksum")
    if key_id:
        raise ChunkForeign(f"a file is encrypted with key {key_id}, which this agent doesn't have")
    label = ChunkLabel(
        storage_key,
        directory_key if flags & _HAS_DIRECTORY_KEY else None,
        parent if flags & _HAS_PARENT else None,
        position,
        salt_tag if salt_tag != _NO_TAG else None,
    )
    if not label.is_sound():
        raise ChunkCorrupt("a file's header has a label that no chunk can have")
    if not math.isfinite(written_at_s):
        raise ChunkCorrupt("a file's header has a time that is none")
    return FileHeader(label, identity, length, checksum, written_at_s)
