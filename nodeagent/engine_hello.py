"""What an engine says of itself at the door: its registration but for the host, and its tokenizer files."""

from collections.abc import Mapping
from dataclasses import dataclass

from directory.costs import ModelShape
from directory.identity import Identity
from nodeagent.messages import Hello, KvEventSource


@dataclass(frozen=True, slots=True)
class EngineHello:
    """What an engine says of itself. `chunk_bytes` is the size of one chunk's payload; `flops` useful FLOP/s.

    `kv_tokens` is how many tokens its KV cache holds, `None` where it doesn't know.
    """

    engine: str
    url: str
    models: tuple[str, ...]
    identity: Identity
    tp_rank: int
    shape: ModelShape
    chunk_tokens: int
    chunk_bytes: int
    context_tokens: int
    tokenizer_files: Mapping[str, bytes]
    flops: float
    key_scheme: str = "warmroute"
    renderer: str = "reference"
    events: KvEventSource | None = None
    kv_tokens: int | None = None

    def message(self, client: bytes) -> Hello:
        """As the door's first message, from the client of that name (16 random bytes)."""
        return Hello(
            client,
            self.engine,
            self.url,
            self.models,
            self.identity,
            self.tp_rank,
            self.shape,
            self.chunk_tokens,
            self.chunk_bytes,
            self.context_tokens,
            dict(self.tokenizer_files),
            self.flops,
            self.key_scheme,
            self.renderer,
            self.events,
            self.kv_tokens,
        )
