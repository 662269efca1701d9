"""Renders chat messages to the prompt text, with the model's own template in jinja2's immutable sandbox.

The gateway has a renderer of its own, written apart on purpose: each checks the other. Both keep these rules, which
are vLLM's for templates that take message contents as strings:

1. Messages are rendered in order; none is merged, moved or dropped. There must be at least one.
2. `role` is one of system, developer, user, assistant. A template that doesn't mention `developer` gets `system`
   in its place. Other roles are refused, as are `tool_calls` and `function_call`: the templates here have no tools.
3. `content` is a string as it stands; null or absent is the empty string; a list is its text parts joined with one
   newline. A part is a string, or an object of type text, input_text or output_text with a string `text`. Other
   parts (images, audio, files) are refused. Nothing is trimmed.
4. The template sees `messages` (objects with `role`, `content`, and `name` where given), `add_generation_prompt`
   (true by default), `bos_token`, `eos_token`, and below those whatever `chat_template_kwargs` holds;
   `chat_template` and `tokenize` in there are refused.
5. `continue_final_message` ends the text right behind the last message's content, without the template's closing; it
   excludes `add_generation_prompt`, which must then be false explicitly.
6. Environment: trim_blocks and lstrip_blocks on, loop controls, `raise_exception`, `tojson` without escaping of
   HTML or non-ASCII. The text is then encoded without adding special tokens; those spelled out in it are parsed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nodeagent.engines.reference.errors import InvalidRequest, ModelFileError

ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("text", "input_text", "output_text")
_RESERVED_ARGUMENTS = ("chat_template", "tokenize")
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
_END_MARK = "\ue000warmroute-end-of-final-message\ue001"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation and how to render it, normalised."""

    messages: tuple[Mapping[str, str], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


class ChatRenderer:
    """Chat -> text. Raises `ModelFileError` for a template that doesn't compile. Thread-safe."""

    def __init__(self, template: str, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise ModelFileError(f"the model's chat template can't be compiled: {error}") from error
        self._knows_developer = "developer" in template
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, chat: Chat) -> str:
        """The prompt text. Raises `InvalidRequest` where the template refuses the conversation."""
        messages = [dict(message) for message in chat.messages]
        for message in messages:
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        if chat.continue_final_message:
            messages[-1]["content"] += _END_MARK
        arguments = {
            **chat.template_arguments,
            **self._tokens,
            "messages": messages,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        try:
            text = self._template.render(arguments)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refused the conversation: {error}", "messages") from error
        return text[: text.rindex(_END_MARK)] if chat.continue_final_message else text


def read_chat(body: Mapping[str, Any]) -> Chat:
    """Normalise a request's messages. Raises `InvalidRequest` naming the field at fault."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    add_generation_prompt = _flag(body, "add_generation_prompt", True)
    continue_final_message = _flag(body, "continue_final_message", False)
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt can't both be true", "continue_final_message"
        )
    arguments = body.get("chat_template_kwargs")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in _RESERVED_ARGUMENTS:
        if name in arguments:
            raise InvalidRequest(f"chat_template_kwargs must not hold {name}", f"chat_template_kwargs.{name}")
    normalised = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    return Chat(normalised, add_generation_prompt, continue_final_message, arguments)


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object", where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    for name in ("tool_calls", "function_call"):
        if message.get(name) not in (None, []):
            raise InvalidRequest(f"{where}.{name} must be left out: this model has no tools", f"{where}.{name}")
    normalised: dict[str, str] = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    speaker = message.get("name")
    if speaker is not None:
        if not isinstance(speaker, str):
            raise InvalidRequest(f"{where}.name must be a string", f"{where}.name")
        normalised["name"] = speaker
    return normalised


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise InvalidRequest(f"{where} must be a string or a list of parts", where)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest(f"{where} must be a string or an object", where)
    if part.get("type") not in _TEXT_PARTS:
        raise InvalidRequest(f"{where}.type must be text: this model takes nothing else", f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
    return text


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", name)
    return value


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
