"""Requests through the whole gateway, over real sockets, with engines that fail in every way."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from pydantic import SecretStr

from directory.tiers import Tier
from gateway.config import EngineConfig, TimeoutsConfig
from gateway.openai_schema import CHAT, COMPLETIONS
from tests.gateway import mock_engine as mock
from tests.gateway.assembly import TestGateway, eventually, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import MODEL
from tests.virtual_time import in_quiet_time

PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "hello there"}]}, COMPLETIONS: {"prompt": "hello there"}}
ENDPOINTS = pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EXPLAIN = {"x-warmroute-explain": "1"}


def body(endpoint: str, stream: bool = False, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "stream": stream, **PROMPTS[endpoint], **fields}


WAIT_S = 20.0


def new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=WAIT_S)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


def events(answer: httpx.Response) -> list[bytes]:
    return [line[6:].encode() for line in answer.text.splitlines() if line.startswith("data: ")]


@ENDPOINTS
@STREAMS
async def test_a_request_is_answered_and_the_ledger_is_empty_again(
    client: httpx.AsyncClient, endpoint: str, stream: bool
) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        answer = await client.post(gateway.url + endpoint, json=body(endpoint, stream))
        assert answer.status_code == 200
        if stream:
            assert events(answer)[-1] == b"[DONE]"
        else:
            tokens = mock.prompt_tokens(body(endpoint))
            assert answer.json() == mock.completion_body(engine, tokens=tokens)
        assert gateway.ledger.engines() == ()
        assert gateway.count("warmroute_requests_total", model=MODEL, endpoint=endpoint, status="200") == 1


async def test_the_body_and_unknown_headers_pass_byte_for_byte_and_hop_by_hop_headers_do_not(
    client: httpx.AsyncClient,
) -> None:
    data = b'{ "model":"tiny", "messages":[{"role":"user","content":"x"}],\n "zzz": [1.50, "\xc3\xa9"] }'
    headers = {"x-custom": "kept", "connection": "x-secret-hop", "x-secret-hop": "1", "te": "trailers",
               "proxy-authorization": "no", "authorization": "Bearer k"}  # fmt: skip
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        await client.post(gateway.url + CHAT, content=data, headers=headers)
        received, seen = engine.received[0]
        assert received == data
        assert seen["x-custom"] == "kept"
        assert seen["authorization"] == "Bearer k"
        assert seen["host"] == engine.url.removeprefix("http://")
        assert not seen.keys() & {"te", "x-secret-hop", "proxy-authorization"}


async def test_the_request_id_is_kept_or_made(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        kept = await client.post(gateway.url + CHAT, json=body(CHAT), headers={"x-request-id": "mine-7"})
        made = await client.post(gateway.url + CHAT, json=body(CHAT))
        assert kept.headers["x-request-id"] == "mine-7"
        assert made.headers["x-request-id"].startswith("req-")
        assert [headers["x-request-id"] for _, headers in engine.received] == [
            "mine-7",
            made.headers["x-request-id"],
        ]


async def test_a_request_goes_where_its_prefix_is_and_says_so(client: httpx.AsyncClient) -> None:
    text = "a long shared prefix " * 50
    async with MockEngine("a") as a, MockEngine("b") as b, MockEngine("c") as c, gateway_for([a, b, c]) as gateway:
        await gateway.hold(text, "host-b", Tier.DRAM)
        await gateway.hold(text, "c", Tier.GPU, chunks=3)
        answer = await client.post(
            gateway.url + COMPLETIONS, json={"model": MODEL, "prompt": text + "question"}, headers=EXPLAIN
        )
        assert answer.headers["x-warmroute-engine"] == "b"
        assert int(answer.headers["x-warmroute-matched-tokens"]) == len(text) // 4 * 4
        assert answer.headers["x-warmroute-tier-tokens"] == f"dram={len(text) // 4 * 4}"
        assert answer.headers["x-warmroute-reason"] == "prefix"
        assert float(answer.headers["x-warmroute-expected-ttft-ms"]) >= 0
        predicted = gateway.count("warmroute_cached_tokens_total", model=MODEL, tier="dram", source="predicted")
        assert predicted == len(text) // 4 * 4


async def test_a_salt_shares_no_chunk_with_the_unsalted_prompt(client: httpx.AsyncClient) -> None:
    text = "a long shared prefix " * 50
    async with MockEngine("a") as a, MockEngine("b") as b, gateway_for([a, b]) as gateway:
        await gateway.hold(text, "host-b", Tier.DRAM)
        salted = {"model": MODEL, "prompt": text + "question", "cache_salt": "s"}
        answer = await client.post(gateway.url + COMPLETIONS, json=salted, headers=EXPLAIN)
        assert answer.headers["x-warmroute-matched-tokens"] == "0"


async def test_the_query_string_reaches_the_engine(client: httpx.AsyncClient) -> None:
    seen: list[str] = []

    async def note(engine: MockEngine, request: Any, fields: Any) -> Any:
        seen.append(request.path_qs)
        return await mock.answer_well(engine, request, fields)

    async with MockEngine("a", note) as engine, gateway_for([engine]) as gateway:
        await client.post(gateway.url + CHAT + "?api-version=1&x=%20y", json=body(CHAT))
    assert seen == [CHAT + "?api-version=1&x=%20y"]


async def test_no_explanation_is_sent_unasked(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        answer = await client.post(gateway.url + CHAT, json=body(CHAT))
        assert not [name for name in answer.headers if name.startswith("x-warmroute")]


@ENDPOINTS
@STREAMS
@pytest.mark.parametrize(
    "fault",
    [mock.drop_connection, mock.answer_status(500), mock.answer_status(502), mock.answer_status(503),
     mock.answer_status(504), mock.answer_status(408),
     mock.answer_status(429)],
    ids=["dropped", "500", "502", "503", "504", "408", "429"],
)  # fmt: skip
async def test_a_failure_before_the_first_byte_is_retried_elsewhere(
    client: httpx.AsyncClient, endpoint: str, stream: bool, fault: Any
) -> None:
    async with MockEngine("a", fault) as bad, MockEngine("b") as good, gateway_for([bad, good]) as gateway:
        await gateway.hold("hello there" if endpoint == COMPLETIONS else "user:hello there;", "a", Tier.GPU)
        for _ in range(6):
            answer = await client.post(gateway.url + endpoint, json=body(endpoint, stream))
            assert answer.status_code == 200
        assert len(bad.received) >= 1
        assert gateway.ledger.engines() == ()


async def test_an_engine_that_dies_while_writing_a_whole_answer_is_replaced(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", mock.break_off_body) as bad, MockEngine("b") as good:
        async with gateway_for([bad, good]) as gateway:
            await gateway.hold("hello there", "a", Tier.GPU)
            answer = await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
            assert answer.json()["id"] == "b"


async def test_a_dropped_connection_takes_an_engine_out_until_a_check_passes(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", mock.drop_connection) as bad, MockEngine("b") as good:
        async with gateway_for([bad, good]) as gateway:
            await gateway.hold("hello there", "a", Tier.GPU)
            await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
            assert gateway.fleet.table.engines["a"].state == "failing"
            await gateway.fleet.check_health()
            assert gateway.fleet.table.engines["a"].state == "ready"


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_an_engines_own_error_passes_unchanged_and_counts_against_nobody(
    client: httpx.AsyncClient, status: int
) -> None:
    async with MockEngine("a", mock.answer_status(status)) as a, MockEngine("b") as b, gateway_for([a, b]) as gateway:
        await gateway.hold("hello there", "a", Tier.GPU)
        answer = await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
        assert answer.status_code == status
        assert answer.json() == {"error": {"message": f"a says {status}"}}
        assert gateway.fleet.table.engines["a"].state == "ready"


async def test_when_every_engine_says_503_the_last_answer_is_passed_on(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", mock.answer_status(503)) as a, MockEngine("b", mock.answer_status(503)) as b:
        async with gateway_for([a, b]) as gateway:
            answer = await client.post(gateway.url + CHAT, json=body(CHAT))
            assert answer.status_code == 503
            assert "says 503" in answer.json()["error"]["message"]
            assert len(a.received) == len(b.received) == 1


async def test_when_every_engine_drops_the_connection_the_answer_is_502(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", mock.drop_connection) as a, MockEngine("b", mock.drop_connection) as b:
        async with gateway_for([a, b]) as gateway:
            answer = await client.post(gateway.url + CHAT, json=body(CHAT))
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "upstream_error"
            assert gateway.ledger.engines() == ()


@in_quiet_time
async def test_an_engine_that_never_answers_is_given_up_after_the_first_byte_deadline() -> None:
    async with MockEngine("a", mock.never_answer) as bad, MockEngine("b") as good, new_client() as client:
        async with gateway_for([bad, good], TimeoutsConfig(connect_s=0.2, first_byte_s=0.2)) as gateway:
            await gateway.hold("hello there", "a", Tier.GPU)
            answer = await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
            assert answer.json()["id"] == "b"
            await asyncio.wait_for(bad.gone.wait(), WAIT_S)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_leaves_an_engine_that_is_found_unwell_while_it_waits(
    client: httpx.AsyncClient, stream: bool
) -> None:
    async with MockEngine("a", mock.never_answer) as stuck, MockEngine("b") as good:
        async with gateway_for([stuck, good]) as gateway:
            await gateway.hold("hello there", "a", Tier.GPU)
            waiting = asyncio.create_task(client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS, stream)))
            await eventually(lambda: stuck.received)
            stuck.is_well = False
            await gateway.fleet.check_health()
            assert not waiting.done()
            await gateway.fleet.check_health()
            assert (await asyncio.wait_for(waiting, WAIT_S)).status_code == 200
            assert good.received
            await asyncio.wait_for(stuck.gone.wait(), WAIT_S)


async def test_a_request_waits_on_where_there_is_no_other_engine(client: httpx.AsyncClient) -> None:
    async def answer_late(engine: MockEngine, request: Any, fields: Any) -> Any:
        await asyncio.wait_for(may_answer.wait(), WAIT_S)
        return await mock.answer_well(engine, request, fields)

    may_answer = asyncio.Event()
    async with MockEngine("a", answer_late) as only, gateway_for([only]) as gateway:
        waiting = asyncio.create_task(client.post(gateway.url + CHAT, json=body(CHAT)))
        await eventually(lambda: only.received)
        only.is_well = False
        await gateway.fleet.check_health()
        await gateway.fleet.check_health()
        assert not gateway.fleet.table.engines["a"].is_ready
        may_answer.set()
        assert (await asyncio.wait_for(waiting, WAIT_S)).status_code == 200


async def test_an_engines_429_is_passed_on_with_its_retry_after_when_the_other_engine_goes(
    client: httpx.AsyncClient,
) -> None:
    async def refuse(engine: MockEngine, request: Any, fields: Any) -> Any:
        gateways[0].fleet.note_failure("b" if engine.name == "a" else "a")
        return mock.web.json_response({"error": {"message": "full"}}, status=429, headers={"retry-after": "7"})

    gateways: list[TestGateway] = []
    async with MockEngine("a", refuse) as a, MockEngine("b", refuse) as b, gateway_for([a, b]) as gateway:
        gateways.append(gateway)
        answer = await client.post(gateway.url + CHAT, json=body(CHAT))
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.json() == {"error": {"message": "full"}}


async def test_a_stream_that_breaks_ends_with_one_well_formed_error_event(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", mock.break_off_stream) as bad, gateway_for([bad]) as gateway:
        answer = await client.post(gateway.url + CHAT, json=body(CHAT, True))
        assert answer.status_code == 200
        seen = [orjson.loads(each) for each in events(answer)]
        assert [each["choices"][0]["delta"]["content"] for each in seen[:2]] == ["0", "1"]
        assert len(seen) == 3
        assert seen[2]["error"]["code"] == "stream_broken"
        assert gateway.ledger.engines() == ()


@in_quiet_time
async def test_a_stalled_stream_ends_with_an_error_event() -> None:
    async def stall(engine: MockEngine, request: Any, fields: Any) -> Any:
        response = await mock.start_stream(request)
        await response.write(mock.event(0))
        await asyncio.Event().wait()

    timeouts = TimeoutsConfig(idle_s=0.2)
    async with MockEngine("a", stall) as engine, gateway_for([engine], timeouts) as gateway, new_client() as client:
        answer = await client.post(gateway.url + CHAT, json=body(CHAT, True))
        assert orjson.loads(events(answer)[-1])["error"]["code"] == "stream_broken"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
async def test_events_pass_byte_for_byte_however_they_are_cut(client: httpx.AsyncClient, line_end: bytes) -> None:
    stream = (b"data: one" + line_end * 2 + b": comment" + line_end * 2 + b"data: [DONE] in text" + line_end * 2) * 3
    stream += b"data: unfinished"

    async def cut_anywhere(engine: MockEngine, request: Any, fields: Any) -> Any:
        response = await mock.start_stream(request)
        for start in range(0, len(stream), 7):
            await response.write(stream[start : start + 7])
            await asyncio.sleep(0)
        return response

    async with MockEngine("a", cut_anywhere) as engine, gateway_for([engine]) as gateway:
        answer = await client.post(gateway.url + CHAT, json=body(CHAT, True))
        assert answer.content == stream


@pytest.mark.parametrize(
    ("behaviour", "stream"),
    [(mock.never_answer, False), (mock.never_answer, True), (mock.stream_for_ever, True)],
    ids=["whole, waiting", "stream, waiting", "stream, running"],
)
@in_quiet_time
async def test_when_the_client_goes_the_engine_sees_it_within_a_second(behaviour: Any, stream: bool) -> None:
    async with MockEngine("a", behaviour) as engine, gateway_for([engine]) as gateway:
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ReadTimeout):
                async with client.stream(
                    "POST", gateway.url + CHAT, json=body(CHAT, stream), timeout=httpx.Timeout(5, read=0.2)
                ) as answer:
                    async for _ in answer.aiter_raw():
                        if behaviour is mock.stream_for_ever:
                            raise httpx.ReadTimeout("enough")
        await asyncio.wait_for(engine.gone.wait(), 1)
        await eventually(lambda: gateway.ledger.engines() == ())
        await eventually(lambda: gateway.count("warmroute_requests_total", model=MODEL, endpoint=CHAT, status="499"))


async def test_a_client_that_goes_with_requests_in_a_row_leaves_the_first_one_too() -> None:
    async with MockEngine("a", mock.never_answer) as engine, gateway_for([engine]) as gateway:
        wire = b"".join(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(asked), asked)
            for asked in [orjson.dumps(body(CHAT, False))] * 2
        )
        _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(wire)
        await eventually(lambda: len(engine.received) == 1)
        writer.transport.abort()
        await asyncio.wait_for(engine.gone.wait(), WAIT_S)
        await eventually(lambda: gateway.ledger.engines() == ())


async def test_an_idle_connection_that_the_engine_closed_is_no_failure(client: httpx.AsyncClient) -> None:
    served = 0

    async def close_after_first(engine: MockEngine, request: Any, fields: Any) -> Any:
        nonlocal served
        served += 1
        if served == 2:  # the second request on the kept connection meets it closing
            mock.cut(request)
            return mock.web.Response()
        return await mock.answer_well(engine, request, fields)

    async with MockEngine("a", close_after_first) as engine, gateway_for([engine]) as gateway:
        for _ in range(3):
            assert (await client.post(gateway.url + CHAT, json=body(CHAT))).status_code == 200
        assert gateway.fleet.table.engines["a"].state == "ready"


async def test_an_unknown_model_is_404_and_a_known_one_without_engines_503(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        unknown = await client.post(gateway.url + CHAT, json={**body(CHAT), "model": "other"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert unknown.json()["error"]["param"] == "model"
        engine.is_well = False
        await gateway.fleet.check_health()
        await gateway.fleet.check_health()
        known = await client.post(gateway.url + CHAT, json=body(CHAT))
        assert known.status_code == 503
        assert known.json()["error"]["code"] == "no_engine_available"
        assert known.headers["retry-after"] == "1"
        assert gateway.count("warmroute_requests_total", model="other", endpoint=CHAT, status="404") == 1


async def test_a_body_over_the_limit_is_413_whether_its_length_was_told_or_not(client: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 1000

    async with MockEngine("a") as engine, gateway_for([engine], body_bytes_max=10_000) as gateway:
        told = await client.post(gateway.url + CHAT, content=b"x" * 20_000)
        untold = await client.post(gateway.url + CHAT, content=pieces())
        for answer in (told, untold):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
        assert engine.received == []


async def test_a_slow_sender_is_408() -> None:
    async with MockEngine("a") as engine, gateway_for([engine], body_timeout_s=0.2) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), WAIT_S)
        assert b"408" in answer
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completions/x", "/v1/chat/completions/x", "/fleet"])
async def test_other_paths_are_404_in_openais_shape(client: httpx.AsyncClient, path: str) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        answer = await client.post(gateway.url + path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_models_are_merged_and_those_of_unready_engines_left_out(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as a, MockEngine("b") as b, gateway_for([a, b]) as gateway:
        rows = (await client.get(gateway.url + "/v1/models")).json()["data"]
        assert [row["id"] for row in rows] == [MODEL]
        assert rows[0]["max_model_len"] == 8192
        assert (await client.get(gateway.url + "/v1/models/" + MODEL)).json() == rows[0]
        assert (await client.get(gateway.url + "/v1/models/other")).json()["error"]["code"] == "model_not_found"
        a.is_well = b.is_well = False
        await gateway.fleet.check_health()
        await gateway.fleet.check_health()
        assert (await client.get(gateway.url + "/v1/models")).json()["data"] == []
        assert (await client.get(gateway.url + "/readyz")).status_code == 503
        assert (await client.get(gateway.url + "/healthz")).status_code == 200


async def test_what_cannot_be_encoded_is_routed_by_load_and_counted(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        answer = await client.post(gateway.url + CHAT, json={"model": MODEL, "messages": [picture]})
        assert answer.status_code == 200
        assert gateway.count("warmroute_degraded_total", reason="not_encoded_content_part") == 1


async def test_reported_cached_tokens_are_compared_with_the_prediction(client: httpx.AsyncClient) -> None:
    async def report(engine: MockEngine, request: Any, fields: Any) -> Any:
        if not fields.get("stream"):
            return mock.web.json_response(mock.completion_body(engine, cached=8))
        response = await mock.start_stream(request)
        await response.write(b"data: " + orjson.dumps(mock.completion_body(engine, cached=8)) + b"\n\ndata: [DONE]\n\n")
        return response

    async with MockEngine("a", report) as engine, gateway_for([engine]) as gateway:
        for stream in (False, True):
            await client.post(gateway.url + CHAT, json=body(CHAT, stream))
        reported = gateway.count("warmroute_cached_tokens_total", model=MODEL, tier="any", source="reported")
        assert reported == 16
        assert gateway.count("warmroute_prediction_error_tokens_sum") == 16


@in_quiet_time
async def test_a_crowd_on_one_engine_spreads_to_the_idle_ones() -> None:
    async def take_a_moment(engine: MockEngine, request: Any, fields: Any) -> Any:
        await asyncio.sleep(0.3)
        return await mock.answer_well(engine, request, fields)

    text = "a long shared prefix " * 200
    engines = [MockEngine(name, take_a_moment) for name in "abcd"]
    async with engines[0], engines[1], engines[2], engines[3], gateway_for(engines) as gateway, new_client() as client:
        await gateway.hold(text, "a", Tier.GPU, chunks=10)
        request = {"model": MODEL, "prompt": text}
        await asyncio.gather(*(client.post(gateway.url + COMPLETIONS, json=request) for _ in range(40)))
        shares = [len(engine.received) for engine in engines]
        assert sum(shares) == 40
        assert max(shares) <= 20, shares


async def test_engines_without_an_agent_are_routed_by_session_and_load(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as a, MockEngine("b") as b:
        static = [
            EngineConfig(url=a.url, name="a", api_key=SecretStr("secret-a")),
            EngineConfig(url=b.url, name="b"),
        ]
        async with gateway_for([], static=static) as gateway:
            for session in range(8):
                turns: list[dict[str, str]] = []
                engines = set()
                for turn in range(3):
                    turns += [{"role": "user", "content": f"session {session}, turn {turn}"}]
                    request = {"model": MODEL, "messages": turns}
                    answer = await client.post(gateway.url + CHAT, json=request, headers=EXPLAIN)
                    assert answer.headers["x-warmroute-reason"] == "session-affinity"
                    engines.add(answer.headers["x-warmroute-engine"])
                    turns += [{"role": "assistant", "content": "ok"}]
                assert len(engines) == 1
            assert a.received
            assert b.received
            authorizations = {headers.get("authorization") for _, headers in a.received}
            assert authorizations == {"Bearer secret-a"}
            assert {headers.get("authorization") for _, headers in b.received} == {None}


async def test_a_session_id_decides_before_the_opening(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as a, MockEngine("b") as b:
        async with gateway_for([], static=[EngineConfig(url=a.url), EngineConfig(url=b.url)]) as gateway:
            for named in ({"headers": {"x-session-id": "s"}}, {"field": {"prompt_cache_key": "s"}}):
                engines = set()
                for number in range(6):
                    request = {"model": MODEL, "prompt": f"text {number}", **named.get("field", {})}
                    headers = {**EXPLAIN, **named.get("headers", {})}
                    answer = await client.post(gateway.url + COMPLETIONS, json=request, headers=headers)
                    engines.add(answer.headers["x-warmroute-engine"])
                assert len(engines) == 1


async def test_a_route_is_explained_without_being_taken(client: httpx.AsyncClient) -> None:
    text = "a long shared prefix " * 50
    async with MockEngine("a") as a, MockEngine("b") as b, gateway_for([a, b]) as gateway:
        await gateway.hold(text, "host-b", Tier.DRAM)
        transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            answer = (await admin.post("/route/explain", json={"model": MODEL, "prompt": text + "?"})).json()
            chat = (await admin.post("/route/explain", json=body(CHAT))).json()
            refused = await admin.post("/route/explain", json={"model": MODEL, "messages": []})
        assert (answer["engine"], answer["reason"], answer["encoding"]) == ("b", "prefix", "exact")
        assert [row["engine"] for row in answer["candidates"]] == ["b", "a"]
        for row in answer["candidates"]:
            terms = row["wait_seconds"] + row["price"] * (row["load_seconds"] + row["prefill_seconds"])
            assert row["score_seconds"] == pytest.approx(terms + row["replies_seconds"] + row["evict_seconds"])
            assert (row["peer"], row["peer_tokens"]) == (None, 0)
        assert answer["candidates"][0]["tier_tokens"] == {"dram": len(text) // 4 * 4}
        held = await gateway.directory.lookup([bytes.fromhex(key) for key in answer["directory_keys"]], 1.0)
        assert sum(map(bool, held.records)) == len(text) // 4
        assert chat["reason"] == "load"
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        assert a.received == b.received == []
        assert gateway.ledger.engines() == ()


@pytest.fixture
async def served() -> AsyncIterator[tuple[MockEngine, TestGateway]]:
    async with MockEngine("a") as engine, gateway_for([engine]) as gateway:
        yield engine, gateway


async def test_the_admin_api_shows_fleet_and_metrics(served: tuple[MockEngine, TestGateway]) -> None:
    _, gateway = served
    transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        fleet = (await client.get("/fleet")).json()
        assert fleet["directory"] == "ok"
        assert [row["engine"] for row in fleet["engines"]] == ["a"]
        assert fleet["engines"][0]["state"] == "ready"
        assert fleet["hosts"][0]["tiers"]["dram"]["bytes_limit"] == 10**9
        assert (await client.get("/readyz")).status_code == 200
        assert "warmroute_requests_total" in (await client.get("/metrics")).text
        assert "/fleet" in (await client.get("/openapi.json")).json()["paths"]
