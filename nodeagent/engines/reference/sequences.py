"""A prompt on its way in, and a reply on its way out: the two phases of a request, advanced a step at a time."""

import time

import numpy as np

from nodeagent.engines.reference.generation import Generation, GenerationStep
from nodeagent.engines.reference.kv import KvSequence
from nodeagent.engines.reference.metrics import EngineMetrics
from nodeagent.engines.reference.model import Floats, LlamaModel
from nodeagent.engines.reference.prefix_cache import PrefixCache
from nodeagent.engines.reference.sampling import Sampler
from nodeagent.engines.reference.speed import Speedometer
from nodeagent.engines.reference.text_stream import TextStream
from nodeagent.engines.reference.tokenizer import TextTokenizer

_REPLY_ROOM_TOKENS = 256


class Prefill:
    """Brings a prompt's KV together: loads leading chunks from the cache, computes the rest.

    Batches are always cut at multiples of the chunk from position 0, so that a cache changes no bit of the result.
    """

    def __init__(
        self, generation: Generation, model: LlamaModel, cache: PrefixCache, chunk_tokens: int, speed: Speedometer
    ) -> None:
        request = generation.request
        self.generation = generation
        self.started_s = time.monotonic()
        self.loaded_tokens: dict[str, int] = {}
        self._model = model
        self._cache = cache
        self._chunk_tokens = chunk_tokens
        self._speed = speed
        self._is_loading = True
        self.sequence = model.new_sequence(len(request.tokens) + min(request.max_tokens, _REPLY_ROOM_TOKENS))
        packed = request.tokens.astype("<u4").tobytes()
        self._keys, self._hit = cache.find(packed, request.scope)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens loaded instead of computed."""
        return sum(self.loaded_tokens.values())

    def advance(self) -> Floats | None:
        """Load one chunk or compute one batch, or find that the chunk isn't there yet: then others get their turn.

        Returns the last token's logits when the prompt is complete.
        """
        if self._is_loading:
            if not self._hit.is_ready():
                return None
            tier = self._hit.load_next(self.sequence)
            if tier is not None:
                self.loaded_tokens[tier] = self.loaded_tokens.get(tier, 0) + self._chunk_tokens
                return None
            self._is_loading = False
        tokens = self.generation.request.tokens
        start = self.sequence.length
        end = min(start + self._chunk_tokens, len(tokens))
        began_s = time.perf_counter()
        logits = self._model.forward(tokens[start:end], self.sequence, want_logits=end == len(tokens))
        self._speed.observe(end, start, time.perf_counter() - began_s)
        index = start // self._chunk_tokens
        if index < len(self._keys.storage):
            self._cache.keep(self._keys, index, self.sequence)
        return logits

    def close(self) -> None:
        """Give back what is still referenced."""
        self._hit.close()


class Reply:
    """Generates a reply token by token, and turns the tokens into text."""

    def __init__(
        self,
        generation: Generation,
        sequence: KvSequence,
        cached_tokens: int,
        model: LlamaModel,
        tokenizer: TextTokenizer,
        metrics: EngineMetrics,
    ) -> None:
        request = generation.request
        self.generation = generation
        self._sequence = sequence
        self._cached_tokens = cached_tokens
        self._model = model
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._sampler = Sampler(request.sampling)
        self._text = TextStream(request.stops)
        self._generated = 0
        self._last = 0
        self.is_finished = False

    def advance(self) -> None:
        """Compute the next token behind the last one and pass it on."""
        logits = self._model.forward(np.array([self._last], np.uint32), self._sequence, want_logits=True)
        assert logits is not None
        self.accept(logits)

    def accept(self, logits: Floats) -> None:
        """Pick a token from `logits` and tell the listener what it brought."""
        request = self.generation.request
        token = self._sampler.pick(logits)
        self._last = token
        self._generated += 1
        self._metrics.generation_tokens.inc()
        is_end = token == self._tokenizer.eos_id and not request.ignore_eos
        text = "" if is_end else self._text.push(self._tokenizer.text_bytes(token))
        reason = None
        if is_end or self._text.is_stopped:
            reason = "stop"
        elif self._generated >= request.max_tokens:
            reason = "length"
        if reason is not None:
            text += self._text.finish()
            reason = "stop" if self._text.is_stopped else reason
            self.is_finished = True
            self._metrics.finished[reason].inc()
        self.generation.on_step(GenerationStep(text, self._generated, self._cached_tokens, reason))
