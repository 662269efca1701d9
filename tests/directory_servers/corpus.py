"""Prompts as the directory sees them: runs of made-up directory keys, the same in every process."""

import hashlib
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Corpus:
    """`prompts` prompts of `chunks` chunks each, dealt out to `agents` agents in turn: each prompt has one holder."""

    prompts: int
    chunks: int
    agents: int

    def keys(self, prompt: int) -> tuple[bytes, ...]:
        """The prompt's directory keys, in order."""
        return _keys(prompt, self.chunks)

    def all_prompts(self) -> list[tuple[bytes, ...]]:
        return [self.keys(prompt) for prompt in range(self.prompts)]

    def held_by(self, agent: int) -> list[bytes]:
        """What one agent holds."""
        return [key for prompt in range(agent, self.prompts, self.agents) for key in self.keys(prompt)]


@cache
def _keys(prompt: int, chunks: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{prompt}/{chunk}".encode()).digest()[:16] for chunk in range(chunks))


def passing_key(agent: int, number: int) -> bytes:
    """A key that no prompt has, for what comes and goes meanwhile."""
    return hashlib.sha256(f"passing {agent}/{number}".encode()).digest()[:16]
