"""A prompt as each of its engines will see it: encoded once for every set of model files among them, and named.

Engines of one model may work with different files for a while: a new version is being rolled out, or one was started by
hand. Each has ids of its own then, and what is known of one says nothing about another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.encoding.encoder import Encoders, Encoding, unencoded
from gateway.encoding.model_files import ModelFiles
from gateway.fleet import EngineView
from gateway.lookup import CHAINS_MAX, ChunkChain, ChunkLookup, NamingGroup
from gateway.openai_schema import InferenceRequest


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The encodings of one prompt: `best` is the one that most is known of, by which costs are estimated.

    `by_files` holds at most `CHAINS_MAX`; an engine with other files has none, and matches nothing. `shortfalls` says
    what isn't known, as reasons for `degraded_total`.
    """

    best: Encoding
    by_files: Mapping[ModelFiles, Encoding] = field(default_factory=dict)
    groups: tuple[NamingGroup, ...] = ()
    shortfalls: tuple[str, ...] = ()

    def of(self, view: EngineView) -> Encoding | None:
        """The encoding with the files of this engine, if there is one."""
        files = view.files
        return None if files is None else self.by_files.get(files)

    def tokens_of(self, view: EngineView) -> int | None:
        """The prompt's length in this engine's tokens, where `best` doesn't say it already."""
        if len(self.by_files) < 2 or (own := self.of(view)) is None or own.tokens is None:
            return None
        return own.prompt_tokens

    def named(self) -> list[tuple[NamingGroup, bytes]]:
        """Each group that names its chunks, with its own engines' ids."""
        encoded = [(group, self.by_files[group.files].tokens) for group in self.groups]
        return [(group, tokens) for group, tokens in encoded if tokens is not None]

    def reads_cache(self, chunk_chain: ChunkChain) -> bool:
        """Whether an engine that holds these chunks would use them."""
        return self.by_files[chunk_chain.group.files].reads_cache


class Prompts:
    """Encodes prompts with the encoders that are loaded; never waits for one that isn't."""

    def __init__(self, encoders: Encoders, lookup: ChunkLookup) -> None:
        self._encoders, self._lookup = encoders, lookup

    async def encode(self, request: InferenceRequest, views: Sequence[EngineView]) -> EncodedPrompt:
        """The prompt for each of the `views`. Groups beyond `CHAINS_MAX`, or without an encoder yet, go without."""
        groups = self._lookup.grouped(request.model, views)
        ready = [group for group in groups if self._encoders.find(group.files) is not None][:CHAINS_MAX]
        context_tokens: dict[ModelFiles, int] = {}
        for group in ready:
            longest = max(view.context_tokens for view in group.engines)
            context_tokens[group.files] = max(longest, context_tokens.get(group.files, 0))
        # All encoders are taken before the first is awaited: what the fleet becomes meanwhile is the next request's.
        encoders = {files: self._encoders.find(files) for files in context_tokens}
        by_files = {
            files: await encoder.encode(request, context_tokens[files])
            for files, encoder in encoders.items()
            if encoder is not None
        }
        if not by_files:
            without = unencoded(request, "no_tokenizer")
            return EncodedPrompt(without, shortfalls=(f"not_encoded_{without.reason}",))
        best = max(by_files.values(), key=_known)
        return EncodedPrompt(best, by_files, tuple(ready), _shortfalls(best, by_files, len(ready) < len(groups)))


def _known(encoding: Encoding) -> tuple[bool, bool]:
    return encoding.tokens is not None, encoding.is_whole


def _shortfalls(best: Encoding, by_files: Mapping[ModelFiles, Encoding], are_missing: bool) -> tuple[str, ...]:
    if best.tokens is None:
        return (f"not_encoded_{best.reason}",)
    found = [] if best.is_whole else [f"partly_encoded_{best.reason}"]
    others = {f"not_encoded_{each.reason}" for each in by_files.values() if each.tokens is None}
    return (*found, *sorted(others), *(("not_encoded_for_all",) if are_missing else ()))
