"""What became of a request to forget: counts by tier, what remains and why. It names no key and no salt."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Amount:
    """Chunks and their bytes."""

    chunks: int = 0
    bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """One chunk more."""
        self.chunks += 1
        self.bytes += size_bytes


@dataclass(slots=True)
class ForgottenAmounts:
    """What went. `nvme` counts bytes of files, of which `files_removed` are gone from disk by now.

    `puts`, `loads` and `writes` were under way, from engines, from disk to DRAM and from DRAM to disk: they come to
    nothing. `placements` are withdrawn from the directory.
    """

    dram: Amount = field(default_factory=Amount)
    nvme: Amount = field(default_factory=Amount)
    files_removed: int = 0
    puts: int = 0
    loads: int = 0
    writes: int = 0
    placements: int = 0


@dataclass(slots=True)
class EngineRemains:
    """Chunks in an engine's own memory that are announced and would be forgotten; `reset` is what it said, if asked."""

    engine: str
    gpu_chunks: int
    reset: str | None = None


@dataclass(slots=True)
class Remains:
    """What is still there, and why.

    `open_references`: engines are reading these; the slots are zeroed when they close. `files_unremoved`: the drive
    refuses; it is tried again, and they are never indexed. `drives_away` and `files_unread`: looked at when they are
    back, or read, before anything of them is served. `salt_unknown`, `unlabelled` and `unlinked`: chunks that stay
    because nothing says of which salt they are, what they are at all, or what they follow (the chunk before them isn't
    here). `placements_pending`: the directory hasn't heard of all yet.
    `engines`: engines' own memory isn't the agent's. `identity_unknown`: only a digest was given, and no engine here
    tells whose it is; what shards of it hold isn't named.
    """

    open_references: Amount = field(default_factory=Amount)
    files_unremoved: int = 0
    drives_away: list[str] = field(default_factory=list)
    files_unread: int = 0
    salt_unknown: int = 0
    unlabelled: int = 0
    unlinked: int = 0
    placements_pending: int = 0
    identity_unknown: bool = False
    engines: list[EngineRemains] = field(default_factory=list)


@dataclass(slots=True)
class Receipt:
    """One request's. `number` is random, in hex; times are UTC, ISO 8601, and seconds.

    `kept_in` and `not_kept_in` are the places of the tombstone, by name. `is_confirmed` says that nothing of it is
    served from the agent's tiers again, whatever happens to its process.
    """

    number: str
    host: str
    by: str
    at: str
    until: str
    forgotten: ForgottenAmounts = field(default_factory=ForgottenAmounts)
    remains: Remains = field(default_factory=Remains)
    kept_in: list[str] = field(default_factory=list)
    not_kept_in: list[str] = field(default_factory=list)
    is_confirmed: bool = False
    took_s: float = 0.0

    def data(self) -> dict[str, Any]:
        """As JSON shows it."""
        return asdict(self)
