"""Renders chat messages as the reference engine does (see its own renderer: the two are written apart, on purpose).

The template is the model's own, run in jinja2's sandbox as transformers runs it. What the engine would refuse, or
what isn't known to render alike, raises `Uncertain`: such a request is routed without keys, never by a guess.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

KNOWN_MESSAGE_FIELDS = frozenset({"role", "content", "name"})
UNCERTAIN_FIELDS = ("tools", "functions", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort")


class Uncertain(Exception):
    """This request can't be rendered exactly; the message is a short reason, fit for a metric's label."""


class ReferenceRenderer:
    """Renders for engines of the kind `reference`. Immutable; safe to share between threads."""

    def __init__(self, template: str, special_tokens: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(template)
        self._special_tokens = {name: token for name, token in special_tokens.items() if isinstance(token, str)}

    def render(self, fields: Mapping[str, Any]) -> str:
        """The prompt's text for a chat request's fields. Raises `Uncertain`."""
        for name in UNCERTAIN_FIELDS:
            if fields.get(name):
                raise Uncertain(name)
        messages = [_normalise(message) for message in fields["messages"]]
        continued = _flag(fields, "continue_final_message", False)
        opened = _flag(fields, "add_generation_prompt", True)
        if continued and opened and "add_generation_prompt" in fields:
            raise Uncertain("continue_final_message")
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=opened and not continued,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise Uncertain("template_error") from error
        return _cut_after_final_message(text, messages) if continued else text


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Uncertain(name)
    return value


def _normalise(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the template sees it: content parts joined by newlines, no content an empty text."""
    if message.keys() - KNOWN_MESSAGE_FIELDS:
        raise Uncertain("message_fields")
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        text = "\n".join(_part_text(part) for part in content)
    return {"role": message["role"], "content": text}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Uncertain("content_part")


def _cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """What stands before the end of the last message, as transformers cuts it for `continue_final_message`."""
    final = str(messages[-1]["content"]).strip()
    position = text.rfind(final) if final else -1
    if position < 0:
        raise Uncertain("continue_final_message")
    return text[: position + len(final)]


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # A date makes the prompt depend on the engine's clock and time zone, which the gateway doesn't know.
    raise jinja2.TemplateError(f"the template asks for the date: {pattern}")
