"""What is read of an OpenAI request, and what is refused: a field that would change the answer is never ignored.

Defaults are OpenAI's: temperature 1, top_p 1, one choice, 16 tokens for a completion and the rest of the context for
a chat. `cache_salt`, `ignore_eos` and a prompt of token ids are vLLM's. Fields that aren't known are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from directory.errors import IdentityRefused
from directory.identity import UNSCOPED, Scope
from nodeagent.engines.reference.errors import InvalidRequest
from nodeagent.engines.reference.sampling import SamplingSettings

COMPLETION_TOKENS_DEFAULT = 16
STOPS_MAX = 16
NAME_CHARS_MAX = 100
"""How much of a client's word an error repeats."""
GREEDY_BELOW = 1e-5

_SEED_MASK = 2**64 - 1

_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": ({},),
    "top_logprobs": (0,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "top_k": (0, -1),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "echo": (False,),
    "suffix": ("",),
    "chat_template": ("",),
    "truncate_prompt_tokens": (),
    "structured_outputs": ({},),
    "guided_json": ({}, ""),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "use_beam_search": (False,),
}
"""Fields this engine can't honour, with the values that ask for nothing. `null` asks for nothing everywhere."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What a chat and a completion have in common. `max_tokens` is None for as many as fit; else a field named it."""

    max_tokens: int | None
    max_tokens_field: str
    sampling: SamplingSettings
    stops: tuple[str, ...]
    scope: Scope
    ignore_eos: bool
    stream: bool
    include_usage: bool


def parse_body(body: bytes) -> dict[str, Any]:
    """A request's JSON object. Raises `InvalidRequest` for bad JSON or UTF-8, deep nesting, or lone surrogates."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Raise `InvalidRequest` (404) for a model that isn't served here; no model means the one there is."""
    model = body.get("model")
    if model is None:
        return
    if not isinstance(model, str):
        raise InvalidRequest("model must be a string", "model")
    if model != served:
        raise InvalidRequest(
            f"the model {model[:NAME_CHARS_MAX]!r} does not exist", "model", status=404, code="model_not_found"
        )


def read_options(body: Mapping[str, Any], *, is_chat: bool) -> GenerationOptions:
    """The options of a request. Raises `InvalidRequest` naming the first field at fault."""
    for name, harmless in _ASKS_NOTHING.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, each) for each in harmless):
            spelled = " or ".join(orjson.dumps(each).decode() for each in (*harmless, None))
            raise InvalidRequest(f"this engine can't honour {name}: it must be left out, or {spelled}", name)
    stream = read_flag(body, "stream")
    max_tokens_field, max_tokens = _read_max_tokens(body, is_chat=is_chat)
    return GenerationOptions(
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        sampling=_read_sampling(body),
        stops=_read_stops(body.get("stop")),
        scope=_read_scope(body.get("cache_salt")),
        ignore_eos=read_flag(body, "ignore_eos"),
        stream=stream,
        include_usage=_read_include_usage(body.get("stream_options"), stream=stream),
    )


def read_prompt(body: Mapping[str, Any], vocabulary: int) -> str | list[int]:
    """A completion's prompt: text, or token ids below `vocabulary`. A list of one prompt is that prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not _is_whole(prompt[0]):
        if len(prompt) > 1:
            raise InvalidRequest("this engine takes one prompt per request", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(_is_whole(token) for token in prompt):
        raise InvalidRequest("prompt must be a string or a list of token ids", "prompt")
    if any(not 0 <= token < vocabulary for token in prompt):
        raise InvalidRequest(f"prompt holds a token id outside 0..{vocabulary - 1}", "prompt")
    return prompt


def resolve_max_tokens(options: GenerationOptions, prompt_tokens: int, context_tokens: int, param: str) -> int:
    """How many tokens may be generated. Raises `InvalidRequest` where prompt and reply don't fit the context."""
    if prompt_tokens == 0:
        raise InvalidRequest(f"the prompt is empty; {param} must hold at least one token", param)
    room = context_tokens - prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens; prompt and reply together may have {context_tokens}",
            param,
            code="context_length_exceeded",
        )
    asked = options.max_tokens
    if asked is not None and asked > room:
        raise InvalidRequest(
            f"{options.max_tokens_field} must be at most {room}: the prompt has {prompt_tokens} tokens, and prompt and "
            f"reply together may have {context_tokens}",
            options.max_tokens_field,
            code="context_length_exceeded",
        )
    return room if asked is None else asked


def _read_max_tokens(body: Mapping[str, Any], *, is_chat: bool) -> tuple[str, int | None]:
    """The field that says it, and what it says."""
    for name in ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",):
        value = body.get(name)
        if value is not None:
            if not _is_whole(value) or value < 1:
                raise InvalidRequest(f"{name} must be a whole number of at least 1", name)
            return name, int(value)
    return "max_tokens", None if is_chat else COMPLETION_TOKENS_DEFAULT


def _read_sampling(body: Mapping[str, Any]) -> SamplingSettings:
    temperature = _number(body, "temperature", 1.0, 0.0, 2.0)
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise InvalidRequest("top_p must be greater than 0", "top_p")
    seed = body.get("seed")
    if seed is not None and not _is_whole(seed):
        raise InvalidRequest("seed must be a whole number", "seed")
    return SamplingSettings(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        seed=None if seed is None else seed & _SEED_MASK,
    )


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidRequest("stop must be a string or a list of strings, none of them empty", "stop")
    if len(stops) > STOPS_MAX:
        raise InvalidRequest(f"stop may hold at most {STOPS_MAX} strings", "stop")
    return tuple(stops)


def _read_scope(salt: Any) -> Scope:
    if salt is None:
        return UNSCOPED
    if not isinstance(salt, str) or not salt:
        raise InvalidRequest("cache_salt must be a string that isn't empty", "cache_salt")
    try:
        return Scope(salt=salt)
    except IdentityRefused as error:
        raise InvalidRequest(str(error), "cache_salt") from error


def _read_include_usage(options: Any, *, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object", "stream_options")
    if not stream:
        raise InvalidRequest("stream_options goes with stream: true only", "stream_options")
    value = options.get("include_usage")
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest("stream_options.include_usage must be true or false", "stream_options.include_usage")
    return bool(value)


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number between {low:g} and {high:g}", name)
    return float(value)


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A boolean field; absent or null is false. Raises `InvalidRequest`."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", name)
    return bool(value)


def _is_same(value: Any, other: Any) -> bool:
    """Equal as JSON: true isn't 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
