"""One request as the scheduler sees it: what was asked, how far it is, and where its steps go."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from directory.identity import UNSCOPED, Scope
from nodeagent.engines.reference.sampling import SamplingSettings


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. `tokens` are ids of the vocabulary, at least one; prompt and reply fit the context."""

    tokens: NDArray[np.uint32]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    scope: Scope = UNSCOPED
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationStep:
    """What one generated token brought: text that is certain now (often none), and at the end the reason.

    `finish_reason` is "stop", "length", or "abort" where the engine gave up (`failure` then says why).
    """

    text: str
    completion_tokens: int
    cached_tokens: int
    finish_reason: str | None = None
    failure: str | None = None


class Generation:
    """A request with its listener. `on_step` is called on the scheduler's thread and must not wait.

    After `cancel` no place is held for it beyond the step in hand, and nothing more is promised to be told.
    """

    def __init__(self, request: GenerationRequest, on_step: Callable[[GenerationStep], None]) -> None:
        self.request = request
        self.on_step = on_step
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Nobody waits for this any more. Idempotent, from any thread."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()
