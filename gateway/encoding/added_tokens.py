"""Splits a text at a tokenizer's added tokens, exactly as Hugging Face `tokenizers` does.

All added tokens split a text, special or not, wherever they come from. Of several that begin at one place the longest
wins (leftmost-longest): cutting at any of them would be wrong for nested ones. Tokens that aren't normalized come
first, and in what they leave, the normalized ones. A token that strips takes the white space beside it, by Unicode's
White_Space, which isn't Python's: that one adds \\x1c to \\x1f.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from directory.chunks import pack_tokens

_SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_SPACES_AFTER = re.compile(f"[{_SPACES}]*")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One of a `tokenizer.json`'s added tokens."""

    content: str
    token_id: int
    strips_before: bool
    strips_after: bool
    is_normalized: bool


Segment = tuple[str, bytes | None, bool]
"""A part of a text; its ids (little-endian u32) where it is an added token, else whether it begins the text."""


class AddedTokenSplitter:
    """Splits at `tokens`. Immutable; safe to share between threads."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._ids = {token.content: pack_tokens([token.token_id]) for token in tokens}
        self._stripping = {token.content: token for token in tokens if token.strips_before or token.strips_after}
        self._passes = [
            re.compile(f"({_longest_first(contents)})")
            for is_normalized in (False, True)
            if (contents := [token.content for token in tokens if token.is_normalized == is_normalized])
        ]
        self._longest_chars = max((len(token.content) for token in tokens), default=0)

    def split(self, text: str) -> list[Segment]:
        """The text's segments, in order, none of them empty."""
        segments: list[Segment] = [(text, None, True)] if text else []
        for pattern in self._passes:
            if len(segments) == 1 and segments[0][1] is None:
                segments = self._split_at(pattern, text, True)
                continue
            parts: list[Segment] = []
            for segment in segments:
                if segment[1] is None:
                    parts += self._split_at(pattern, segment[0], segment[2])
                else:
                    parts.append(segment)
            segments = parts
        return segments

    def certain_chars(self, text: str) -> int:
        """How many characters of `text` have the same ids by themselves as they have before any other text.

        They end with an added token, behind which there is room for the longest: no other can begin inside it, nor a
        longer one where it begins, that isn't there already. Zero where spaces are stripped: ends aren't tokens' ends.
        """
        if self._stripping:
            return 0
        end = certain = 0
        for content, ids, _ in self.split(text):
            end += len(content)
            if ids is not None and end + self._longest_chars <= len(text):
                certain = end
        return certain

    def _split_at(self, pattern: re.Pattern[str], text: str, at_start: bool) -> list[Segment]:
        if self._stripping:
            return self._split_and_strip(pattern, text, at_start)
        if pattern.search(text) is None:
            return [(text, None, at_start)]
        segments: list[Segment] = []
        ids = self._ids
        for place, part in enumerate(pattern.split(text)):
            if place & 1:
                segments.append((part, ids[part], False))
            elif part:
                segments.append((part, None, at_start and place == 0))
        return segments

    def _split_and_strip(self, pattern: re.Pattern[str], text: str, at_start: bool) -> list[Segment]:
        segments: list[Segment] = []
        position = 0
        for match in pattern.finditer(text):
            content, (start, end) = match[0], match.span()
            token = self._stripping.get(content)
            if token is not None and token.strips_before:
                start = position + len(text[position:start].rstrip(_SPACES))  # `re` would try each space of every run
            if token is not None and token.strips_after:
                spaces = _SPACES_AFTER.match(text, end)
                end = spaces.end() if spaces else end
            if position < start:
                segments.append((text[position:start], None, at_start and position == 0))
            segments.append((content, self._ids[content], False))
            position = end
        if position < len(text):
            segments.append((text[position:], None, at_start and position == 0))
        return segments


def _longest_first(words: Sequence[str]) -> str:
    """A regular expression for the longest of `words` at a place: their trie, written out.

    Alternatives differ in their first character, and what may follow is tried before what may be left out. Many times
    faster than the words as alternatives.
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _as_pattern(trie)


def _as_pattern(node: dict[str, Any]) -> str:
    alternatives = []
    for character in sorted(node.keys() - {""}):
        below, prefix = node[character], re.escape(character)
        while len(below) == 1 and "" not in below:
            ((character, below),) = below.items()
            prefix += re.escape(character)
        alternatives.append(prefix + _as_pattern(below))
    if not alternatives:
        return ""
    body = alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"
    return f"(?:{body})?" if "" in node else body
