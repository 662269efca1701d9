"""Renderers for tests, and requests as the gateway reads them."""

import json
from pathlib import Path
from typing import Any

import orjson

from gateway.encoding.template_files import ModelTemplates, read_templates
from gateway.openai_schema import InferenceRequest, parse_request
from tests.render_matrix import SPECIAL_TOKENS

VECTORS = Path(__file__).parent.parent / "vectors"
RENDERS: dict[str, dict[str, dict[str, Any]]] = json.loads((VECTORS / "renders.json").read_text(encoding="utf-8"))
"""By engine, template and request: what the functions of vLLM 0.32 and SGLang 0.5.23 render, or null for a refusal.

`messages` and `responses` are vLLM's of these endpoints; SGLang's are pairs, the second of which is encoded by itself.
"""


def templates(source: str, config: dict[str, Any] | None = None, **files: bytes) -> ModelTemplates:
    config_json = orjson.dumps(SPECIAL_TOKENS if config is None else config)
    return read_templates({"chat_template.jinja": source.encode(), "tokenizer_config.json": config_json, **files})


def asked(endpoint: str, fields: dict[str, Any]) -> InferenceRequest:
    """Written and read again: as it comes over the wire."""
    return parse_request(endpoint, orjson.dumps({"model": "m", **fields}))
