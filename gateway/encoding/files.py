"""Tokenizer and template files, fetched from the agents by digest, verified, and kept on disk."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from gateway.encoding.file_cache import FileCache

logger = logging.getLogger(__name__)

FILE_BYTES_MAX = 64 * 2**20
FETCH_TIMEOUT_S = 10.0
"""For an agent to accept, and between two pieces of its answer."""
FETCH_BOUND_S = 60.0
"""For a whole file."""
_DIGEST = re.compile("[0-9a-f]{64}")


class FileUnavailable(Exception):
    """No agent gave a file with the digest asked for."""


class TokenizerFiles:
    """Files by the sha256 of their content: those held here, those that lie in `folder`, or else from an agent.

    A file whose content doesn't match its digest is never returned and never kept; `on_damaged` counts those in the
    folder. A folder that can't be read or written costs a fetch.
    """

    def __init__(
        self, folder: Path, client: httpx.AsyncClient, on_damaged: Callable[[], object] = lambda: None
    ) -> None:
        self._cache, self._client, self._on_damaged = FileCache(folder), client, on_damaged
        self._held: dict[str, dict[str, bytes]] = {}

    async def hold(self, owner: str, contents: Mapping[str, bytes]) -> dict[str, str]:
        """Have an owner's files at hand, in place of those it had; returns each name's digest."""
        digests = {name: await asyncio.to_thread(_digest, content) for name, content in contents.items()}
        self._held[owner] = {digests[name]: content for name, content in contents.items()}
        return digests

    async def get(self, digest: str, agent_urls: Sequence[str]) -> bytes:
        """The file's content. Raises `FileUnavailable` when no agent in `agent_urls` has it."""
        if not _DIGEST.fullmatch(digest):  # it would be a path: others write what engines are registered with
            raise FileUnavailable(f"{digest[:12]!r} isn't a sha256")
        for held in self._held.values():
            if digest in held:
                return held[digest]
        content = await asyncio.to_thread(self._cache.read, digest, FILE_BYTES_MAX)
        if content is not None and await asyncio.to_thread(_digest, content) == digest:
            return content
        if content is not None:
            logger.warning("the file %s in the cache is damaged, it is fetched anew", digest[:12])
            self._on_damaged()
        reasons = []
        for agent_url in agent_urls:
            try:
                content = await self._fetch(f"{agent_url}/files/{digest}")
            except (httpx.HTTPError, httpx.InvalidURL, FileUnavailable, TimeoutError) as error:
                reasons.append(f"{agent_url}: {str(error) or type(error).__name__}")
                continue
            if await asyncio.to_thread(_digest, content) == digest:
                await asyncio.to_thread(self._cache.write, digest, content)
                return content
            reasons.append(f"{agent_url}: the content doesn't match its digest")
        raise FileUnavailable(f"file {digest[:12]} is not to be had: {'; '.join(reasons) or 'no agent has it'}")

    async def _fetch(self, url: str) -> bytes:
        content = bytearray()
        async with (
            asyncio.timeout(FETCH_BOUND_S),
            self._client.stream("GET", url, timeout=FETCH_TIMEOUT_S) as response,
        ):
            response.raise_for_status()
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > FILE_BYTES_MAX:
                    raise FileUnavailable(f"larger than {FILE_BYTES_MAX} bytes")
        return bytes(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
