"""What is read of a request, and what a bad one is told."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.chunks import pack_tokens
from gateway.errors import InvalidRequest
from gateway.openai_schema import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ENDPOINTS,
    MESSAGES,
    RERANK,
    RESPONSES,
    SCORE,
    parse_request,
)

USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", **fields})


@pytest.mark.parametrize(
    ("endpoint", "data", "param"),
    [
        pytest.param(CHAT, b"{", None, id="truncated"),
        pytest.param(CHAT, b"\xff\xfe{}", None, id="not utf-8"),
        pytest.param(CHAT, b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', None, id="surrogate"),
        pytest.param(CHAT, b"[" * 5000 + b"]" * 5000, None, id="deep"),
        pytest.param(CHAT, b"[]", None, id="a list"),
        pytest.param(CHAT, b"null", None, id="null"),
        pytest.param(CHAT, b"{}", "model", id="no model"),
        pytest.param(CHAT, body(model=7, messages=[USER]), "model", id="model number"),
        pytest.param(CHAT, body(model="", messages=[USER]), "model", id="model empty"),
        pytest.param(CHAT, body(messages=[USER], stream="yes"), "stream", id="stream string"),
        pytest.param(CHAT, body(messages=[USER], stream=1), "stream", id="stream number"),
        pytest.param(CHAT, body(messages=[USER], cache_salt=""), "cache_salt", id="salt empty"),
        pytest.param(CHAT, body(messages=[USER], cache_salt=5), "cache_salt", id="salt number"),
        pytest.param(CHAT, body(), "messages", id="no messages"),
        pytest.param(CHAT, body(messages=[]), "messages", id="messages empty"),
        pytest.param(CHAT, body(messages="hi"), "messages", id="messages string"),
        pytest.param(CHAT, body(messages=[USER, "x"]), "messages[1]", id="message string"),
        pytest.param(CHAT, body(messages=[{"content": "x"}]), "messages[0].role", id="no role"),
        pytest.param(CHAT, body(messages=[{"role": "user", "content": 1}]), "messages[0].content", id="content number"),
        pytest.param(COMPLETIONS, body(), "prompt", id="no prompt"),
        pytest.param(COMPLETIONS, body(prompt=[]), "prompt", id="prompt empty"),
        pytest.param(COMPLETIONS, body(prompt={}), "prompt", id="prompt object"),
        pytest.param(COMPLETIONS, body(prompt=[1, "a"]), "prompt", id="prompt mixed"),
        pytest.param(COMPLETIONS, body(prompt=[1, True]), "prompt", id="prompt bool"),
        pytest.param(COMPLETIONS, body(prompt=[-1]), "prompt", id="prompt negative"),
        pytest.param(COMPLETIONS, body(prompt=[2**32]), "prompt", id="prompt too large"),
        pytest.param(COMPLETIONS, body(prompt=["a", 1]), "prompt[1]", id="prompts mixed"),
        pytest.param(COMPLETIONS, body(prompt=[[1], []]), "prompt[1]", id="prompts empty"),
        pytest.param(EMBEDDINGS, body(), "input", id="embeddings: no input"),
        pytest.param(EMBEDDINGS, body(input=["a", 1]), "input[1]", id="embeddings: inputs mixed"),
        pytest.param(EMBEDDINGS, body(messages=[]), "messages", id="embeddings: messages empty"),
        pytest.param(RESPONSES, body(), "input", id="responses: no input"),
        pytest.param(RESPONSES, body(input=5), "input", id="responses: input number"),
        pytest.param(
            RESPONSES, body(input="x", previous_response_id=5), "previous_response_id", id="responses: previous number"
        ),
        pytest.param(MESSAGES, body(), "messages", id="messages: none"),
        pytest.param(MESSAGES, body(messages=[{"role": 5}]), "messages[0].role", id="messages: role number"),
        pytest.param(RERANK[0], body(documents=["d"]), "query", id="rerank: no query"),
        pytest.param(RERANK[2], body(query="q", documents=[]), "documents", id="rerank: documents empty"),
        pytest.param(SCORE, body(model=5), "model", id="score: model number"),
        *(pytest.param(each, b'{"model":"m","x":"\\udc00"}', None, id=f"{each}: surrogate") for each in ENDPOINTS),
    ],
)
def test_a_bad_request_is_refused_and_the_field_named(endpoint: str, data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_request(endpoint, data)
    assert refused.value.param == param
    error = orjson.loads(refused.value.body())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], (pack_tokens([1, 2]),)),
        ([[1], [2, 3]], (pack_tokens([1]), pack_tokens([2, 3]))),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_shape_of_prompt_is_read(prompt: Any, prompts: tuple[str | bytes, ...]) -> None:
    assert parse_request(COMPLETIONS, body(prompt=prompt)).prompts == prompts
    assert parse_request(EMBEDDINGS, body(input=prompt)).prompts == prompts


def test_unknown_fields_are_left_alone_and_the_body_is_kept_byte_for_byte() -> None:
    data = b'{ "model":"m", "messages":[{"role":"user","content":"x","odd":1}],\n "zzz": [1.50] }'
    assert parse_request(CHAT, data).body == data


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.dictionaries(
    st.sampled_from(["model", "messages", "prompt", "input", "query", "stream", "cache_salt", "x"]), json_values
)


@given(st.sampled_from(ENDPOINTS), fields | json_values)
def test_whatever_comes_is_read_or_refused(endpoint: str, value: Any) -> None:
    import json

    try:
        request = parse_request(endpoint, json.dumps(value).encode())
    except InvalidRequest:
        return
    assert request.model


@given(st.sampled_from(ENDPOINTS), st.binary(max_size=60))
def test_whatever_bytes_come_are_refused(endpoint: str, data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request(endpoint, data)
