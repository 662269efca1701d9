"""Replies are encoded before the next turn asks for them, behind everything else, and within bounds."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from bench.encoding.fuzz import Tokenizer, load
from gateway.encoding import warming
from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.encoder import Encoder
from gateway.encoding.prompt_tokenizer import CachedPieces, Shared
from gateway.encoding.render import ReferenceRenderer
from gateway.encoding.self_check import SelfCheck
from gateway.encoding.warming import (
    REPLIES_WAITING_MAX,
    REPLY_BYTES_MAX,
    KeptEvents,
    Reply,
    Warmer,
    answered_text,
    streamed_text,
    warm,
)
from gateway.openai_schema import CHAT, COMPLETIONS, InferenceRequest, parse_request
from tests.gateway.assembly import eventually
from tests.gateway.pipelines import smollm2_content

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SAID = (
    'It was a dark and stormy night; the rain fell in torrents, "except" at intervals.\n\nÉté; 天气预报说明天有雨。'
    * 16
)
MESSAGES = [{"role": "user", "content": "How does the novel begin?"}]


def chat(**fields: Any) -> InferenceRequest:
    return parse_request(CHAT, orjson.dumps({"model": "m", "messages": MESSAGES, **fields}))


def answer(**message: Any) -> bytes:
    return orjson.dumps({"choices": [{"message": {"role": "assistant", **message}}], "usage": {}})


def stream(text: str, *more: bytes) -> bytes:
    """As engines stream it, a few characters at a time."""
    events = [b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n']
    for start in range(0, len(text), 5):
        delta = orjson.dumps({"choices": [{"delta": {"content": text[start : start + 5]}, "logprobs": None}]})
        events.append(b"data: " + delta + b"\n\n")
    return b"".join([*events, *more, b"data: [DONE]\n\n"])


class Counted:
    """How many characters were encoded."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.characters = backend, 0
        self.name, self.inline_chars_max, self.piece_chars = backend.name, 10**9, backend.piece_chars

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        return bytes(self._backend.encode(text, add_special_tokens))

    def encode_batch(self, texts: list[str]) -> list[bytes]:
        self.characters += sum(map(len, texts))
        return list(self._backend.encode_batch(texts))


class Stand:
    def __init__(self, tokenizer: Tokenizer, pool: EncodePool) -> None:
        pieces = tokenizer.encoder(2**22)
        self.backend = Counted(tokenizer.rest)
        pieces._backends = (self.backend, self.backend)  # what a request costs is what isn't known yet
        check = SelfCheck(pool, lambda: None, draw=lambda: 1.0)
        texts = CachedPieces(pieces, tokenizer.whole, tokenizer.rest, Shared.of(pool, check))
        self.encoder = Encoder(texts, ReferenceRenderer(CHATML, {}), 100)

    async def cost(self, request: InferenceRequest) -> int:
        before = self.backend.characters
        assert (await self.encoder.encode(request, 10**6)).tokens is not None
        return self.backend.characters - before


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load("smollm2", smollm2_content())


@pytest.fixture
async def stand(smollm2: Tokenizer) -> AsyncIterator[Stand]:
    pool = EncodePool()
    yield Stand(smollm2, pool)
    pool.close()


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_the_next_turn_encodes_only_what_its_user_wrote(stand: Stand, is_stream: bool) -> None:
    request = chat(stream=is_stream, tools=[])
    await stand.cost(request)
    data = stream(SAID) if is_stream else answer(content=SAID)
    assert await warm(Reply(stand.encoder, request, 10**6, data, is_stream))
    question = {"role": "user", "content": "And how does it go on?"}
    turn = chat(messages=[*MESSAGES, {"role": "assistant", "content": SAID}, question])
    assert await stand.cost(turn) < 60 < len(SAID)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (answer(content=SAID), SAID),
        (answer(content=None), ""),
        (answer(content="x", tool_calls=[{"id": "1"}]), ""),
        (answer(content=[{"type": "text", "text": "x"}]), ""),
        (b"{}", ""),
        (b'{"choices":[]}', ""),
        (b'{"choices":[7]}', ""),
        (b"[" * 10_000, ""),
        (b"nonsense", ""),
    ],
    ids=range(9),
)
def test_what_an_answer_says_is_found_or_nothing_is(data: bytes, said: str) -> None:
    assert answered_text(data) == said


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (stream(SAID), SAID),
        (stream(SAID).replace(b'"content":', b'"content": '), SAID),
        (stream('a "content":"b" \\" \\\\'), 'a "content":"b" \\" \\\\'),
        (stream(SAID, b'data: {"choices":[{"delta":{"tool_calls":[{}]}}]}\n\n'), ""),
        (b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n', ""),
        (b'data: {"choices":[{"delta":{"content":"half', ""),
        (b'data: {"choices":[{"delta":{"content":"\\ud800"}}]}\n\n', ""),
        (b"", ""),
    ],
    ids=range(8),
)
def test_what_a_stream_says_is_found_or_nothing_is(events: bytes, said: str) -> None:
    assert streamed_text(events) == said


async def test_replies_wait_within_a_bound_and_the_rest_is_dropped(stand: Stand) -> None:
    results: list[str] = []
    warmer = Warmer(results.append)
    for _ in range(REPLIES_WAITING_MAX + 3):
        warmer.send(Reply(stand.encoder, chat(), 10**6, answer(content=SAID), False))
    assert results == ["dropped"] * 3
    warmer.send(Reply(stand.encoder, chat(n=2), 10**6, answer(content=SAID), False))
    completion = InferenceRequest(COMPLETIONS, b"{}", {"prompt": "x"}, "m", False, None, ("x",))
    warmer.send(Reply(stand.encoder, completion, 10**6, answer(content=SAID), False))
    warmer.send(Reply(stand.encoder, chat(), 10**6, b"x" * (REPLY_BYTES_MAX + 1), False))
    assert results == ["dropped"] * 3, "several choices, completions and what is too long are nobody's next turn"
    running = asyncio.create_task(warmer.run())
    await eventually(lambda: len(results) == REPLIES_WAITING_MAX + 3)
    running.cancel()
    assert results[3:] == ["warmed"] * REPLIES_WAITING_MAX


async def test_a_fault_in_a_reply_does_not_end_the_loop(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    results: list[str] = []
    warmer = Warmer(results.append)
    warmer.send(Reply(None, chat(), 10**6, answer(content=SAID), False))  # type: ignore[arg-type]
    warmer.send(Reply(stand.encoder, chat(), 10**6, answer(content="ok"), False))
    running = asyncio.create_task(warmer.run())
    await eventually(lambda: results == ["skipped"])
    running.cancel()
    assert "couldn't be encoded in advance" in caplog.text


def test_kept_events_are_bounded_for_a_stream_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "REPLY_BYTES_MAX", 10)
    monkeypatch.setattr(warming, "KEPT_BYTES_MAX", 15)
    warmer = Warmer()
    first, second, third = (KeptEvents(warmer) for _ in range(3))
    for each in (first, second, third):
        each.add(b"12345")
    assert [each.joined() for each in (first, second, third)] == [b"12345"] * 3
    second.add(b"6")
    assert (second.joined(), warmer.kept_bytes) == (b"", 10)
    second.add(b"7")
    first.add(b"67890")
    assert (first.joined(), second.joined(), warmer.kept_bytes) == (b"1234567890", b"", 15)
    third.release()
    first.add(b"1")
    assert (first.joined(), warmer.kept_bytes) == (b"", 0)
