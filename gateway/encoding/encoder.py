"""A request into the token ids its engine will see: one encoder for each set of tokenizer files in the fleet."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from directory.members import EngineRegistration
from gateway.encoding.encode_pool import EncodePool, PoolBusy
from gateway.encoding.files import FileUnavailable, TokenizerFiles
from gateway.encoding.prompt_tokenizer import PromptTokenizer, Shared, load_tokenizer
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
"""Larger requests are rendered in a thread: a template with hundreds of messages takes ten milliseconds."""
RETRY_S = 2.0
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
    def cache_bytes(self) -> int:
        """What the ids of known text take, about."""
        return self._tokenizer.cache_bytes

    async def encode(self, request: InferenceRequest, context_tokens: int) -> Encoding:
        """Exact token ids, or as many as are sure, or why there are none. Of several prompts the first decides.

        A text that can't fit into `context_tokens`, were every token the longest there is, isn't tokenized: its engine
        will refuse it.
        """
        try:
            if self._pool is None or len(request.body) <= RENDERED_INLINE_BYTES_MAX:
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


def unencoded(request: InferenceRequest, reason: str) -> Encoding:
    """An encoding that says that it isn't one: about four bytes make a token."""
    return Encoding(None, max(1, len(request.body) // 4), reason)


FilesKey = tuple[str, tuple[tuple[str, str], ...]]


class Encoders:
    """The encoders of the fleet, loaded in the background as engines appear; requests never wait for one."""

    def __init__(
        self,
        files: TokenizerFiles,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        on_mismatch: Callable[[], object] = lambda: None,
        on_encoded: Callable[[int, int], object] = lambda hit_chars, miss_chars: None,
    ) -> None:
        self._files, self._sleep, self._cache_bytes_max = files, sleep, cache_bytes_max
        self._pool = EncodePool()
        self._shared = Shared.of(self._pool, SelfCheck(self._pool, on_mismatch), on_encoded)
        self._encoders: dict[FilesKey, Encoder] = {}
        self._failures: dict[FilesKey, str] = {}
        self._wanted: dict[FilesKey, tuple[str, ...]] = {}
        self._changed = asyncio.Event()

    def want(self, engines: Sequence[tuple[EngineRegistration, str]]) -> None:
        """Say which (engine, agent URL) pairs are in the fleet; encoders nobody needs any more are let go."""
        wanted: dict[FilesKey, tuple[str, ...]] = {}
        for registration, agent_url in engines:
            if registration.tokenizer_files:
                key = files_key(registration)
                wanted[key] = (*wanted.get(key, ()), agent_url)
        if wanted != self._wanted:
            self._wanted = wanted
            for key in self._encoders.keys() - wanted.keys():
                del self._encoders[key]
            self._changed.set()

    def find(self, registration: EngineRegistration) -> Encoder | None:
        """The encoder for this engine, if it is loaded."""
        return self._encoders.get(files_key(registration))

    def state(self, registration: EngineRegistration) -> str:
        """In plain words, for `/fleet`: `exact`, or why not."""
        if not registration.tokenizer_files:
            return "no tokenizer files"
        key = files_key(registration)
        return "exact" if key in self._encoders else self._failures.get(key, "loading")

    def tokenizer_state(self, registration: EngineRegistration) -> str | None:
        """How its texts are encoded, in plain words, for `/fleet`; `None` while they aren't."""
        encoder = self._encoders.get(files_key(registration))
        return encoder.state if encoder else None

    def cache_bytes(self) -> int:
        """What the ids of known text take, about, for all tokenizers."""
        return sum(encoder.cache_bytes for encoder in self._encoders.values())

    async def run(self) -> None:
        """Load what is wanted and not there, check samples of what is encoded, and learn from it, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._load_wanted())
            loops.create_task(self._shared.check.run())
            loops.create_task(self._shared.learner.run())

    async def _load_wanted(self) -> None:
        while True:
            self._changed.clear()
            missing = [key for key in self._wanted if key not in self._encoders]
            for key in missing:
                await self._load(key, self._wanted[key])
            if any(key not in self._encoders for key in self._wanted):
                await self._sleep(RETRY_S)
            else:
                await self._changed.wait()

    def close(self) -> None:
        """Let the threads go."""
        self._pool.close()

    async def _load(self, key: FilesKey, agent_urls: tuple[str, ...]) -> None:
        renderer, names = key[0], dict(key[1])
        try:
            contents = {name: await self._files.get(digest, agent_urls) for name, digest in names.items()}
            render = build_renderer(renderer, contents)
            tokenizer, token_chars_max = await load_tokenizer(
                contents["tokenizer.json"], self._shared, self._cache_bytes_max
            )
            self._encoders[key] = Encoder(tokenizer, render, token_chars_max, self._pool)
            logger.info("a tokenizer is loaded: %s", tokenizer.state)
            self._failures.pop(key, None)
        except (FileUnavailable, ValueError, KeyError) as error:
            self._failures[key] = str(error)
            logger.warning("no exact encoding for an engine's tokenizer yet: %s", error)
        except Exception as error:  # the edge of the loop: files are foreign, and theirs alone go without encoding
            self._failures[key] = f"files that can't be used: {type(error).__name__}: {error}"
            logger.exception("no exact encoding for an engine's tokenizer")


def files_key(registration: EngineRegistration) -> FilesKey:
    """What names an encoder: the renderer's kind and the digests of the files."""
    return registration.renderer, tuple(sorted(registration.tokenizer_files.items()))


def build_renderer(kind: str, contents: Mapping[str, bytes]) -> Renderer:
    """A renderer from the files' contents. Raises `ValueError` or `KeyError` for files it can't be built from."""
    if kind not in RENDERERS:
        raise ValueError(f"no renderer of the kind {kind!r}; known are {', '.join(RENDERERS)}")
    return RENDERERS[kind](contents)
