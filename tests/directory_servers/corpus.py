"""Prompts as the directory sees them: runs of made-up directory keys, the same in every process."""

import hashlib
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Corpus:
    """`prompts` prompts of `chunks` chunks each, dealt out to `agents` agents in turn.

    The first `shared` of them are held by every agent, each of the others by one.
    """

    prompts: int
    chunks: int
    agents: int
    shared: int = 0

    def keys(self, prompt: int) -> tuple[bytes, ...]:
        """The prompt's directory keys, in order."""
        return _keys(prompt, self.chunks)

    def all_prompts(self) -> list[tuple[bytes, ...]]:
        return [self.keys(prompt) for prompt in range(self.prompts)]

    def held_by(self, agent: int) -> list[bytes]:
        """What one agent holds, the shared prompts first."""
        own = range(self.shared + agent, self.prompts, self.agents)
        return [key for prompt in (*range(self.shared), *own) for key in self.keys(prompt)]

    @classmethod
    def read(cls, text: str) -> "Corpus":
        """What `str` wrote."""
        return cls(*map(int, text.split(",")))

    def __str__(self) -> str:
        return f"{self.prompts},{self.chunks},{self.agents},{self.shared}"


@cache
def _keys(prompt: int, chunks: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{prompt}/{chunk}".encode()).digest()[:16] for chunk in range(chunks))


def passing_key(agent: int, number: int) -> bytes:
    """A key that no prompt has, for what comes and goes meanwhile."""
    return hashlib.sha256(f"passing {agent}/{number}".encode()).digest()[:16]
