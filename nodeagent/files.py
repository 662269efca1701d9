"""Tokenizer files of this host's engines, in memory, served by the digest of their content."""

import hashlib
from collections.abc import Mapping

from nodeagent.errors import HelloRefused

FILES_BYTES_MAX = 256 << 20


class FileShelf:
    """Files by sha256. A file stays while an engine that brought it is attached."""

    def __init__(self, bytes_max: int = FILES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._files: dict[str, bytes] = {}
        self._digests: dict[str, frozenset[str]] = {}

    def keep(self, owner: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Keep an engine's files in place of what it had; returns each name's sha256 in hex.

        Raises `HelloRefused`, and keeps nothing new, where all engines' files would take too much memory.
        """
        named = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        kept = self._files | {named[name]: content for name, content in files.items()}
        if sum(map(len, kept.values())) > self._bytes_max:
            raise HelloRefused(f"the tokenizer files of this host's engines exceed {self._bytes_max:,} bytes")
        self._files = kept
        self._digests[owner] = frozenset(named.values())
        self._drop_unowned()
        return named

    def forget(self, owner: str) -> None:
        """An engine has gone; so do the files that it alone brought."""
        self._digests.pop(owner, None)
        self._drop_unowned()

    def get(self, sha256: str) -> bytes | None:
        """The content with that digest (hex), or `None`."""
        return self._files.get(sha256)

    def _drop_unowned(self) -> None:
        owned = frozenset[str]().union(*self._digests.values())
        self._files = {digest: content for digest, content in self._files.items() if digest in owned}
