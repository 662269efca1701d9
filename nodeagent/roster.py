"""The engines of this host: who is attached, what each one announces, and when its life ends.

An engine's life in the directory begins with its first hello. It ends when its process is gone, when it says goodbye,
or when its connection stays lost for `GRACE_S`; a process that reconnects in time goes on with the life it had. Only
its `gpu` placements end with it: what it stored belongs to the host.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Protocol
from urllib.parse import urlsplit

from directory.errors import IdentityRefused
from directory.interface import DirectoryWriter
from directory.members import EngineRegistration, Load
from directory.tiers import Tier
from nodeagent.errors import HelloRefused
from nodeagent.files import FileShelf
from nodeagent.host_rates import EngineRates, HostRates
from nodeagent.inventory import Inventory
from nodeagent.messages import Hello, KvEventSource, LoadReport
from nodeagent.metrics import AgentMetrics
from nodeagent.processes import Process
from nodeagent.publisher import Publisher
from nodeagent.registration import Clock, Lives, Sleep

GRACE_S = 5.0
ENGINES_MAX = 64
GPU_KEYS_MAX = 4_000_000
NOTE_STEP_KEYS = 1_024
AGAIN_MIN_S, AGAIN_MAX_S = 1.0, 60.0
"""After a fault an engine's work is begun again so much later, and twice as much after each fault that follows."""

logger = logging.getLogger(__name__)


class Follow(Protocol):
    """Follows a foreign engine's events and metrics."""

    async def __call__(self, engine: "AttachedEngine", source: KvEventSource) -> None:
        """Until cancelled."""
        ...


class Connection(Protocol):
    """One connection of an engine's client."""

    def supersede(self) -> None:
        """The client has another connection now: what is still unread on this one doesn't count any more."""
        ...


@dataclass(eq=False, slots=True)
class AttachedEngine:
    """One engine: its registration, what it last reported, and the publisher of its `gpu` tier.

    `identity_digest` says whose bytes it puts: its shard's, or, of a foreign engine, the fleet's. `events` is where
    the `gpu` tier of a foreign engine is learned.
    """

    name: str
    process: Process
    registration: EngineRegistration
    flops: float
    identity_digest: bytes
    events: KvEventSource | None = None
    running: int = 0
    waiting: int = 0
    rates: EngineRates = field(default_factory=lambda: HostRates().for_engine())
    client: bytes = b""
    connection: Connection | None = None
    publisher: Publisher = field(init=False)
    task: asyncio.Task[None] = field(init=False)
    following: asyncio.Task[None] | None = None
    grace: asyncio.Task[None] | None = None

    def load(self) -> Load:
        """What its renewals report: its rates, and its queue."""
        return Load(
            rates=self.rates.rates(self.flops),
            running=self.running,
            waiting=self.waiting,
            is_directory_full=self.publisher.refusals.is_full,
            announced_chunks=len(self.publisher.inventory),
        )

    def doubt(self) -> None:
        """What follows it has met a fault: nothing that it said is believed any more."""
        self.publisher.record_all({})
        self.running = self.waiting = 0

    def note_load(self, report: LoadReport) -> None:
        """Take over what the engine says of itself."""
        self.running, self.waiting = report.running, report.waiting
        if 0 < report.flops < math.inf:
            self.flops = report.flops

    def replacing_gpu(self, keys: list[bytes]) -> Iterator[None]:
        """The whole `gpu` inventory, as directory keys, most recently used last: noted a step at a time.

        Whoever takes the steps may let others have their turn in between, but not another word of this engine's.
        """
        held = dict.fromkeys(keys)
        gone = [key for key in self.publisher.inventory if key not in held]
        return self._noting(chain(zip(gone, repeat(0)), zip(held, repeat(int(Tier.GPU)))))

    def changing_gpu(self, stored: list[bytes], evicted: list[bytes]) -> Iterator[None]:
        """Newest states of the `gpu` tier, in the same way."""
        return self._noting(chain(zip(stored, repeat(int(Tier.GPU))), zip(evicted, repeat(0))))

    def change_gpu(self, stored: list[bytes], evicted: list[bytes]) -> None:
        """The same at once, of few."""
        for _ in self.changing_gpu(stored, evicted):
            pass

    def _noting(self, states: Iterator[tuple[bytes, int]]) -> Iterator[None]:
        while step := list(islice(states, NOTE_STEP_KEYS)):
            for key, mask in step:
                self.publisher.record(key, mask)
            yield


class Roster:
    """Attaches and detaches engines; every method belongs to the event loop.

    `group` holds the engines' tasks, but for those that end a life: they outlast a group that is ending, and `close`
    waits for them. A fault in an engine's work is logged and costs that engine alone. `host` is written into every
    registration. `rates` are what loading costs on this host. `follow` runs beside each foreign engine.
    """

    def __init__(
        self,
        host: str,
        directory: DirectoryWriter,
        files: FileShelf,
        group: asyncio.TaskGroup,
        *,
        clock: Clock,
        sleep: Sleep,
        metrics: AgentMetrics,
        walk_interval_s: float,
        rates: HostRates,
        follow: Follow | None = None,
    ) -> None:
        self._host = host
        self._directory = directory
        self._files = files
        self._group = group
        self._clock = clock
        self._sleep = sleep
        self._metrics = metrics
        self._walk_interval_s = walk_interval_s
        self._rates = rates
        self._follow = follow
        self._engines: dict[str, AttachedEngine] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closing = False

    @property
    def engines(self) -> tuple[AttachedEngine, ...]:
        """Those attached now, or within their grace."""
        return tuple(self._engines.values())

    def attach(self, hello: Hello, process: Process, connection: Connection) -> AttachedEngine:
        """Register the engine that says hello, or continue the life it has.

        Raises `HelloRefused` for a description that must not be registered, a name that another living process
        holds, or parallelism that this door doesn't know.
        """
        if self._is_closing:
            raise HelloRefused("the agent is ending")
        known = self._engines.get(hello.engine)
        if known is not None and known.process is not process and not known.process.is_gone:
            raise HelloRefused(f"an engine named {hello.engine!r} is attached already, as process {known.process.pid}")
        if known is None and len(self._engines) >= ENGINES_MAX:
            raise HelloRefused(f"{ENGINES_MAX} engines are attached already")
        registration = self._registration(hello)
        registration = replace(registration, tokenizer_files=self._files.keep(hello.engine, hello.tokenizer_files))
        if known is not None and known.process is process and known.registration == registration:
            self._stop_grace(known)
        else:
            if known is not None:
                self._remove(known, "said hello as another")
            known = self._begin(hello, registration, process)
        if known.connection is not None and known.client == hello.client:
            known.connection.supersede()
        known.client, known.connection = hello.client, connection
        known.flops = hello.flops
        return known

    def lose(self, engine: AttachedEngine, connection: Connection) -> None:
        """An engine's connection is lost: it has a short while to come back."""
        if engine.connection is not connection or self._engines.get(engine.name) is not engine:
            return
        engine.connection = None
        self._stop_grace(engine)
        if not self._is_closing:
            engine.grace = self._group.create_task(self._wait_grace(engine))

    def process_gone(self, process: Process) -> None:
        """A process has ended, and its engines with it."""
        for engine in self.engines:
            if engine.process is process:
                self.detach(engine, "process gone")

    def detach(self, engine: AttachedEngine, reason: str) -> None:
        """End an engine's life; what it stored in the host's tiers stays."""
        if self._engines.get(engine.name) is engine:
            self._remove(engine, reason)
            self._files.forget(engine.name)

    def stop(self) -> None:
        """Let nobody in any more; the group may be ending."""
        self._is_closing = True

    async def close(self) -> None:
        """Detach all, and wait until their lives are retired."""
        self.stop()
        for engine in self.engines:
            self.detach(engine, "agent stops")
        await asyncio.gather(*self._ending)

    def _registration(self, hello: Hello) -> EngineRegistration:
        if hello.identity.tp_size != 1 and hello.events is None:
            raise HelloRefused(
                f"tp_size {hello.identity.tp_size}: this door stores whole chunks, not the shards of several ranks"
            )
        if not math.isfinite(hello.flops):
            raise HelloRefused("flops must be a finite number of useful FLOP/s")
        if not all(math.isfinite(each) and each >= 0 for each in astuple(hello.shape)):
            raise HelloRefused(f"shape must hold finite numbers of at least 0: {hello.shape}")
        if not _is_http_url(hello.url):
            raise HelloRefused(f"url must be an http URL with a host, and a port of 1 to 65535: {hello.url!r}")
        try:
            _identity_digest(hello)
            return EngineRegistration(
                engine=hello.engine,
                host=self._host,
                url=hello.url,
                models=hello.models,
                identity=hello.identity,
                shape=hello.shape,
                chunk_tokens=hello.chunk_tokens,
                context_tokens=hello.context_tokens,
                key_scheme=hello.key_scheme,
                renderer=hello.renderer,
                kv_tokens=hello.kv_tokens,
            )
        except IdentityRefused as error:
            raise HelloRefused(str(error)) from error

    def _begin(self, hello: Hello, registration: EngineRegistration, process: Process) -> AttachedEngine:
        engine = AttachedEngine(
            hello.engine,
            process,
            registration,
            hello.flops,
            _identity_digest(hello),
            hello.events,
            rates=self._rates.for_engine(),
        )
        lives = Lives(self._directory, registration, engine.load, self._sleep, self._metrics)
        engine.publisher = Publisher(
            self._directory,
            lives,
            Inventory(GPU_KEYS_MAX),
            clock=self._clock,
            sleep=self._sleep,
            metrics=self._metrics,
            walk_interval_s=self._walk_interval_s,
        )
        engine.task = self._group.create_task(
            self._keep_up(engine, engine.publisher.run, partial(engine.publisher.doubt, "fault"))
        )
        if hello.events is not None and self._follow is not None:
            follow = partial(self._follow, engine, hello.events)
            engine.following = self._group.create_task(self._keep_up(engine, follow, engine.doubt))
        self._engines[engine.name] = engine
        logger.info("engine %s is attached, process %d", engine.name, process.pid)
        return engine

    def _remove(self, engine: AttachedEngine, reason: str) -> None:
        del self._engines[engine.name]
        self._stop_grace(engine)
        logger.info("engine %s is detached: %s", engine.name, reason)
        ending = asyncio.get_running_loop().create_task(self._end(engine))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _keep_up(
        self, engine: AttachedEngine, work: Callable[[], Awaitable[None]], on_fault: Callable[[], None]
    ) -> None:
        """Do an engine's work for as long as it is attached. After a fault it is tried again, at a bounded pace."""
        pause_s = AGAIN_MIN_S
        while self._engines.get(engine.name) is engine:
            began_at = self._clock()
            try:
                await work()
            except Exception:  # the edge of the loop: one engine's fault stays its own
                logger.exception("following engine %s met a fault; trying again", engine.name)
                self._metrics.degraded.labels("engine_fault").inc()
            on_fault()
            if self._clock() - began_at > AGAIN_MAX_S:
                pause_s = AGAIN_MIN_S
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MAX_S)

    async def _wait_grace(self, engine: AttachedEngine) -> None:
        await self._sleep(GRACE_S)
        engine.grace = None
        self.detach(engine, "connection lost")

    async def _end(self, engine: AttachedEngine) -> None:
        tasks = [engine.task, *([] if engine.following is None else [engine.following])]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        try:
            await engine.publisher.stop()
        except Exception:  # the edge of a task: a life that isn't retired lapses by itself
            logger.exception("ending the life of engine %s met a fault", engine.name)

    @staticmethod
    def _stop_grace(engine: AttachedEngine) -> None:
        if engine.grace is not None:
            engine.grace.cancel()
            engine.grace = None


def _identity_digest(hello: Hello) -> bytes:
    """Whose bytes an engine puts. Raises `IdentityRefused`."""
    if hello.events is not None:
        return hello.identity.fleet_digest()
    return hello.identity.shard_digest(hello.tp_rank)


def _is_http_url(url: str) -> bool:
    """Whether gateways and this agent can ask at `url`: what HTTP clients refuse raises far from here."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_plain = url.isprintable() and not any(letter.isspace() for letter in url)
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and is_plain
    except ValueError:  # a port, an IPv6 address, or a name that is none
        return False
