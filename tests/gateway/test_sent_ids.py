"""Token ids instead of text: which requests, to which engines, and what becomes of a refusal."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from directory.chunks import pack_tokens
from directory.members import draw_incarnation
from gateway.encoding.encoder import Encoding
from gateway.fleet import FleetTable
from gateway.ids_body import body_with_ids
from gateway.ids_probe import LONG_TEXT, RETRY_S, SHORT_TEXT
from gateway.ids_sender import TEXT_EVERY, IdsSender
from gateway.openai_schema import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, parse_request
from tests.gateway import mock_engine as mock
from tests.gateway.api_answers import PROMPTS
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.mock_engine import MockEngine
from tests.gateway.real_engine import real_engine
from tests.gateway.samples import ENGINE_LOAD, MODEL, engine_registration
from tests.gateway.views import view

IDS = [5, 6, 7]
PROBE_IDS = list(SHORT_TEXT.encode())


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        yield client


def ids_of(fields: dict[str, Any]) -> list[int] | None:
    """The ids that an engine finds in a body, whichever way."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        return prompt
    params = fields.get("kv_transfer_params") or {}
    found: list[int] | None = fields.get("input_ids") or params.get("prompt_token_ids")
    return found


def text_of(fields: dict[str, Any]) -> str:
    """The prompt that the engine renders, with the template of the tests' gateways."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['role']}:{message['content']};" for message in fields["messages"])


async def count_ids(engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
    """Takes ids where there are any."""
    ids = ids_of(fields)
    tokens = len(ids) if ids is not None else len(text_of(fields).encode())
    return mock.web.json_response({"id": engine.name, "usage": {"prompt_tokens": tokens}})


async def count_text(engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
    """Knows nothing of ids in a chat, and goes by the first of two keys."""
    text = LONG_TEXT if "prompt" in fields else text_of(fields)
    return mock.web.json_response({"usage": {"prompt_tokens": len(text.encode())}})


async def count_nine(engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
    return mock.web.json_response({"usage": {"prompt_tokens": 9}})


async def render_otherwise(engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
    """Takes ids, and was started with another template, of the same length."""
    ids = ids_of(fields) or list(text_of(fields).upper().encode())
    said = {"prompt_token_ids": ids} if fields.get("return_token_ids") else {}
    return mock.web.json_response({**said, "usage": {"prompt_tokens": len(ids)}})


async def refuse_ids(engine: MockEngine, request: Any, fields: dict[str, Any]) -> Any:
    if ids_of(fields) is not None:
        return mock.web.json_response({"error": {"message": "no ids"}}, status=400)
    return await count_ids(engine, request, fields)


def body(endpoint: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, **PROMPTS[endpoint], **fields}


def with_ids(endpoint: str, kind: str = "vllm", context: int = 100, reason: str = "", **fields: Any) -> Any:
    """The fields that an engine reads of a request sent with ids; `None` where there are none."""
    request = parse_request(endpoint, orjson.dumps(body(endpoint, **fields)))
    sent = body_with_ids(request, kind, Encoding(pack_tokens(IDS), 3, reason), context)
    return None if sent is None else orjson.loads(sent)


def test_ids_stand_where_each_kind_of_engine_reads_them() -> None:
    assert with_ids(CHAT, "vllm")["kv_transfer_params"] == {"prompt_token_ids": IDS}
    assert with_ids(CHAT, "sglang")["input_ids"] == IDS
    assert with_ids(CHAT, "sglang")["messages"] == PROMPTS[CHAT]["messages"]
    for kind in ("reference", "vllm", "vllm-own", "sglang"):
        assert with_ids(COMPLETIONS, kind)["prompt"] == IDS
    assert with_ids(CHAT, "reference") is None
    for endpoint in (RESPONSES, MESSAGES, EMBEDDINGS):
        assert with_ids(endpoint, "vllm") is None


def test_the_body_is_kept_byte_for_byte_and_the_ids_follow() -> None:
    data = b' {"model":"m", "prompt" : "a \\u00e9",\n "seed": 12345678901234567890123, "x": 1.50 } \n'
    sent = body_with_ids(parse_request(COMPLETIONS, data), "vllm", Encoding(pack_tokens(IDS), 3), 100)
    assert sent == data.rstrip()[:-1] + b',"prompt":[5,6,7]}'


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        pytest.param(CHAT, {"echo": True}, id="echo"),
        pytest.param(COMPLETIONS, {"echo": "yes"}, id="echo as text"),
        pytest.param(COMPLETIONS, {"prompt_logprobs": 0}, id="prompt logprobs"),
        pytest.param(COMPLETIONS, {"prompt": ["a"], "echo": False, "suffix": "x"}, id="suffix"),
        pytest.param(COMPLETIONS, {"prompt": ["a", "b"]}, id="two prompts"),
        pytest.param(COMPLETIONS, {"prompt": [1, 2]}, id="ids already"),
        pytest.param(CHAT, {"kv_transfer_params": {"max_load_tokens": 1}}, id="the client's own parameters"),
        pytest.param(CHAT, {"input_ids": [1]}, id="the client's own ids"),
        pytest.param(CHAT, {"use_beam_search": True}, id="beam search"),
        pytest.param(CHAT, {"continue_final_message": True}, id="continued"),
        pytest.param(CHAT, {"max_tokens": 98}, id="no room"),
        pytest.param(CHAT, {"max_completion_tokens": 98}, id="no room, by its new name"),
    ],
)
def test_some_requests_keep_their_text(endpoint: str, fields: dict[str, Any]) -> None:
    assert with_ids(endpoint, **fields) is None
    assert with_ids(endpoint, **{name: None for name in fields if name != "prompt"}) is not None


def test_what_is_not_known_to_its_end_keeps_its_text() -> None:
    assert with_ids(CHAT, reason="media") is None
    request = parse_request(CHAT, orjson.dumps(body(CHAT)))
    assert body_with_ids(request, "vllm", Encoding(None, 3, "tools"), 100) is None
    assert body_with_ids(request, "vllm", Encoding(b"", 0), 100) is None


async def fleet_rows(gateway: TestGateway) -> dict[str, Any]:
    transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
        rows = (await admin.get("/fleet")).json()["engines"]
    return {row["engine"]: row["token_ids"] for row in rows}


async def test_no_engine_is_asked_and_no_body_is_changed_unless_it_is_configured(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", count_ids) as engine, gateway_for([engine], renderer="sglang") as gateway:
        await gateway.probe.probe_all()
        assert engine.received == []
        assert await fleet_rows(gateway) == {"a": "off"}
        answer = await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
        assert engine.received[0][0] == answer.request.content


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_that_takes_ids_is_sent_them(client: httpx.AsyncClient, kind: str) -> None:
    async with MockEngine("a", count_ids) as engine, gateway_for([engine], renderer=kind, sends_ids=True) as gateway:
        before = await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
        assert engine.received[-1][0] == before.request.content, "nothing is known yet"
        unknown = {CHAT: "not known yet", COMPLETIONS: "not known yet"}
        assert await fleet_rows(gateway) == {"a": unknown}
        await gateway.probe.probe_all()
        assert await fleet_rows(gateway) == {"a": {CHAT: "taken", COMPLETIONS: "taken"}}
        probes = [orjson.loads(content) for content, _ in engine.received[1:]]
        assert [ids_of(probe) for probe in probes] == [None, PROBE_IDS, None, PROBE_IDS]
        assert all(probe["max_tokens"] == 1 for probe in probes)
        await gateway.probe.probe_all()
        assert len(engine.received) == 5, "it is asked once"
        for endpoint in (CHAT, COMPLETIONS):
            answer = await client.post(gateway.url + endpoint, json=body(endpoint))
            content = engine.received[-1][0]
            assert content.startswith(answer.request.content[:-1])
            rendered = "hello there" if endpoint == COMPLETIONS else "user:hello there;"
            assert ids_of(orjson.loads(content)) == list(rendered.encode())
            assert answer.json()["usage"]["prompt_tokens"] == len(rendered)


@pytest.mark.parametrize(
    ("behaviour", "verdict"),
    [
        (count_text, "ignored"),
        (refuse_ids, "refused"),
        (mock.answer_status(404), "refused"),
        (mock.answer_status(503), "not known yet"),
        (mock.answer_status(401), "not known yet"),
        (mock.drop_connection, "not known yet"),
        (count_nine, "has other ids for a prompt"),
        (mock.break_off_body, "not known yet"),
    ],
    ids=["ignores", "refuses", "404", "503", "401", "drops", "other usage", "breaks off"],
)
async def test_an_engine_that_does_not_take_ids_is_never_sent_them(
    client: httpx.AsyncClient, behaviour: Any, verdict: str
) -> None:
    async with MockEngine("a", behaviour) as engine:
        async with gateway_for([engine], renderer="sglang", sends_ids=True) as gateway:
            await gateway.probe.probe_all()
            assert await fleet_rows(gateway) == {"a": {CHAT: verdict, COMPLETIONS: verdict}}
            engine.behaviour, asked = count_ids, len(engine.received)
            await gateway.probe.probe_all()
            assert len(engine.received) == asked, "not so soon"
            await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
            assert ids_of(orjson.loads(engine.received[-1][0])) is None


async def test_an_engine_that_renders_otherwise_is_not_sent_the_gateways_ids(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", render_otherwise) as engine:
        async with gateway_for([engine], renderer="vllm", sends_ids=True) as gateway:
            await gateway.probe.probe_all()
            verdict = "has other ids for a prompt"
            assert await fleet_rows(gateway) == {"a": {CHAT: verdict, COMPLETIONS: verdict}}
            for endpoint in (CHAT, COMPLETIONS):
                answer = await client.post(gateway.url + endpoint, json=body(endpoint))
                assert engine.received[-1][0] == answer.request.content


async def test_now_and_then_a_prompt_goes_as_text_so_that_a_drift_can_be_seen(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", count_ids) as engine, gateway_for([engine], sends_ids=True) as gateway:
        await gateway.probe.probe_all()
        asked = len(engine.received)
        for _ in range(TEXT_EVERY * 2):
            await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))
        as_text = [ids_of(orjson.loads(content)) is None for content, _ in engine.received[asked:]]
        assert as_text == ([False] * (TEXT_EVERY - 1) + [True]) * 2


class Upstream:
    """Keeps which bodies were sent to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []

    async def send(self, url: str, headers: object, body: bytes, api_key: str | None) -> Any:
        self.sent.append((url, body))
        return SimpleNamespace(status=200)


async def test_engines_that_take_turns_each_get_a_prompt_as_text_now_and_then() -> None:
    """Counted together, one of two would get all texts, and the other's drift were never seen."""
    upstream: Any = Upstream()
    probe: Any = SimpleNamespace(takes=lambda view, endpoint: True)
    sender = IdsSender(upstream, probe)
    request = parse_request(COMPLETIONS, orjson.dumps({"model": MODEL, "prompt": "Once"}))
    encoding = Encoding(pack_tokens([1, 2]), 2)
    views = [replace(view(name), url=name) for name in ("a", "b")]
    for _ in range(TEXT_EVERY):
        for each in views:
            await sender.send(each, "", [], encoding, request)
    assert sorted(url for url, body in upstream.sent if body == request.body) == ["a", "b"]


async def test_a_probe_without_a_verdict_is_repeated_ever_more_seldom() -> None:
    now = 1000.0
    async with MockEngine("a", mock.answer_status(503)) as engine:
        async with gateway_for([engine], renderer="sglang", sends_ids=True, clock=lambda: now) as gateway:
            asked = []
            for _ in range(5):
                await gateway.probe.probe_all()
                asked.append(len(engine.received) // 2)
                now += RETRY_S
            assert asked == [1, 2, 2, 3, 3]
            engine.behaviour = count_ids
            now += 1000.0
            await gateway.probe.probe_all()
            assert await fleet_rows(gateway) == {"a": {CHAT: "taken", COMPLETIONS: "taken"}}


async def test_an_engine_that_serves_no_model_is_not_asked_and_a_fault_with_one_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(view: Any, endpoint: str) -> str:
        raise LookupError(endpoint)

    async with MockEngine("a", count_ids) as a, MockEngine("b", count_ids) as b:
        async with gateway_for([a, b], renderer="sglang", sends_ids=True) as gateway:
            views = gateway.fleet.table.engines
            gateway.probe.see(FleetTable({**views, "a": replace(views["a"], models=())}, {}))
            await gateway.probe.probe_all()
            assert (len(a.received), len(b.received)) == (0, 4)
            gateway.probe.see(FleetTable(views, {}))
            monkeypatch.setattr(gateway.probe, "_verdict", fail)
            with pytest.raises(LookupError):
                await gateway.probe.probe_all()
            monkeypatch.undo()
            await gateway.probe.probe_all()
            assert a.received == [], "not so soon after a fault"


async def test_a_refusal_is_logged_once_however_many_requests_meet_it(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with MockEngine("a", count_ids) as engine, gateway_for([engine], sends_ids=True) as gateway:
        await gateway.probe.probe_all()
        engine.behaviour = refuse_ids
        asked = [client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS)) for _ in range(8)]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert caplog.text.count("refused a prompt's token ids") == 1


async def test_a_refusal_is_asked_again_without_ids_and_remembered(client: httpx.AsyncClient) -> None:
    async with MockEngine("a", count_ids) as engine:
        async with gateway_for([engine], renderer="sglang", sends_ids=True) as gateway:
            await gateway.probe.probe_all()
            engine.behaviour = mock.answer_status(400)
            answer = await client.post(gateway.url + CHAT, json=body(CHAT))
            assert answer.status_code == 400
            assert [ids_of(orjson.loads(content)) is None for content, _ in engine.received[-2:]] == [False, True]
            engine.behaviour = refuse_ids
            answer = await client.post(gateway.url + CHAT, json=body(CHAT))
            assert answer.status_code == 200, "the refusal was about the ids"
            assert await fleet_rows(gateway) == {"a": {CHAT: "refused", COMPLETIONS: "taken"}}
            asked = len(engine.received)
            assert (await client.post(gateway.url + CHAT, json=body(CHAT))).status_code == 200
            assert len(engine.received) == asked + 1
            assert ids_of(orjson.loads(engine.received[-1][0])) is None
            assert gateway.ledger.engines() == ()


async def test_another_life_of_an_engine_is_probed_anew_and_a_walk_is_not() -> None:
    async with MockEngine("a", count_ids) as engine:
        async with gateway_for([engine], renderer="sglang", sends_ids=True) as gateway:
            await gateway.probe.probe_all()
            registration = engine_registration("a", engine.url, "host-a", renderer="sglang")
            walked = draw_incarnation()
            await gateway.directory.register(walked, registration, ENGINE_LOAD, 60.0)
            await gateway.fleet.refresh()
            await gateway.directory.retire(gateway.lives["a"])
            await gateway.fleet.refresh()
            assert gateway.fleet.table.engines["a"].reach.own == {walked}
            await gateway.probe.probe_all()
            assert len(engine.received) == 4, "one life led to the other"
            engine.behaviour = refuse_ids
            await gateway.directory.retire(walked)
            await gateway.directory.register(draw_incarnation(), registration, ENGINE_LOAD, 60.0)
            await gateway.fleet.refresh()
            await gateway.probe.probe_all()
            assert await fleet_rows(gateway) == {"a": {CHAT: "refused", COMPLETIONS: "refused"}}


async def test_an_engine_that_was_unwell_or_went_elsewhere_is_probed_anew() -> None:
    async with MockEngine("a", count_ids) as engine:
        async with gateway_for([engine], renderer="sglang", sends_ids=True) as gateway:
            await gateway.probe.probe_all()
            view = gateway.fleet.table.engines["a"]
            assert gateway.probe.takes(view, CHAT)
            assert not gateway.probe.takes(replace(view, url="http://elsewhere:1"), CHAT)
            gateway.fleet.note_failure("a")
            assert not gateway.probe.takes(view, CHAT)
            await gateway.fleet.check_health()
            await gateway.probe.probe_all()
            assert gateway.probe.takes(view, CHAT)
            gateway.probe.see(FleetTable({}, {}))
            assert not gateway.probe.takes(view, CHAT)


async def test_an_engine_whose_prompts_are_encoded_by_other_files_is_probed_anew() -> None:
    async with MockEngine("a", count_ids) as engine:
        async with gateway_for([engine], renderer="sglang", sends_ids=True) as gateway:
            await gateway.probe.probe_all()
            view = gateway.fleet.table.engines["a"]
            assert view.registration is not None
            files = {**view.registration.tokenizer_files, "tokenizer.json": "0" * 64}
            changed = replace(view, registration=replace(view.registration, tokenizer_files=files))
            assert gateway.probe.takes(view, CHAT)
            assert not gateway.probe.takes(changed, CHAT), "these ids may be none of the engine's"
            gateway.probe.see(FleetTable({"a": changed}, {}))
            assert not gateway.probe.takes(changed, CHAT)
            await gateway.probe.probe_all()
            assert gateway.probe.takes(changed, CHAT)
            assert not gateway.probe.takes(view, CHAT)


async def test_sent_ids_give_a_real_engines_same_answer(client: httpx.AsyncClient, tmp_path: Path) -> None:
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "prompt": "hello world"}
    async with real_engine(tmp_path) as (url, encoder):
        engine: Any = SimpleNamespace(name="a", url=url)
        plain = (await client.post(url + COMPLETIONS, json=asked)).json()
        async with gateway_for([engine], sends_ids=True, encoder=encoder) as gateway:
            await gateway.probe.probe_all()
            assert await fleet_rows(gateway) == {"a": {COMPLETIONS: "taken"}}
            sent = (await client.post(gateway.url + COMPLETIONS, json=asked)).json()
            assert (sent["choices"], sent["usage"]) == (plain["choices"], plain["usage"])
            for odd in ({"temperature": "hot"}, {"max_tokens": 10**9}):
                refused = await client.post(gateway.url + COMPLETIONS, json={**asked, **odd})
                direct = await client.post(url + COMPLETIONS, json={**asked, **odd})
                assert (refused.status_code, refused.json()) == (400, direct.json())
            assert await fleet_rows(gateway) == {"a": {COMPLETIONS: "taken"}}


async def test_a_count_of_sent_ids_says_nothing_and_a_prompt_that_is_not_believed_goes_as_text(
    client: httpx.AsyncClient,
) -> None:
    async with MockEngine("a", count_ids) as engine, gateway_for([engine], sends_ids=True) as gateway:

        async def ask() -> list[int] | None:
            assert (await client.post(gateway.url + COMPLETIONS, json=body(COMPLETIONS))).status_code == 200
            return ids_of(orjson.loads(engine.received[-1][0]))

        def matches() -> float:
            return gateway.count("warmroute_parity_total", kind="usage", result="match")

        assert await ask() is None
        assert matches() == 1
        await gateway.probe.probe_all()
        assert await ask() is not None
        assert matches() == 1, "the engine has counted what it was sent"
        gateway.probe.note_refusal(gateway.fleet.table.engines["a"], COMPLETIONS)
        engine.behaviour = count_nine
        for _ in range(20):
            assert await ask() is None
        gateway.fleet.note_failure("a")
        await gateway.fleet.check_health()
        engine.behaviour = count_ids
        await gateway.probe.probe_all()
        assert gateway.probe.takes(gateway.fleet.table.engines["a"], COMPLETIONS)
        assert await ask() is None, "its bucket is approximate"
