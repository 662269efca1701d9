"""Fields of a request by which it reaches into vLLM's cache. Pure. Read from vLLM 0.32's source:

| field | what vLLM does with it | here |
|---|---|---|
| `vllm_xargs.kv_cache_report_mode` | "full" announces blocks again that are held (`v1/request.py`) | refused |
| `vllm_xargs.kv_transfer_params`, `.ec_transfer_params` | override the fields of that name, of any type | refused |
| `kv_transfer_params` | narrows what is loaded (`max_load_tokens`, tiers), may bring token ids | not encoded |
| `prompt_logprobs`, `echo` (with `logprobs` for completions) | nothing cached is read (`sampling_params.py`) | no hit |
| `cache_salt` | part of the first block's hash | in the keys |

What is stored doesn't change by any of them. `skip_reading_prefix_cache` and pooling parameters aren't fields of the
endpoints served here.
"""

from collections.abc import Mapping
from typing import Any

from gateway.errors import InvalidRequest
from gateway.openai_schema import CHAT

XARGS = "vllm_xargs"
REPORT_MODE, INCREMENTAL = "kv_cache_report_mode", "incremental"
TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
"""Texts that pydantic takes for false."""


def refuse_reserved(fields: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for a field that would make what the fleet knows of an engine's cache wrong."""
    given = fields.get(XARGS)
    if not isinstance(given, Mapping):
        return  # vLLM refuses it, if it is anything
    if given.get(REPORT_MODE, INCREMENTAL) != INCREMENTAL:
        where = f"{XARGS}.{REPORT_MODE}"
        raise InvalidRequest(f'{where} must be "{INCREMENTAL}" or left out: this fleet counts what is cached', where)
    for name in TRANSFERS:
        if name in given:
            where = f"{XARGS}.{name}"
            raise InvalidRequest(f"{where} isn't taken; {name} is a field of its own", where)


def reads_cache(endpoint: str, fields: Mapping[str, Any]) -> bool:
    """Whether vLLM looks the prompt up in its caches: not where it is to tell logprobs of the prompt's tokens."""
    if fields.get("prompt_logprobs") is not None:
        return False
    echo = fields.get("echo")
    is_echoed = echo.lower() not in _FALSE if isinstance(echo, str) else bool(echo)
    if not is_echoed:
        return True
    return endpoint != CHAT and fields.get("logprobs") is None  # a chat's top_logprobs is 0 where it isn't said
