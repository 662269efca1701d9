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

Character classes are ASCII or narrow ranges on purpose: Python, Rust and Oniguruma agree on them. Pieces depend on
their text alone, not on where it stands: a document gives the same pieces in every prompt.
"""

import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gateway.encoding.pipeline import Family

UNCUT_CHARS_MAX = 2048
"""Gaps up to here are kept whole: most messages of a conversation."""
PIECE_CHARS = 512
"""Pieces longer than this are cut again, at a finer kind of place."""

LETTERS = frozenset(string.ascii_letters)
VISIBLE = frozenset(map(chr, range(0x21, 0x7F)))
HAN = frozenset(map(chr, range(0x4E00, 0x9FA6)))


@dataclass(frozen=True, slots=True)
class CutRule:
    """Cut `offset` characters after the start of each match whose neighbours are among `before` and `after`.

    Expressions begin with a literal, which `re` finds an order of magnitude faster than one that looks behind.
    """

    pattern: re.Pattern[str]
    offset: int
    before: frozenset[str] | None = None
    after: frozenset[str] | None = None

    def places(self, text: str) -> list[int]:
        """Where `text` may be cut, ascending."""
        offset, before, after = self.offset, self.before, self.after
        places = [match.start() for match in self.pattern.finditer(text)]
        if before is not None:
            places = [place for place in places if place and text[place - 1] in before]
        if after is not None:
            length = len(self.pattern.pattern.partition("(")[0].replace("\\", ""))
            places = [place for place in places if text[place + length] in after]
        return [place + offset for place in places] if offset else places


@dataclass(frozen=True, slots=True)
class CutRules:
    """From coarse to fine; `words` last, where nothing else made a piece short. No rules: nothing is cut."""

    coarse: tuple[CutRule, ...] = ()
    words: CutRule | None = None


_PARAGRAPH, _LINE = re.compile("\n\n(?=[A-Za-z])"), re.compile("\n(?=[A-Za-z])")
_SENTENCE, _WORD, _FULL_STOP = re.compile(r"\. (?=[A-Za-z])"), re.compile(" (?=[A-Za-z])"), re.compile("。")
_SENTENCES, _WORDS, _FULL_STOPS = CutRule(_SENTENCE, 1), CutRule(_WORD, 0, LETTERS), CutRule(_FULL_STOP, 0, HAN)
_LATER = (CutRule(_PARAGRAPH, 2), CutRule(_LINE, 1), _SENTENCES, _FULL_STOPS)

RULES: dict[Family, CutRules] = {
    Family.GPT2: CutRules(
        (CutRule(_PARAGRAPH, 0, VISIBLE), CutRule(_LINE, 1, VISIBLE), _SENTENCES, _FULL_STOPS), _WORDS
    ),
    Family.CL100K: CutRules(_LATER, _WORDS),
    Family.O200K: CutRules(_LATER, _WORDS),
    Family.DEEPSEEK: CutRules(_LATER, _WORDS),
}


def cut_rules(family: Family | None, vocabulary: Iterable[str]) -> CutRules:
    """The rules of a family; for SentencePiece those that the vocabulary allows."""
    if family is None:
        return CutRules()
    return _sentencepiece_rules(vocabulary) if family is Family.SENTENCEPIECE else RULES[family]


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
    rules: list[CutRule] = []
    openers = frozenset(letter for letter in letters if f"\n{letter}" not in pairs)
    rules += [replace(rule, after=openers) for rule in (CutRule(_PARAGRAPH, 2), CutRule(_LINE, 1))]
    if " " not in characters:
        return CutRules(tuple(rules))
    if ". " not in pairs:
        rules.append(_SENTENCES)
    if "。" in characters:
        rules.append(replace(_FULL_STOPS, before=frozenset(each for each in HAN if f"{each}。" not in pairs)))
    return CutRules(
        tuple(rules), replace(_WORDS, before=frozenset(each for each in letters if f"{each} " not in pairs))
    )


def pieces_by_content(text: str, rules: CutRules, piece_chars: int = PIECE_CHARS) -> Sequence[str]:
    """The text in pieces: by paragraphs, and what is longer than `piece_chars` by lines, sentences, words."""
    pieces = [text]
    for rule in rules.coarse:
        if all(len(piece) <= piece_chars for piece in pieces):
            return pieces
        finer: list[str] = []
        for piece in pieces:
            if len(piece) <= piece_chars:
                finer.append(piece)
            else:
                finer += _cut(piece, rule.places(piece))
        pieces = finer
    if rules.words is None:
        return pieces
    finer = []
    for piece in pieces:
        if len(piece) <= 2 * piece_chars:
            finer.append(piece)
            continue
        places, last = [], 0
        for place in rules.words.places(piece):
            if place - last >= piece_chars:
                places.append(place)
                last = place
        finer += _cut(piece, places)
    return finer


def pieces_everywhere(text: str, rules: CutRules) -> Sequence[str]:
    """The text cut wherever it may be: what a proof tries."""
    every = (*rules.coarse, rules.words) if rules.words else rules.coarse
    return _cut(text, sorted({place for rule in every for place in rule.places(text)}))


def _cut(text: str, places: Iterable[int]) -> list[str]:
    pieces, start = [], 0
    for place in places:
        if place > start:
            pieces.append(text[start:place])
            start = place
    pieces.append(text[start:])
    return pieces
