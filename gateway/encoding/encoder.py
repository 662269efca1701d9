"""A request into the token ids its engine will see: one encoder for each set of tokenizer files in the fleet."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import orjson

from gateway.encoding.encode_pool import EncodePool, PoolBusy
from gateway.encoding.files import FileUnavailable, TokenizerFiles
from gateway.encoding.model_files import IDS_ONLY, ModelFiles
from gateway.encoding.prompt_tokenizer import IdsOnly, PromptTokenizer, Shared, load_tokenizer
from gateway.encoding.render import ReferenceRenderer
from gateway.encoding.rendering import Rendered, Renderer, Uncertain
from gateway.encoding.self_check import SelfCheck
from gateway.encoding.sglang_renderer import SglangRenderer
from gateway.encoding.template_files import read_templates
from gateway.encoding.vllm_renderer import VllmIdsRenderer, VllmRenderer
from gateway.openai_schema import InferenceRequest

logger = logging.getLogger(__name__)

CACHE_BYTES_MAX = 64 * 2**20
"""What the ids of known text take, for each tokenizer, where it isn't configured."""
RENDERED_INLINE_BYTES_MAX = 200_000
RENDERED_INLINE_MESSAGES_MAX = 256
"""Larger requests are rendered in a thread: a template takes up to 15 microseconds for each message, however short."""
ENCODERS_MAX = 64
"""Sets of model files in a fleet for which there are encoders."""
FETCHES_AT_ONCE_MAX, LOADS_AT_ONCE_MAX = 4, 1
RETRY_S, RETRY_MAX_S = 2.0, 60.0
"""Between two tries: the first for files that no agent has given yet, growing to the second for what can't be used."""
RENDERERS: dict[str, Callable[[Mapping[str, bytes]], Renderer]] = {
    "reference": lambda contents: ReferenceRenderer(
        contents["chat_template.jinja"].decode(), orjson.loads(contents["tokenizer_config.json"])
    ),
    "vllm": lambda contents: VllmRenderer(read_templates(contents)),
    "vllm-own": lambda contents: VllmRenderer(read_templates(contents), has_own_renderer=True),
    "vllm-unknown": lambda contents: VllmIdsRenderer(),
    "sglang": lambda contents: SglangRenderer(read_templates(contents)),
}
"""By an engine's kind: its renderer, from the contents of the model's files. They raise `ValueError` or `KeyError`."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The token ids of the prompt that decides the routing, as little-endian u32; exactly the engine's.

    Or as many of them, from the first on, as are known, or `None`; with the reason why it isn't all of them, and
    `tokens_estimate` is then a rough count. `reads_cache` is whether the engine uses what is cached of it.
    """

    tokens: bytes | None
    tokens_estimate: int
    reason: str = ""
    reads_cache: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether all ids are known."""
        return not self.reason

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return self.tokens_estimate if self.tokens is None or self.reason else len(self.tokens) // 4


class Encoder:
    """Renders and tokenizes for engines that share tokenizer files and a renderer."""

    def __init__(
        self, tokenizer: PromptTokenizer, renderer: Renderer, token_chars_max: int, pool: EncodePool | None = None
    ) -> None:
        self._tokenizer, self._renderer, self._token_chars_max = tokenizer, renderer, token_chars_max
        self._pool = pool

    @property
    def state(self) -> str:
        """How texts are encoded, in plain words."""
        return self._tokenizer.state

    @property
    def tokenizer(self) -> tuple[PromptTokenizer, int]:
        """What texts are encoded with, and the most characters that one of its tokens stands for."""
        return self._tokenizer, self._token_chars_max

    async def encode(self, request: InferenceRequest, context_tokens: int) -> Encoding:
        """Exact token ids, or as many as are sure, or why there are none. Of several prompts the first decides.

        A text that can't fit into `context_tokens`, were every token the longest there is, isn't tokenized: its engine
        will refuse it.
        """
        try:
            if self._pool is None or _is_small(request):
                prompt = self._renderer.prompt(request)
            else:
                prompt = await self._pool.run(self._renderer.prompt, request)
            reads_cache = self._renderer.reads_cache(request)
            if isinstance(prompt, bytes):
                return Encoding(prompt, len(prompt) // 4, reads_cache=reads_cache)
            if len(prompt.text) + len(prompt.then) > context_tokens * self._token_chars_max:
                raise Uncertain("too_long")
            tokens = await self._encode(prompt)
        except Uncertain as reason:
            return unencoded(request, str(reason))
        except PoolBusy:
            return unencoded(request, "encoder_busy")
        except RecursionError:  # JSON may be nested more deeply than what renders it can follow
            return unencoded(request, "nested_deeply")
        count = len(tokens) // 4
        return Encoding(tokens, count + prompt.rest_tokens, prompt.reason, reads_cache)

    async def _encode(self, prompt: Rendered) -> bytes:
        """The prompt's ids, as far as they are sure."""
        if prompt.reason:
            certain = self._tokenizer.certain_chars(prompt.text)
            if not certain or prompt.adds_special:
                raise Uncertain(prompt.reason)
            return await self._tokenizer.encode(prompt.text[:certain], False)
        tokens = await self._tokenizer.encode(prompt.text, prompt.adds_special)
        if not prompt.then:
            return tokens
        if len(await self._tokenizer.encode("", True)) > 4:
            raise Uncertain("continue_final_message")  # special tokens behind a text would stay in there
        return tokens + await self._tokenizer.encode(prompt.then, False)


def _is_small(request: InferenceRequest) -> bool:
    messages = request.fields.get("messages") or request.fields.get("input")
    is_long = isinstance(messages, list) and len(messages) > RENDERED_INLINE_MESSAGES_MAX
    return not is_long and len(request.body) <= RENDERED_INLINE_BYTES_MAX


def unencoded(request: InferenceRequest, reason: str) -> Encoding:
    """An encoding that says that it isn't one: about four bytes make a token."""
    return Encoding(None, max(1, request.text_bytes // 4), reason)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the encoder for one set of files is: `loading`, `exact`, `ids` (texts aren't encoded), or `failed`."""

    state: str
    since: float
    reason: str = ""


class Encoders:
    """The encoders of the fleet, loaded in the background as engines appear; requests never wait for one.

    Each set of files has its own. When a model's files change, the new encoder is loaded while the old one serves the
    engines that still work with the old files; one that no engine needs is let go, and requests that hold it finish.
    """

    def __init__(
        self,
        files: TokenizerFiles,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        on_mismatch: Callable[[], object] = lambda: None,
        on_match: Callable[[], object] = lambda: None,
        on_encoded: Callable[[int, int], object] = lambda hit_chars, miss_chars: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._sleep, self._cache_bytes_max, self._clock = files, sleep, cache_bytes_max, clock
        self._pool = EncodePool()
        check = SelfCheck(self._pool, on_mismatch, on_match)
        self._shared = Shared.of(self._pool, check, on_encoded)
        self._encoders: dict[ModelFiles, Encoder] = {}
        self._tokenizers: dict[str, tuple[PromptTokenizer, int]] = {}
        self._progress: dict[ModelFiles, Progress] = {}
        self._wanted: dict[ModelFiles, tuple[str, ...]] = {}
        self._fetches, self._loads = asyncio.Semaphore(FETCHES_AT_ONCE_MAX), asyncio.Semaphore(LOADS_AT_ONCE_MAX)
        self._changed = asyncio.Event()

    def want(self, engines: Iterable[tuple[ModelFiles, str]]) -> None:
        """Say which files are worked with in the fleet, each with the URL of an agent that has them (or an empty one).

        Encoders nobody needs any more are let go. Of more than `ENCODERS_MAX` the last go without.
        """
        wanted: dict[ModelFiles, tuple[str, ...]] = {}
        for files, agent_url in engines:
            if files.is_enough and (files in wanted or len(wanted) < ENCODERS_MAX):
                urls = wanted.get(files, ())
                wanted[files] = urls if not agent_url or agent_url in urls else (*urls, agent_url)
        if wanted != self._wanted:
            self._wanted = wanted
            for files in self._progress.keys() - wanted.keys():
                del self._progress[files]
                self._encoders.pop(files, None)
            for digest in self._tokenizers.keys() - {files.tokenizer_digest for files in wanted}:
                del self._tokenizers[digest]
            for files in wanted.keys() - self._progress.keys():
                self._progress[files] = Progress("loading", self._clock())
            self._changed.set()

    def find(self, files: ModelFiles) -> Encoder | None:
        """The encoder for engines that work with these files, if it is loaded."""
        return self._encoders.get(files)

    def state(self, files: ModelFiles) -> str:
        """In plain words, for `/fleet`: `exact`, or why not."""
        if not files.is_enough:
            return "no tokenizer files"
        progress = self._progress.get(files)
        if progress is None:
            return f"more than {ENCODERS_MAX} sets of files are in the fleet" if self._is_full() else "loading"
        return progress.reason if progress.state in ("failed", "ids") else progress.state

    def tokenizer_state(self, files: ModelFiles) -> str | None:
        """How texts are encoded, in plain words, for `/fleet`; `None` while they aren't."""
        encoder = self._encoders.get(files)
        return encoder.state if encoder else None

    def cache_bytes(self) -> int:
        """What the ids of known text take, about, for all tokenizers."""
        return sum(tokenizer.cache_bytes for tokenizer, _ in self._tokenizers.values())

    def progress(self) -> list[tuple[ModelFiles, Progress, float]]:
        """Of each set of files how far its encoder is, and since how many seconds."""
        now = self._clock()
        return [(files, progress, now - progress.since) for files, progress in self._progress.items()]

    async def run(self) -> None:
        """Load what is wanted and not there, check samples of what is encoded, and learn from it, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._load_wanted())
            loops.create_task(self._shared.check.run())
            loops.create_task(self._shared.learner.run())

    def close(self) -> None:
        """Let the threads go."""
        self._pool.close()

    def _is_full(self) -> bool:
        return len(self._wanted) >= ENCODERS_MAX

    async def _load_wanted(self) -> None:
        """A task for each set of files that is wanted and not there: one that is slow or broken holds up no other."""
        loading: dict[ModelFiles, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                loading = {files: task for files, task in loading.items() if not task.done()}
                for files in loading.keys() - self._wanted.keys():
                    loading.pop(files).cancel()
                for files in self._wanted.keys() - loading.keys() - self._encoders.keys():
                    loading[files] = tasks.create_task(self._load_until_there(files))
                await self._changed.wait()

    async def _load_until_there(self, files: ModelFiles) -> None:
        """Files that can't be had may be had soon; those that can't be used hardly ever."""
        pause_s = RETRY_S
        while files in self._wanted and files not in self._encoders:
            try:
                encoder = await self._load(files)
            except FileUnavailable as error:
                pause_s = RETRY_S
                self._note_failure(files, str(error))
            except (ValueError, KeyError) as error:
                pause_s = min(2 * pause_s, RETRY_MAX_S)
                self._note_failure(files, f"without {error}" if isinstance(error, KeyError) else str(error))
            except Exception as error:  # the edge of the loop: files are foreign, and theirs alone go without encoding
                pause_s = min(2 * pause_s, RETRY_MAX_S)
                self._note_failure(files, f"files that can't be used: {type(error).__name__}: {error}")
                logger.debug("no exact encoding for an engine's files", exc_info=True)
            else:
                self._note_loaded(files, encoder)
                return
            await self._sleep(pause_s)

    async def _load(self, files: ModelFiles) -> Encoder:
        async with self._fetches:
            contents = {
                name: await self._files.get(digest, self._wanted.get(files, ())) for name, digest in files.digests
            }
        render = build_renderer(files.renderer, contents)
        if files.renderer == IDS_ONLY:
            return Encoder(IdsOnly(), render, 0)
        async with self._loads:
            loaded = self._tokenizers.get(files.tokenizer_digest)  # of the same model with another template
            if loaded is None:
                content = contents["tokenizer.json"]
                loaded = await load_tokenizer(content, self._shared, self._cache_bytes_max)
        return Encoder(loaded[0], render, loaded[1], self._pool)

    def _note_loaded(self, files: ModelFiles, encoder: Encoder) -> None:
        if files not in self._wanted:  # let go while it was loaded
            return
        self._encoders[files] = encoder
        self._tokenizers.setdefault(files.tokenizer_digest, encoder.tokenizer)
        if files.renderer == IDS_ONLY:
            self._progress[files] = Progress("ids", self._clock(), encoder.state)
        else:
            self._progress[files] = Progress("exact", self._clock())
        logger.info("a tokenizer is loaded: %s, %s", files.short, encoder.state)

    def _note_failure(self, files: ModelFiles, reason: str) -> None:
        progress = self._progress.get(files)
        if progress is None:
            return
        if (progress.state, progress.reason) != ("failed", reason):
            logger.warning("no exact encoding for the tokenizer %s: %s", files.short, reason)
            self._progress[files] = Progress("failed", self._clock(), reason)


def build_renderer(kind: str, contents: Mapping[str, bytes]) -> Renderer:
    """A renderer from the files' contents. Raises `ValueError` or `KeyError` for files it can't be built from."""
    if kind not in RENDERERS:
        raise ValueError(f"no renderer of the kind {kind!r}; known are {', '.join(RENDERERS)}")
    return RENDERERS[kind](contents)
