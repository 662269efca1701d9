"""The API server, as a pod sees it: lists and watches EndpointSlices with the rights of its service account.

Rights: `get`, `list` and `watch` on `endpointslices` of `discovery.k8s.io`. The token is read anew for each request, as
the kubelet replaces it within the hour. Protocol: https://kubernetes.io/docs/reference/using-api/api-concepts.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import orjson

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE_ITEMS = 500
PAGES_MAX = 200
ANSWER_S = 15.0
"""For a page of a list, and until a watch begins."""
WATCH_S = 240
"""The server ends a watch after so many seconds; then the next one goes on from there."""
SILENCE_S = WATCH_S + 30.0
"""A watch that says nothing for longer is broken: its end would have come."""
LINE_BYTES_MAX = 4 * 2**20
GONE = 410
OPENED = "OPENED"


class ApiFailed(Exception):
    """The API server can't be asked, or answers what can't be used; the message says what."""


class HistoryGone(ApiFailed):
    """The server has forgotten what followed the version that a watch should go on from: all must be listed again."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the API server is, and who asks. `token` is a file; so is `ca`, by which the server is known."""

    url: str
    token: Path | None = None
    ca: Path | None = None
    namespace: str = "default"

    @classmethod
    def own(cls, environment: Mapping[str, str] = os.environ, folder: Path = ACCOUNT_FOLDER) -> Self:
        """The cluster that this process is a pod of. Raises `ApiFailed` outside of one."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ApiFailed("not in a cluster: KUBERNETES_SERVICE_HOST isn't set; name `kubernetes[].api_url`")
        try:
            namespace = (folder / "namespace").read_text().strip()
        except OSError as error:
            raise ApiFailed(f"no service account is mounted at {folder}: {error.strerror}") from None
        place = f"[{host}]" if ":" in host else host
        return cls(f"https://{place}:{port}", folder / "token", folder / "ca.crt", namespace)


class KubernetesApi:
    """Use as an async context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def __aenter__(self) -> Self:
        verify: ssl.SSLContext | bool = True
        if self._cluster.ca is not None:
            try:
                verify = ssl.create_default_context(cafile=str(self._cluster.ca))
            except (OSError, ssl.SSLError) as error:
                raise ApiFailed(f"the cluster's authority at {self._cluster.ca} can't be read: {error}") from None
        self._client = httpx.AsyncClient(base_url=self._cluster.url, verify=verify, trust_env=False, timeout=None)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def list_slices(self, namespace: str, selector: str) -> tuple[list[Any], str]:
        """All slices, and the version from which a watch goes on. Raises `ApiFailed`."""
        found: list[Any] = []
        query = {"labelSelector": selector, "limit": str(PAGE_ITEMS)}
        for _ in range(PAGES_MAX):
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await self._client.get(_path(namespace), params=query, headers=self._headers())
            except (httpx.HTTPError, TimeoutError) as error:
                raise _unreachable(error) from None
            content = _checked(answer.status_code, answer.content)
            metadata = content.get("metadata")
            metadata = metadata if isinstance(metadata, dict) else {}
            items = content.get("items")
            found += items if isinstance(items, list) else []
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion") or "")
            query["continue"] = str(metadata["continue"])
        raise ApiFailed(f"more than {PAGES_MAX * PAGE_ITEMS} slices match")

    async def watch_slices(self, namespace: str, selector: str, version: str) -> AsyncGenerator[dict[str, Any], None]:
        """`OPENED` when it has begun, and events since `version`, until the server ends it. Raises `ApiFailed`."""
        query = {
            "labelSelector": selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        try:
            async with asyncio.timeout(ANSWER_S) as patience:
                async with self._client.stream(
                    "GET", _path(namespace), params=query, headers=self._headers()
                ) as answer:
                    patience.reschedule(None)
                    if answer.status_code != httpx.codes.OK:
                        _checked(answer.status_code, await answer.aread())
                    yield {"type": OPENED}
                    async for line in _lines(answer):
                        yield _event(line)
        except (httpx.HTTPError, TimeoutError) as error:
            raise _unreachable(error) from None

    def _headers(self) -> dict[str, str]:
        if self._cluster.token is None:
            return {}
        try:
            return {"authorization": f"Bearer {self._cluster.token.read_text().strip()}"}
        except OSError as error:
            raise ApiFailed(f"the token at {self._cluster.token} can't be read: {error.strerror}") from None


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a watch, each bounded in length, and all in time."""
    kept, pieces = b"", aiter(answer.aiter_bytes())
    while True:
        async with asyncio.timeout(SILENCE_S):
            piece = await anext(pieces, None)
        if piece is None:
            return
        *lines, kept = (kept + piece).split(b"\n")
        if len(kept) > LINE_BYTES_MAX:
            raise ApiFailed(f"an event is longer than {LINE_BYTES_MAX} bytes")
        for line in lines:
            if line.strip():
                yield line


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(line)
    except ValueError:
        raise ApiFailed("a watch says what isn't JSON") from None
    if not isinstance(event, dict):
        raise ApiFailed("a watch says what isn't an event")
    if event.get("type") == "ERROR":
        status = event.get("object")
        status = status if isinstance(status, dict) else {}
        kind = HistoryGone if status.get("code") == GONE else ApiFailed
        raise kind(f"the watch ended: {status.get('message') or status.get('code')}")
    return event


def _checked(status: int, content: bytes) -> dict[str, Any]:
    if status == GONE:
        raise HistoryGone("what the watch should go on from is forgotten")
    try:
        decoded = orjson.loads(content)
    except ValueError:
        decoded = None
    if status != httpx.codes.OK:
        said = decoded.get("message") if isinstance(decoded, dict) else None
        hint = "; the service account must get, list and watch endpointslices of discovery.k8s.io" * (status == 403)
        raise ApiFailed(f"the API server answers {status}{f': {said}' if said else ''}{hint}")
    if not isinstance(decoded, dict):
        raise ApiFailed("the API server answers what isn't a list")
    return decoded


def _path(namespace: str) -> str:
    return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def _unreachable(error: Exception) -> ApiFailed:
    return ApiFailed(f"the API server can't be reached: {type(error).__name__}{f': {error}' if str(error) else ''}")
