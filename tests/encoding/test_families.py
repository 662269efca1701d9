"""Eight families of real tokenizers: a thousand nasty texts each, in pieces, have the ids of plain Hugging Face."""

import re
from dataclasses import replace

import pytest

from bench.encoding.fuzz import Tokenizer, fuzz, load
from bench.encoding.tokenizer_packages import FAMILIES, tokenizer_json
from gateway.encoding.cuts import CutRule, CutRules
from gateway.encoding.piece_encoder import Depth
from gateway.encoding.pipeline import Family, Prefix

TEXTS = 1000
MUTATED_TEXTS = 200
SEED = 20_260_101
KNOWN = {
    "smollm2": (Family.GPT2, Prefix.NONE, "fastokens"),
    "llama3_1": (Family.CL100K, Prefix.NONE, "fastokens"),
    "qwen3": (Family.CL100K, Prefix.NONE, "fastokens"),
    "gpt_oss": (Family.O200K, Prefix.NONE, "fastokens"),
    "deepseek_v3": (Family.DEEPSEEK, Prefix.NONE, "fastokens"),
    "mistral": (Family.SENTENCEPIECE, Prefix.START, "fastokens"),
    "llama2": (Family.SENTENCEPIECE, Prefix.GAPS, "fastokens"),
    "gemma3": (Family.SENTENCEPIECE, Prefix.NONE, "fastokens"),
}
HARMLESS = {"mistral": {"。"}, "llama2": {"。"}, "gemma3": {"\n"}}
"""Rules, by how they begin, that are right a character later, too: these vocabularies have no token across it."""
INSIDE_WORDS = CutRules((CutRule(re.compile("e(?=[a-z])"), 1, 8),))


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Up to seven seconds for the largest; one at a time, as each takes some hundred megabytes."""
    return load(request.param, tokenizer_json(request.param))


def test_a_family_is_known_with_all_its_cuts(tokenizer: Tokenizer) -> None:
    assert (tokenizer.pipeline.family, tokenizer.pipeline.prefix, tokenizer.rest.name) == KNOWN[tokenizer.name]
    assert len(tokenizer.rules.lines) == 2
    assert len(tokenizer.rules.within) >= 2
    assert tokenizer.rules.between_tokens
    declared = {token.content: token.token_id for token in tokenizer.pipeline.added_tokens}
    assert declared == tokenizer.reference.added_tokens()


def test_nasty_texts_cut_everywhere_have_the_ids_of_plain_hugging_face(tokenizer: Tokenizer) -> None:
    report = fuzz(tokenizer, TEXTS, SEED)
    assert report.texts == TEXTS
    assert report.cuts > 10 * TEXTS
    assert (report.told > TEXTS / 4) == (tokenizer.pipeline.prefix is not Prefix.GAPS)
    assert report.mismatches == []


def test_special_tokens_are_those_of_plain_hugging_face(tokenizer: Tokenizer) -> None:
    encoder = tokenizer.encoder(2**20)
    for text in ("", "some words", " and more", "\n\n", tokenizer.pipeline.added_tokens[0].content):
        for _ in range(2):
            assert encoder.encode(text, True) == tokenizer.reference.encode(text, True)


def test_a_wrong_cut_rule_is_found_in_each_family(tokenizer: Tokenizer) -> None:
    assert fuzz(tokenizer.with_rules(INSIDE_WORDS), MUTATED_TEXTS, SEED).mismatches


def test_each_rule_is_found_where_it_cuts_a_character_later_or_after_anything(tokenizer: Tokenizer) -> None:
    harmless = set()
    for rule in tokenizer.rules.every:
        wrong = (replace(rule, offset=rule.offset + 1), replace(rule, before=None))
        reports = [fuzz(tokenizer.with_rules(CutRules((each,))), MUTATED_TEXTS, SEED) for each in wrong]
        if not any(report.mismatches for report in reports):
            harmless.add(rule.pattern.pattern[0])
    assert harmless == HARMLESS.get(tokenizer.name, set())


def test_a_long_document_is_cut_and_found_again_elsewhere(tokenizer: Tokenizer) -> None:
    lines = [f"Line {number} of the document says something that no other line says." for number in range(600)]
    document = "\n\n".join("\n".join(lines[start : start + 6]) for start in range(0, 600, 6))
    encoder = tokenizer.encoder(2**24)
    encoder.encode(f"Read this:\n\n{document}\n\nThen answer.")
    elsewhere = f"Another opening.\n\n{document}\n\nAnother question?"
    assert encoder.depth is Depth.PIECES
    assert encoder.look_up(elsewhere).missing_chars[False] < len(document) / 4
    assert encoder.encode(elsewhere) == tokenizer.reference.encode(elsewhere)
