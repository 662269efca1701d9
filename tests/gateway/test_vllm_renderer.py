"""What vLLM renders otherwise than the reference engine, or isn't known to render alike, isn't guessed."""

from typing import Any

import pytest

from gateway.encoding.render import Uncertain, VllmRenderer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def renderer() -> VllmRenderer:
    return VllmRenderer(TEMPLATE, {})


def test_text_messages_go_through_the_models_template(renderer: VllmRenderer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fields = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]}
    renderer.check(fields)
    assert renderer.render(fields) == "[system]s[user]a\nb[assistant]"


@pytest.mark.parametrize("role", ["developer", "tool"])
def test_a_role_that_is_not_known_to_render_alike_is_uncertain(renderer: VllmRenderer, role: str) -> None:
    with pytest.raises(Uncertain, match="role"):
        renderer.render({"messages": [{"role": role, "content": "x"}]})


@pytest.mark.parametrize(
    "field",
    [{"add_special_tokens": False}, {"truncate_prompt_tokens": 5}, {"kv_transfer_params": {"prompt_token_ids": []}}],
)
def test_fields_that_change_the_token_ids_are_uncertain(renderer: VllmRenderer, field: dict[str, Any]) -> None:
    with pytest.raises(Uncertain, match=next(iter(field))):
        renderer.check({"prompt": "x", **field})
