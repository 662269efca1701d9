"""A request of `/v1/messages` as the chat that vLLM 0.32 makes of it (`entrypoints/anthropic/serving.py`). Pure."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.encoding.chat_template import TEMPLATE_ERRORS, ChatTemplate
from gateway.encoding.rendering import Uncertain
from gateway.encoding.vllm_messages import BILLING_HEADER

EFFORTS = ("low", "medium", "high", "xhigh", "max")
PROBE = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


class SystemRules:
    """Whether system messages in the midst of a conversation go to its beginning: where a template would refuse them.

    As vLLM finds out: the template is run on a conversation of that kind, without the functions that it has otherwise.
    """

    def __init__(self, templates: Iterable[ChatTemplate | None]) -> None:
        self.are_merged = any(template is None or not _takes_system_anywhere(template) for template in templates)


def chat_of_messages(
    fields: Mapping[str, Any], rules: SystemRules, render_probe: Callable[[str], str]
) -> dict[str, Any]:
    """The fields of the chat. `render_probe` renders a short chat with a reasoning effort. Raises `Uncertain`."""
    messages: list[dict[str, Any]] = []
    system = _system_texts(fields.get("system"))
    inline = [_inline_system(each) for each in fields["messages"] if each["role"] == "system"]
    if rules.are_merged:
        system += filter(None, inline)
    if system:
        messages.append({"role": "system", "content": "".join(system)})
    for message in fields["messages"]:
        if message["role"] != "system":
            messages += _messages_of(message)
        elif not rules.are_merged and (text := _inline_system(message)):
            messages.append({"role": "system", "content": text})
    chat: dict[str, Any] = {"messages": messages, "chat_template_kwargs": fields.get("chat_template_kwargs")}
    effort = _effort(fields, render_probe)
    if effort is not None:
        chat["reasoning_effort"] = effort
    if fields.get("tools") is not None:
        chat["tools"] = [_tool(tool) for tool in _list(fields["tools"], "tools")]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        chat["tool_choice"] = "none"
    return chat


def _takes_system_anywhere(template: ChatTemplate) -> bool:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    try:
        environment.from_string(template.source).render(messages=PROBE, add_generation_prompt=False)
    except TEMPLATE_ERRORS:
        return False
    return True


def _system_texts(system: Any) -> list[str]:
    if system is None or isinstance(system, str):
        return [system] if system else []
    texts = [_text_of(block, "system") for block in _list(system, "system")]
    return [text for text in texts if text and not text.startswith(BILLING_HEADER)]


def _inline_system(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [_text_of(each, "system") for each in _list(content, "system")]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _text_of(block: Any, reason: str) -> str:
    """The text of a block that must be one of text."""
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        raise Uncertain(reason)
    return text


def _messages_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of tools as messages of their own, and then the message, unless a user's has nothing else."""
    role, content = message["role"], message.get("content")
    if role not in ("user", "assistant"):
        raise Uncertain("role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in _list(content, "content"):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            if text := _text_of(block, "content_part"):
                parts.append({"type": "text", "text": text})
        elif kind == "image" and isinstance(block.get("source"), dict) and block["source"]:
            parts.append({"type": "image_url", "image_url": {"url": ""}})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            reasoning.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind == "tool_result" and role == "user":
            results += _tool_result(block)
        elif kind != "redacted_thinking":
            raise Uncertain("content_part")
    converted: dict[str, Any] = {"role": role}
    if reasoning:
        converted["reasoning"] = "".join(reasoning)
    if calls:
        converted["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        converted["content"] = parts[0]["text"]
    elif parts:
        converted["content"] = parts
    return results if role == "user" and not parts else [*results, converted]


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    identity, name, arguments = block.get("id"), block.get("name"), block.get("input") or {}
    if not (isinstance(identity, str) and identity and isinstance(name, str) and isinstance(arguments, dict)):
        raise Uncertain("tool_calls")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _tool_result(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    identity, content = block.get("tool_use_id") or "", block.get("content")
    if not isinstance(identity, str):
        raise Uncertain("tool_result")
    images = 0
    if content is None:
        content = ""
    elif not isinstance(content, str):
        texts = []
        for item in _list(content, "tool_result"):
            if isinstance(item, dict) and item.get("type") == "image" and isinstance(item.get("source"), dict):
                images += 1
            else:
                texts.append(_text_of(item, "tool_result"))
        content = "\n".join(texts)
    messages: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": identity, "content": content}]
    if images:
        part = {"type": "image_url", "image_url": {"url": ""}}
        messages.append({"role": "user", "content": [part] * images})
    return messages


def _tool(tool: Any) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise Uncertain("tools")
    schema = schema if "type" in schema else {**schema, "type": "object"}
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _effort(fields: Mapping[str, Any], render_probe: Callable[[str], str]) -> Any:
    """The reasoning effort that is asked for. Thinking that is switched off is "none", if the template knows that."""
    output, thinking = fields.get("output_config"), fields.get("thinking")
    effort = output.get("effort") if isinstance(output, dict) else None
    if thinking is None:
        return effort
    if not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        raise Uncertain("thinking")
    if thinking["type"] != "disabled":
        return effort
    switched_off = _probed("none", render_probe)
    is_known = switched_off is not None and all(_probed(each, render_probe) != switched_off for each in EFFORTS)
    return "none" if is_known else "low"


def _probed(effort: str, render_probe: Callable[[str], str]) -> str | None:
    """The probe's text; `None` where the template refuses the effort."""
    try:
        return render_probe(effort)
    except Uncertain as reason:
        if str(reason) != "template_error":
            raise
        return None


def _list(value: Any, reason: str) -> list[Any]:
    if not isinstance(value, list):
        raise Uncertain(reason)
    return value
