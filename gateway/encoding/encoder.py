"""A request into the token ids its engine will see: one encoder for each set of tokenizer files in the fleet."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson

from directory.members import EngineRegistration
from gateway.encoding.files import FileUnavailable, TokenizerFiles
from gateway.encoding.render import ReferenceRenderer, Uncertain, VllmRenderer
from gateway.encoding.tokenizer import Backend, load_tokenizer, longest_token_chars
from gateway.openai_schema import CHAT, InferenceRequest

logger = logging.getLogger(__name__)

INLINE_CHARS_MAX = 16_000
"""Longer texts are encoded in a thread, so that the event loop isn't held."""
RETRY_S = 2.0
RENDERERS: dict[str, type[ReferenceRenderer]] = {"reference": ReferenceRenderer, "vllm": VllmRenderer}


@dataclass(frozen=True, slots=True)
class Encoding:
    """The token ids of the prompt that decides the routing, as little-endian u32; exactly the engine's.

    Or `None` with the reason why they aren't known; `tokens_estimate` is then a rough count. `reads_cache` is whether
    the engine uses what is cached of it.
    """

    tokens: bytes | None
    tokens_estimate: int
    reason: str = ""
    reads_cache: bool = True

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return self.tokens_estimate if self.tokens is None else len(self.tokens) // 4


class Encoder:
    """Renders and tokenizes for engines that share tokenizer files and a renderer."""

    def __init__(
        self, backend: Backend, renderer: ReferenceRenderer, pool: ThreadPoolExecutor, token_chars_max: int
    ) -> None:
        self._backend, self._renderer, self._pool = backend, renderer, pool
        self._token_chars_max = token_chars_max

    async def encode(self, request: InferenceRequest, context_tokens: int) -> Encoding:
        """Exact token ids, or why there are none. Of several prompts in one request the first decides.

        A text that can't fit into `context_tokens`, were every token the longest there is, isn't tokenized: its engine
        will refuse it.
        """
        prompt: str | bytes
        try:
            self._renderer.check(request.fields)
            prompt = self._renderer.render(request.fields) if request.endpoint == CHAT else request.prompts[0]
        except Uncertain as reason:
            return unencoded(request, str(reason))
        reads_cache = self._renderer.reads_cache(request.endpoint, request.fields)
        adds_special = request.endpoint != CHAT and self._renderer.adds_special_tokens
        if isinstance(prompt, bytes):
            return Encoding(prompt, len(prompt) // 4, reads_cache=reads_cache)
        if len(prompt) > context_tokens * self._token_chars_max:
            return unencoded(request, "too_long")
        if len(prompt) <= INLINE_CHARS_MAX:
            tokens = self._backend.encode(prompt, adds_special)
        else:
            loop = asyncio.get_running_loop()
            tokens = await loop.run_in_executor(self._pool, self._backend.encode, prompt, adds_special)
        return Encoding(tokens, len(tokens) // 4, reads_cache=reads_cache)


def unencoded(request: InferenceRequest, reason: str) -> Encoding:
    """An encoding that says that it isn't one: about four bytes make a token."""
    return Encoding(None, max(1, len(request.body) // 4), reason)


FilesKey = tuple[str, tuple[tuple[str, str], ...]]


class Encoders:
    """The encoders of the fleet, loaded in the background as engines appear; requests never wait for one."""

    def __init__(self, files: TokenizerFiles, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._files, self._sleep = files, sleep
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")
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

    async def run(self) -> None:
        """Load what is wanted and not there, until cancelled."""
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
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _load(self, key: FilesKey, agent_urls: tuple[str, ...]) -> None:
        renderer, names = key[0], dict(key[1])
        try:
            contents = {name: await self._files.get(digest, agent_urls) for name, digest in names.items()}
            self._encoders[key] = await asyncio.get_running_loop().run_in_executor(
                self._pool, build_encoder, renderer, contents, self._pool
            )
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


def build_encoder(renderer: str, contents: Mapping[str, bytes], pool: ThreadPoolExecutor) -> Encoder:
    """An encoder from the files' contents. Raises `ValueError` or `KeyError` for files it can't be built from."""
    if renderer not in RENDERERS:
        raise ValueError(f"no renderer of the kind {renderer!r}; known are {', '.join(RENDERERS)}")
    config: dict[str, Any] = orjson.loads(contents["tokenizer_config.json"])
    template = contents["chat_template.jinja"].decode()
    tokenizer = load_tokenizer(contents["tokenizer.json"])
    longest = longest_token_chars(contents["tokenizer.json"])
    return Encoder(tokenizer, RENDERERS[renderer](template, config), pool, longest)
