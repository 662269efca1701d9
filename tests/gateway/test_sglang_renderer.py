"""SGLang's renders, to the letter, or none: over the matrix against what its own functions gave."""

from typing import Any

import pytest

from directory.chunks import pack_tokens
from gateway.encoding.rendering import Rendered, Uncertain
from gateway.encoding.sglang_renderer import SglangRenderer
from gateway.openai_schema import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.gateway.rendered import RENDERS, asked, templates
from tests.render_matrix import CHATS, SHOW_ALL, TEMPLATES, USER

NOT_FOLLOWED = {"arguments with a large number", "thoughts as parts"}
"""What SGLang renders and the gateway doesn't: its reader of JSON and its parts of thoughts aren't followed."""


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_rendered_as_sglang_renders_it(template: str, name: str) -> None:
    expected = RENDERS["sglang"][template][name]
    try:
        rendered = SglangRenderer(templates(TEMPLATES[template])).prompt(asked(CHAT, CHATS[name]))
    except Uncertain:
        assert expected is None or name in NOT_FOLLOWED
        return
    assert isinstance(rendered, Rendered)
    assert [rendered.text, rendered.then] == expected
    assert not rendered.adds_special


def test_the_ids_that_a_chat_brings_are_its_prompt() -> None:
    renderer = SglangRenderer(templates(SHOW_ALL))
    assert renderer.prompt(asked(CHAT, {"messages": [USER], "input_ids": [1, 2]})) == pack_tokens([1, 2])
    with pytest.raises(Uncertain, match="input_ids"):
        renderer.prompt(asked(CHAT, {"messages": [USER], "input_ids": [1, -2]}))


def test_a_completion_gets_special_tokens() -> None:
    renderer = SglangRenderer(templates(SHOW_ALL))
    assert renderer.prompt(asked(COMPLETIONS, {"prompt": "a"})) == Rendered("a", adds_special=True)


@pytest.mark.parametrize(
    ("endpoint", "fields", "reason"),
    [
        (CHAT, {"messages": [USER], "lora_path": "x"}, "lora_path"),
        (CHAT, {"messages": [USER], "reasoning": {"effort": "low"}}, "reasoning"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content_part"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "role"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        (RESPONSES, {"input": "x"}, "endpoint"),
        (MESSAGES, {"messages": [USER]}, "endpoint"),
    ],
)
def test_what_is_not_followed_is_uncertain(endpoint: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(Uncertain, match=reason):
        SglangRenderer(templates(SHOW_ALL)).prompt(asked(endpoint, fields))


def test_a_template_that_refuses_tools_gets_their_functions() -> None:
    source = "{% for t in tools %}{% if t.function %}{{ raise_exception('flat') }}{% endif %}{{ t.name }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "ping"}}
    rendered = SglangRenderer(templates(source)).prompt(asked(CHAT, {"messages": [USER], "tools": [tool]}))
    assert rendered == Rendered("ping")


def test_a_continued_text_that_begins_with_the_first_token_is_uncertain() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "<s>x"}]
    with pytest.raises(Uncertain, match="continue_final_message"):
        SglangRenderer(templates(source)).prompt(asked(CHAT, {"messages": messages, "continue_final_message": True}))
