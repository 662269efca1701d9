"""Fleet: the hosts and engines a gateway knows, refreshed in the background; joins an engine with its host.

The directory says who is in the fleet and whose placements to believe; health checks say who may serve. So an engine
whose agent has died goes on serving, routed by load, and a dead engine is left at once whatever the directory says.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from directory.costs import ModelShape, Rates
from directory.errors import DirectoryError
from directory.hardware import Hardware
from directory.interface import DirectoryReader
from directory.members import (
    POLL_INTERVAL_S,
    EngineRegistration,
    GatewayRegistration,
    HostRegistration,
    Member,
)
from directory.placements import Reach
from gateway.belief import Belief
from gateway.config import EngineConfig
from gateway.encoding.model_files import ModelFiles, registered_files
from gateway.health import HealthCheck, Target
from gateway.names import Names
from gateway.places import assumed_of, hosts_among, lives_by_place, member_name, member_place
from gateway.twins import without_twins

logger = logging.getLogger(__name__)


UNKNOWN_SHAPE = ModelShape(parameters=8e9, layers=32, d_model=4096, kv_bytes_per_token=131072)
"""Stands for engines without an agent: an 8B model. Among themselves only the ratio of candidates counts."""
UNKNOWN_CHUNK_TOKENS = 256
UNKNOWN_CONTEXT_TOKENS = 2**20
"""Of an engine that doesn't list its `max_model_len`: longer texts aren't encoded."""
FAILING = "failing"
"""The state of an engine that dropped a connection, until its next health check."""
HUNG = "hangs: takes requests and answers none"
"""The state of an engine that looks well and isn't, until it answers (`gateway.hang_watch`)."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine as the router sees it. `reach` is empty where nothing it holds is believed.

    `registration` is `None` for an engine without an agent: nothing is known of its cache. `configured_files` are then
    its tokenizer's, where they are configured and loaded, and `listed_context` is what it says at `/v1/models`.
    """

    engine: str
    url: str
    models: tuple[str, ...]
    registration: EngineRegistration | None
    agent_url: str
    reach: Reach
    rates: Rates | None
    state: str = "starting"
    api_key: str | None = None
    announced_chunks: int = 0
    """What its `gpu` tier is said to hold; 0 as well where nothing is said of it."""
    configured_files: ModelFiles | None = None
    listed_context: int | None = None
    known_shape: ModelShape | None = None
    """Of an engine without an agent: its model's, where it is in the table of hardware."""
    peer_address: str | None = None
    """Where other hosts' agents fetch its host's chunks."""
    peer_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """How fast its host's agent got chunks from others, by their `peer_address`."""
    configured_kv_tokens: int | None = None
    """Of an engine without an agent: what its KV cache holds, where that and its tokenizer are configured."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Those of its models that it lists as adapters (LoRA), and of which model."""

    @property
    def files(self) -> ModelFiles | None:
        """What its prompts are encoded with; `None` where nothing is known of it."""
        return self.configured_files if self.registration is None else registered_files(self.registration)

    @property
    def context_tokens(self) -> int:
        """What its model's context holds, or more."""
        if self.registration is not None:
            return self.registration.context_tokens
        return self.listed_context or UNKNOWN_CONTEXT_TOKENS

    @property
    def shape(self) -> ModelShape:
        """What its model's arithmetic depends on."""
        return (self.known_shape or UNKNOWN_SHAPE) if self.registration is None else self.registration.shape

    @property
    def chunk_tokens(self) -> int:
        """Tokens in one of its chunks."""
        return UNKNOWN_CHUNK_TOKENS if self.registration is None else self.registration.chunk_tokens

    @property
    def kv_tokens(self) -> int | None:
        """How many tokens its KV cache holds; `None` where nobody says."""
        return self.configured_kv_tokens if self.registration is None else self.registration.kv_tokens

    @property
    def is_ready(self) -> bool:
        """Whether it may be sent requests."""
        return self.state == "ready"


@dataclass(frozen=True, slots=True)
class FleetTable:
    """One consistent view of the fleet, replaced as a whole."""

    engines: Mapping[str, EngineView]
    hosts: Mapping[str, Member]
    _serving: dict[str, tuple[EngineView, ...]] = field(default_factory=dict, repr=False, compare=False)

    def serving(self, model: str) -> tuple[EngineView, ...]:
        """The ready engines that serve `model`: one and the same tuple as long as the table lives."""
        views = self._serving.get(model)
        if views is None:
            views = tuple(view for view in self.engines.values() if view.is_ready and model in view.models)
            if views:  # names that clients make up aren't kept
                self._serving[model] = views
        return views

    def doubtful(self, model: str) -> tuple[EngineView, ...]:
        """Engines that dropped a connection since their last check, or that hang: tried for want of a ready one."""
        return tuple(view for view in self.engines.values() if view.state in (FAILING, HUNG) and model in view.models)

    def models(self) -> dict[str, EngineView]:
        """Every model served by a ready engine, with one such engine."""
        return {model: view for view in self.engines.values() if view.is_ready for model in view.models}


class Fleet:
    """Polls the directory's table and checks engines' health, until cancelled.

    `table` may be stale by a poll, but nobody in it is believed beyond the end of its own term, however late the next
    poll is. When the table can't be read, or more than half of it lapses at once, what was believed stays believed for
    one more term, and `directory_state` says so (`Belief` has the rules).
    """

    def __init__(
        self,
        directory: DirectoryReader,
        health: HealthCheck,
        clock: Callable[[], float],
        on_change: Callable[[FleetTable], None] = lambda table: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        static: Sequence[EngineConfig] = (),
        on_name_taken: Callable[[], None] = lambda: None,
        on_unread: Callable[[], None] = lambda: None,
        files_of: Callable[[str], ModelFiles | None] = lambda engine: None,
        hardware: Hardware | None = None,
        on_gateways: Callable[[Sequence[Member]], None] = lambda gateways: None,
        own_lives: Callable[[], Collection[bytes]] = tuple,
    ) -> None:
        self._hardware, self._files_of, self._on_gateways = hardware or Hardware(), files_of, on_gateways
        self._own_lives = own_lives
        self._directory, self._health, self._clock = directory, health, clock
        self._on_change, self._sleep = on_change, sleep
        self._names, self._on_unread = Names(on_name_taken), on_unread
        self._watchers: dict[str, set[Callable[[], None]]] = {}
        self._static = {each.engine: _static_view(each, self._hardware) for each in static}
        self._table = FleetTable(dict(self._static), {})
        self.directory_state = "not read yet"
        self.directory_full_for: tuple[str, ...] = ()
        """Hosts and engines that say that the directory refuses their placements for want of memory."""
        self.models_seen: set[str] = set()
        self._belief, self.hung = Belief(), set[str]()
        self._belief_changes_at = float("inf")
        self._read_at: float | None = None

    @property
    def table(self) -> FleetTable:
        """The fleet as of now."""
        if self._clock() >= self._belief_changes_at:
            self._believe_less()
        return self._table

    def is_directory_known(self) -> bool:
        """Whether placements may be believed at all."""
        return self._belief.is_known(self._clock())

    def table_age_s(self) -> float | None:
        """Seconds since the poll that the table comes from was sent; `None` before the first."""
        return None if self._read_at is None else self._clock() - self._read_at

    def note_failure(self, engine: str) -> None:
        """An engine refused or dropped a connection: it isn't chosen again until a health check passes."""
        view = self.table.engines.get(engine)
        if view is not None and view.is_ready:
            self._health.distrust(engine)
            self._publish({**self.table.engines, engine: replace(view, state=FAILING)}, self.table.hosts)

    def note_hung(self, engine: str, hangs: bool) -> None:
        """Whether an engine answers nothing, whatever health checks say: while it hangs it isn't chosen."""
        (self.hung.add if hangs else self.hung.discard)(engine)
        self._publish(self._table.engines, self._table.hosts)

    @contextlib.contextmanager
    def told_when_lost(self, engine: str, tell: Callable[[], None]) -> Iterator[None]:
        """Call `tell`, once, if the engine is found worse than it was inside this block: in doubt, or unwell."""
        watchers = self._watchers.setdefault(engine, set())
        watchers.add(tell)
        try:
            yield
        finally:
            watchers.discard(tell)
            if not watchers:
                self._watchers.pop(engine, None)

    def configure(self, static: Sequence[EngineConfig], hardware: Hardware) -> None:
        """These are the engines without an agent from now on; requests on one that is left out run to their end."""
        views = {each.engine: _static_view(each, hardware) for each in static}
        for engine in self._static.keys() - views.keys():
            self._watchers.pop(engine, None)
        for engine in views:
            self._health.list_again(engine)
        self._static, self._hardware = views, hardware
        of_agents = {name: view for name, view in self._table.engines.items() if view.registration is not None}
        kept = {name: _reconfigured(self._table.engines.get(name), view) for name, view in views.items()}
        self._publish({**kept, **of_agents}, self._table.hosts)

    async def run(self) -> None:
        """Refresh until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_for_ever())
            tasks.create_task(self._check_for_ever())

    async def refresh(self) -> None:
        """Read the table once and join it with what health checks know."""
        sent_at = self._clock()
        try:
            rows = await self._directory.members()
        except DirectoryError as error:
            if not self.directory_state.startswith("unavailable"):
                logger.warning("the directory's table can't be read, keeping the last: %s", error)
            self._miss(f"unavailable: {error}")
            return
        self._read_at = sent_at
        gateways = [row for row in rows if isinstance(row.registration, GatewayRegistration)]
        self._on_gateways([row for row in gateways if not assumed_of(row)[0]])
        members = [row for row in rows if not isinstance(row.registration, GatewayRegistration)]
        self._believe([*members, *(row for row in gateways if assumed_of(row)[0])])
        self._note_full(members)
        incumbents = {engine: view.url for engine, view in self._table.engines.items()}
        incumbents |= {host: member_place(member) for host, member in self._table.hosts.items()}
        hosts = self._names.chosen(hosts_among(members), incumbents)
        engines = self._static_views(gateways)
        engines |= {view.engine: view for view in self._views(members, hosts, incumbents)}
        for engine, view in self._table.engines.items():
            if engine not in engines and view.state in ("ready", "starting"):
                engines[engine] = replace(view, reach=_nothing(engine))  # forgotten by the directory, yet alive
        self._publish(engines, hosts)

    async def check_health(self) -> None:
        """Check every engine once and note who may serve."""
        asked = {view.engine: view.url for view in self._table.engines.values()}
        found = await self._health.check([self._target(view) for view in self._table.engines.values()])
        engines = dict(self._table.engines)
        for engine, health in found.items():
            view = engines.get(engine)
            if view is not None and view.url == asked[engine]:
                if health.state != view.state:
                    logger.info("engine %s at %s: %s", engine, view.url, health.state)
                own = view.models if view.registration is None else view.registration.models
                adapters = {each: parent for each, parent in health.adapters.items() if each not in own}
                view = replace(view, state=health.state, models=(*own, *adapters), adapters=adapters)
                engines[engine] = view
                if view.registration is None:
                    models = health.models or view.models
                    engines[engine] = replace(
                        view,
                        adapters=health.adapters,
                        models=models,
                        known_shape=self._static[engine].known_shape or self._hardware.shape_served(models),
                        configured_files=self._files_of(engine),
                        listed_context=health.context_tokens,
                    )
        self._publish(engines, self._table.hosts)

    def _target(self, view: EngineView) -> Target:
        static = self._static.get(view.engine)
        own = view.models if view.registration is None else view.registration.models
        return Target(view.engine, view.url, own if static is None else static.models, view.api_key)

    async def _poll_for_ever(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:  # the edge of the loop: one strange row must not end the gateway
                logger.exception("reading the directory's table met a fault, keeping the last")
                self._miss("unavailable: it met a fault of the gateway's own")
            await self._sleep(POLL_INTERVAL_S)

    async def _check_for_ever(self) -> None:
        while True:
            try:
                await self.check_health()
            except Exception:  # the edge of the loop: one strange engine must not end the gateway
                logger.exception("checking the engines' health met a fault")
            await self._sleep(self._health.interval_s)

    def _miss(self, state: str) -> None:
        self.directory_state = state
        self._on_unread()
        self._belief.miss(self._clock())
        self._believe_less()

    def _believe(self, members: Sequence[Member]) -> None:
        now = self._clock()
        self._belief.read(members, now)
        excused = self._belief.excused(now)
        if excused and self.directory_state != "many lapsed":
            logger.warning("%d registrations lapsed at once, they are believed for one more term", excused)
        if self.directory_state.startswith("unavailable"):
            logger.info("the directory's table can be read again")
        self.directory_state = "many lapsed" if excused else "ok"

    def _note_full(self, members: Sequence[Member]) -> None:
        was_full = bool(self.directory_full_for)
        refused = {member_name(member) for member in members if member.is_live and member.load.is_directory_full}
        self.directory_full_for = tuple(sorted(refused))
        if refused and not was_full:
            logger.warning("the directory is full: placements of %s, and maybe of others, aren't taken", min(refused))
        elif was_full and not refused:
            logger.info("the directory has room again")

    def _believe_less(self) -> None:
        """Drop lives whose time is over from what engines reach. Between tables belief only shrinks."""
        now = self._clock()
        lives = self._belief.lives(now)
        self._belief_changes_at = self._belief.changes_at(now)
        engines = {}
        for engine, view in self._table.engines.items():
            reach = view.reach
            if not (reach.own <= lives and reach.host <= lives):
                engines[engine] = replace(view, reach=Reach(engine, reach.own & lives, reach.host & lives))
        if engines:
            self._publish({**self._table.engines, **engines}, self._table.hosts)

    def _views(
        self, members: Sequence[Member], hosts: Mapping[str, Member], incumbents: Mapping[str, str]
    ) -> list[EngineView]:
        engines = [member for member in members if isinstance(member.registration, EngineRegistration)]
        now = self._clock()
        believed = self._belief.lives(now)
        self._belief_changes_at = self._belief.changes_at(now)
        engine_lives, host_lives = lives_by_place(engines), lives_by_place(hosts_among(members))
        views = []
        for name, member in self._names.chosen(engines, incumbents).items():
            registration = member.registration
            assert isinstance(registration, EngineRegistration)
            host = hosts.get(registration.host)
            own = engine_lives[name, member_place(member)]
            of_host = host_lives[member_name(host), member_place(host)] if host else frozenset()
            of_agent = host.registration if host and isinstance(host.registration, HostRegistration) else None
            before = self._table.engines.get(name)
            is_same = before is not None and before.url == registration.url
            listed = before.adapters if before is not None and is_same else {}
            adapters = {each: parent for each, parent in listed.items() if each not in registration.models}
            views.append(
                EngineView(
                    name,
                    registration.url,
                    (*registration.models, *adapters),
                    registration,
                    of_agent.agent_url if of_agent else "",
                    Reach(name, own & believed, of_host & believed),
                    member.load.rates,
                    before.state if before is not None and is_same else "starting",
                    announced_chunks=member.load.announced_chunks,
                    adapters=adapters,
                    peer_address=of_agent.peer_address if of_agent else None,
                    peer_bytes_per_s=host.load.peer_bytes_per_s if host else {},
                )
            )
        return views

    def _static_views(self, gateways: Sequence[Member]) -> dict[str, EngineView]:
        """Engines without an agent, with what other gateways assume of them."""
        believed = self._belief.lives(self._clock()) - frozenset(self._own_lives())
        lives: dict[tuple[str, str], set[bytes]] = {}
        for member in gateways:
            if member.incarnation in believed:
                lives.setdefault(assumed_of(member), set()).add(member.incarnation)
        views = {}
        for name, static in self._static.items():
            view = self._table.engines.get(name, static)
            reach = Reach(name, frozenset(lives.get((name, view.url), ())), frozenset())
            views[name] = replace(view, reach=reach) if view.registration is None and view.reach != reach else view
        return views

    def _publish(self, engines: Mapping[str, EngineView], hosts: Mapping[str, Member]) -> None:
        self.hung &= engines.keys()
        engines = {name: _as_it_hangs(view, name in self.hung) for name, view in without_twins(engines).items()}
        before, self._table = self._table, FleetTable(engines, dict(hosts))
        for engine in list(self._watchers):
            was = before.engines[engine].state if engine in before.engines else ""
            now = engines[engine].state if engine in engines else ""
            if was in ("ready", FAILING) and now not in ("ready", was):
                for tell in self._watchers.pop(engine):
                    tell()
        for view in engines.values():
            self.models_seen.update(view.models)
        self._on_change(self._table)


def _as_it_hangs(view: EngineView, hangs: bool) -> EngineView:
    if view.state == ("ready" if hangs else HUNG):
        return replace(view, state=HUNG if hangs else "ready")
    return view


def _static_view(engine: EngineConfig, hardware: Hardware) -> EngineView:
    device = None if engine.accelerator is None else hardware.accelerator(engine.accelerator)
    return EngineView(
        engine.engine,
        engine.url,
        engine.models,
        None,
        "",
        _nothing(engine.engine),
        rates=None if device is None else Rates(device.useful_flops(engine.devices)),
        api_key=engine.api_key.get_secret_value() if engine.api_key else None,
        known_shape=None if engine.shape is None else hardware.model(engine.shape).shape(),
        configured_kv_tokens=None if engine.tokenizer is None else engine.kv_tokens,
    )


def _reconfigured(before: EngineView | None, now: EngineView) -> EngineView:
    """`now` with what was found out of the same engine."""
    if before is None or before.registration is not None or before.url != now.url:
        return now
    return replace(
        before,
        models=now.models or before.models,
        rates=now.rates,
        api_key=now.api_key,
        known_shape=now.known_shape or before.known_shape,
        configured_kv_tokens=now.configured_kv_tokens,
    )


def _nothing(engine: str) -> Reach:
    return Reach(engine, frozenset(), frozenset())
