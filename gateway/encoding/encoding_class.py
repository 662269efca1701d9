"""How far a prompt's token ids are known, in the one word that clients and operators are told."""

from typing import Literal

from gateway.encoding.encoder import Encoding

EncodingClass = Literal["exact", "up-to", "affinity"]


def encoding_class(encoding: Encoding) -> EncodingClass:
    """`exact`: all ids; `up-to`: those before the first part that isn't known; `affinity`: none."""
    if encoding.tokens is None:
        return "affinity"
    return "exact" if encoding.is_whole else "up-to"
