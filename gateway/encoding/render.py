"""Renders as the reference engine does (see its own renderer: the two are written apart, on purpose).

The template is the model's own, run in jinja2's sandbox as transformers runs it. What the engine would refuse, or
what isn't known to render alike, raises `Uncertain`: such a request is routed without keys, never by a guess.
"""

import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.encoding.chat_template import TEMPLATE_ERRORS
from gateway.encoding.rendering import Rendered, Uncertain, flag
from gateway.openai_schema import CHAT, COMPLETIONS, InferenceRequest

ROLES = frozenset({"system", "developer", "user", "assistant"})
TEXT_PARTS = ("text", "input_text", "output_text")
UNCERTAIN_FIELDS = ("tools", "functions", "documents", "chat_template", "reasoning_effort")
UNCERTAIN_MESSAGE_FIELDS = ("tool_calls", "function_call", "tool_call_id", "reasoning", "reasoning_content")
UNCERTAIN_ARGUMENTS = frozenset({"chat_template", "tokenize"})
FINAL_MARK = "\ue0f0final\ue0f1"
"""Private-use characters that no template treats specially; marks where the last message's content ends."""


class ReferenceRenderer:
    """Renders for engines of the kind `reference`. Immutable; safe to share between threads."""

    def __init__(self, template: str, special_tokens: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(template)
        self._maps_developer = "developer" not in template
        tokens = {name: special_tokens.get(name) for name in ("bos_token", "eos_token")}
        self._special_tokens = {name: token for name, token in tokens.items() if isinstance(token, str)}

    def prompt(self, request: InferenceRequest) -> Rendered | bytes:
        """See `Renderer`. No special tokens are added to a completion's text."""
        if request.endpoint == CHAT:
            return Rendered(self.render(request.fields))
        if request.endpoint != COMPLETIONS:
            raise Uncertain("endpoint")
        prompt = request.prompts[0]
        return prompt if isinstance(prompt, bytes) else Rendered(prompt)

    def reads_cache(self, request: InferenceRequest) -> bool:
        """See `Renderer`."""
        return True

    def render(self, fields: Mapping[str, Any]) -> str:
        """The prompt's text for a chat request's fields. Raises `Uncertain`."""
        for name in UNCERTAIN_FIELDS:
            if fields.get(name):
                raise Uncertain(name)
        arguments = fields.get("chat_template_kwargs") or {}
        if not isinstance(arguments, Mapping) or arguments.keys() & UNCERTAIN_ARGUMENTS:
            raise Uncertain("chat_template_kwargs")
        is_open = flag(fields, "add_generation_prompt", True)
        is_continued = flag(fields, "continue_final_message", False)
        if is_open and is_continued:
            raise Uncertain("continue_final_message")  # the engine refuses it
        messages = [self._normalise(message) for message in fields["messages"]]
        if is_continued:
            messages[-1]["content"] += FINAL_MARK
        variables = {**arguments, **self._special_tokens, "messages": messages, "add_generation_prompt": is_open}
        try:
            text = self._template.render(variables)
        except TEMPLATE_ERRORS as error:
            raise Uncertain("template_error") from error
        if not is_continued:
            return text
        if text.count(FINAL_MARK) != 1:
            raise Uncertain("continue_final_message")
        return text[: text.index(FINAL_MARK)]

    def _normalise(self, message: Mapping[str, Any]) -> dict[str, str]:
        """The message as the template sees it: content parts joined by newlines, no content an empty text."""
        role = message["role"]
        if role not in ROLES:
            raise Uncertain("role")
        if any(message.get(name) for name in UNCERTAIN_MESSAGE_FIELDS):
            raise Uncertain("message_fields")
        if role == "developer" and self._maps_developer:
            role = "system"
        content = message.get("content")
        if content is None:
            content = ""
        elif not isinstance(content, str):
            content = "\n".join(_part_text(part) for part in content)
        normalised = {"role": role, "content": content}
        name = message.get("name")
        if isinstance(name, str):
            normalised["name"] = name
        elif name is not None:
            raise Uncertain("message_fields")
        return normalised


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Uncertain("content_part")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
