"""vLLM's renders, to the letter, or none: over the matrix against what its own functions gave."""

from typing import Any

import pytest

from directory.chunks import pack_tokens
from gateway.encoding.content_format import ContentFormat
from gateway.encoding.rendering import Rendered, Uncertain
from gateway.encoding.vllm_renderer import ServerSettings, VllmIdsRenderer, VllmRenderer
from gateway.openai_schema import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RERANK, RESPONSES, SCORE
from tests.gateway.rendered import RENDERS, asked, templates
from tests.render_matrix import CHATS, PARTS, SHOW_ALL, TEMPLATES, WEATHER
from tests.render_matrix import MESSAGES as MESSAGES_ASKED
from tests.render_matrix import RESPONSES as RESPONSES_ASKED

CONTENTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def renderers() -> dict[str, VllmRenderer]:
    return {name: VllmRenderer(templates(source)) for name, source in TEMPLATES.items()}


def text_of(renderer: VllmRenderer, endpoint: str, fields: dict[str, Any]) -> str | None:
    try:
        rendered = renderer.prompt(asked(endpoint, fields))
    except Uncertain:
        return None
    assert isinstance(rendered, Rendered)
    assert not rendered.then
    return rendered.text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_rendered_as_vllm_renders_it(renderers: dict[str, VllmRenderer], template: str, name: str) -> None:
    assert text_of(renderers[template], CHAT, CHATS[name]) == RENDERS["vllm"][template][name]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", MESSAGES_ASKED)
def test_messages_are_rendered_as_vllm_does(renderers: dict[str, VllmRenderer], template: str, name: str) -> None:
    asked_for = {"max_tokens": 9000, **MESSAGES_ASKED[name]}
    assert text_of(renderers[template], MESSAGES, asked_for) == RENDERS["messages"][template][name]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", RESPONSES_ASKED)
def test_responses_are_rendered_as_vllm_does(renderers: dict[str, VllmRenderer], template: str, name: str) -> None:
    assert text_of(renderers[template], RESPONSES, RESPONSES_ASKED[name]) == RENDERS["responses"][template][name]


def test_a_responses_prompt_gets_special_tokens() -> None:
    assert VllmRenderer(templates(CONTENTS)).prompt(asked(RESPONSES, {"input": "x"})).adds_special  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}]}, "input_item"),
        ({"input": [{"role": "assistant", "content": "x", "status": "incomplete"}]}, "input_item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "content_part"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_response_may_refer_to_is_uncertain(field: dict[str, Any], reason: str) -> None:
    with pytest.raises(Uncertain, match=reason):
        VllmRenderer(templates(CONTENTS)).prompt(asked(RESPONSES, {"input": "x", **field}))


@pytest.mark.parametrize(
    "field",
    [
        {"truncate_prompt_tokens": 5},
        {"kv_transfer_params": {"prompt_token_ids": []}},
        {"prompt_embeds": "AA=="},
        {"suffix": "x"},
    ],
)
def test_fields_that_change_the_token_ids_are_uncertain(field: dict[str, Any]) -> None:
    with pytest.raises(Uncertain, match=next(iter(field))):
        VllmRenderer(templates(CONTENTS)).prompt(asked(COMPLETIONS, {"prompt": "x", **field}))


def test_texts_and_ids_are_taken_as_they_are_with_special_tokens_unless_told() -> None:
    renderer = VllmRenderer(templates(CONTENTS))
    assert renderer.prompt(asked(COMPLETIONS, {"prompt": ["a", "b"]})) == Rendered("a", adds_special=True)
    assert renderer.prompt(asked(EMBEDDINGS, {"input": "a", "add_special_tokens": False})) == Rendered("a")
    assert renderer.prompt(asked(COMPLETIONS, {"prompt": [[1, 2], [3]]})) == pack_tokens([1, 2])
    assert renderer.prompt(asked(CHAT, {**CHATS["plain"], "add_special_tokens": True})).adds_special  # type: ignore[union-attr]


@pytest.mark.parametrize("endpoint", [*RERANK, SCORE])
def test_pairs_of_texts_are_uncertain(endpoint: str) -> None:
    fields = {"query": "q", "documents": ["d"], "text_1": "q", "text_2": "d"}
    with pytest.raises(Uncertain, match="pairs"):
        VllmRenderer(templates(CONTENTS)).prompt(asked(endpoint, fields))


def test_a_model_with_a_renderer_of_its_own_has_certain_texts_and_no_chats() -> None:
    renderer = VllmRenderer(templates(CONTENTS), has_own_renderer=True)
    assert renderer.prompt(asked(COMPLETIONS, {"prompt": "a"})) == Rendered("a", adds_special=True)
    with pytest.raises(Uncertain, match="own_renderer"):
        renderer.prompt(asked(CHAT, CHATS["plain"]))


def test_of_a_model_with_a_tokenizer_of_its_own_only_ids_are_certain() -> None:
    renderer = VllmIdsRenderer()
    assert renderer.prompt(asked(COMPLETIONS, {"prompt": [1, 2]})) == pack_tokens([1, 2])
    for endpoint, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, CHATS["plain"])):
        with pytest.raises(Uncertain, match="own_tokenizer"):
            renderer.prompt(asked(endpoint, fields))


def test_a_template_in_the_request_is_uncertain() -> None:
    with pytest.raises(Uncertain, match="chat_template"):
        VllmRenderer(templates(CONTENTS)).prompt(asked(CHAT, {**CHATS["plain"], "chat_template": "x"}))


def test_a_servers_own_arguments_come_before_those_of_the_request() -> None:
    settings = ServerSettings({"enable_thinking": False, "date_string": "today"}, ContentFormat.PARTS, True)
    renderer = VllmRenderer(templates(SHOW_ALL), settings)
    plain = renderer.render(asked(CHAT, {**CHATS["plain"], "tools": [WEATHER], "tool_choice": "none"}).fields).text
    assert '"content": [{"type": "text"' in plain
    assert "tools=null" in plain
    assert plain.endswith("thinking=False extra=today")
    assert "thinking=True" in renderer.render(asked(CHAT, CHATS["thinking on"]).fields).text


def conversation(*parts: Any, before: str = "Look at this") -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": before}, {"role": "user", "content": list(parts)}]}


def test_a_prompt_with_an_image_is_known_up_to_it() -> None:
    renderer = VllmRenderer(templates(PARTS))
    rendered = renderer.render(conversation({"type": "text", "text": "This:"}, IMAGE, {"type": "text", "text": "?"}))
    assert rendered.text.endswith('{"type": "text", "text": "This:"}{"type": "')
    assert rendered.reason == "media"
    assert rendered.rest_tokens > 1000


def test_an_image_in_a_template_that_takes_one_text_leaves_nothing_certain() -> None:
    with pytest.raises(Uncertain, match="content_part"):
        VllmRenderer(templates(CONTENTS)).render(conversation(IMAGE))


def test_a_template_that_moves_images_to_the_front_is_known_up_to_there() -> None:
    source = (
        "{{ bos_token }}start{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<img>"
        "{% endif %}{% endfor %}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}"
    )
    rendered = VllmRenderer(templates(source)).render(conversation({"type": "text", "text": "a"}, IMAGE))
    assert rendered.text == "<s>start"


@pytest.mark.parametrize(
    ("escaped", "shown"),
    [(r"\ud83d\ude00", "\U0001f600"), (r"\ud83d", None), (r"\udE00\ud83d", None), (r"\u00e9", "\xe9")],
)
def test_half_a_pair_in_a_calls_arguments_is_left_to_the_engine(escaped: str, shown: str | None) -> None:
    function = {"name": "f", "arguments": f'{{"a": "{escaped}"}}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = text_of(
        VllmRenderer(templates("{{ messages[1].tool_calls[0].function.arguments.a }}")), CHAT, {"messages": messages}
    )
    assert text == shown
