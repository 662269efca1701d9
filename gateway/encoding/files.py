"""Tokenizer and template files, fetched from the agents by digest, verified, and kept on disk."""

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

FILE_BYTES_MAX = 64 * 2**20
FETCH_TIMEOUT_S = 10.0


class FileUnavailable(Exception):
    """No agent gave a file with the digest asked for."""


class TokenizerFiles:
    """Files by the sha256 of their content: from `folder` if they lie there, else from an agent.

    A file whose content doesn't match its digest is never returned and never kept.
    """

    def __init__(self, folder: Path, client: httpx.AsyncClient) -> None:
        self._folder, self._client = folder, client

    async def get(self, digest: str, agent_urls: Sequence[str]) -> bytes:
        """The file's content. Raises `FileUnavailable` when no agent in `agent_urls` has it."""
        path = self._folder / digest
        with contextlib.suppress(OSError):
            content = await asyncio.to_thread(path.read_bytes)
            if _digest(content) == digest:
                return content
        reasons = []
        for agent_url in agent_urls:
            try:
                content = await self._fetch(f"{agent_url}/files/{digest}")
            except (httpx.HTTPError, httpx.InvalidURL, FileUnavailable) as error:
                reasons.append(f"{agent_url}: {error}")
                continue
            if _digest(content) == digest:
                with contextlib.suppress(OSError):  # a cache that can't be written costs a fetch next time
                    await asyncio.to_thread(_write_atomically, path, content)
                return content
            reasons.append(f"{agent_url}: the content doesn't match its digest")
        raise FileUnavailable(f"file {digest[:12]} is not to be had: {'; '.join(reasons) or 'no agent has it'}")

    async def _fetch(self, url: str) -> bytes:
        content = bytearray()
        async with self._client.stream("GET", url, timeout=FETCH_TIMEOUT_S) as response:
            response.raise_for_status()
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > FILE_BYTES_MAX:
                    raise FileUnavailable(f"larger than {FILE_BYTES_MAX} bytes")
        return bytes(content)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
