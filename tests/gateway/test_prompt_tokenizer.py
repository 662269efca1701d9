"""Prompts are encoded off the loop, and only what is new; a wrong sample is noticed, counted, and ends the cuts."""

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from bench.encoding.fuzz import Tokenizer, load
from directory.chunks import pack_tokens
from gateway.encoding.cuts import Cutter
from gateway.encoding.encode_pool import TEXTS_MAX, EncodePool, PoolBusy
from gateway.encoding.encoder import RENDERED_INLINE_BYTES_MAX, RENDERED_INLINE_MESSAGES_MAX, Encoder
from gateway.encoding.examination import examine
from gateway.encoding.examiner import examine_apart
from gateway.encoding.known_openings import Opening
from gateway.encoding.piece_encoder import Depth, PartialEncoding, PieceEncoder
from gateway.encoding.prompt_tokenizer import (
    LOOKED_UP_INLINE_CHARS_MAX,
    CachedPieces,
    Shared,
    WholeTexts,
    load_tokenizer,
)
from gateway.encoding.render import ReferenceRenderer
from gateway.encoding.rendering import Rendered
from gateway.encoding.self_check import SAMPLE_SHARE, SelfCheck
from gateway.encoding.tokenizer import FastokensBackend, HuggingFaceBackend
from gateway.openai_schema import CHAT, COMPLETIONS, InferenceRequest, parse_request
from tests.gateway.assembly import eventually
from tests.gateway.pipelines import smollm2_content

LOOP_THREAD = threading.main_thread().name
SPELLED_0X04 = "\u0104"
"""How byte-level vocabularies write the byte 4."""
SECRET = "a secret that no log may hold"


class ByteBackend:
    """A token a byte; knows in which threads it ran, and may be held."""

    name: ClassVar[str] = "bytes"
    inline_chars_max: ClassVar[int] = 100
    piece_chars: ClassVar[int] = 256
    is_quick: ClassVar[bool] = False

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        self.threads.append(threading.current_thread().name)
        self.may_go.wait()
        return [pack_tokens(list(text.encode())) for text in texts]


@pytest.fixture
async def pool() -> AsyncIterator[EncodePool]:
    pool = EncodePool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load("smollm2", smollm2_content())


class Mismatches:
    count = 0

    def __call__(self) -> None:
        self.count += 1


def pieces_of(
    tokenizer: Tokenizer, backend: ByteBackend, pool: EncodePool, check: SelfCheck | None = None
) -> tuple[CachedPieces, PieceEncoder]:
    encoder = PieceEncoder(tokenizer.pipeline, Cutter(tokenizer.rules, 256), backend, backend, 2**20)
    encoder.depth = Depth.PIECES
    check = check or SelfCheck(pool, Mismatches(), draw=lambda: 1.0)
    return CachedPieces(encoder, backend, backend, Shared.of(pool, check)), encoder


async def test_a_loaded_tokenizer_gives_the_references_ids_and_is_quick_at_once(
    pool: EncodePool, smollm2: Tokenizer
) -> None:
    tokenizer, token_chars_max = await load_tokenizer(smollm2_content(), Shared.of(pool), 2**20)
    assert tokenizer.state == "fastokens, cached pieces"
    assert token_chars_max == smollm2.reference.longest_token_chars()
    text = "<|im_start|>user\n" + "Some words, and more of them.\n" * 3000
    for _ in range(2):
        assert await tokenizer.encode(text, False) == smollm2.reference.encode(text)


async def test_much_that_is_new_goes_to_a_thread_and_little_does_not(pool: EncodePool, smollm2: Tokenizer) -> None:
    backend = ByteBackend()
    tokenizer, _ = pieces_of(smollm2, backend, pool)
    await tokenizer.encode("x" * 100, False)
    await tokenizer.encode("y" * 101, False)
    await tokenizer.encode("<|im_start|>" + "y" * 101, False)
    whole = WholeTexts(backend, Shared.of(pool), "for a test")
    await whole.encode("z" * 100, False)
    await whole.encode("z" * 101, False)
    assert [name.startswith("encode") for name in backend.threads] == [False, True, False, True]
    assert backend.threads[0] == LOOP_THREAD


class ThreadRenderer:
    """Says in which threads it ran."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def prompt(self, request: InferenceRequest) -> Rendered:
        self.threads.append(threading.current_thread().name)
        return Rendered("a prompt")

    def reads_cache(self, request: InferenceRequest) -> bool:
        return True


async def test_a_large_request_is_rendered_in_a_thread(pool: EncodePool) -> None:
    renderer = ThreadRenderer()
    encoder = Encoder(WholeTexts(ByteBackend(), Shared.of(pool), "for a test"), renderer, 100, pool)
    for size in (RENDERED_INLINE_BYTES_MAX // 2, RENDERED_INLINE_BYTES_MAX):
        request = parse_request(COMPLETIONS, b'{"model": "m", "prompt": "%s"}' % (b"x" * size))
        assert (await encoder.encode(request, 8192)).prompt_tokens == len("a prompt")
    message = b'{"role":"user","content":"x"}'
    for messages in (RENDERED_INLINE_MESSAGES_MAX, RENDERED_INLINE_MESSAGES_MAX + 1):
        request = parse_request(CHAT, b'{"model":"m","messages":[%s]}' % b",".join([message] * messages))
        assert (await encoder.encode(request, 8192)).prompt_tokens == len("a prompt")
    assert renderer.threads[::2] == [LOOP_THREAD] * 2
    assert all(thread.startswith("encode") for thread in renderer.threads[1::2])


async def test_a_long_text_of_small_pieces_is_looked_up_in_a_thread(
    pool: EncodePool, smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, encoder = pieces_of(smollm2, ByteBackend(), pool)
    threads: list[str] = []
    look_up = encoder.look_up

    def noted(text: str, opening: Opening) -> PartialEncoding:
        threads.append(threading.current_thread().name)
        return look_up(text, opening)

    monkeypatch.setattr(PieceEncoder, "look_up", lambda _, text, opening: noted(text, opening))
    for text in ("short", "x" * (LOOKED_UP_INLINE_CHARS_MAX + 1)):
        assert await tokenizer.encode(text, False) == pack_tokens(list(text.encode()))
    assert threads[0] == LOOP_THREAD
    assert threads[1].startswith("encode")


async def test_too_many_texts_at_once_go_without_keys(pool: EncodePool) -> None:
    backend = ByteBackend()
    backend.may_go.clear()
    whole = WholeTexts(backend, Shared.of(pool), "for a test")
    waiting = [asyncio.create_task(whole.encode("x" * 200, False)) for _ in range(TEXTS_MAX)]
    try:
        await eventually(lambda: len(backend.threads) == 2)
        with pytest.raises(PoolBusy):
            await whole.encode("x" * 200, False)
        request = parse_request(COMPLETIONS, b'{"model": "m", "prompt": "%s"}' % (b"x" * 200))
        encoding = await Encoder(whole, ReferenceRenderer("", {}), 100).encode(request, 8192)
        assert (encoding.tokens, encoding.reason) == (None, "encoder_busy")
    finally:
        backend.may_go.set()
    assert len(await asyncio.gather(*waiting)) == TEXTS_MAX
    assert await whole.encode("x" * 200, False)


async def test_a_wrong_sample_ends_the_cuts_then_the_segments_and_is_counted_without_its_text(
    pool: EncodePool, smollm2: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    mismatches = Mismatches()
    check = SelfCheck(pool, mismatches, draw=lambda: 0.0)
    backend = ByteBackend()
    tokenizer, encoder = pieces_of(smollm2, backend, pool, check)
    running = asyncio.create_task(check.run())
    try:
        for depth, state in (
            (Depth.SEGMENTS, "bytes, cached segments: a check of encoded texts failed"),
            (Depth.WHOLE, "bytes, whole texts: a check of encoded texts failed"),
        ):
            encoder.cache.put(SECRET, False, pack_tokens(list(SECRET.encode())[:-1]))
            await tokenizer.encode(SECRET, False)
            await eventually(lambda depth=depth: encoder.depth is depth)
            assert tokenizer.state == state
            assert encoder.cache.bytes_used == 0
        assert mismatches.count == 2
        assert await tokenizer.encode(SECRET, False) == pack_tokens(list(SECRET.encode()))
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert "at token 28 of 29" in caplog.text
    assert SECRET not in caplog.text


async def test_two_wrong_samples_of_one_depth_end_the_cuts_alone(pool: EncodePool, smollm2: Tokenizer) -> None:
    mismatches = Mismatches()
    check = SelfCheck(pool, mismatches, draw=lambda: 0.0)
    tokenizer, encoder = pieces_of(smollm2, ByteBackend(), pool, check)
    encoder.cache.put(SECRET, False, pack_tokens([7]))
    for _ in range(2):
        await tokenizer.encode(SECRET, False)
    running = asyncio.create_task(check.run())
    await eventually(lambda: mismatches.count == 2)
    running.cancel()
    await asyncio.wait({running})
    assert encoder.depth is Depth.SEGMENTS


async def test_a_right_sample_changes_nothing(pool: EncodePool, smollm2: Tokenizer) -> None:
    mismatches = Mismatches()
    check = SelfCheck(pool, mismatches, draw=lambda: 0.0)
    backend = ByteBackend()
    tokenizer, encoder = pieces_of(smollm2, backend, pool, check)
    running = asyncio.create_task(check.run())
    await tokenizer.encode("some words", False)
    await eventually(lambda: len(backend.threads) == 2)
    running.cancel()
    await asyncio.wait({running})
    assert backend.threads[1].startswith("load"), "behind everything else"
    assert (mismatches.count, encoder.depth) == (0, Depth.PIECES)


async def test_one_text_in_a_thousand_is_checked_and_what_can_not_be_kept_up_with_is_let_go(
    pool: EncodePool, smollm2: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    drawn = iter([SAMPLE_SHARE, SAMPLE_SHARE / 2] + [0.0] * 100)
    check = SelfCheck(pool, Mismatches(), draw=lambda: next(drawn))
    backend = ByteBackend()
    tokenizer, _ = pieces_of(smollm2, backend, pool, check)
    for _ in range(50):
        await tokenizer.encode("some words", False)
    running = asyncio.create_task(check.run())
    await eventually(lambda: len(backend.threads) == 1 + 4)
    running.cancel()
    await asyncio.wait({running})
    assert len(backend.threads) == 1 + 4


async def test_what_is_no_tokenizer_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
        await examine_apart(b'{"model": 5}')


async def test_an_examination_that_is_not_wanted_any_more_leaves_no_process() -> None:
    before = children()
    examining = asyncio.create_task(examine_apart(smollm2_content()))
    await eventually(lambda: children() > before)
    examining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await examining
    assert children() == before


def children() -> set[str]:
    """The ids of this process's children."""
    found = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return {number for numbers in found for number in numbers}


async def test_a_vocabulary_that_lacks_a_byte_is_encoded_by_the_reference_which_leaves_it_out(pool: EncodePool) -> None:
    pipeline = json.loads(smollm2_content())
    pipeline["pre_tokenizer"] = pipeline["pre_tokenizer"]["pretokenizers"][-1]  # as the model's vLLM has it
    content = json.dumps(pipeline).encode()
    tokenizer, _ = await load_tokenizer(content, Shared.of(pool), 2**20)
    reference = HuggingFaceBackend(content.decode())
    with pytest.raises(ValueError, match="byte 0x1d has no token"):
        FastokensBackend(content.decode()).encode("a\x1db")
    assert tokenizer.state == "tokenizers, cached pieces"
    assert (
        await tokenizer.encode("a\x1db", False)
        == reference.encode("a\x1db")
        == reference.encode("a") + reference.encode("b")
    )


def test_any_one_byte_that_a_vocabulary_lacks_is_found_out() -> None:
    pipeline = json.loads(smollm2_content())
    pipeline["pre_tokenizer"] = pipeline["pre_tokenizer"]["pretokenizers"][-1]  # as the model's vLLM has it
    vocabulary: dict[str, int] = pipeline["model"]["vocab"]
    unused = itertools.count(len(vocabulary))
    for spelling in set(ByteLevel.alphabet()) - vocabulary.keys() - {SPELLED_0X04}:
        vocabulary[spelling] = next(unused)
    assert examine(json.dumps(pipeline).encode()).backend == "tokenizers", "fastokens refuses a text that holds it"
