"""What names an encoder: the kind of renderer, and the digests of the files that a model's engines work with."""

from dataclasses import dataclass

from directory.members import EngineRegistration

IDS_ONLY = "vllm-unknown"
"""The kind whose texts aren't encoded: it needs no files."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`digests` are (file name, hex sha256 of its content), by name."""

    renderer: str
    digests: tuple[tuple[str, str], ...]

    @property
    def is_enough(self) -> bool:
        """Whether an encoder could be made of them."""
        return bool(self.digests) or self.renderer == IDS_ONLY

    @property
    def tokenizer_digest(self) -> str:
        """That of `tokenizer.json`; empty without one."""
        return dict(self.digests).get("tokenizer.json", "")

    @property
    def short(self) -> str:
        """For people: the first twelve digits of the tokenizer's digest."""
        return self.tokenizer_digest[:12] or "none"


def registered_files(registration: EngineRegistration) -> ModelFiles:
    """Those that an engine's agent has."""
    return ModelFiles(registration.renderer, tuple(sorted(registration.tokenizer_files.items())))
