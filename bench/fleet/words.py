"""Text of a known number of tokens, and its tokenizer: byte-level BPE in which a word of two syllables is a token.

Routers load the tokenizer's files and the chat template as they would a model's. The engines encode by a table of
words, which for this text gives the same ids (`tests/bench/test_fleet_bench.py` holds that) at a fraction of the time.
"""

import itertools
import json
import random
import re
from collections.abc import Mapping
from functools import cache

USER, SYSTEM, ASSISTANT, END = "<|user|>", "<|system|>", "<|assistant|>", "<|end|>"
SPECIAL = (USER, SYSTEM, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SYLLABLES = tuple(consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou")
_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level BPE writes a blank
_SPLIT = re.compile("|".join(map(re.escape, SPECIAL)) + "| [a-z]{4}")


class NotOurText(ValueError):
    """A text that isn't made of the bench's words."""


@cache
def word_ids() -> Mapping[str, int]:
    """Words with the blank in front, and special tokens, by text."""
    words = [" " + first + second for first, second in itertools.product(_SYLLABLES, repeat=2)]
    vocabulary, _ = _vocabulary()
    return {text: vocabulary[text.replace(" ", _SPACE)] for text in (*SPECIAL, *words)}


@cache
def _words() -> tuple[str, ...]:
    return tuple(text for text in word_ids() if text not in SPECIAL)


def encode(text: str) -> list[int]:
    """Token ids of a text of the bench's words and special tokens. Raises `NotOurText`."""
    ids, pieces = word_ids(), _SPLIT.findall(text)
    try:
        found = [ids[piece] for piece in pieces]
    except KeyError as error:
        raise NotOurText(f"{error} isn't one of the bench's words") from None
    if sum(map(len, pieces)) != len(text):
        raise NotOurText("the text holds more than the bench's words")
    return found


def chat_text(messages: list[Mapping[str, str]]) -> str:
    """What `CHAT_TEMPLATE` makes of messages, with the generation prompt."""
    return "".join(f"<|{each['role']}|>{each['content']}{END}" for each in messages) + ASSISTANT


def some_words(seed: str, count: int) -> str:
    """`count` words, the same for the same seed: as many tokens."""
    return "".join(random.Random(seed).choices(_words(), k=count))


@cache
def tokenizer_files() -> Mapping[str, bytes]:
    """`tokenizer.json` and `tokenizer_config.json`, as a model's folder has them."""
    vocabulary, merges = _vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    pipeline = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[text], "content": text, **flags} for text in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHAT_TEMPLATE}
    return {"tokenizer.json": json.dumps(pipeline).encode(), "tokenizer_config.json": json.dumps(config).encode()}


@cache
def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Ids by token, and merges in their order: letters to syllables, a blank to those, then two syllables to a word."""
    merges = [list(syllable) for syllable in _SYLLABLES]
    merges += [[_SPACE, syllable] for syllable in _SYLLABLES]
    merges += [[_SPACE + first, second] for first, second in itertools.product(_SYLLABLES, repeat=2)]
    tokens = [*SPECIAL, *_byte_letters(), *("".join(pair) for pair in merges)]
    return {token: number for number, token in enumerate(tokens)}, merges


def _byte_letters() -> list[str]:
    """The letters that byte-level BPE writes the 256 bytes with (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    return [chr(byte) for byte in plain] + [chr(256 + number) for number in range(256 - len(plain))]
