"""Picks the next token from logits: greedily, or at random from a seeded generator."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to pick. Temperature 0 is greedy; `top_p` keeps the smallest set of tokens with that much probability."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None


class Sampler:
    """The picks of one generation: the same seed and logits give the same tokens."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        self._random = np.random.default_rng(settings.seed)

    def pick(self, logits: NDArray[np.float32]) -> int:
        """The next token's id; the lowest id among equals when greedy."""
        settings = self._settings
        if settings.temperature == 0:
            return int(np.argmax(logits))
        scaled = (logits.astype(np.float64) - float(logits.max())) / settings.temperature
        weights = np.exp(scaled)
        if settings.top_p >= 1.0:
            return _draw(np.arange(len(weights)), weights, self._random)
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        kept = int(np.searchsorted(cumulative, settings.top_p * cumulative[-1])) + 1
        return _draw(order[:kept], weights[order[:kept]], self._random)


def _draw(candidates: NDArray[np.intp], weights: NDArray[np.float64], random: np.random.Generator) -> int:
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])
