from typing import Any

import pytest

from nodeagent.engines.reference.errors import InvalidRequest, ModelFileError
from nodeagent.engines.reference.loaded_model import LoadedModel
from nodeagent.engines.reference.render import ChatRenderer, read_chat
from tests.nodeagent.engines.tiny_model import TEMPLATE

USER = {"role": "user", "content": "hi"}
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"


def render(body: dict[str, Any], template: str = TEMPLATE) -> str:
    return ChatRenderer(template, "<s>", "</s>").render(read_chat(body))


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_the_real_template_adds_its_system_message_where_there_is_none(real: LoadedModel) -> None:
    text = real.renderer.render(read_chat({"messages": [USER]}))
    assert text == SYSTEM + turn("user", "hi") + OPEN


def test_a_developer_message_becomes_the_system_message(real: LoadedModel) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    text = real.renderer.render(read_chat({"messages": messages}))
    assert text == turn("system", "Be brief.") + turn("user", "hi") + OPEN


def test_a_template_that_knows_developers_keeps_them() -> None:
    template = "{# developer #}" + TEMPLATE
    assert render({"messages": [{"role": "developer", "content": "x"}]}, template).startswith("<|im_start|>developer")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("  kept as it is \n", "  kept as it is \n"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "a\nb\nc"),
        ("{{ 1 + 1 }}", "{{ 1 + 1 }}"),
    ],
    ids=["string", "null", "no-parts", "parts", "template-in-text"],
)
def test_contents_are_normalised(content: Any, expected: str) -> None:
    assert render({"messages": [{"role": "user", "content": content}]}) == turn("user", expected) + OPEN


def test_an_absent_content_is_empty() -> None:
    assert render({"messages": [{"role": "assistant"}, USER]}) == turn("assistant", "") + turn("user", "hi") + OPEN


def test_without_a_generation_prompt_the_text_ends_with_the_last_turn() -> None:
    assert render({"messages": [USER], "add_generation_prompt": False}) == turn("user", "hi")


def test_a_final_message_is_continued_right_behind_its_content() -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert render(body) == turn("user", "hi") + "<|im_start|>assistant\nThe answer is "


def test_template_arguments_reach_the_template_below_our_own() -> None:
    template = "{{ mood }}{{ messages[0].content }}{{ bos_token }}"
    body = {"messages": [USER], "chat_template_kwargs": {"mood": "calm ", "messages": [], "bos_token": "no"}}
    assert render(body, template) == "calm hi<s>"


def test_tojson_escapes_neither_html_nor_other_scripts() -> None:
    assert (
        render({"messages": [{"role": "user", "content": "<é'>"}]}, "{{ messages[0].content | tojson }}") == '"<é\'>"'
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "tool", "content": "4"}]}, "messages[1].role"),
        ({"messages": [{"role": ["user"], "content": "4"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [4]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "", "name": 1}]}, "messages[0].name"),
        ({"messages": [USER], "add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ],
)
def test_what_cant_be_rendered_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_chat(body)
    assert refusal.value.param == param
    assert refusal.value.status == 400


def test_a_template_can_refuse() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render({"messages": [USER]}, "{{ raise_exception('roles must alternate') }}")


def test_a_template_can_neither_reach_out_nor_change_messages() -> None:
    for template in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(InvalidRequest):
            render({"messages": [USER]}, template)


def test_a_template_that_doesnt_compile_is_refused_at_the_start() -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        ChatRenderer("{% if %}", "", "")
