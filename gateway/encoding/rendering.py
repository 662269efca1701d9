"""What a renderer gives: the text that an engine tokenizes, or the token ids, or the reason why neither is known."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.openai_schema import InferenceRequest


class Uncertain(Exception):
    """This request can't be rendered exactly; the message is a short reason, fit for a metric's label."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. `then` is encoded by itself, and its ids follow; a special token before it is left out.

    Where `reason` is given, the prompt goes on in a way that isn't known, and `rest_tokens` is a guess at how far: of
    `text`, what a longer text can't change is exact.
    """

    text: str
    adds_special: bool = False
    then: str = ""
    reason: str = ""
    rest_tokens: int = 0


class Renderer(Protocol):
    """Knows what one family of engines makes of a request."""

    def prompt(self, request: InferenceRequest) -> Rendered | bytes:
        """The prompt that decides the routing, or its token ids (little-endian u32). Raises `Uncertain`."""
        ...

    def reads_cache(self, request: InferenceRequest) -> bool:
        """Whether the engine uses what it has cached of the prompt."""
        ...


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """A field that is true or false. Raises `Uncertain` for anything else."""
    value = fields.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Uncertain(name)
    return value


def read_alike(value: Any, name: str) -> Any:
    """The value, if every reader of JSON makes the same of it. Raises `Uncertain`.

    The gateway's reader gives whole numbers beyond 64 bits as floats; Python's, which engines use, as they are.
    """
    if isinstance(value, float):
        if math.isinf(value) or abs(value) >= 2**63:
            raise Uncertain(name)
    elif isinstance(value, Mapping):
        for each in value.values():
            read_alike(each, name)
    elif isinstance(value, list):
        for each in value:
            read_alike(each, name)
    return value
