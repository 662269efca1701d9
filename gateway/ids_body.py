"""A request's body with its prompt as token ids: what was encoded here needn't be encoded there. Pure.

| endpoint | kind of engine | the field that is added |
|---|---|---|
| `/v1/completions` | any | `prompt`, once more, with the ids: the last of two keys counts |
| `/v1/chat/completions` | vLLM 0.32 (`renderers/online_renderer.py`) | `kv_transfer_params.prompt_token_ids` |
| `/v1/chat/completions` | SGLang 0.5.23 (`serving_chat.py`) | `input_ids` |

The messages stay in the body: tools, structured output and stop texts come from them as ever. vLLM takes the ids out of
the field before a connector sees it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from gateway.encoding.encoder import Encoding
from gateway.openai_schema import CHAT, COMPLETIONS, InferenceRequest

CHAT_FIELDS: Mapping[str, bytes] = {
    "vllm": b'"kv_transfer_params":{"prompt_token_ids":%s}',
    "sglang": b'"input_ids":%s',
}
"""By kind of engine, whose chats are encoded here."""
PROMPT_FIELD = b'"prompt":%s'
LEFT_AS_TEXT = (
    "echo",  # the prompt's text is part of the answer
    "prompt_logprobs",
    "logprob_start_len",
    "kv_transfer_params",  # a client's own is left alone
    "input_ids",
    "suffix",
    "prompt_embeds",
    "use_beam_search",
    "continue_final_message",  # SGLang takes the message for a part of the answer
)
"""Fields with which the text matters beyond its ids, or that say the ids already."""


def body_with_ids(request: InferenceRequest, kind: str, encoding: Encoding, context_tokens: int) -> bytes | None:
    """The request's body with the ids added, byte for byte otherwise; `None` if they must not be, or needn't."""
    field = field_for(request.endpoint, kind)
    if field is None or not encoding.tokens or not encoding.is_whole:
        return None
    fields = request.fields
    if any(fields.get(name) is not None and fields[name] is not False for name in LEFT_AS_TEXT):
        return None
    if request.endpoint == COMPLETIONS and (len(request.prompts) != 1 or not isinstance(request.prompts[0], str)):
        return None
    if len(encoding.tokens) // 4 + _answer_tokens(fields) > context_tokens:
        return None  # the engine refuses it, and shall say so of what the client sent
    return spliced(request.body, field, encoding.tokens)


def field_for(endpoint: str, kind: str) -> bytes | None:
    """The field that takes ids, with `%s` for their list; `None` where no field is known."""
    if endpoint == COMPLETIONS:
        return PROMPT_FIELD
    return CHAT_FIELDS.get(kind) if endpoint == CHAT else None


def spliced(body: bytes, field: bytes, tokens: bytes) -> bytes:
    """A JSON object that isn't empty, with one field more at its end, where it counts before one of the same name."""
    ids = orjson.dumps(np.frombuffer(tokens, np.uint32), option=orjson.OPT_SERIALIZE_NUMPY)
    return b"%s,%s}" % (body.rstrip()[:-1], field % ids)


def _answer_tokens(fields: Mapping[str, Any]) -> int:
    """What is kept free of the context for the answer, at least."""
    asked = [fields.get(name) for name in ("max_tokens", "max_completion_tokens")]
    return max([each for each in asked if isinstance(each, int)], default=1)
