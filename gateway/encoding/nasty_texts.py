"""Texts that tokenizers get wrong: many scripts, every kind of space, digits, contractions, added tokens whole and cut.

They prove, before anything is believed, that two ways of encoding give the same ids: a backend against the reference,
and pieces against whole texts. Drawn from a seed, so that a failure can be seen again.
"""
# ruff: noqa: RUF001 - characters that look like others are what this is about

import random
from collections.abc import Iterator, Sequence

_WORDS = (
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "on", "are", "as", "with", "they", "be",
    "at", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were", "we", "when",
    "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their", "if", "will", "other",
    "about", "Tokenization", "International", "unbelievable", "JavaScript", "iPhone", "McDonald", "HTTPServer",
    "x", "I", "OK", "naïve", "café", "Zürich", "résumé", "WHO", "lowerUPPER", "snake_case", "kebab-case", "straße",
)  # fmt: skip
_SENTENCES = (
    "The tide runs twice a day. Nobody in the harbour asks why.",
    "See section 4.2 for details. It isn't long, and it's worth it!",
    "Berlin ist groß. Über den Dächern liegt Nebel.",
    "Mr. Smith paid $3.50 (about 3 EUR) at 10:45 a.m. on 2024-01-02.",
)
_CODE = (
    "def f(x):\n    return x + 1\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n\n", "import os\nimport re\n\n",
    "\n\t\tif x:  # why\n\t\t\tpass\n", '<div class="a">\n  <p>text</p>\n</div>', '{"key": [1, 2.5], "b": "c\\n"}',
    "SELECT * FROM t WHERE a = 'b';\n", "https://example.org/a/b?q=1&r=2#s", "/* c */ // d\n/e", "x = y  \n  z",
)  # fmt: skip
_CHINESE = "你好，世界。我们在这里讨论人工智能的发展。这是一个很长的句子，没有空格。今天天气很好！他说：「明天见。」"
_SPACES = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\x0b", "\x0c", "\x85", "\xa0", "\u1680", "\u2003", "\u2028",
    "\u2029", "\u3000", "\u200b", "\ufeff", "\x1c", "\x1d", "\x1e", "\x1f", "\u180e", "\u2060", " \n", "\n ",
    " \n \n  ", "\n\t\n",
)  # fmt: skip
_ODD = (
    "é", "e\u0301", "a\u0300\u0316", "\u0301", "n\u0303o", "한국어", "\u1112\u1161\u11ab", "\u1161", "\u11ab", "각",
    "각\u11a8", "ﬁ", "ß", "İ", "ı", "ǅ", "ʰ", "ª", "²", "½", "Ⅷ", "١٢٣", "๓", "𝟘𝟙", "१२", "㊿", "𐍈", "😀",
    "👩\u200d👩\u200d👧", "🇩🇪", "❤️", "\u200d", "\u200c", "नमस्ते", "ภาษาไทย", "שלום", "العربية", "日本語",
    "カタカナ", "ひらがな", "「」", "…", "—", "\u2019s", "\u2019", "“q”", "«»", "\x00", "\x07", "\x7f", "\ue000",
    "\U000e0001", "\ufffd", "\u2581", "\u2581\u2581", "Ġ", "Ċ", "\u0345", "\u0f71\u0f72", "\u0958", "\u2126", "\u212b",
    "\u1e9b\u0323", "\ud7a3", "</s>", "<s>",
)  # fmt: skip
_CONTRACTIONS = (
    "'s", "'S", "'t", "'re", "'LL", "'ve", "'m", "'d", "'sx", "don't", "it's", "I'M", "we'll", "'", "''", "\u2019t",
)  # fmt: skip
_MARKS: tuple[str, ...] = (
    *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "...", "!!", "?!", "->", "=>", "//", "/*", "*/", "://", "<|", "|>", "</",
    "<s", "[INST", "[[", "]]", "/\n", ".\n", "!\n\n", ").\n", ";\r\n", "\n/", "\n/a", ".\n/",
)  # fmt: skip
_NUMBERS = ("0", "1", "12", "123", "1234", "12345", "1234567890", "3.14", "1,000", "0x1F", "1e10", "2024-01-02")
_SHARES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.69, _ODD),
    (0.75, _CONTRACTIONS),
    (0.80, _NUMBERS),
    (0.84, _CODE),
    (0.90, _SENTENCES),
)
_EACH_LEAD = (
    range(0x800),
    range(0x800, 0xD800, 0x400),
    range(0xE000, 0x10000, 0x400),
    range(0x10000, 0x110000, 0x4000),
)
EVERY_BYTE = "".join(chr(point) for points in _EACH_LEAD for point in points)
"""A text with each byte that UTF-8 has: a vocabulary may lack any of them."""
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(0x100))
"""Texts that look like what SentencePiece calls its tokens of single bytes."""
_POINTS = ((32, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0x10000, 0x1FBFF), (0xE000, 0x10000))
_PIECES = (3, 10, 30, 60, 100, 200)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
"""The most common ones first, which are drawn more often."""


def nasty_texts(added_tokens: Sequence[str], count: int, seed: int = 0) -> Iterator[str]:
    """`count` texts of a few to a few thousand characters, the same for the same arguments."""
    choose = random.Random(seed)
    for _ in range(count):
        yield _text(choose, added_tokens)


def _text(choose: random.Random, added_tokens: Sequence[str]) -> str:
    pieces = []
    is_mostly_space = choose.random() < 0.15
    for _ in range(choose.choice(_PIECES)):
        kind = choose.random()
        if is_mostly_space and kind < 0.7:
            kind = kind * 0.5 + 0.35
        pieces.append(_piece(choose, kind, added_tokens))
    return "".join(pieces)


def _piece(choose: random.Random, kind: float, added_tokens: Sequence[str]) -> str:
    """A piece of the kind that a number below 1 stands for: the limits are the shares."""
    if kind < 0.42:
        return _word(choose) if kind < 0.30 else " " if choose.random() < 0.8 else choose.choice(_SPACES)
    if kind < 0.52:
        return choose.choice(_SPACES) * choose.choice((1, 1, 1, 2, 3, 7))
    if kind < 0.59:
        return choose.choice(_MARKS) * choose.choice((1, 1, 1, 2, 5))
    for limit, pieces in _SHARES:
        if kind < limit:
            return choose.choice(pieces)
    if kind < 0.92:
        start = choose.randrange(len(_CHINESE))
        return _CHINESE[start : start + choose.randrange(40)]
    if kind < 0.95 and added_tokens:
        token = choose.choice(added_tokens)
        return token if choose.random() < 0.7 else token[: choose.randrange(len(token) + 1)]
    return chr(choose.randrange(*choose.choice(_POINTS))) if kind < 0.97 else f" {_word(choose)}"


def _word(choose: random.Random) -> str:
    if choose.random() < 0.7:
        return choose.choice(_WORDS)
    return "".join(_LETTERS[int(len(_LETTERS) * choose.random() ** 2)] for _ in range(choose.randrange(1, 12)))
