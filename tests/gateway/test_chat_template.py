"""Which template is taken of a model's files, what it is given, and what engines guess from its syntax."""

from datetime import datetime
from typing import Any

import orjson
import pytest

from gateway.encoding.chat_template import ChatTemplate
from gateway.encoding.content_format import ContentFormat, sglang_content_format, vllm_content_format
from gateway.encoding.rendering import Uncertain
from gateway.encoding.template_files import read_templates
from gateway.encoding.vllm_renderer import VllmRenderer
from tests.gateway.rendered import templates
from tests.render_matrix import USER, WEATHER

CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
SEVERAL = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]


def text_or_reason(renderer: VllmRenderer, fields: dict[str, Any]) -> str:
    try:
        return renderer.render({"messages": [USER], **fields}).text
    except Uncertain as reason:
        return f"uncertain: {reason}"


@pytest.mark.parametrize(
    ("config", "fields", "text"),
    [
        ({"chat_template": "one{{ bos_token }}", "bos_token": "<s>"}, {}, "one<s>"),
        ({"chat_template": "one{{ bos_token }}", "bos_token": {"content": "<s>"}}, {}, "one<s>"),
        ({"chat_template": "one{{ bos_token }}", "bos_token": None}, {}, "one"),
        ({"chat_template": "one{{ bos_token }}", "bos_token": 5}, {}, "uncertain: special_tokens"),
        ({"chat_template": "one{{ bos_token }}"}, {}, "uncertain: special_tokens"),
        ({}, {}, "uncertain: no_template"),
        ({"chat_template": "{% if %}"}, {}, "uncertain: template_error"),
        ({"chat_template": SEVERAL}, {}, "d"),
        ({"chat_template": SEVERAL}, {"tools": [WEATHER]}, "t"),
        ({"chat_template": SEVERAL[:1]}, {"tools": [WEATHER]}, "d"),
    ],
    ids=["text", "token", "null", "number", "unsaid", "none", "broken", "several", "several, tools", "default, tools"],
)
def test_the_template_is_the_one_that_the_files_name(config: dict[str, Any], fields: dict[str, Any], text: str) -> None:
    renderer = VllmRenderer(read_templates({"tokenizer_config.json": orjson.dumps(config)}))
    assert text_or_reason(renderer, fields) == text


def test_a_file_goes_before_the_configuration() -> None:
    assert text_or_reason(VllmRenderer(templates("file", {"chat_template": "config"})), {}) == "file"


def test_a_processors_other_template_leaves_requests_without_tools_uncertain() -> None:
    other = VllmRenderer(templates(CONTENTS, **{"chat_template.json": b'{"chat_template": "other"}'}))
    assert text_or_reason(other, {}) == "uncertain: several_templates"
    assert text_or_reason(other, {"tools": [WEATHER]}) == USER["content"]
    same = orjson.dumps({"chat_template": CONTENTS})
    assert text_or_reason(VllmRenderer(templates(CONTENTS, **{"chat_template.json": same})), {}) == USER["content"]


@pytest.mark.parametrize(
    ("second", "told"), [(0, None), (29, None), (31, "2 Jan"), (86_369, "2 Jan"), (86_370, None), (86_399, None)]
)
def test_a_date_is_told_where_clocks_that_differ_a_little_show_the_same(second: int, told: str | None) -> None:
    hour, rest = divmod(second, 3600)
    now = datetime(2026, 1, 2, hour, rest // 60, rest % 60)
    template = ChatTemplate("{{ strftime_now('%-d %b') }}", lambda: now)
    if told is None:
        with pytest.raises(Uncertain, match="clock"):
            template.render({})
    else:
        assert template.render({}) == told


LOOP, END, CALLS = "{% for c in ", "{% endfor %}", "{% endmacro %}{% for x in messages %}"


@pytest.mark.parametrize(
    ("source", "vllm", "sglang"),
    [
        (CONTENTS, False, False),
        ("{% for m in messages %}" + LOOP + "m.content %}" + END * 2, True, True),
        ("{% for m in messages %}" + LOOP + "m['content'] %}" + END * 2, True, True),
        ("{% for message in messages %}" + LOOP + "message['content'] | list %}" + END * 2, True, True),
        ("{% set l = messages[1:] %}{% for x in l %}" + LOOP + "x.content %}" + END * 2, True, False),
        ("{% set a = messages %}{% set b = a | list %}{% for x in b %}" + LOOP + "x.content %}" + END * 2, True, False),
        ("{% set t = messages is defined %}{% for x in t %}" + LOOP + "x.content %}" + END * 2, True, False),
        ("{% for i, m in messages | items %}" + LOOP + "m.content %}" + END * 2, False, True),
        (
            "{% macro r(b) %}" + LOOP + "b %}" + END + CALLS + "{{ r(x.content) }}" + END,
            True,
            False,
        ),
        (
            "{% macro r(b) %}" + LOOP + "b %}" + END + CALLS + "{{ r(b=x.content) }}" + END,
            True,
            False,
        ),
        (
            "{% macro r(content) %}" + LOOP + "content %}" + END + CALLS + "{{ r(x.t) }}" + END,
            False,
            False,
        ),
        ("{% for x in messages %}{% set content = x.content %}" + LOOP + "content %}" + END * 2, True, False),
        ("{% for x in messages %}{% set body = x.content %}" + LOOP + "body %}" + END * 2, False, False),
        ("{% for x in messages %}{{ x.content }}{% if x.image %}{% endif %}" + END, False, True),
        ("{% set ns = namespace() %}{% set ns.m = messages %}{% for m in messages %}" + LOOP + "m.content %}" + END * 2,
         False, True),
    ],
    ids=["no loop", "attribute", "item", "filter", "slice", "chain", "test", "pairs", "macro", "macro by name",
         "macro of others", "set content", "set body", "word", "namespace"],
)  # fmt: skip
def test_the_content_format_is_guessed_as_engines_do(source: str, vllm: bool, sglang: bool) -> None:
    """Expected: what the functions of vLLM 0.32 and SGLang 0.5.23 say of these templates."""
    template = ChatTemplate(source)
    assert (vllm_content_format(template) is ContentFormat.PARTS) == vllm
    assert (sglang_content_format(template) is ContentFormat.PARTS) == sglang
