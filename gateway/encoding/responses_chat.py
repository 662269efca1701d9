"""A request of `/v1/responses` as the chat that vLLM 0.32 makes of it (`entrypoints/openai/responses/utils.py`). Pure.

Only what a client sends whole: what goes on from a response that an engine keeps is in that engine's memory alone.
Items of tools and of reasoning aren't read here.
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
        messages += [_message(item) for item in given]
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


def _message(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("type", "message") != "message" or item.get("status") in UNFINISHED:
        raise Uncertain("input_item")
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise Uncertain("input_item")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not content:
        raise Uncertain("input_item")
    texts = [_text(part) for part in content]
    if role == "assistant":
        return {"role": role, "content": texts[0]}
    if any(part.keys() != {"type", "text"} for part in content):
        raise Uncertain("content_part")
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


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
