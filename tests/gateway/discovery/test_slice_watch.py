"""A service's endpoints are followed: nothing that changes is missed, whatever happens to the watch."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import kmock
import orjson
import pytest

from gateway.discovery import slice_watch
from gateway.discovery.endpoint_slices import Endpoint, SliceTable
from gateway.discovery.kubernetes_api import ApiFailed, Cluster, KubernetesApi
from gateway.discovery.slice_watch import SliceWatch
from tests.gateway.assembly import eventually
from tests.gateway.discovery.samples import SERVICE, endpoint, endpoint_slice
from tests.gateway.discovery.scripted_api import PATH, ScriptedApi, event

SELECTOR = f"kubernetes.io/service-name={SERVICE}"
A, B = endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")


class Followed:
    """What a watch told."""

    def __init__(self, cluster: Cluster) -> None:
        self.told: list[list[str]] = []
        self.failures = 0
        self.watch = SliceWatch(SELECTOR, SliceTable(), self._note, self._fail)
        self._open = partial(lambda: (KubernetesApi(cluster), "llm"))

    @property
    def names(self) -> list[str] | None:
        """Who is there now."""
        return self.told[-1] if self.told else None

    async def run(self) -> None:
        await self.watch.run(self._open)

    def _note(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.told.append([each.name for each in endpoints])

    def _fail(self) -> None:
        self.failures += 1


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_watch, "BACKOFF_S", 0.01)


@contextlib.asynccontextmanager
async def following(url: str, token: Path | None = None) -> AsyncIterator[Followed]:
    followed = Followed(Cluster(url, token))
    running = asyncio.create_task(followed.run())
    try:
        yield followed
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_pods_come_change_and_go_as_kubernetes_tells() -> None:
    async with kmock.KubernetesEmulator() as emulated, kmock.Server(emulated):
        url = str(emulated.url).rstrip("/")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as operator:
            (await operator.post(PATH, json=endpoint_slice("s", A))).raise_for_status()
            async with following(url) as followed:
                await eventually(lambda: followed.names == ["a"])
                (await operator.post(PATH, json=endpoint_slice("t", B))).raise_for_status()
                await eventually(lambda: followed.names == ["a", "b"])
                (await operator.patch(f"{PATH}/s", json={"endpoints": []})).raise_for_status()
                await eventually(lambda: followed.names == ["b"])
                (await operator.delete(f"{PATH}/t")).raise_for_status()
                await eventually(lambda: followed.names == [])
                assert followed.watch.state == "watching"
                assert followed.failures == 0


async def test_a_watch_that_ends_goes_on_where_it_was_and_nothing_is_listed_again() -> None:
    async with ScriptedApi(endpoint_slice("s", A)) as api:
        api.watches = [[event("ADDED", endpoint_slice("t", B), "7")], [event("BOOKMARK", endpoint_slice("x"), "9")], []]
        async with following(api.url) as followed:
            await eventually(lambda: len(api.watched_from) == 4)
            assert api.watched_from == ["1", "7", "9", "9"]
            assert (api.listed, followed.names, followed.failures) == (1, ["a", "b"], 0)


@pytest.mark.parametrize(
    "gone",
    [410, [orjson.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}) + b"\n"]],
    ids=["status", "event"],
)
async def test_what_was_deleted_while_the_past_was_forgotten_is_gone_after_the_next_list(gone: Any) -> None:
    async with ScriptedApi(endpoint_slice("s", A), endpoint_slice("t", B)) as api:
        async with following(api.url) as followed:
            await eventually(lambda: followed.names == ["a", "b"] and api.watched_from)
            api.slices, api.watches = [endpoint_slice("t", B)], [gone]
            api.play(b"")
            await eventually(lambda: followed.names == ["b"])
            assert followed.told == [["a", "b"], ["b"]]


@pytest.mark.parametrize(
    "fault",
    [403, 500, [b"{nonsense\n"], [b"[]\n"], [orjson.dumps({"type": "ERROR", "object": {"code": 500}}) + b"\n"]],
    ids=["403", "500", "no JSON", "no event", "error"],
)
async def test_a_fault_of_the_server_costs_nothing_that_was_known_and_is_said(fault: Any) -> None:
    async with ScriptedApi(endpoint_slice("s", A)) as api:
        api.watches = [fault, [event("ADDED", endpoint_slice("t", B))]]
        async with following(api.url) as followed:
            await eventually(lambda: followed.names == ["a", "b"])
            assert ([], 1) not in (followed.told, followed.failures)
            assert followed.failures >= 1
            assert followed.watch.state == "watching"


async def test_while_the_server_is_away_the_last_list_stands_and_the_state_says_so() -> None:
    api = ScriptedApi(endpoint_slice("s", A))
    async with api:
        async with following(api.url) as followed:
            await eventually(lambda: followed.names == ["a"])
            await api.__aexit__()
            await eventually(lambda: followed.watch.state.startswith("failing, the last list stands: "))
            assert followed.told == [["a"]]


async def test_a_refused_list_is_tried_again_and_says_what_right_is_missing() -> None:
    async with ScriptedApi(endpoint_slice("s", A)) as api:
        api.lists = [403] * 3
        async with following(api.url) as followed:
            await eventually(lambda: "must get, list and watch" in followed.watch.state or followed.names is not None)
            await eventually(lambda: followed.names == ["a"])
            assert followed.failures == 3


async def test_what_could_not_be_taken_is_told_again_with_the_next_list() -> None:
    async with ScriptedApi(endpoint_slice("s", A)) as api:
        followed = Followed(Cluster(api.url))
        faults = [RuntimeError("a fault of the gateway's own")]
        note = followed._note

        def take(endpoints: tuple[Endpoint, ...]) -> None:
            if faults:
                raise faults.pop()
            note(endpoints)

        followed.watch = SliceWatch(SELECTOR, SliceTable(), take, followed._fail)
        running = asyncio.create_task(followed.run())
        await eventually(lambda: followed.names == ["a"])
        running.cancel()
        assert followed.failures == 1


@pytest.mark.parametrize("how", ["bookmark and end", "403", "410"])
async def test_a_server_whose_watches_end_at_once_is_asked_ever_less(how: str) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        await asyncio.sleep(0)

    async with ScriptedApi(endpoint_slice("s", A)) as api:
        followed = Followed(Cluster(api.url))
        followed.watch = SliceWatch(SELECTOR, SliceTable(), followed._note, followed._fail, sleep)
        bookmark: Any = [event("BOOKMARK", endpoint_slice("x"), "9")]
        api.watches = [{"bookmark and end": bookmark, "403": 403, "410": 410}[how]] * 60
        running = asyncio.create_task(followed.run())
        await eventually(lambda: len(pauses) >= 14)
        running.cancel()
        assert max(pauses[-6:]) > 20 * slice_watch.BACKOFF_S
        assert len(api.watched_from) <= len(pauses) + 1
        assert (followed.failures > 0) == (how != "bookmark and end")


async def test_the_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    async with ScriptedApi(endpoint_slice("s", A)) as api:
        async with following(api.url, token) as followed:
            await eventually(lambda: followed.names == ["a"] and api.watched_from)
            token.write_text("second\n")
            api.play(b"")
            await eventually(lambda: "Bearer second" in api.tokens)
            assert api.tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_a_missing_token_is_a_failure_that_is_said(tmp_path: Path) -> None:
    async with ScriptedApi(endpoint_slice("s", A)) as api, following(api.url, tmp_path / "none") as followed:
        await eventually(lambda: "can't be read" in followed.watch.state)
        assert api.tokens == []


def test_a_pod_finds_its_cluster_and_anybody_else_is_told_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ApiFailed, match="api_url"):
        Cluster.own({}, tmp_path)
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    with pytest.raises(ApiFailed, match="no service account"):
        Cluster.own(environment, tmp_path)
    (tmp_path / "namespace").write_text("llm\n")
    own = Cluster.own(environment, tmp_path)
    assert (own.url, own.namespace, own.token) == ("https://[fd00::1]:6443", "llm", tmp_path / "token")
