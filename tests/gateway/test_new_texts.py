"""A long text that nobody has seen is encoded at once, and taken apart behind the request's back."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from bench.encoding.fuzz import Tokenizer, fuzz, load
from directory.chunks import pack_tokens
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.examination import tells_stretches
from gateway.encoding.piece_encoder import NEW_CHARS_MIN, PieceEncoder
from gateway.encoding.piece_learner import TEXTS_WAITING_MAX, PieceLearner
from gateway.encoding.prompt_tokenizer import CachedPieces, Shared
from gateway.encoding.self_check import SelfCheck
from gateway.encoding.token_lengths import TokenLengths
from gateway.encoding.tokenizer import FastokensBackend
from gateway.metrics import GatewayMetrics
from tests.gateway.assembly import eventually
from tests.gateway.pipelines import PIPELINES, smollm2_content

CACHE_BYTES = 2**24


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load("smollm2", smollm2_content())


@pytest.fixture
async def pool() -> AsyncIterator[EncodePool]:
    pool = EncodePool()
    yield pool
    pool.close()


def document(subject: str) -> str:
    lines = [f"Line {number} about {subject} says what no other line says." for number in range(600)]
    return "\n\n".join("\n".join(lines[start : start + 5]) for start in range(0, 600, 5))


def missing(encoder: PieceEncoder, text: str) -> int:
    return sum(encoder.look_up(text).missing_chars)


def test_its_ids_are_the_references_and_its_pieces_are_known_once_it_is_taken_apart(smollm2: Tokenizer) -> None:
    encoder = smollm2.encoder(CACHE_BYTES)
    text = f"<|im_start|>user\nRead this.\n\n{document('tides')}<|im_end|>\n"
    assert encoder.looks_new(text)
    new = encoder.encode_at_once(text)
    assert new.ids == smollm2.reference.encode(text)
    assert encoder.cache_bytes == 0
    stretches = encoder.take_apart(new)
    assert stretches is not None
    assert len(stretches) > 10
    encoder.keep(new, stretches)
    assert missing(encoder, text) == 0
    assert encoder.encode(text) == new.ids
    elsewhere = f"<|im_start|>user\nAnother opening.\n\n{document('tides')}\n\nAnd a question?<|im_end|>\n"
    assert missing(encoder, elsewhere) < len(elsewhere) / 4
    assert encoder.encode(elsewhere) == smollm2.reference.encode(elsewhere)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(document("tides")[: NEW_CHARS_MIN - 1], id="short"),
        pytest.param("x" * 30_000, id="without a line"),
    ],
)
def test_a_text_that_is_short_or_can_not_be_judged_is_looked_up(smollm2: Tokenizer, text: str) -> None:
    assert not smollm2.encoder(CACHE_BYTES).looks_new(text)


def test_a_text_of_which_much_was_seen_is_not_new(smollm2: Tokenizer) -> None:
    encoder = smollm2.encoder(CACHE_BYTES)
    encoder.encode(document("tides"))
    assert not encoder.looks_new(document("tides") + "\n\nAnd more.")
    assert not encoder.looks_new(document("tides") + "\n\n" + document("ebbs"))
    assert encoder.looks_new(document("ebbs"))


def test_where_only_the_beginning_has_a_space_before_it_that_alone_goes_through_the_reference() -> None:
    mistral = load("mistral", json.dumps(PIPELINES["mistral"]()).encode())
    assert mistral.whole.name == "tokenizers"
    # Not what would be chosen: it is wrong for texts like <0x0A>, as this small vocabulary lacks an "A".
    mistral = replace(mistral, rest=FastokensBackend(mistral.pipeline.without_prefix))
    encoder, text = mistral.encoder(CACHE_BYTES), document("tides")
    new = encoder.encode_at_once(text)
    assert 0 < new.opening_chars < 200
    assert new.ids == mistral.reference.encode(text)
    stretches = encoder.take_apart(new)
    assert stretches is not None
    encoder.keep(new, stretches)
    assert missing(encoder, text) == 0
    assert encoder.encode(text) == new.ids
    assert not encoder.goes_at_once(text.replace("\n", " "))


def test_stretches_that_get_other_ids_than_they_have_are_found_out(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = TokenLengths.split

    def one_token_late(lengths: TokenLengths, pieces: Sequence[str], ids: bytes) -> list[bytes] | None:
        found = exact(lengths, pieces, ids)
        if found is None or len(found) < 2:
            return found
        return [found[0] + found[1][:4], found[1][4:], *found[2:]]

    parts = smollm2.pipeline, smollm2.rules, smollm2.whole, smollm2.rest
    assert tells_stretches(*parts)
    monkeypatch.setattr(TokenLengths, "split", one_token_late)
    assert not tells_stretches(*parts)
    assert fuzz(smollm2, 40, seed=1).mismatches


LENGTHS = TokenLengths(pack_tokens([1, 2, 3, 0]), composes=False)
COMPOSING = TokenLengths(pack_tokens([1, 2, 3, 0]), composes=True)


@pytest.mark.parametrize(
    ("lengths", "pieces", "ids", "expected"),
    [
        (LENGTHS, ["a", "bb"], [0, 1], [[0], [1]]),
        (LENGTHS, ["abb", "é", "x"], [0, 1, 1, 0], [[0, 1], [1], [0]]),
        (LENGTHS, ["ab", "b"], [0, 1], None),
        (LENGTHS, ["a", "bbb"], [0, 1], None),
        (LENGTHS, ["a", "bb"], [0, 1, 0], None),
        (LENGTHS, ["a", "bb"], [0, 3], None),
        (LENGTHS, ["a", "bb"], [0, 4], None),
        (LENGTHS, ["e\u0301"], [2], [[2]]),
        (COMPOSING, ["e\u0301"], [2], None),
        (COMPOSING, ["é"], [1], [[1]]),
        (LENGTHS, [], [], None),
    ],
    ids=[
        "two",
        "not ascii",
        "within a token",
        "more text",
        "more ids",
        "an unknown character",
        "an unknown id",
        "apart",
        "composed",
        "whole",
        "none",
    ],
)
def test_ids_are_split_where_pieces_end_or_not_at_all(
    lengths: TokenLengths, pieces: list[str], ids: list[int], expected: list[list[int]] | None
) -> None:
    found = lengths.split(pieces, pack_tokens(ids))
    assert found == (None if expected is None else [pack_tokens(each) for each in expected])


def learning(
    tokenizer: Tokenizer, pool: EncodePool, metrics: GatewayMetrics
) -> tuple[CachedPieces, PieceEncoder, Shared]:
    encoder = tokenizer.encoder(CACHE_BYTES)
    shared = Shared(pool, SelfCheck(pool, lambda: None), PieceLearner(pool), metrics.count_encoded)
    return CachedPieces(encoder, tokenizer.whole, tokenizer.rest, shared), encoder, shared


async def test_what_a_request_brought_is_known_to_the_next_and_counted(smollm2: Tokenizer, pool: EncodePool) -> None:
    metrics = GatewayMetrics()
    prompts, encoder, shared = learning(smollm2, pool, metrics)
    text = document("tides")

    def counted() -> list[float | None]:
        names = ("hit", "miss")
        return [metrics.registry.get_sample_value(f"warmroute_tokenizer_cache_{name}_chars_total") for name in names]

    assert counted() == [0, 0]
    running = asyncio.create_task(shared.learner.run())
    try:
        assert await prompts.encode(text, False) == smollm2.reference.encode(text)
        await eventually(lambda: prompts.cache_bytes > 0)
        assert counted() == [0, len(text)]
        assert await prompts.encode(text, True) == smollm2.reference.encode(text, True)
        assert counted() == [len(text), len(text)]
        assert encoder.cache_bytes == prompts.cache_bytes
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_a_text_whose_ids_can_not_be_told_apart_is_encoded_in_pieces_later(
    smollm2: Tokenizer, pool: EncodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, encoder, shared = learning(smollm2, pool, GatewayMetrics())
    monkeypatch.setattr(TokenLengths, "split", lambda *_: None)
    running = asyncio.create_task(shared.learner.run())
    try:
        await prompts.encode(document("tides"), False)
        await eventually(lambda: missing(encoder, document("tides")) == 0)
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_what_was_forgotten_meanwhile_is_not_learned(smollm2: Tokenizer, pool: EncodePool) -> None:
    prompts, encoder, shared = learning(smollm2, pool, GatewayMetrics())
    await prompts.encode(document("tides"), False)
    encoder.flush()
    await prompts.encode(document("ebbs"), False)
    running = asyncio.create_task(shared.learner.run())
    await eventually(lambda: encoder.cache.bytes_used > 0)
    running.cancel()
    await asyncio.wait({running})
    assert encoder.looks_new(document("tides"))
    assert not encoder.looks_new(document("ebbs"))


async def test_no_more_texts_wait_than_it_says_and_no_request_waits_for_one(
    smollm2: Tokenizer, pool: EncodePool
) -> None:
    prompts, encoder, shared = learning(smollm2, pool, GatewayMetrics())
    texts = [document(f"tide {number}") for number in range(TEXTS_WAITING_MAX + 3)]
    for text in texts:
        await prompts.encode(text, False)
    running = asyncio.create_task(shared.learner.run())
    await eventually(lambda: not encoder.looks_new(texts[TEXTS_WAITING_MAX - 1]))
    running.cancel()
    await asyncio.wait({running})
    assert [encoder.looks_new(text) for text in texts[TEXTS_WAITING_MAX:]] == [True] * 3
