"""Ids from pieces are those of the whole text, for every family; a rule that cuts wrongly is found."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from bench.encoding.fuzz import Tokenizer, fuzz, load
from directory.chunks import pack_tokens
from gateway.encoding.added_tokens import AddedToken, AddedTokenSplitter
from gateway.encoding.cuts import LETTERS, RULES, CutRule, CutRules, Cutter
from gateway.encoding.examination import examine, proven_depth
from gateway.encoding.piece_encoder import Depth, PieceEncoder
from gateway.encoding.pipeline import Family, Prefix, Unsupported, read_pipeline
from tests.gateway.pipelines import (
    PIPELINES,
    Pipeline,
    family,
    sentencepiece,
    smollm2,
    smollm2_content,
    split_by,
)

FAMILY_TEXTS = 300
LINE, PARAGRAPH = re.compile("\n(?=[A-Za-z])"), re.compile("\n\n(?=[A-Za-z])")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """SmolLM2's, as the gateway loads it."""
    return load("smollm2", smollm2_content())


def test_a_thousand_texts_cut_everywhere_have_the_ids_of_the_whole_ones(tokenizer: Tokenizer) -> None:
    report = fuzz(tokenizer, 1000, seed=1)
    assert (report.backend, report.texts) == ("fastokens", 1000)
    assert report.cuts > 20 * report.texts
    assert report.mismatches == []


@pytest.mark.parametrize("name", PIPELINES)
def test_every_family_has_the_ids_of_the_whole_texts(name: str) -> None:
    report = fuzz(family(name), FAMILY_TEXTS, seed=2)
    assert report.cuts > report.texts / 2
    assert report.mismatches == []


WRONG: dict[str, tuple[str, CutRules]] = {
    "any line, gpt2": ("gpt2", CutRules((CutRule(LINE, 1, 64),))),
    "before paragraphs, cl100k": ("cl100k", CutRules((CutRule(PARAGRAPH, 0, 256),))),
    "before a slash, o200k": ("o200k", CutRules((CutRule(re.compile("\n(?=/)"), 1, 64),))),
    "in words, deepseek": ("deepseek", CutRules((CutRule(re.compile("e(?=[a-z])"), 1, 8),))),
    "any word, sentencepiece": ("gemma", CutRules((CutRule(re.compile(" (?=[A-Za-z])"), 0, 8, LETTERS),))),
    "after the space, cl100k": ("cl100k", CutRules((CutRule(re.compile(" (?=[A-Za-z])"), 1, 8, LETTERS),))),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_rule_that_cuts_wrongly_is_found(case: str) -> None:
    name, rules = WRONG[case]
    wrong = family(name).with_rules(rules)
    assert fuzz(wrong, FAMILY_TEXTS, seed=3).mismatches
    assert proven_depth(wrong.pipeline, rules, wrong.whole, wrong.rest) is Depth.SEGMENTS


def test_a_tokenizer_whose_segments_have_other_ids_is_encoded_whole() -> None:
    good = family("mistral")
    pipeline = replace(good.pipeline, prefix=Prefix.NONE)
    assert proven_depth(pipeline, good.rules, good.whole, good.whole) is Depth.WHOLE


def test_special_tokens_stand_once_around_what_is_cached() -> None:
    tokenizer = family("cl100k")
    encoder = tokenizer.encoder(2**20)
    bare = encoder.encode("some words")
    for _ in range(2):
        assert encoder.encode("some words", True) == pack_tokens([1, 2]) + bare + pack_tokens([3])
        assert encoder.encode("some words") == bare
    assert encoder.encode("", True) == pack_tokens([1, 2, 3]) == tokenizer.whole.encode("", True)


def test_of_nested_tokens_the_longest_splits() -> None:
    tokenizer = family("nested tokens")
    encoder = tokenizer.encoder(2**20)
    ids = tokenizer.reference.added_tokens()
    assert encoder.encode("<|x|>") == pack_tokens([ids["<|x|>"]])
    assert encoder.encode("<|x|>y")[:4] == pack_tokens([ids["<|x|>"]])
    assert encoder.encode("<|<|x|>") == pack_tokens([ids["<|"], ids["<|x|>"]])


def test_a_million_spaces_before_a_token_that_takes_them_are_split_off_at_once() -> None:
    splitter = AddedTokenSplitter(
        [AddedToken("<|end|>", 7, strips_before=True, strips_after=True, is_normalized=False)]
    )
    spaces = " \u3000" * 500_000  # looked at from each of them, they would take hours
    end = ("<|end|>", pack_tokens([7]), False)
    assert splitter.split(f"{spaces}a{spaces}<|end|>{spaces}b") == [(f"{spaces}a", None, True), end, ("b", None, False)]


def test_only_what_is_new_is_encoded(tokenizer: Tokenizer) -> None:
    encoder = tokenizer.encoder(2**24)
    lines = [f"Line {number} of the document says something that no other line says." for number in range(600)]
    document = "\n\n".join("\n".join(lines[start : start + 5]) for start in range(0, 600, 5))
    first = f"<|im_start|>user\nRead this.\n\n{document}<|im_end|>\n"
    assert encoder.look_up(first).missing_chars[False] > len(document) * 0.9
    encoder.encode(first)
    assert encoder.look_up(first).missing_chars[False] == 0
    elsewhere = f"<|im_start|>user\nAnother question about it:\n\n{document}\n\nIs it so?<|im_end|>\n"
    assert encoder.look_up(elsewhere).missing_chars[False] < len(document) / 4
    assert encoder.encode(elsewhere) == tokenizer.reference.encode(elsewhere)


class CountingBackend:
    name: ClassVar[str] = "counting"
    inline_chars_max: ClassVar[int] = 4_000
    piece_chars: ClassVar[int] = 256
    is_quick: ClassVar[bool] = False

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        raise AssertionError("whole texts aren't asked for")

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        self.batches.append(list(texts))
        return [pack_tokens(list(text.encode())) for text in texts]


def test_all_that_is_missing_goes_in_one_batch_each_piece_once(tokenizer: Tokenizer) -> None:
    backend = CountingBackend()
    encoder = PieceEncoder(tokenizer.pipeline, Cutter(CutRules(), 10), backend, backend, 2**20)
    encoder.depth = Depth.PIECES
    text = "<|im_start|>user\nhello<|im_end|>\n" * 5
    encoder.encode(text)
    assert backend.batches == [["user\nhello", "\n"]]
    encoder.encode(text)
    assert len(backend.batches) == 1


def test_what_is_in_flight_while_all_is_forgotten_is_not_kept(tokenizer: Tokenizer) -> None:
    encoder = tokenizer.encoder(2**20)
    partial = encoder.look_up("some words")
    encoder.flush()
    assert encoder.join(partial, encoder.encode_missing(partial), False) == tokenizer.reference.encode("some words")
    assert encoder.look_up("some words").missing_chars[False] > 0


def test_pieces_depend_on_their_text_alone() -> None:
    document = "\n\n".join(f"Paragraph {number}. And words\nin another line" for number in range(200))
    cutter = Cutter(RULES[Family.CL100K], 64)
    alone, amid = cutter.pieces(document), cutter.pieces(f"Before it.\n\n{document}\n\nAfter it.")
    assert len(alone) > 20
    assert "".join(alone) == document
    assert len(set(alone) - set(amid)) <= 2


def changed(**parts: object) -> Pipeline:
    return dict(smollm2(), **parts)


def with_token(**flags: object) -> list[dict[str, object]]:
    first, *others = smollm2()["added_tokens"]
    return [dict(first, **flags), *others]


REFUSED = {
    "whole words": (changed(added_tokens=with_token(single_word=True)), "whole words"),
    "normalized tokens": (
        changed(added_tokens=with_token(normalized=True), normalizer={"type": "NFC"}),
        "normalized text",
    ),
    "strips and spaces": (changed(added_tokens=with_token(lstrip=True, content="a b")), "strip"),
    "normalizer": (changed(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
    "pre-tokenizer": (changed(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer Whitespace"),
    "dropout": (changed(model=dict(smollm2()["model"], dropout=0.1)), "dropout"),
    "post-processor": (
        changed(post_processor={"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}),
        "post-processor",
    ),
    "shape": (changed(pre_tokenizer={"type": "Sequence"}), "another shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case: str) -> None:
    pipeline, reason = REFUSED[case]
    with pytest.raises(Unsupported, match=reason):
        read_pipeline(json.dumps(pipeline))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer Lowercase"),
        ({"added_tokens": with_token(id=5000)}, "added tokens under other ids than the file says"),
    ],
    ids=["normalizer", "ids"],
)
def test_a_refused_pipeline_is_examined_as_one_for_whole_texts(parts: Pipeline, reason: str) -> None:
    verdict = examine(json.dumps(changed(**parts)).encode())
    assert (verdict.parts, verdict.reason) == (None, reason)


UNCUT = {
    "another expression": split_by(Family.CL100K),
    "replacing": dict(
        split_by(Family.O200K), normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    ),
    "words apart": sentencepiece(
        None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    ),
    "subword prefix": changed(model=dict(smollm2()["model"], continuing_subword_prefix="##")),
}
UNCUT["another expression"]["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|x"


@pytest.mark.parametrize("case", UNCUT)
def test_gaps_are_not_cut_where_their_split_is_not_known_to_the_letter(case: str) -> None:
    assert read_pipeline(json.dumps(UNCUT[case])).family is None


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_a_backend_that_takes_a_text_for_a_byte_is_not_used(name: str) -> None:
    pipeline = PIPELINES[name]()
    assert "A" not in pipeline["model"]["vocab"], "where it isn't, fastokens takes the text <0x0A> for the byte 10"
    verdict = examine(json.dumps(pipeline).encode())
    assert verdict.parts is not None
    assert (verdict.backend, verdict.parts.backend, verdict.parts.depth) == ("tokenizers", "tokenizers", Depth.PIECES)
