"""A request's messages and tools as vLLM 0.32 gives them to a template. Pure.

Read from `renderers/chat_utils.py` and `entrypoints/openai/chat_completion/protocol.py`, whose pydantic types decide
the order of keys and what is left out:

| what comes | what the template sees |
|---|---|
| content as a text, or none | a text; for a template of parts a list with one text part, or none |
| text parts | those that aren't empty, joined by line ends; for a template of parts a list |
| content of a tool's result | always one text |
| a system text that begins with a client's billing header | without that line |
| a tool call | `id`, `function` (`arguments`, `name`), `type`; arguments read from JSON, or an empty object |
| no tool calls in a list | no list |
| `reasoning` or `reasoning_content` of an assistant | both names |
| `developer`, which the template doesn't know | `system`, and all system messages as one, in front |
| a tool | `type`, `function` (`name`, `description`, `parameters`, and `strict` and `defer_loading` if given) |
| an image, audio or video part, in a template of parts | its kind |

What its types would refuse is `Uncertain`, as is what isn't listed here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.encoding.content_format import ContentFormat
from gateway.encoding.rendering import Uncertain, read_alike

BILLING_HEADER = "x-anthropic-billing-header"
TEXT_OF_PART = {"text": "text", "refusal": "refusal", "thinking": "thinking", "input_text": "text"}
ONLY_ASSISTANTS = ("refusal", "thinking")
MEDIA_KINDS = {"image_url": "image", "audio_url": "audio", "input_audio": "audio", "video_url": "video"}
CALL_FIELDS = ("arguments", "name")
"""The order in which a template sees them in a chat's calls."""
FUNCTION_FIELDS = ("name", "description", "parameters")
Message = dict[str, Any]


def conversation(
    messages: Sequence[Mapping[str, Any]],
    format: ContentFormat,
    media_mark: str | None = None,
    call_fields: Sequence[str] = CALL_FIELDS,
) -> list[Message]:
    """The messages as a template sees them. Media parts become texts of `media_mark` where one is given."""
    return [_message(message, format, media_mark, call_fields) for message in messages]


def count_media(messages: Iterable[Mapping[str, Any]]) -> int:
    """How many parts of all messages aren't text."""
    return sum(
        isinstance(part, dict) and part.get("type") in MEDIA_KINDS
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def without_developers(messages: Sequence[Message]) -> list[Message]:
    """For templates that don't know the role: developers are the system, and there is one system message, in front."""
    if not any(message["role"] == "developer" for message in messages):
        return list(messages)
    renamed: list[Message] = []
    for message in messages:
        if message["role"] == "developer":
            message = {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        renamed.append(message)
    systems = [place for place, message in enumerate(renamed) if message["role"] == "system"]
    if systems == [0]:
        return renamed
    texts = [_flat_text(renamed[place]["content"]) for place in systems]
    rest = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *rest]


def tool_list(tools: Any) -> list[dict[str, Any]] | None:
    """The tools as a template sees them; `None` where there are none."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise Uncertain("tools")
    return [_tool(tool) for tool in tools]


def function_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool that is this function (`name`, and perhaps `description`, `parameters`, `strict`, `defer_loading`)."""
    return _tool({"function": function})


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise Uncertain("tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise Uncertain("tools")
    defer = tool.get("defer_loading")
    inner_defer = function.get("defer_loading")
    inner_defer = defer if inner_defer is None else inner_defer
    strict, parameters = function.get("strict"), function.get("parameters")
    is_known = (
        isinstance(function.get("name"), str)
        and isinstance(function.get("description"), str | None)
        and isinstance(parameters, dict | None)
        and all(isinstance(each, bool | None) for each in (strict, defer, inner_defer))
    )
    if not is_known:
        raise Uncertain("tools")
    seen: dict[str, Any] = {name: function.get(name) for name in FUNCTION_FIELDS}
    seen["parameters"] = read_alike(parameters, "tools")
    if strict is not None:
        seen["strict"] = strict
    if inner_defer is not None:
        seen["defer_loading"] = inner_defer
    return {"type": "function", "function": seen} | ({} if defer is None else {"defer_loading": defer})


def _message(
    message: Mapping[str, Any], format: ContentFormat, media_mark: str | None, call_fields: Sequence[str]
) -> Message:
    role = message["role"]
    parts = _parts(message)
    if role == "system":
        parts = _without_billing_header(parts)
    content: Any = [_part(part, role, format, media_mark) for part in parts]
    if format is ContentFormat.TEXT:
        content = "\n".join(filter(None, content))
    elif role == "tool" and all(part["type"] == "text" for part in content):
        content = "\n".join(part["text"] for part in content)
    seen: Message = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_fields(message, seen, call_fields)
    elif role == "tool" and "tool_call_id" in message:
        if not isinstance(message["tool_call_id"], str | None):
            raise Uncertain("message_fields")
        seen["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if name in message:
            if not isinstance(message[name], str):
                raise Uncertain("message_fields")
            seen[name] = message[name]
    if role == "developer":
        if message.get("tools") is not None:
            raise Uncertain("message_fields")
        seen["tools"] = None
    return seen


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    if "content" in message and (message["role"] != "assistant" or message.get("tool_calls", ()) is None):
        raise Uncertain("content")  # a null that the engine's types don't take
    return []


def _part(part: Any, role: str, format: ContentFormat, media_mark: str | None) -> Any:
    if not isinstance(part, dict):
        raise Uncertain("content_part")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise Uncertain("content_part")
    if kind in TEXT_OF_PART and not (kind in ONLY_ASSISTANTS and role != "assistant"):
        text = part.get(TEXT_OF_PART[kind])
        others = part.keys() - {"type", TEXT_OF_PART[kind], "cache_control"}
        if not isinstance(text, str) or others:
            raise Uncertain("content_part")
        if format is ContentFormat.TEXT:
            return text
        kept = {"cache_control": part["cache_control"]} if "cache_control" in part else {}
        return {"type": "text", "text": text, **kept}
    if kind not in MEDIA_KINDS or format is ContentFormat.TEXT or part.keys() - {"type", kind, "uuid"}:
        raise Uncertain("content_part")  # in one text, media stand where only the model's code knows
    return {"type": MEDIA_KINDS[kind]} if media_mark is None else {"type": "text", "text": media_mark}


def _without_billing_header(parts: Sequence[Any]) -> list[Any]:
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if isinstance(text, str) and text.startswith(BILLING_HEADER):
            rest = text.partition("\n")[2]
            if rest:
                kept.append({**part, "text": rest})
        else:
            kept.append(part)
    return kept


def _add_assistant_fields(message: Mapping[str, Any], seen: Message, call_fields: Sequence[str]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise Uncertain("tool_calls")
        if calls:
            seen["tool_calls"] = [_tool_call(call, call_fields) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise Uncertain("reasoning")
        seen["reasoning"] = seen["reasoning_content"] = reasoning


def _tool_call(call: Any, call_fields: Sequence[str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Uncertain("tool_calls")
    is_known = (
        isinstance(call.get("id"), str)
        and call.get("type") == "function"
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str)
    )
    if not is_known:
        raise Uncertain("tool_calls")
    others = {name: value for name, value in call.items() if name not in ("id", "function", "type")}
    inner = {name: value for name, value in function.items() if name not in ("arguments", "name")}
    read_alike([*others.values(), *inner.values()], "tool_calls")
    read = {"arguments": tool_arguments(function["arguments"]), "name": function["name"]}
    seen = {name: read[name] for name in call_fields} | inner
    return {"id": call["id"], "function": seen, "type": "function", **others}


def tool_arguments(text: str) -> dict[str, Any]:
    """A tool call's arguments, read as vLLM reads them: an object, or an empty one. Raises `Uncertain`."""
    try:
        arguments = json.loads(text) if text else {}
        if r"\u" in text:
            json.dumps(arguments, ensure_ascii=False).encode()  # half of a pair is no Unicode: no tokenizer takes it
    except json.JSONDecodeError:
        return {}
    except (RecursionError, ValueError):
        raise Uncertain("tool_calls") from None
    return arguments if isinstance(arguments, dict) else {}


def _flat_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
