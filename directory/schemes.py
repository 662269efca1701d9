"""Key schemes: how the chunks of a prompt are named, so that engines which chain their own way are routed exactly.

An engine registers one scheme and one chunk size. Every scheme gives the raw digest of each full chunk and the
directory key it is announced under.
"""

import hashlib
from typing import Protocol

from directory.chunks import (
    DIRECTORY_KEY_BYTES,
    TOKEN_BYTES,
    TokenBytes,
    chunk_keys,
    directory_key,
)
from directory.errors import IdentityRefused
from directory.identity import Scope

_SGLANG_LABEL = b"sglang-cache-namespace-v1"


KNOWN_PAGES_MIN = 8
"""Chunks of fewer pages are hashed in less time than they are looked up in."""

ChunkName = tuple[int, bytes, bytes]
"""Page size, the digest before, the tokens."""


class KnownDigests(Protocol):
    """Digests of chunks that were seen before."""

    def get(self, chunk: ChunkName) -> bytes | None:
        """The chunk's digest, if it is known."""
        ...

    def put(self, chunk: ChunkName, digest: bytes) -> bytes:
        """Keep a digest, and give it back."""
        ...


class KeyScheme(Protocol):
    """Names the full chunks of a prompt."""

    def digests(
        self,
        fleet_digest: bytes,
        scope: Scope,
        tokens: TokenBytes,
        chunk_tokens: int,
        page_tokens: int | None,
    ) -> list[bytes]:
        """The raw 32-byte digest of each full chunk of `tokens` (little-endian u32)."""
        ...

    def directory_keys(self, fleet_digest: bytes, scope: Scope, digests: list[bytes]) -> list[bytes]:
        """The 16-byte directory keys of chunks with these digests."""
        ...


class WarmrouteScheme:
    """Our own chain: sha256 from the scoped digest; the directory key is the chunk key, cut to 16 bytes."""

    def digests(
        self,
        fleet_digest: bytes,
        scope: Scope,
        tokens: TokenBytes,
        chunk_tokens: int,
        page_tokens: int | None,
    ) -> list[bytes]:
        """See `KeyScheme`; pages play no part."""
        return chunk_keys(scope.root(fleet_digest), tokens, chunk_tokens)

    def directory_keys(self, fleet_digest: bytes, scope: Scope, digests: list[bytes]) -> list[bytes]:
        """See `KeyScheme`."""
        return [directory_key(key) for key in digests]


class SglangScheme:
    """SGLang 0.5's HiCache hash: sha256(previous page's digest || page tokens as little-endian u32).

    Nothing stands before the first page, or the seed where a salt or an extra key is set. A chunk's digest is its
    last page's. The scheme has no field for an adapter, so LoRA is kept apart by the directory key alone.

    Pages of one token, SGLang's default, make a prompt of 100k tokens cost 50 ms. So what is in `known` isn't hashed
    again: a chunk's digest by its page size, what stands before it, and its tokens. Whoever gives `known` bounds it.
    """

    def __init__(self, known: KnownDigests | None = None) -> None:
        self._known = known

    def digests(
        self,
        fleet_digest: bytes,
        scope: Scope,
        tokens: TokenBytes,
        chunk_tokens: int,
        page_tokens: int | None,
    ) -> list[bytes]:
        """See `KeyScheme`. Raises `IdentityRefused` where the page doesn't divide the chunk."""
        page = chunk_tokens if page_tokens is None else page_tokens
        if page < 1 or chunk_tokens % page:
            raise IdentityRefused(f"page_tokens must divide the chunk of {chunk_tokens} tokens, not be {page}")
        view, step = memoryview(tokens).cast("B"), page * TOKEN_BYTES
        previous = sglang_seed(None, scope.salt) if scope.salt is not None else b""
        known = self._known if chunk_tokens // page >= KNOWN_PAGES_MIN else None
        digests: list[bytes] = []
        for start in range(0, view.nbytes - chunk_tokens * TOKEN_BYTES + 1, chunk_tokens * TOKEN_BYTES):
            chunk = view[start : start + chunk_tokens * TOKEN_BYTES]
            if known is None:
                previous = chain_pages(previous, chunk, step)
            else:
                name = (page, previous, bytes(chunk))
                previous = known.get(name) or known.put(name, chain_pages(previous, chunk, step))
            digests.append(previous)
        return digests

    def directory_keys(self, fleet_digest: bytes, scope: Scope, digests: list[bytes]) -> list[bytes]:
        """See `KeyScheme`."""
        return labelled(fleet_digest, scope, digests)


def chain_pages(previous: bytes, chunk: memoryview, step: int) -> bytes:
    """The digest of a chunk's last page, of `step` bytes each, behind the digest `previous`."""
    for start in range(0, chunk.nbytes, step):
        previous = hashlib.sha256(previous + chunk[start : start + step]).digest()
    return previous


def sglang_seed(extra_key: str | None, salt: str | None) -> bytes:
    """What stands before SGLang's first page when an extra key or a salt is set (32 bytes)."""
    parts = [_SGLANG_LABEL]
    for field in (extra_key, salt):
        if field is None:
            parts.append(b"\x00")
        else:
            value = field.encode()
            parts.append(b"\x01" + len(value).to_bytes(8, "little") + value)
    return hashlib.sha256(b"".join(parts)).digest()


def labelled(fleet_digest: bytes, scope: Scope, digests: list[bytes]) -> list[bytes]:
    """Directory keys of a foreign scheme: sha256(scoped fleet root || chunk digest)[:16]."""
    root = scope.root(fleet_digest)
    return [hashlib.sha256(root + digest).digest()[:DIRECTORY_KEY_BYTES] for digest in digests]


SCHEMES = ("warmroute", "sglang", "lmcache-mp")


def key_scheme(name: str, known: KnownDigests | None = None) -> KeyScheme:
    """The scheme of that name; `known` spares it work where it would pay.

    Raises `IdentityRefused` for an unknown one, or one whose library is missing.
    """
    if name == "warmroute":
        return WarmrouteScheme()
    if name == "sglang":
        return SglangScheme(known)
    if name == "lmcache-mp":
        try:
            from directory.lmcache_keys import LmcacheScheme
        except ImportError:
            raise IdentityRefused(
                "the scheme lmcache-mp needs the package blake3: pip install 'warmroute[lmcache]'"
            ) from None
        return LmcacheScheme()
    raise IdentityRefused(f"unknown key scheme {name!r}: it must be one of {', '.join(SCHEMES)}")
