"""A request for another model: the same body, byte for byte, but for the name of its model. Pure.

JSON isn't written anew: its numbers, its order and its fields that nobody here knows stay as the client wrote them. Of
two keys of one name JSON's readers take the last, or the first; so each is changed.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

import orjson

from gateway.form_body import form_fields
from gateway.openai_schema import InferenceRequest

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")


def with_model(request: InferenceRequest, model: str) -> InferenceRequest:
    """The request as if it had asked for `model`."""
    body = request.body
    if request.content_type:
        named = [each for each in form_fields(body, request.content_type) if each.name == "model"]
        spans, said = [(each.start, each.end) for each in named], model.encode()
    else:
        spans, said = list(_model_spans(body)), orjson.dumps(model)
    pieces, place = [], 0
    for start, end in spans:
        pieces += [body[place:start], said]
        place = end
    changed = b"".join([*pieces, body[place:]])
    return replace(request, body=changed, model=model, fields={**request.fields, "model": model})


def _model_spans(body: bytes) -> Iterator[tuple[int, int]]:
    """Where the texts stand that are the value of a key `model` of the outermost object; `body` is valid JSON."""
    depth, place = 0, 0
    while (token := _TOKEN.search(body, place)) is not None:
        place = token.end()
        first = token[0][:1]
        if first != b'"':
            depth += 1 if first in b"{[" else -1
            continue
        if depth != 1 or (colon := _COLON.match(body, place)) is None or not _is_model(token[0]):
            continue
        value = _TOKEN.match(body, colon.end())
        if value is not None and value[0][:1] == b'"':
            yield value.span()
            place = value.end()


def _is_model(key: bytes) -> bool:
    return key == b'"model"' or (b"\\" in key and len(key) <= len(b'"model"') * 6 and orjson.loads(key) == "model")
