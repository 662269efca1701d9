"""What requests cost in CPU time of this process, threads included: encoded plainly, and as the gateway does it."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import tokenizers

from bench.encoding.fuzz import Tokenizer
from bench.encoding.workloads import Writer, conversation, questions, template_of
from directory.chunks import chunk_keys
from gateway.encoding.encoder import CACHE_BYTES_MAX
from gateway.encoding.piece_encoder import NewText, PieceEncoder
from gateway.encoding.render import ReferenceRenderer

TURNS = 20
DOCUMENTS = 12
ROOT = bytes(32)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Cost:
    """A workload's CPU ms a request: encoded plainly (rendered too, where the gateway's is), and ours.

    Medians of the rounds, and the least of them: what it costs where nobody else disturbs the caches.
    """

    tokenizer: str
    backend: str
    workload: str
    tokens: int
    plain_ms: float
    ours_ms: float
    plain_least_ms: float
    ours_least_ms: float

    @property
    def times_cheaper(self) -> float:
        """How many times cheaper ours is, by the medians."""
        return self.plain_ms / self.ours_ms

    @property
    def times_cheaper_at_least_cost(self) -> float:
        """The same by the least costs."""
        return self.plain_least_ms / self.ours_least_ms


@dataclass(frozen=True, slots=True)
class Setting:
    """How much is measured: tokens in a prompt, and rounds of each workload."""

    prompt_tokens: int
    rounds: int


def measure(tokenizer: Tokenizer, content: str, setting: Setting) -> list[Cost]:
    """All workloads of one tokenizer. Raises `AssertionError` where ids differ from the plain ones."""
    plain = tokenizers.Tokenizer.from_str(content)
    writer = Writer(random.Random(1))
    sample = writer.text(40_000)
    token_chars = len(sample) / len(plain.encode(sample, add_special_tokens=False).ids)
    meter = _Meter(tokenizer, plain, ReferenceRenderer(template_of(tokenizer.name), {}), setting, token_chars)
    # Collections of garbage would fall on whoever runs when they are due.
    gc.collect()
    gc.disable()
    try:
        return [
            meter.identical(writer),
            meter.last_turn(writer),
            meter.shuffled_documents(writer),
            *meter.never_seen(writer),
        ]
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True)
class _Meter:
    tokenizer: Tokenizer
    plain: tokenizers.Tokenizer
    renderer: ReferenceRenderer
    setting: Setting
    token_chars: float

    def identical(self, writer: Writer) -> Cost:
        """The same prompt again."""
        text = writer.text(int(self.setting.prompt_tokens * self.token_chars))
        encoder = self.tokenizer.encoder(CACHE_BYTES_MAX)
        encoder.encode(text)
        rows = [self._both(partial(str, _copy(text)), encoder.encode, text) for _ in range(self.setting.rounds)]
        return self._cost("identical prompt", rows)

    def last_turn(self, writer: Writer) -> Cost:
        """The twentieth turn, with render and keys; what an earlier turn had was seen."""
        pairs = []
        for _ in range(self.setting.rounds):
            encoder = self.tokenizer.encoder(CACHE_BYTES_MAX)
            turn_chars = int((self.setting.prompt_tokens * self.token_chars - 1500) / TURNS)
            *earlier, last = conversation(writer, TURNS, turn_chars)
            rendered = [self._rendered(messages) for messages in earlier]
            for text in rendered:
                encoder.encode(text)
            step = partial(self._rendered, last)
            pairs.append(self._both(step, encoder.encode, rendered[-1], with_keys=True))
        return self._cost("20th turn, with render and keys", pairs)

    def shuffled_documents(self, writer: Writer) -> Cost:
        """Twelve documents in an order of their own for each request."""
        document_chars = int(self.setting.prompt_tokens * self.token_chars / DOCUMENTS)
        documents = [writer.text(document_chars) for _ in range(DOCUMENTS)]
        encoder = self.tokenizer.encoder(CACHE_BYTES_MAX)
        first, *later = [self._rendered(each) for each in questions(writer, documents, 1 + self.setting.rounds)]
        encoder.encode(first)
        rows = [self._both(partial(str, text), encoder.encode, first) for text in later]
        return self._cost("shuffled documents", rows)

    def never_seen(self, writer: Writer) -> list[Cost]:
        """Text that nobody has seen, against the backend alone: what its request waits for, and what is done after it
        so that its pieces are known.
        """
        encoder = self.tokenizer.encoder(CACHE_BYTES_MAX)
        rows, rows_later = [], []
        for number in range(self.setting.rounds):
            # The backend remembers words itself, so each has texts of its own, of one kind; and they take turns.
            ours, theirs = (writer.text(int(self.setting.prompt_tokens * self.token_chars)) for _ in range(2))
            alone, alone_ms = _timed(partial(self.tokenizer.rest.encode, theirs)) if number % 2 else (b"", 0.0)
            (ids, new), ours_ms = _timed(partial(_encode_fresh, encoder, ours))
            if not number % 2:
                alone, alone_ms = _timed(partial(self.tokenizer.rest.encode, theirs))
            _, later_ms = _timed(partial(_learn, encoder, new))
            assert encoder.encode(ours) == ids, "ids differ"
            alone_ms *= len(ids) / len(alone)
            rows.append((len(ids) // 4, alone_ms, ours_ms))
            rows_later.append((len(ids) // 4, alone_ms, ours_ms + later_ms))
        workload = "never-seen text, against the backend alone"
        return [self._cost(workload, rows), self._cost(f"{workload}, all in all", rows_later)]

    def _both(
        self, text_of: Callable[[], str], encode: Callable[[str], bytes], known: str, with_keys: bool = False
    ) -> tuple[int, float, float]:
        """`known` is the text of a request that was just served."""

        def ours() -> bytes:
            ids = encode(text_of())
            if with_keys:
                chunk_keys(ROOT, ids)
            return ids

        def plainly() -> list[int]:
            ids: list[int] = self.plain.encode(text_of(), add_special_tokens=False).ids
            return ids

        expected, plain_ms = _timed(plainly)
        # Plain encoding frees ten thousands of small blocks, and whoever asks for memory next pays for the tidying, up
        # to 4 ms. A gateway doesn't encode plainly: its last request was one like this.
        encode(_copy(known))
        ids, ours_ms = _timed(ours)
        assert list(memoryview(ids).cast("I")) == expected, "ids differ"
        return len(expected), plain_ms, ours_ms

    def _rendered(self, messages: Sequence[dict[str, str]]) -> str:
        return self.renderer.render({"messages": messages})

    def _cost(self, workload: str, rows: Sequence[tuple[int, float, float]]) -> Cost:
        tokens, plain, ours = zip(*rows, strict=True)
        return Cost(
            self.tokenizer.name,
            self.tokenizer.rest.name,
            workload,
            int(statistics.median(tokens)),
            statistics.median(plain),
            statistics.median(ours),
            min(plain),
            min(ours),
        )


def _encode_fresh(encoder: PieceEncoder, text: str) -> tuple[bytes, NewText | None]:
    """As `CachedPieces` does."""
    if not encoder.looks_new(text):
        return encoder.encode(text), None
    new = encoder.encode_at_once(text)
    return new.ids, new


def _learn(encoder: PieceEncoder, new: NewText | None) -> None:
    if new is not None:
        encoder.keep(new, encoder.take_apart(new) or [])


def _copy(text: str) -> str:
    """An object of its own, as each request's text is: its hash isn't known yet."""
    return text.encode().decode()


def _timed(step: Callable[[], Result]) -> tuple[Result, float]:
    started = time.process_time()
    result = step()
    return result, (time.process_time() - started) * 1e3
