"""Renders as SGLang 0.5.23 does (`entrypoints/openai/serving_chat.py, protocol.py`, `parser/jinja_template_utils.py`).

Where it differs from vLLM:
- The last message, if it is an assistant's, becomes a user's; or, to be continued, it is encoded by itself behind the
  prompt, which ends as one that asks for an answer.
- Tools keep the client's order of keys. With `tool_choice` "none" there are none, with a named function only that one.
  If the template refuses them, it is run again with the functions alone.
- Text parts are joined by spaces; a text stays one, whatever the template's format. A user's `name` is dropped.
- Malformed arguments of a tool call are refused. A tool call shows `index`, and whatever else wasn't given, as null.
- `reasoning_effort` sets `thinking` and `enable_thinking`; `chat_template_kwargs` go before it.
- `add_generation_prompt`, `add_special_tokens` and `documents` aren't fields of a chat. `input_ids` are the prompt.
- Media go through a processor that encodes the prompt's text anew: nothing of it is sure.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from directory.chunks import pack_tokens
from gateway.encoding.content_format import ContentFormat, sglang_content_format
from gateway.encoding.rendering import Rendered, Uncertain, flag, read_alike
from gateway.encoding.template_files import ModelTemplates
from gateway.encoding.vllm_renderer import RESERVED_ARGUMENTS
from gateway.openai_schema import CHAT, COMPLETIONS, EMBEDDINGS, InferenceRequest

UNCERTAIN_FIELDS = ("lora_path", "extra_key", "session_params", "mm_processor_kwargs", "suffix")
ROLES = frozenset({"system", "assistant", "tool", "function", "developer"})
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
Message = dict[str, Any]


class SglangRenderer:
    """Renders for engines of the kind `sglang`. Immutable; safe to share between threads."""

    def __init__(self, templates: ModelTemplates) -> None:
        self._model, self._are_several = templates.without_tools, templates.are_several
        template = self._model.template
        self._format = sglang_content_format(template) if template else ContentFormat.TEXT

    def prompt(self, request: InferenceRequest) -> Rendered | bytes:
        """See `Renderer`."""
        for name in UNCERTAIN_FIELDS:
            if request.fields.get(name) is not None:
                raise Uncertain(name)
        if request.endpoint == CHAT:
            return self.render(request.fields)
        if request.endpoint not in (COMPLETIONS, EMBEDDINGS) or not request.prompts:
            raise Uncertain("endpoint")
        prompt = request.prompts[0]
        return prompt if isinstance(prompt, bytes) else Rendered(prompt, adds_special=True)

    def reads_cache(self, request: InferenceRequest) -> bool:
        """See `Renderer`."""
        return request.fields.get("logprob_start_len") is None

    def render(self, fields: Mapping[str, Any]) -> Rendered | bytes:
        """A chat's prompt. Raises `Uncertain`."""
        if fields.get("input_ids") is not None:
            return _ids(fields["input_ids"])
        template = self._model.known()
        if self._are_several:
            raise Uncertain("several_templates")
        messages = [_message(message, self._format) for message in fields["messages"]]
        then = ""
        last = messages[-1]
        if last["role"] == "assistant" and isinstance(last["content"], str):
            if flag(fields, "continue_final_message", False):
                messages, then = messages[:-1], last["content"]
            else:
                messages[-1] = {"role": "user", "content": last["content"]}
        bos = self._model.special_tokens.get("bos_token")
        if bos and then.startswith(bos):
            raise Uncertain("continue_final_message")  # the engine takes it for the token that it adds itself
        variables = {
            **self._model.special_tokens,
            **_arguments(fields),
            "messages": messages,
            "documents": None,
            "add_generation_prompt": True,
        }
        tools = _tools(fields)
        try:
            text = template.render({**variables, "tools": tools})
        except Uncertain as refusal:
            if not tools or str(refusal) != "template_error":
                raise
            text = template.render({**variables, "tools": [tool["function"] for tool in tools]})
        return Rendered(text, then=then)


def _ids(token_ids: Any) -> bytes:
    if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
        raise Uncertain("input_ids")
    try:
        return pack_tokens(token_ids)
    except ValueError:
        raise Uncertain("input_ids") from None


def _message(message: Mapping[str, Any], format: ContentFormat) -> Message:
    role, content = message["role"], message.get("content")
    if role == "user":
        if content is None:
            raise Uncertain("content")
        return {"role": role, "content": _content(content, format)}
    role = role.lower()
    if role not in ROLES or message.get("tools") is not None or message.get("phase") is not None:
        raise Uncertain("role" if role not in ROLES else "message_fields")
    is_list = isinstance(content, list) and format is ContentFormat.PARTS
    content = _content("" if content is None else content, format)
    if role == "tool" and isinstance(content, list):
        content = " ".join(part["text"] for part in content)
    seen: Message = {"role": role} if is_list else {"role": role, "content": content}
    for name in ("tool_call_id", "name", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise Uncertain("message_fields")
            seen[name] = value
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise Uncertain("tool_calls")
        seen["tool_calls"] = [_tool_call(call, reads_arguments=role == "assistant") for call in calls]
    return seen | {"content": content}


def _content(content: Any, format: ContentFormat) -> Any:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Uncertain("content_part")
        texts.append(part["text"])
    return " ".join(texts) if format is ContentFormat.TEXT else [{"type": "text", "text": text} for text in texts]


def _tool_call(call: Any, reads_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Uncertain("tool_calls")
    identity, index, name, arguments = (
        call.get("id"),
        call.get("index"),
        function.get("name"),
        function.get("arguments"),
    )
    is_known = (
        isinstance(identity, str | None)
        and (index is None or type(index) is int)
        and isinstance(name, str | None)
        and isinstance(arguments, str | dict | None)
    )
    if not is_known:
        raise Uncertain("tool_calls")
    if isinstance(arguments, str) and reads_arguments:
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            raise Uncertain("tool_calls") from None
        if not isinstance(arguments, dict):
            raise Uncertain("tool_calls")
    return {"id": identity, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if tools is None or choice == "none":
        return None
    if not isinstance(tools, list):
        raise Uncertain("tools")
    seen = [_tool(tool) for tool in tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        seen = [tool for tool in seen if tool["function"]["name"] == name]
    elif choice not in (None, "auto", "required"):
        raise Uncertain("tool_choice")
    return seen or None


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise Uncertain("tools")
    kind, defer = tool.get("type", "function"), tool.get("defer_loading")
    inner_defer = function.get("defer_loading")
    inner_defer = defer if inner_defer is None else inner_defer
    known: dict[str, Any] = {
        "description": function.get("description"),
        "name": function.get("name"),
        "parameters": read_alike(function.get("parameters"), "tools"),
        "strict": function.get("strict"),
        "defer_loading": inner_defer,
    }
    is_known = (
        isinstance(kind, str)
        and isinstance(known["description"], str | None)
        and isinstance(known["name"], str)
        and all(isinstance(each, bool | None) for each in (known["strict"], defer, inner_defer))
    )
    if not is_known:
        raise Uncertain("tools")
    for name in ("strict", "defer_loading"):
        if known[name] is None:
            del known[name]
    order = [name for name in function if name in known] + [name for name in known if name not in function]
    return {"type": kind, "function": {name: known[name] for name in order}, "defer_loading": defer}


def _arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = fields.get("chat_template_kwargs")
    given = {} if given is None else given
    if not isinstance(given, Mapping) or given.keys() & RESERVED_ARGUMENTS:
        raise Uncertain("chat_template_kwargs")
    reasoning, effort = fields.get("reasoning"), fields.get("reasoning_effort")
    if reasoning is not None or effort not in (None, *EFFORTS):
        raise Uncertain("reasoning" if reasoning is not None else "reasoning_effort")
    arguments: dict[str, Any] = {}
    if effort is not None:
        is_on = effort != "none"
        arguments = {"reasoning_effort": effort, "thinking": is_on, "enable_thinking": is_on}
        if effort == "low":
            arguments["low_effort"] = True
    read_alike(dict(given), "chat_template_kwargs")
    return {**arguments, **given}
