import asyncio
import contextlib
import logging
import time
from importlib.metadata import version

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nodeagent import http_api, http_connection
from nodeagent.files import FileShelf
from nodeagent.hints import Hint, PeerAddress, PeerHint, read_address
from nodeagent.http_api import HttpServer, ResetOutcome, create_api, listen
from nodeagent.metrics import AgentMetrics
from nodeagent.tiers import write_policy
from nodeagent.tiers.write_policy import Pins

NAMES = {
    "warmroute_tier_tokens_requested",
    "warmroute_tier_hit_tokens",
    "warmroute_tier_bytes_used",
    "warmroute_tier_bytes_limit",
    "warmroute_tier_read_seconds",
    "warmroute_tier_write_bytes",
    "warmroute_checksum_failures",
    "warmroute_evictions",
    "warmroute_admission_refused",
    "warmroute_announced_chunks",
    "warmroute_nvme_write_budget_bytes",
    "warmroute_announce_lag_seconds",
    "warmroute_degraded",
}


@pytest.fixture
def state():
    return {"ready": False, "pins": Pins()}


class HintsNoted:
    def __init__(self, state):
        self.state = state

    def prefetch(self, hint):
        self.state["hinted"] = hint
        return len(hint.keys) + sum(len(peer.keys) for peer in hint.peers)

    def cancel(self, hint):
        self.state["cancelled"] = hint
        return len(hint.keys)


async def no_reset(engine):
    return ResetOutcome.UNKNOWN


@pytest.fixture
async def http(state):
    files = FileShelf()
    state["named"] = files.keep("engine", {"tokenizer.json": b"content"})

    async def reset(engine):
        state["reset"] = engine
        return state["outcome"]

    api = create_api(
        files,
        AgentMetrics().registry,
        lambda: state["ready"],
        lambda: {"host": "h"},
        HintsNoted(state),
        reset,
        state["pins"],
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://agent") as client:
        yield client


async def test_it_is_alive_before_it_is_ready(http, state):
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/readyz")).status_code == 503
    state["ready"] = True
    assert (await http.get("/readyz")).status_code == 200


async def test_a_file_is_served_by_its_digest_alone(http, state):
    answer = await http.get(f"/files/{state['named']['tokenizer.json']}")
    assert (answer.status_code, answer.content) == (200, b"content")
    for other in ("0" * 64, "tokenizer.json", "..%2f..%2fetc%2fpasswd"):
        assert (await http.get(f"/files/{other}")).status_code == 404


async def test_the_metrics_that_dashboards_rely_on_are_there(http):
    text = (await http.get("/metrics")).text
    assert not NAMES - {family.name for family in text_string_to_metric_families(text)}


async def test_the_status_is_json_with_the_version_and_the_time(http):
    status = (await http.get("/status")).json()
    assert status["host"] == "h"
    assert status["version"] == version("warmroute")
    assert abs(status["unix_time_s"] - time.time()) < 60


async def test_a_hint_names_directory_keys(http, state):
    answer = await http.post("/prefetch", json={"keys": ["ab" * 16, "CD" * 16]})
    assert (answer.status_code, answer.json()) == (202, {"accepted": 2})
    assert state["hinted"] == Hint((b"\xab" * 16, b"\xcd" * 16))


async def test_a_hint_may_name_peers_and_what_they_hold(http, state):
    body = {"keys": [], "peers": [{"address": "10.0.0.7:8301", "keys": ["ab" * 16]}, {"address": "b:1", "keys": []}]}
    answer = await http.post("/prefetch", json=body)
    assert (answer.status_code, answer.json()) == (202, {"accepted": 1})
    peers = (PeerHint(PeerAddress("10.0.0.7", 8301), (b"\xab" * 16,)), PeerHint(PeerAddress("b", 1), ()))
    assert state["hinted"] == Hint((), peers)


async def test_a_hint_is_cancelled_by_the_same_body(http, state):
    answer = await http.request("DELETE", "/prefetch", json={"keys": ["ab" * 16]})
    assert (answer.status_code, answer.json()) == (200, {"cancelled": 1})
    assert state["cancelled"] == Hint((b"\xab" * 16,))
    assert (await http.request("DELETE", "/prefetch", json={"keys": 3})).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"", 400, "keys"),
        (b"{", 400, "keys"),
        (b"[]", 400, "keys"),
        (b"\xff", 400, "keys"),
        (b"{}", 400, "keys"),
        (b'{"keys": 3}', 400, "$.keys"),
        (b'{"keys": ["abc"]}', 400, "$.keys[0]"),
        (b'{"keys": [7]}', 400, "$.keys[0]"),
        (b'{"keys": [], "kyes": []}', 400, "kyes"),
        (b'{"keys": [' + b",".join([b'"' + b"ab" * 16 + b'"'] * 4_097) + b"]}", 400, "$.keys"),
        (b"[" * 100_000, 400, "keys"),
        (b'{"peers": []}', 400, "keys"),
        (b'{"keys": [], "peers": {}}', 400, "$.peers"),
        (b'{"keys": [], "peers": [{"keys": []}]}', 400, "address"),
        (b'{"keys": [], "peers": [{"address": "a:1"}]}', 400, "keys"),
        (b'{"keys": [], "peers": [{"address": "a:1", "keys": ["ab"]}]}', 400, "$.peers[0].keys[0]"),
        (b'{"keys": [], "peers": [{"address": "a:1", "keys": [], "weight": 1}]}', 400, "weight"),
        (b'{"keys": [], "peers": [{"address": "a:0", "keys": []}]}', 400, "$.peers[0].address"),
        (b'{"keys": [], "peers": [' + b",".join([b'{"address": "a:1", "keys": []}'] * 17) + b"]}", 400, "$.peers"),
        (
            b'{"keys": ['
            + b",".join([b'"' + b"ab" * 16 + b'"'] * 4_000)
            + b'], "peers": [{"address": "a:1", "keys": ['
            + b",".join([b'"' + b"ab" * 16 + b'"'] * 97)
            + b"]}]}",
            400,
            "$.peers",
        ),
        (b" " * 300_000, 413, "exceeds"),
    ],
    ids=lambda value: repr(value)[:24],
)
async def test_a_bad_hint_is_a_400_that_names_the_field(http, state, body, status, named):
    answer = await http.post("/prefetch", content=body)
    assert answer.status_code == status
    assert named in answer.json()["detail"]
    assert "hinted" not in state


@pytest.mark.parametrize("text", ["a:1", "node-7.rack_2.example.:65535", "10.0.0.7:8301", "[::1]:80", "[fe80::1]:80"])
def test_an_address_is_read_as_it_is_written(text):
    assert str(read_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", ":1", "a:", "a:0", "a:65536", "a:1234567", "a:+1", "a:\u0661", "a b:1", "a/b:1", "u@a:1"),
        *("::1:80", "[::1:80", "[a]:1", "-a:1", "a\n:1", "[fe80::1%eth0]:80", "[fe80::1%\n]:80"),
    ],
    ids=ascii,
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="an address is host:port"):
        read_address(text)


async def test_pins_are_added_and_removed_within_their_bound(http, state, monkeypatch):
    monkeypatch.setattr(write_policy, "PINS_MAX", 2)
    answer = await http.post("/pins", json={"keys": ["ab" * 16, "CD" * 16]})
    assert (answer.status_code, answer.json()) == (200, {"pinned": 2})
    answer = await http.post("/pins", json={"keys": ["ef" * 16]})
    assert (answer.status_code, "no more than 2" in answer.json()["detail"]) == (409, True)
    answer = await http.request("DELETE", "/pins", json={"keys": ["AB" * 16, "ef" * 16]})
    assert (answer.status_code, answer.json()) == (200, {"pinned": 1})
    assert b"\xcd" * 16 in state["pins"]
    assert (await http.post("/pins", json={"keys": [7]})).status_code == 400


@pytest.fixture
async def port(state):
    files, registry = FileShelf(), AgentMetrics().registry
    api = create_api(files, registry, lambda: True, lambda: {"host": "h"}, HintsNoted(state), no_reset, None)
    with listen("127.0.0.1", 0) as listener:
        server = HttpServer(api, listener)
        task = asyncio.create_task(server.run_until_stopped())
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


HEAD = b"POST /prefetch HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"content-length: 100\r\n\r\n{", 408),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{", 408),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"content-length: -1\r\n\r\n{}", 400),
        (HEAD + b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b", 400),
        (b"PUT /prefetch HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET /files/%ff%00 HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"nonsense\r\n\r\n", 400),
    ],
    ids=["slow", "a chunk that stops", "bad chunk", "bad length", "gzip", "method", "odd name", "no HTTP"],
)
async def test_broken_requests_are_answered_and_the_agent_serves_on(port, monkeypatch, sent, status):
    monkeypatch.setattr(http_api, "BODY_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert b" %d " % status in await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/status")).json()["host"] == "h"


async def test_a_gateway_that_goes_while_it_sends_a_hint_is_no_fault(port, caplog):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"content-length: 100\r\n\r\n{")
    await writer.drain()
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
        writer.close()
        await writer.wait_closed()
        assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("outcome", "status"), [(ResetOutcome.DONE, 200), (ResetOutcome.UNKNOWN, 404), (ResetOutcome.REFUSED, 502)]
)
async def test_a_reset_says_what_became_of_it(http, state, outcome, status):
    state["outcome"] = outcome
    answer = await http.post("/engines/gpu-07-a/reset_prefix_cache")
    assert (answer.status_code, state["reset"]) == (status, "gpu-07-a")
    assert outcome.value in answer.text


@pytest.mark.parametrize("sent", [b"", HEAD], ids=["nothing", "half a head"])
async def test_a_connection_whose_request_does_not_come_is_closed(port, monkeypatch, sent):
    monkeypatch.setattr(http_connection, "HEAD_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_head_without_end_is_cut_off(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in range(200):
        writer.write(b"x-%d: %s\r\n" % (number, b"x" * 1_000) if number else HEAD)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), http_connection.HEAD_S - 1) == b""
    writer.close()


async def test_connections_are_bounded_and_one_that_ends_makes_room(port, monkeypatch):
    monkeypatch.setattr(http_connection, "CONNECTIONS_MAX", 2)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(reader.read(), http_connection.HEAD_S - 1) == b""
    writer.close()
    held[0][1].close()
    await held[0][1].wait_closed()

    async def is_answered():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            return b"200" in await reader.readline()
        except ConnectionError:
            return False
        finally:
            writer.close()

    async with asyncio.timeout(http_connection.HEAD_S - 1):
        while not await is_answered():
            await asyncio.sleep(0)
    held[1][1].close()
