"""Where a gap between added tokens may be cut so that its pieces' ids, joined, are its own. Pure.

Byte-level families split a text by a regular expression and run BPE on each match. The expressions look ahead and never
back. So a cut at p changes nothing if p is a boundary between two matches, and no match that ends at or before p looks
past it. With "L" an ASCII letter and "|" the cut:

| cut | GPT-2 | cl100k | o200k | DeepSeek | why |
|---|---|---|---|---|---|
| `L| L` | yes | yes | yes | yes | a match of letters ends before a space; ` L` begins one |
| `.| L` | yes | yes | yes | yes | a match of marks ends before a space |
| `\\n|L` | after a visible character | yes | yes | yes | `\\s*[\\r\\n]+` comes before `\\s+(?!\\S)`, but for GPT-2 |
| `L|\\n\\n` | after a visible character | no | no | no | marks swallow the line ends that follow, but for GPT-2 |
| `漢|。` | yes | yes | yes | yes | letters end before a mark |

`\\s+(?!\\S)` gives its last character back where something visible follows; so for GPT-2 a line end belongs to the
spaces before it or not, and only one that follows something visible is known to stand alone. Never inside digits
(groups of three), between spaces, before an apostrophe, or before a combining mark. With NFC the right side begins with
a character that composes with nothing before it.

SentencePiece's BPE runs over the whole gap. A merge can only make an entry of the vocabulary; so if no entry holds
"ab", no merge ever bridges a|b, and BPE(left + right) = BPE(left) + BPE(right).

Character classes are ASCII or narrow ranges on purpose: Python, Rust and Oniguruma agree on them. Which of the safe
places are used depends on the text right behind them alone, not on where it stands: a document gives the same pieces in
every prompt, but for those at its ends.

Line ends are places before the split at added tokens, too: if no added token holds a line end beside something visible,
none can span such a place, and what lies on either side is split as before.
"""

import functools
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gateway.encoding.pipeline import Family, Pipeline, Prefix

LONG = 4
"""What is longer than so many times the aim is cut, or cut again at a finer kind of place."""
STRETCH_CHARS = 1024
"""Aimed at for stretches of whole prompts."""

LETTERS = frozenset(string.ascii_letters)
VISIBLE = frozenset(map(chr, range(0x21, 0x7F)))
HAN = frozenset(map(chr, range(0x4E00, 0x9FA6)))
_ODD = re.escape(" " + "".join(map(chr, range(0x21, 0x7F, 2)))) + "\u4e01-\u76ff"
"""Characters of an odd number among the visible ASCII ones, and as large a share of the common Han."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """Cut `offset` characters after the start of each match whose neighbours are among `before` and `after`.

    Expressions begin with a literal, which `re` finds an order of magnitude faster than one that looks behind. `apart`
    is about how many characters lie between two such places.
    """

    pattern: re.Pattern[str]
    offset: int
    apart: int
    before: frozenset[str] | None = None
    after: frozenset[str] | None = None

    def places(self, text: str) -> list[int]:
        """Where `text` may be cut, ascending."""
        return self._places(self.pattern, text)

    def chosen_places(self, text: str, aim_chars: int) -> list[int]:
        """Those of them that leave pieces of about `aim_chars`, chosen by what follows."""
        halvings = (aim_chars // self.apart).bit_length() - 1
        return self._places(_choosing(self.pattern, halvings) if halvings > 0 else self.pattern, text)

    def _places(self, pattern: re.Pattern[str], text: str) -> list[int]:
        offset, before, after = self.offset, self.before, self.after
        matches = [match.span() for match in pattern.finditer(text)]
        if before is not None:
            matches = [(start, end) for start, end in matches if start and text[start - 1] in before]
        if after is not None:
            matches = [(start, end) for start, end in matches if text[end] in after]
        return [start + offset for start, _ in matches]


@functools.cache
def _choosing(pattern: re.Pattern[str], halvings: int) -> re.Pattern[str]:
    """A pattern for about one in 2**`halvings` of its places: those behind which every fourth character is odd.

    About half of all characters are, in any prose or code, and neighbours within a word aren't drawn apart. `re` looks
    at them itself: a checksum of each place would cost more than the search.
    """
    return re.compile(f"{pattern.pattern}(?=(?:.{{3}}[{_ODD}]){{{halvings}}})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CutRules:
    """From coarse to fine; none: nothing is cut. `between_tokens` is whether `lines` hold in whole prompts, too."""

    lines: tuple[CutRule, ...] = ()
    within: tuple[CutRule, ...] = ()
    between_tokens: bool = False

    @property
    def every(self) -> tuple[CutRule, ...]:
        """All of them."""
        return self.lines + self.within


_PARAGRAPH, _LINE = re.compile("\n\n(?=[A-Za-z])"), re.compile("\n(?=[A-Za-z])")
_SENTENCE, _WORD, _FULL_STOP = re.compile(r"\. (?=[A-Za-z])"), re.compile(" (?=[A-Za-z])"), re.compile("。")
_LINES = (CutRule(_PARAGRAPH, 2, 256), CutRule(_LINE, 1, 64))
_GPT2_LINES = (CutRule(_PARAGRAPH, 0, 256, VISIBLE), CutRule(_LINE, 1, 64, VISIBLE))
_SENTENCES, _WORDS, _FULL_STOPS = (
    CutRule(_SENTENCE, 1, 128),
    CutRule(_WORD, 0, 8, LETTERS),
    CutRule(_FULL_STOP, 0, 32, HAN),
)
_WITHIN = (_SENTENCES, _FULL_STOPS, _WORDS)

RULES: dict[Family, CutRules] = {
    Family.GPT2: CutRules(_GPT2_LINES, _WITHIN),
    Family.CL100K: CutRules(_LINES, _WITHIN),
    Family.O200K: CutRules(_LINES, _WITHIN),
    Family.DEEPSEEK: CutRules(_LINES, _WITHIN),
}


def cut_rules(pipeline: Pipeline) -> CutRules:
    """The rules for a pipeline; for SentencePiece those that its vocabulary allows."""
    if pipeline.family is None:
        return CutRules()
    is_sentencepiece = pipeline.family is Family.SENTENCEPIECE
    rules = _sentencepiece_rules(pipeline.vocabulary) if is_sentencepiece else RULES[pipeline.family]
    return replace(rules, between_tokens=_hold_between_tokens(pipeline, rules))


def _hold_between_tokens(pipeline: Pipeline, rules: CutRules) -> bool:
    tokens = pipeline.added_tokens
    if any(token.strips_before or token.strips_after for token in tokens):
        return False
    if any(re.search("\n[A-Za-z]|[!-~]\n", token.content) for token in tokens):
        return False
    # Where every gap has a prefix, what follows a place must go on with a gap, and not begin one.
    goes_on = all(rule.offset for rule in rules.lines) and not any(token.content.endswith("\n") for token in tokens)
    return goes_on or pipeline.prefix is not Prefix.GAPS


def _sentencepiece_rules(vocabulary: Iterable[str]) -> CutRules:
    pairs: set[str] = set()
    characters: set[str] = set()
    for token in vocabulary:
        spelling = token.replace("▁", " ")
        pairs.update(map("".join, pairwise(spelling)))
        if len(spelling) == 1:
            characters.add(spelling)
    # A character that isn't in the vocabulary may be fused with its neighbour into one unknown token.
    letters = LETTERS & characters
    openers = frozenset(letter for letter in letters if f"\n{letter}" not in pairs)
    lines = tuple(replace(rule, after=openers) for rule in _LINES)
    if " " not in characters:
        return CutRules(lines)
    within: list[CutRule] = []
    if ". " not in pairs:
        within.append(_SENTENCES)
    if "。" in characters:
        within.append(replace(_FULL_STOPS, before=frozenset(each for each in HAN if f"{each}。" not in pairs)))
    within.append(replace(_WORDS, before=frozenset(each for each in letters if f"{each} " not in pairs)))
    return CutRules(lines, tuple(within))


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts by `rules` into pieces of about `piece_chars`, and whole prompts into stretches of about `stretch_chars`."""

    rules: CutRules
    piece_chars: int
    stretch_chars: int = STRETCH_CHARS

    @property
    def uncut_chars_max(self) -> int:
        """What is no longer is encoded as it is."""
        return LONG * self.piece_chars

    def stretches(self, prompt: str, goes_on: bool = False) -> Sequence[str]:
        """A whole prompt in stretches, added tokens and all; or the rest of one, which `goes_on` from the end of one of
        its stretches. Where they end doesn't depend on what lies before, so a rest is cut as the whole prompt is.
        """
        rules = self.rules.lines if self.rules.between_tokens else ()
        if not rules or (len(prompt) <= LONG * self.stretch_chars and not goes_on):
            return [prompt]
        return _cut_at(prompt, self._stretch_places(prompt, rules))

    def opening_chars(self, prompt: str) -> int:
        """How long the shortest part is that a whole prompt may be cut off after; 0 where none is short."""
        rules = self.rules.lines if self.rules.between_tokens else ()
        opening = prompt[: self.stretch_chars]
        return min((place for rule in rules for place in rule.places(opening) if place), default=0)

    def pieces(self, gap: str) -> Sequence[str]:
        """What lies between two added tokens, in pieces."""
        return self._cut(gap, self.rules.every, self.piece_chars)

    def _stretch_places(self, prompt: str, rules: Sequence[CutRule]) -> Iterable[int]:
        return sorted({place for rule in rules for place in rule.chosen_places(prompt, self.stretch_chars)})

    def _cut(self, text: str, rules: Sequence[CutRule], aim_chars: int) -> Sequence[str]:
        long = LONG * aim_chars
        pieces = [text]
        for rule in rules:
            if all(len(piece) <= long for piece in pieces):
                break
            finer: list[str] = []
            for piece in pieces:
                if len(piece) <= long:
                    finer.append(piece)
                else:
                    finer += _cut_at(piece, rule.chosen_places(piece, aim_chars))
            pieces = finer
        return pieces


class CutterEverywhere(Cutter):
    """Cuts wherever the rules allow it: what a proof tries.

    With 0 `piece_chars` stretches are taken apart, too; with many they are encoded as they are.
    """

    def stretches(self, prompt: str, goes_on: bool = False) -> Sequence[str]:
        """See `Cutter`; short ones as well."""
        return super().stretches(prompt, goes_on=True)

    def _stretch_places(self, prompt: str, rules: Sequence[CutRule]) -> Iterable[int]:
        return _every_place(prompt, rules)

    def _cut(self, text: str, rules: Sequence[CutRule], aim_chars: int) -> Sequence[str]:
        return _cut_at(text, _every_place(text, rules))


def _every_place(text: str, rules: Sequence[CutRule]) -> list[int]:
    return sorted({place for rule in rules for place in rule.places(text)})


def _cut_at(text: str, places: Iterable[int]) -> list[str]:
    pieces, start = [], 0
    for place in places:
        if place > start:
            pieces.append(text[start:place])
            start = place
    pieces.append(text[start:])
    return pieces
