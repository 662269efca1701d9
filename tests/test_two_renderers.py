"""The gateway's encoding against the reference engine's own: written apart, they must give the same token ids."""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.chunks import pack_tokens
from gateway.encoding.examination import examine, fastest_backend
from gateway.encoding.nasty_texts import nasty_texts
from gateway.encoding.render import ReferenceRenderer
from gateway.encoding.rendering import Uncertain
from gateway.encoding.tokenizer import FastokensBackend, HuggingFaceBackend
from nodeagent.engines.reference.errors import InvalidRequest
from nodeagent.engines.reference.gguf_file import GgufFile
from nodeagent.engines.reference.loaded_model import default_model_path
from nodeagent.engines.reference.render import ChatRenderer, read_chat
from nodeagent.engines.reference.tokenizer import TextTokenizer, TokenizerFiles, read_tokenizer_files

with GgufFile(default_model_path()) as _file:
    FILES: TokenizerFiles = read_tokenizer_files(_file)
CONTENTS = FILES.as_mapping()
CONFIG: dict[str, Any] = orjson.loads(CONTENTS["tokenizer_config.json"])
TEMPLATE = CONTENTS["chat_template.jinja"].decode()
REFERENCE = HuggingFaceBackend(CONTENTS["tokenizer.json"].decode())
TOKENIZER = fastest_backend(CONTENTS["tokenizer.json"].decode(), REFERENCE)
ENGINES_TOKENIZER = TextTokenizer(FILES)
KNOWS_DEVELOPER = (
    "{% for message in messages %}{% if message['role'] == 'developer' %}[dev]{% endif %}"
    "{{ message.name or '' }}{{ bos_token }}{{ message['content'] | trim }}{{ extra }}{{ eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}>{% endif %}"
)

texts = st.text(max_size=30) | st.sampled_from(
    ["", " ", "<|im_end|>", "<|im_start|>user\n", "a\r\nb", "  x  ", "{{ x }}"]
)
parts = st.lists(
    texts | st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "output_text"]), "text": texts}),
    max_size=3,
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant"]),
            "content": texts | st.none() | parts,
        },
        optional={"name": texts | st.none(), "odd": st.integers()},
    ),
    min_size=1,
    max_size=5,
)
requests = st.fixed_dictionaries(
    {"messages": messages},
    optional={
        "add_generation_prompt": st.booleans() | st.none(),
        "continue_final_message": st.booleans() | st.none(),
        "chat_template_kwargs": st.none() | st.dictionaries(st.sampled_from(["extra", "bos_token", "x"]), texts),
    },
)


def engines_text(renderer: ChatRenderer, fields: Mapping[str, Any]) -> str | None:
    try:
        return renderer.render(read_chat(fields))
    except InvalidRequest:
        return None


def gateways_text(renderer: ReferenceRenderer, fields: Mapping[str, Any]) -> str | None:
    try:
        return renderer.render(fields)
    except Uncertain:
        return None


@pytest.mark.parametrize("template", [TEMPLATE, KNOWS_DEVELOPER], ids=["smollm2", "developer and names"])
@settings(max_examples=300, deadline=None)
@given(requests)
def test_both_render_the_same_text_or_neither_does(template: str, fields: dict[str, Any]) -> None:
    engine = ChatRenderer(template, CONFIG["bos_token"], CONFIG["eos_token"])
    gateway = ReferenceRenderer(template, CONFIG)
    assert gateways_text(gateway, fields) == engines_text(engine, fields)


def test_a_plain_conversation_is_rendered_as_the_model_was_trained() -> None:
    fields = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]}
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert ReferenceRenderer(TEMPLATE, CONFIG).render(fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"documents": [{}]},
        {"chat_template": "{{ x }}"},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
    ids=["tools", "documents", "template", "effort", "reserved", "tool role", "tool calls", "image"],
)
def test_what_is_not_known_to_render_alike_is_never_guessed(fields: dict[str, Any]) -> None:
    with pytest.raises(Uncertain):
        ReferenceRenderer(TEMPLATE, CONFIG).render({"messages": [{"role": "user", "content": "x"}], **fields})


def test_fastokens_serves_this_model() -> None:
    assert isinstance(TOKENIZER, FastokensBackend)


@pytest.mark.parametrize("seed", range(4))
def test_gateway_and_engine_give_the_same_ids_for_nasty_texts(seed: int) -> None:
    for text in nasty_texts(list(REFERENCE.added_tokens()), 300, seed):
        ids = pack_tokens(ENGINES_TOKENIZER.encode(text))
        assert TOKENIZER.encode(text) == ids
        assert REFERENCE.encode(text) == ids


@settings(max_examples=300, deadline=None)
@given(texts)
def test_gateway_and_engine_give_the_same_ids_for_any_text(text: str) -> None:
    assert TOKENIZER.encode(text) == pack_tokens(ENGINES_TOKENIZER.encode(text))


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        examine(b'{"model": 5}')
