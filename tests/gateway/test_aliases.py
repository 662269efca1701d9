"""Aliases and splits: the engine is asked for its own model, in a body that is otherwise the client's to the byte."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.aliases import chosen
from gateway.body_model import with_model
from gateway.config import AliasTarget, EngineConfig, GatewayConfig, ModelsConfig
from gateway.openai_schema import CHAT, COMPLETIONS, FORMS, RESPONSES, InferenceRequest, parse_passed
from tests import bad_input
from tests.gateway.api_answers import answer_in_shape
from tests.gateway.assembly import TestGateway, gateway_for
from tests.gateway.mock_engine import MockEngine
from warmroute.configuration import effective, load

TYPE = "multipart/form-data; boundary=xyz"


def aliases(**models: list[tuple[str, float]]) -> ModelsConfig:
    return ModelsConfig(
        aliases={
            name: tuple(AliasTarget(model=model, weight=weight) for model, weight in targets)
            for name, targets in models.items()
        }
    )


def static(*engines: MockEngine) -> list[EngineConfig]:
    return [EngineConfig(url=engine.url, name=engine.name) for engine in engines]


def chat(text: str, model: str = "chat", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture
async def two() -> AsyncIterator[tuple[MockEngine, MockEngine, TestGateway]]:
    """Engine `a` serves `old`, `b` serves `new`; `chat` is split between them, `canary` is mostly `old`."""
    async with MockEngine("a", answer_in_shape) as a, MockEngine("b", answer_in_shape) as b:
        a.models, b.models = ["old"], ["new"]
        models = aliases(chat=[("old", 1), ("new", 1)], spare=[("old", 1), ("new", 0)], none=[("gone", 1)])
        async with gateway_for([], static=static(a, b), models=models) as gateway:
            yield a, b, gateway


async def test_the_engine_is_asked_for_its_model_in_the_clients_own_bytes(
    two: tuple[MockEngine, MockEngine, TestGateway], client: httpx.AsyncClient
) -> None:
    a, b, gateway = two
    messages = b'{ "messages": [{"role":"user","content":"the \\"model\\": {x"}], "n" :1.0, '
    body = messages + b'"model" : "chat", "odd":{"model":"chat"}}'
    answer = await client.post(gateway.url + CHAT, content=body)
    assert answer.status_code == 200
    engine = a if a.received else b
    assert engine.received[0][0] == body.replace(b'"model" : "chat"', b'"model" : "%s"' % engine.models[0].encode())
    form = b'--xyz\r\nContent-Disposition: form-data; name="model"\r\n\r\nchat\r\n--xyz--\r\n'
    await client.post(gateway.url + FORMS[0], content=form, headers={"content-type": TYPE})
    sent = [content for each in (a, b) for content, _ in each.received]
    assert {form.replace(b"chat", b"old"), form.replace(b"chat", b"new")} & set(sent)
    assert gateway.count("warmroute_requests_total", model="chat", endpoint=CHAT, status="200") == 1


async def test_a_conversation_stays_with_its_model_and_different_ones_are_split(
    two: tuple[MockEngine, MockEngine, TestGateway], client: httpx.AsyncClient
) -> None:
    _, _, gateway = two
    shared = "x" * 5000
    by_opening, by_name = set(), set()
    for number in range(12):
        turn = chat(shared + str(number))
        first = await client.post(gateway.url + CHAT, json=turn)
        turn["messages"] += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
        second = await client.post(gateway.url + CHAT, json=turn)
        assert first.json()["engine"] == second.json()["engine"]
        named = [
            (await client.post(gateway.url + CHAT, json=chat(text), headers={"x-session-id": str(number)})).json()
            for text in ("one", "two", "three")
        ]
        assert len({each["engine"] for each in named}) == 1
        by_opening.add(first.json()["engine"])
        by_name.add(named[0]["engine"])
    assert by_opening == by_name == {"a", "b"}


async def test_a_model_of_weight_0_is_asked_only_while_no_other_is_served(
    two: tuple[MockEngine, MockEngine, TestGateway], client: httpx.AsyncClient
) -> None:
    a, b, gateway = two
    for number in range(8):
        assert (await client.post(gateway.url + CHAT, json=chat(str(number), "spare"))).json()["engine"] == "a"
    a.is_well = False
    for _ in range(3):
        await gateway.fleet.check_health()
    assert (await client.post(gateway.url + CHAT, json=chat("x", "spare"))).json()["engine"] == "b"
    b.is_well = False
    for _ in range(3):
        await gateway.fleet.check_health()
    nobody = await client.post(gateway.url + CHAT, json=chat("x", "spare"))
    assert nobody.status_code == 503
    assert "'spare'" in bad_input.check_error_shape(nobody.content)["message"]


async def test_an_alias_of_models_that_nobody_ever_served_is_unknown(
    two: tuple[MockEngine, MockEngine, TestGateway], client: httpx.AsyncClient
) -> None:
    _, _, gateway = two
    missing = await client.post(gateway.url + CHAT, json=chat("x", "none"))
    assert missing.status_code == 404
    error = bad_input.check_error_shape(missing.content)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'none'" in error["message"]
    assert "gone" not in error["message"]
    assert (await client.get(gateway.url + "/v1/models/none")).status_code == 404
    await client.post(gateway.url + CHAT, json=chat("x", "made up"))
    assert gateway.count("warmroute_requests_total", model="none", endpoint=CHAT, status="404") == 1
    assert gateway.count("warmroute_requests_total", model="other", endpoint=CHAT, status="404") == 1


async def test_what_goes_on_from_a_response_goes_to_the_model_that_made_it(
    two: tuple[MockEngine, MockEngine, TestGateway], client: httpx.AsyncClient
) -> None:
    _, _, gateway = two
    for number in range(8):
        first = (await client.post(gateway.url + RESPONSES, json={"model": "chat", "input": str(number)})).json()
        asked = {"model": "chat", "input": "go on", "previous_response_id": first["id"]}
        assert (await client.post(gateway.url + RESPONSES, json=asked)).json()["engine"] == first["engine"]


async def test_aliases_are_listed_and_explained_and_change_while_the_gateway_runs(client: httpx.AsyncClient) -> None:
    async with MockEngine("a") as a, MockEngine("b") as b:
        b.adapters = {"lora": b.models[0]}
        models = aliases(fast=[("tiny", 1)], tuned=[("lora", 1)])
        async with gateway_for([a], static=static(b), models=models) as gateway:
            rows = {row["id"]: row for row in (await client.get(gateway.url + "/v1/models")).json()["data"]}
            assert list(rows) == ["fast", "lora", "tiny", "tuned"]
            assert rows["lora"]["parent"] == "tiny"
            assert (rows["fast"]["root"], rows["fast"]["max_model_len"]) == ("tiny", 8192)
            assert rows["tiny"]["max_model_len"] == 8192
            assert (await client.get(gateway.url + "/v1/models/fast")).json() == rows["fast"]
            transport = httpx.ASGITransport(app=gateway.admin)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
                told = await admin.post("/route/explain", json={"model": "tuned", "prompt": "x"})
            assert told.json()["engine"] == "b"
            gateway.aliases.configure(aliases(slow=[("lora", 1)]))
            assert (await client.post(gateway.url + CHAT, json=chat("x", "fast"))).status_code == 404
            assert (await client.post(gateway.url + CHAT, json=chat("x", "slow"))).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": []},
        {"": [{"model": "m"}]},
        {"a": [{"model": "m"}, {"model": "m"}]},
        {"a": [{"model": "m", "weight": -1}]},
        {"a": [{"model": "x\n"}]},
        {"a": [{"model": "m", "share": 1}]},
    ],
)
def test_aliases_that_lead_nowhere_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ModelsConfig.model_validate({"aliases": wrong})


def test_aliases_come_from_files_and_variables(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("models:\n  aliases:\n    fast: [{model: x, weight: 9}, {model: y}]\n")
    from_file = load(GatewayConfig, file, {}, {})
    assert from_file.models.aliases["fast"][1].weight == 1
    said = json.dumps({"fast": [{"model": "x", "weight": 9}, {"model": "y"}]})
    assert load(GatewayConfig, None, {"WARMROUTE_MODELS__ALIASES": said}, {}).models == from_file.models
    assert "model: y" in effective(from_file)


def test_conversations_are_split_by_weight_and_few_move_when_weights_change() -> None:
    def split(**weights: float) -> list[str]:
        targets = [AliasTarget(model=model, weight=weight) for model, weight in weights.items()]
        return [chosen(targets, str(number).encode()) for number in range(2000)]

    before, after = split(a=9, b=1), split(a=8, b=2)
    assert 140 < before.count("b") < 260
    moved = [(was, now) for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) == {("a", "b")}
    assert set(split(a=0, b=0)) == {"a", "b"}
    assert set(split(a=0, b=1)) == {"b"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='"\\{}[]:, model', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "x", '"model":']), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), json_values), json_values, st.text(), st.text(), st.integers(0, 3))
def test_only_the_model_changes_whatever_stands_around_it(
    fields: dict[str, Any], last: Any, model: str, other: str, indent: int
) -> None:
    said = {**fields, "model": model, "last": last}
    body = json.dumps(said, indent=indent or None, ensure_ascii=indent == 2).encode("utf-8", "replace")
    request = InferenceRequest(COMPLETIONS, body, orjson.loads(body), model, False, None)
    changed = with_model(request, other)
    assert orjson.loads(changed.body) == {**said, "model": other} == changed.fields
    assert len(changed.body) == len(body) - len(json.dumps(model, ensure_ascii=indent == 2).encode()) + len(
        orjson.dumps(other)
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"new"}'),
        (b'{"model":"a","model":"b"}', b'{"model":"new","model":"new"}'),
        (b'{"model":{"model":"a"},"model":\n"b"}', b'{"model":{"model":"a"},"model":\n"new"}'),
        (b'{"x":"model","model":"a\\"b"}', b'{"x":"model","model":"new"}'),
        (b'{"x":"\\\\","model":"a"}', b'{"x":"\\\\","model":"new"}'),
    ],
)
def test_a_model_is_found_however_it_is_written(body: bytes, expected: bytes) -> None:
    request = InferenceRequest(COMPLETIONS, body, {}, "a", False, None)
    assert with_model(request, "new").body == expected


def test_a_forms_model_is_changed_and_its_file_is_not() -> None:
    head = b'--xyz\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    parts = [(b"file", b'; filename="x"', b"model"), (b"model", b"", b"a"), (b"prompt", b"", b"a")]
    body = b"".join(head % part for part in parts) + b"--xyz--"
    changed = with_model(parse_passed(FORMS[0], body, TYPE), "größer")
    parts[1] = (b"model", b"", "größer".encode())
    assert changed.body == b"".join(head % part for part in parts) + b"--xyz--"
    assert parse_passed(FORMS[0], changed.body, TYPE).model == "größer"
