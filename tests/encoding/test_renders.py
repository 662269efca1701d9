"""Real models' templates: over the matrix, the gateway renders what the functions of vLLM and SGLang rendered."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench.encoding.tokenizer_packages import template_files
from gateway.encoding.rendering import Rendered, Uncertain
from gateway.encoding.sglang_renderer import SglangRenderer
from gateway.encoding.template_files import read_templates
from gateway.encoding.vllm_renderer import VllmRenderer
from gateway.openai_schema import CHAT
from tests.gateway.rendered import asked
from tests.render_matrix import CHATS

VECTORS = Path(__file__).parent.parent / "vectors" / "renders_of_families.json"
DIGESTS: dict[str, dict[str, dict[str, Any]]] = json.loads(VECTORS.read_text(encoding="utf-8"))
"""By engine, family and request: the first 16 hex digits of a rendered text's sha256, or null for a refusal."""
RENDERERS = {"vllm": VllmRenderer, "sglang": SglangRenderer}
NOT_FOLLOWED = {"vllm": set(), "sglang": {"arguments with a large number", "thoughts as parts"}}
FAMILIES = tuple(DIGESTS["vllm"])


def digest(engine: str, rendered: Rendered) -> str:
    text = rendered.text if engine == "vllm" else f"{rendered.text}\0{rendered.then}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", RENDERERS)
def test_a_familys_chats_are_rendered_as_the_engine_renders_them(engine: str, family: str) -> None:
    renderer = RENDERERS[engine](read_templates(template_files(family)))
    digests: dict[str, str | None] = {}
    for name, fields in CHATS.items():
        try:
            rendered = renderer.prompt(asked(CHAT, fields))
        except Uncertain:
            digests[name] = None
            continue
        assert isinstance(rendered, Rendered)
        digests[name] = digest(engine, rendered)
    expected = {name: None if name in NOT_FOLLOWED[engine] else said for name, said in DIGESTS[engine][family].items()}
    assert digests == expected


@pytest.mark.parametrize("family", ["gpt_oss", "llama2"])
def test_a_model_without_a_template_in_its_files_has_no_chats(family: str) -> None:
    with pytest.raises(Uncertain, match="no_template"):
        VllmRenderer(read_templates(template_files(family))).prompt(asked(CHAT, CHATS["plain"]))
