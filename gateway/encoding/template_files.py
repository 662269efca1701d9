"""Which template an engine takes of those in a model's files, and which special tokens a template may name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson

from gateway.encoding.chat_template import ChatTemplate, TemplateBroken
from gateway.encoding.rendering import Uncertain

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelTemplate:
    """A template with the special tokens that it is given, or the reason why there is none."""

    template: ChatTemplate | None
    special_tokens: Mapping[str, str]
    missing: str = ""

    def known(self) -> ChatTemplate:
        """The template. Raises `Uncertain`."""
        if self.template is None:
            raise Uncertain(self.missing)
        return self.template


@dataclass(frozen=True, slots=True)
class ModelTemplates:
    """The templates of a model: for requests without tools and for those with; and whether there are others."""

    without_tools: ModelTemplate
    with_tools: ModelTemplate
    are_several: bool


def read_templates(contents: Mapping[str, bytes], now: Callable[[], datetime] = datetime.now) -> ModelTemplates:
    """From the contents of `chat_template.jinja`, `tokenizer_config.json` and a processor's `chat_template.json`.

    A tokenizer's file goes before its configuration, which may hold several by name; with tools `tool_use` is taken
    (`tokenization_utils_base.py` in transformers 5.19). A processor's template counts where there are no tools (vLLM
    0.32, `renderers/hf.py`), if the model has a processor: if it differs, it isn't known which is taken. Raises
    `ValueError` for files that aren't JSON, `KeyError` without a configuration.
    """
    config: dict[str, Any] = orjson.loads(contents["tokenizer_config.json"])
    named = _named_templates(contents, config)
    default = named.get("default")
    without_tools = _model_template(default, config, now)
    with_tools = _model_template(named["tool_use"], config, now) if "tool_use" in named else without_tools
    if "chat_template.json" in contents:
        of_processor = orjson.loads(contents["chat_template.json"]).get("chat_template")
        if of_processor is not None and of_processor != default:
            without_tools = ModelTemplate(None, {}, "several_templates")
    return ModelTemplates(without_tools, with_tools, len(named) > 1)


def _named_templates(contents: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    if "chat_template.jinja" in contents:
        return {"default": contents["chat_template.jinja"].decode()}
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {str(row["name"]): str(row["template"]) for row in given}
    return {}


def _model_template(source: str | None, config: Mapping[str, Any], now: Callable[[], datetime]) -> ModelTemplate:
    if source is None:
        return ModelTemplate(None, {}, "no_template")
    try:
        template = ChatTemplate(source, now)
    except TemplateBroken:
        return ModelTemplate(None, {}, "template_error")
    tokens = {}
    for name in SPECIAL_TOKENS:
        if name not in template.variables:
            continue
        if name not in config:  # the tokenizer's class may have one of its own
            return ModelTemplate(None, {}, "special_tokens")
        value = config[name]
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
        elif value is not None:
            return ModelTemplate(None, {}, "special_tokens")
    return ModelTemplate(template, tokens)
