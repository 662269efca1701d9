"""Requests that engines render in ways of their own, and templates that show every difference: for all parity tests."""

from typing import Any

Fields = dict[str, Any]

USER = {"role": "user", "content": "What is the weather?"}
WEATHER = {
    "type": "function",
    "function": {
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["°C", "°F"]}, "city": {"type": "string"}},
            "required": ["city"],
        },
        "name": "get_weather",
        "description": "The weather <now> & here",
    },
}
BARE = {"type": "function", "function": {"name": "ping"}}
STRICT = {"function": {"name": "pong", "strict": True, "odd": 1, "description": None}, "odd": 2, "type": "function"}
CALL = {
    "type": "function",
    "function": {"arguments": '{"unit": "°C", "city": "Köln", "n": [1, 2.50, null, true]}', "name": "get_weather"},
    "id": "call00001",
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"t": 12}'}
TORTURE = (
    "e\u0301 \u00e9 \ufb01 \u1100\u1161 👩‍👩‍👧 \u200b\u00a0\u3000 ﷽ \u202eabc\u202c \x1c\x85\u2028 𐍈 "
    "\r\n\t <|im_end|> </s> {{ x }} {% if %} 中文。日本語 ١٢٣ '\"\\"
)


def _called(arguments: str, **other: Any) -> Fields:
    call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call], **other}, RESULT]
    return {"messages": messages, "tools": [WEATHER]}


CHATS: dict[str, Fields] = {
    "plain": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "multi-turn": {
        "messages": [USER, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And now?"}]
    },
    "closed": {"messages": [USER, {"role": "assistant", "content": "Rain."}], "add_generation_prompt": False},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "It is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued, trimmed": {
        "messages": [USER, {"role": "assistant", "content": "It is  \n"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continued and open": {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
    "tools": {"messages": [USER], "tools": [WEATHER, BARE, STRICT]},
    "tools not to be used": {"messages": [USER], "tools": [WEATHER, BARE], "tool_choice": "none"},
    "a deferred tool": {"messages": [USER], "tools": [{**BARE, "defer_loading": True}]},
    "no tools in a list": {"messages": [USER], "tools": []},
    "tool call and result": {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]},
    "tool call with tools": _called(CALL["function"]["arguments"]),
    "two calls": {
        "messages": [
            USER,
            {"role": "assistant", "content": "Two.", "tool_calls": [CALL, {**CALL, "id": "call00002", "index": 1}]},
            RESULT,
            {**RESULT, "tool_call_id": "call00002", "name": "get_weather"},
            USER,
        ],
        "tools": [WEATHER],
    },
    "malformed arguments": _called('{"city": '),
    "arguments that are no object": _called("[1]"),
    "no arguments": _called(""),
    "arguments with a large number": _called('{"n": 123456789012345678901234567890, "x": 1e400}'),
    "a call without an id": {
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": None}]}, RESULT]
    },
    "no calls in a list": {"messages": [USER, {"role": "assistant", "content": "Hm.", "tool_calls": []}, USER]},
    "result in parts": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {**RESULT, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    },
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"text": "a ", "type": "text"}, {"type": "text", "text": "\nb"}]},
        ]
    },
    "cached parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
        ]
    },
    "an empty part": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "a"}]}]
    },
    "no parts": {"messages": [{"role": "user", "content": []}]},
    "strings as parts": {"messages": [{"role": "user", "content": ["a"]}]},
    "thoughts as parts": {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "h"}, {"type": "text", "text": "b"}]},
            USER,
        ]
    },
    "no content": {"messages": [USER, {"role": "assistant", "content": None}, USER]},
    "a user without content": {"messages": [{"role": "user", "content": None}]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "system and developer": {
        "messages": [
            {"role": "system", "content": "One."},
            USER,
            {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
            {"role": "system", "content": ""},
            USER,
        ]
    },
    "billing header": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."}, USER]
    },
    "only a billing header": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1"}, USER]},
    "reasoning": {
        "messages": [USER, {"role": "assistant", "content": "Rain.", "reasoning": "Clouds."}, USER],
    },
    "reasoning by its old name": {
        "messages": [USER, {"role": "assistant", "content": "Rain.", "reasoning_content": "Clouds."}, USER],
    },
    "thoughts in the text": {
        "messages": [USER, {"role": "assistant", "content": "<think>\nClouds.\n</think>\n\nRain."}, USER],
    },
    "an answer sent back": {
        "messages": [
            USER,
            {"role": "assistant", "content": "Rain.", "refusal": None, "audio": None, "function_call": None},
            USER,
        ]
    },
    "names": {"messages": [{**USER, "name": "Ann"}, {"role": "assistant", "content": "Rain.", "name": "Bot"}, USER]},
    "unknown fields": {"messages": [{**USER, "odd": 1}], "odd": 2},
    "thinking on": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "thinking off": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
    "thinking unsaid": {
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": None},
        "reasoning_effort": "low",
    },
    "effort": {"messages": [USER], "reasoning_effort": "low"},
    "no effort": {"messages": [USER], "reasoning_effort": "none"},
    "effort against thinking": {
        "messages": [USER],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "an effort nobody knows": {"messages": [USER], "reasoning_effort": "enormous"},
    "arguments": {
        "messages": [USER],
        "chat_template_kwargs": {"date_string": "1 Jan 2026", "extra": {"b": 1, "a": "ü"}, "auto": "auto"},
    },
    "arguments for special tokens": {"messages": [USER], "chat_template_kwargs": {"bos_token": "<bos>"}},
    "reserved arguments": {"messages": [USER], "chat_template_kwargs": {"tokenize": True}},
    "documents": {"messages": [USER], "documents": [{"title": "T", "text": "U & V"}, {"text": "W"}]},
    "documents of numbers": {"messages": [USER], "documents": [{"text": 5}]},
    "special tokens": {"messages": [USER], "add_special_tokens": True},
    "torture": {"messages": [{"role": "system", "content": TORTURE}, {"role": "user", "content": TORTURE}]},
    "white space": {
        "messages": [{"role": "user", "content": " \n a \n "}, {"role": "assistant", "content": "\n"}, USER]
    },
}

MESSAGES: dict[str, Fields] = {
    "plain": {"messages": [USER]},
    "system": {"system": "Be brief.", "messages": [USER]},
    "system in blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " Be kind."},
        ],
        "messages": [USER],
    },
    "system within": {"system": "One.", "messages": [USER, {"role": "system", "content": "Two."}, USER]},
    "blocks": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": [{"type": "text", "text": "d"}]},
        ]
    },
    "thoughts": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Clouds.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Rain."},
                ],
            },
            USER,
        ]
    },
    "tools": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "call00001", "name": "get_weather", "input": {"city": "Köln", "n": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": "12 °C"}]},
        ],
        "tools": [
            {"name": "get_weather", "description": "W", "input_schema": {"properties": {"city": {"type": "string"}}}},
            {"name": "ping", "input_schema": {"type": "object"}},
        ],
        "tool_choice": {"type": "auto"},
    },
    "a result in blocks": {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "call00001", "name": "ping", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call00001",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ]
    },
    "thinking on": {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 2048}},
    "thinking off": {"messages": [USER], "thinking": {"type": "disabled"}},
    "effort": {"messages": [USER], "output_config": {"effort": "high"}},
}
"""Of `/v1/messages`, without `model` and `max_tokens`."""

RESPONSES: dict[str, Fields] = {
    "text": {"input": "What is the weather?"},
    "instructions": {"input": "What is the weather?", "instructions": "Be brief."},
    "messages": {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"type": "message", "role": "user", "content": "d"},
        ]
    },
    "tools": {
        "input": "What is the weather?",
        "tools": [{"type": "function", **WEATHER["function"], "strict": None}],
    },
    "effort": {"input": "What is the weather?", "reasoning": {"effort": "low"}},
    "an agent's turns": {
        "input": [
            {"role": "user", "content": "What is the weather?"},
            {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Köln"}'},
            {"type": "function_call", "call_id": "c2", "name": "ping", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "12 °C"},
            {"type": "function_call_output", "call_id": "c2", "output": "pong"},
            {"type": "reasoning", "id": "r2", "summary": [{"type": "summary_text", "text": "So."}]},
            {
                "type": "message",
                "id": "m1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Rain.", "annotations": []}],
            },
            {"role": "assistant", "content": "And wind."},
            {"type": "function_call", "call_id": "c3", "name": "ping", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c3", "output": ""},
        ],
        "tools": [{"type": "function", "name": "ping"}],
    },
}
"""Of `/v1/responses`, without `model`."""

SHOW_ALL = (
    "{% for message in messages %}{{ message | tojson }}\n{% endfor %}"
    "tools={{ (tools or none) | tojson }} documents={{ (documents or none) | tojson }} "
    "open={{ add_generation_prompt }} bos={{ bos_token }} effort={{ reasoning_effort }} thinking={{ enable_thinking }} "
    "extra={{ extra | tojson if extra }}"
    "{{ auto }}{{ date_string }}"
)
PARTS = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part | tojson }}"
    "{% if part.type == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if reasoning_effort %}[{{ 'low' if reasoning_effort == 'low' else 'most' }}]{% endif %}"
)
DEVELOPERS = (
    "{%- for m in messages %}{% if m['role'] == 'developer' %}[dev {{ m.tools is none }}]{% else %}[{{ m['role'] }}]"
    "{% endif %}{{ m['content'] | trim }}{% generation %}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}\n"
    "  {% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
    "{% for d in documents or [] %}{% if loop.index > 1 %}{% break %}{% endif %}{{ d.title }}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)
TEMPLATES = {"shows all": SHOW_ALL, "parts": PARTS, "developers": DEVELOPERS, "system first": SYSTEM_FIRST}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
