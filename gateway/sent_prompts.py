"""What this gateway knows by having sent it: chunks on their way to engines, and what engines without an agent hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from directory.placements import NO_MATCH, PrefixMatch
from directory.tiers import Tier
from gateway.audit import Usage
from gateway.config import KV_TOKENS_DEFAULT
from gateway.fleet import EngineView, FleetTable
from gateway.routing.assumed import AssumedPlacements, AssumedRun
from gateway.routing.overlay import LIFETIME_S, Expectation, Overlay

_NONE: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class KnownMatch:
    """An engine's match with all that is known here: the last `expected_chunks` aren't there yet."""

    match: PrefixMatch
    expected_chunks: int


class SentPrompts:
    """Lengthens what the directory says of a prompt's holders, and follows prompts that are sent.

    `kv_tokens` is what the GPU memory of engines without an agent holds, by their names, where that is known.
    """

    def __init__(
        self,
        overlay: Overlay,
        assumed: AssumedPlacements,
        clock: Callable[[], float],
        on_its_way_s: float = LIFETIME_S,
        kv_tokens: Mapping[str, int] | None = None,
    ) -> None:
        self.overlay, self.assumed, self._clock = overlay, assumed, clock
        self._on_its_way_s, self._kv_tokens = on_its_way_s, kv_tokens or {}
        self._lives: dict[str, frozenset[bytes]] = {}

    def configure(self, kv_tokens: Mapping[str, int]) -> None:
        """What the memory of engines without an agent holds, from now on."""
        self._kv_tokens = kv_tokens

    def match(self, view: EngineView, match: PrefixMatch, keys: Sequence[bytes]) -> KnownMatch:
        """What an engine can use of a prompt; `match` is what the directory says, `keys` its chunks in its naming."""
        now = self._clock()
        if view.registration is None:
            if self.assumed.is_distrusted(view.engine, now):  # what is on its way there won't be kept either
                return KnownMatch(NO_MATCH, 0)
            if (chunks := self.assumed.chunks(view.engine, keys, now)) > match.chunks:
                match = PrefixMatch((Tier.GPU,) * chunks)
        found = self.overlay.extend(view.engine, match, keys, now)
        return KnownMatch(found, found.chunks - match.chunks)

    def send(self, view: EngineView, keys: Sequence[bytes], known: KnownMatch, expected_ttft_s: float) -> "SentPrompt":
        """A prompt with these chunks goes to an engine, and is expected to be computed there after so many seconds."""
        now = self._clock()
        expectation = self.overlay.expect(view.engine, keys, now + expected_ttft_s + self._on_its_way_s, now)
        run = AssumedRun() if view.registration is not None else self.assumed.run(view.engine, keys, now)
        return SentPrompt(self, view, keys, expectation, run, known.match.chunks - known.expected_chunks)

    def keep(self, table: FleetTable) -> None:
        """Forget what was sent to engines that aren't ready any more, or have a new life: their memory is empty."""
        lives = {view.engine: view.reach.own for view in table.engines.values() if view.is_ready}
        own = {name: lives[name] or self._lives.get(name, _NONE) for name in lives if table.engines[name].registration}
        begun_anew = {name for name, now in own.items() if (before := self._lives.get(name)) and now - before}
        self._lives = own
        self.overlay.keep(lives.keys() - begun_anew)
        self.assumed.keep(lives.keys())

    def note_computed(self, sent: "SentPrompt") -> None:
        """The prompt's chunks are in the engine's GPU memory."""
        now, view = self._clock(), sent.view
        self.overlay.settle(sent.expectation, now + self._on_its_way_s)
        if view.registration is None and sent.keys:
            others = len(view.reach.own)  # each gateway knows what it sent itself: they share the room
            tokens = self._kv_tokens.get(view.engine, KV_TOKENS_DEFAULT) // (1 + others)
            self.assumed.note_computed(view.engine, sent.keys, tokens // view.chunk_tokens, now)

    def note_cached(self, sent: "SentPrompt", cached_tokens: int) -> None:
        """The engine says how much of the prompt was there already."""
        self.overlay.note_cached(sent.expectation, cached_tokens, self._clock())
        if sent.view.registration is None:
            chunks = cached_tokens // sent.view.chunk_tokens
            self.assumed.note_cached(sent.view.engine, sent.assumed, sent.promised_chunks, chunks, self._clock())


@dataclass(slots=True)
class SentPrompt:
    """One prompt that was sent to one engine. `release` has to be called however it ends.

    `promised_chunks` were believed to be there when it was sent, of which `assumed` by this gateway itself.
    """

    prompts: SentPrompts
    view: EngineView
    keys: Sequence[bytes]
    expectation: Expectation
    assumed: AssumedRun
    promised_chunks: int
    is_computed: bool = field(default=False)

    def first_byte(self, is_computed: bool) -> None:
        """The engine answers; `is_computed`: and not with a refusal. Repeating it changes nothing."""
        if is_computed and not self.is_computed:
            self.is_computed = True
            self.prompts.note_computed(self)

    def note_usage(self, usage: Usage | None) -> None:
        """What the engine reports at the end of its answer."""
        if usage is not None and usage.cached_tokens is not None:
            self.prompts.note_cached(self, usage.cached_tokens)

    def release(self) -> None:
        """It is over. What wasn't computed by then won't be: others don't follow it. Repeating it changes nothing."""
        if not self.is_computed:
            self.prompts.overlay.take_back(self.expectation)
