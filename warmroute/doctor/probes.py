"""Requests of every kind that engines render in ways of their own, with which token ids are compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.openai_schema import CHAT, COMPLETIONS

_USER = {"role": "user", "content": "What is the weather in Köln?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & here",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["°C", "°F"]}, "city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"unit": "°C", "city": "Köln", "n": [1, 2.50, null, true]}'},
}
_TORTURE = (
    "e\u0301 \u00e9 \ufb01 \u1100\u1161 👩‍👩‍👧 \u200b\u00a0\u3000 ﷽ \u202eabc\u202c \x1c\x85\u2028 𐍈 \r\n\t "
    "<|im_end|> </s> <s> {{ x }} {% if %} 中文。日本語 ١٢٣ '\"\\  1234567  \n\n\n  don't"
)


@dataclass(frozen=True, slots=True)
class Probe:
    """A request without its model: to `endpoint`, of the kind that `name` says."""

    name: str
    endpoint: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def _chat(name: str, *messages: Mapping[str, Any], **more: Any) -> Probe:
    return Probe(name, CHAT, {"messages": list(messages), **more})


PLAIN = _chat("plain", _USER)
TEXT = Probe("text", COMPLETIONS, {"prompt": "The tide runs twice a day, and the moon draws it."})
PROBES = (
    PLAIN,
    _chat("system", {"role": "system", "content": "Be brief."}, _USER),
    _chat("multi-turn", _USER, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And now?"}),
    _chat("developer", {"role": "developer", "content": "Be brief."}, _USER),
    _chat("parts", {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "\nb"}]}),
    _chat(
        "continued",
        _USER,
        {"role": "assistant", "content": "It is "},
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    _chat("closed", _USER, {"role": "assistant", "content": "Rain."}, add_generation_prompt=False),
    _chat("tools", _USER, tools=[_TOOL]),
    _chat(
        "tool results",
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": '{"t": 12}'},
        tools=[_TOOL],
    ),
    _chat("thinking on", _USER, chat_template_kwargs={"enable_thinking": True}),
    _chat("thinking off", _USER, chat_template_kwargs={"enable_thinking": False}),
    _chat("effort", _USER, reasoning_effort="low"),
    _chat("documents", _USER, documents=[{"title": "T", "text": "U & V"}]),
    _chat("Unicode", {"role": "system", "content": _TORTURE}, {"role": "user", "content": _TORTURE}),
    _chat("white space", {"role": "user", "content": " \n a \n "}, {"role": "assistant", "content": "\n"}, _USER),
    TEXT,
    Probe("Unicode text", COMPLETIONS, {"prompt": _TORTURE}),
    Probe("text with special tokens", COMPLETIONS, {"prompt": _TORTURE, "add_special_tokens": True}),
    Probe("text without special tokens", COMPLETIONS, {"prompt": _TORTURE, "add_special_tokens": False}),
)
