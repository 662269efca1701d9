"""A request of `/v1/responses` as the chat that vLLM 0.32 makes of it (`entrypoints/openai/responses/utils.py`). Pure.

Only what a client sends whole: what goes on from a response that an engine keeps is in that engine's memory alone.
Reasoning, text and calls that follow each other are one message of the assistant's, as long as none is there twice.
"""

from collections.abc import Mapping
from typing import Any

from gateway.encoding.rendering import Uncertain

UNCERTAIN_FIELDS = ("previous_response_id", "conversation", "previous_input_messages", "prompt")
PASSED_FIELDS = ("chat_template_kwargs", "tool_choice")
UNFINISHED = ("in_progress", "incomplete")
TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})


def chat_of_response(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the chat. Raises `Uncertain`."""
    for name in UNCERTAIN_FIELDS:
        if fields.get(name) is not None:
            raise Uncertain(name)
    if fields.get("truncation", "disabled") != "disabled":
        raise Uncertain("truncation")
    messages: list[dict[str, Any]] = []
    instructions = fields.get("instructions")
    if instructions:
        if not isinstance(instructions, str):
            raise Uncertain("instructions")
        messages.append({"role": "system", "content": instructions})
    given = fields.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add_item(item, messages)
    else:
        raise Uncertain("input")
    chat: dict[str, Any] = {"messages": messages, **{name: fields.get(name) for name in PASSED_FIELDS}}
    reasoning = fields.get("reasoning")
    if reasoning is not None:
        if not isinstance(reasoning, dict):
            raise Uncertain("reasoning")
        chat["reasoning_effort"] = reasoning.get("effort")
    if fields.get("tools"):
        chat["tools"] = _tools(fields["tools"])
    return chat


def _add_item(item: Any, messages: list[dict[str, Any]]) -> None:
    if not isinstance(item, dict) or item.get("status") in UNFINISHED:
        raise Uncertain("input_item")
    kind = item.get("type", "message")
    if kind == "function_call":
        _add_call(item, messages)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str) or not isinstance(item.get("output"), str):
            raise Uncertain("input_item")
        messages.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
    elif kind == "reasoning":
        _add_to_assistant("reasoning", _reasoning(item), messages)
    elif kind == "message":
        _add_message(item, messages)
    else:
        raise Uncertain("input_item")


def _add_message(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise Uncertain("input_item")
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list) and content:
        texts = [_text(part) for part in content]
    else:
        raise Uncertain("input_item")
    if role == "assistant":
        _add_to_assistant("content", texts[0], messages)
    elif isinstance(content, list) and any(
        part.keys() != {"type", "text"} or part["type"] != "input_text" for part in content
    ):
        raise Uncertain("content_part")
    else:
        messages.append({"role": role, "content": content})


def _add_to_assistant(name: str, text: str, messages: list[dict[str, Any]]) -> None:
    if messages and messages[-1]["role"] == "assistant" and name not in messages[-1]:
        messages[-1][name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _add_call(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    is_known = all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments"))
    if not is_known or item.get("namespace") is not None:
        raise Uncertain("input_item")
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "function": function, "type": "function"}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _reasoning(item: dict[str, Any]) -> str:
    """The first text of the thoughts, or of their summary."""
    content, summary = item.get("content"), item.get("summary")
    parts = content or summary
    if item.get("encrypted_content") or not isinstance(summary, list) or not isinstance(content, list | None):
        raise Uncertain("input_item")
    if not parts:
        return ""
    text = parts[0].get("text") if isinstance(parts[0], dict) else None
    if not isinstance(text, str) or parts[0].get("type") != ("reasoning_text" if content else "summary_text"):
        raise Uncertain("input_item")
    return text


def _text(part: Any) -> str:
    is_text = isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
    if not is_text or not isinstance(part.get("text"), str):
        raise Uncertain("content_part")
    return str(part["text"])


def _tools(tools: Any) -> list[dict[str, Any]]:
    is_known = isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and tool.keys() <= TOOL_FIELDS for tool in tools
    )
    if not is_known:
        raise Uncertain("tools")
    return [{"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in tools]
