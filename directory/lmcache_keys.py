"""The key scheme of LMCache's multi-process server (0.5): blake3 over big-endian token ids. Needs `blake3`."""

from array import array

from blake3 import blake3

from directory.chunks import TOKEN_BYTES, TokenBytes
from directory.identity import Scope
from directory.schemes import labelled

_FIRST_PREFIX = blake3((0).to_bytes(8, "big") + (0).to_bytes(4, "big")).digest()


class LmcacheScheme:
    """blake3(prefix || tokens as big-endian u32), the first prefix being blake3(int64_be(0) || u32_be(0)).

    The salt is a field of LMCache's key and isn't hashed here; the directory key folds it in.
    """

    def digests(
        self,
        fleet_digest: bytes,
        scope: Scope,
        tokens: TokenBytes,
        chunk_tokens: int,
        page_tokens: int | None,
    ) -> list[bytes]:
        """See `KeyScheme`; pages play no part."""
        swapped = array("I")
        swapped.frombytes(memoryview(tokens).cast("B"))
        swapped.byteswap()
        data, step = memoryview(swapped.tobytes()), chunk_tokens * TOKEN_BYTES
        previous, digests = _FIRST_PREFIX, []
        for start in range(0, data.nbytes - step + 1, step):
            previous = blake3(previous + data[start : start + step]).digest()
            digests.append(previous)
        return digests

    def directory_keys(self, fleet_digest: bytes, scope: Scope, digests: list[bytes]) -> list[bytes]:
        """See `KeyScheme`."""
        return labelled(fleet_digest, scope, digests)
