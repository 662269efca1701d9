"""How much of a prompt is known, in one word: the classes of the table in `README.md`."""

from gateway.encoding.encoder import Encoding


def encoding_class(encoding: Encoding) -> str:
    """`exact`: all ids; `up-to`: those before the first uncertain part; `affinity`: none."""
    if encoding.tokens is None:
        return "affinity"
    return "exact" if encoding.is_whole else "up-to"
