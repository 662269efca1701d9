"""The gateway's composition root: builds every part, and hands them to the servers that run and end them."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
from fastapi import FastAPI
from prometheus_client import disable_created_metrics

from directory.hardware import Hardware
from directory.members import GatewayRegistration
from directory.redis_directory import RedisDirectory
from gateway.access_log import AccessLog
from gateway.admin_api import create_admin_api
from gateway.admission import Admission
from gateway.aliases import Aliases
from gateway.assumed_publisher import AssumedPublisher
from gateway.completion import Completion
from gateway.config import EngineConfig, GatewayConfig
from gateway.discovery.discovery import Discovery
from gateway.discovery.engine_sources import EngineSources
from gateway.dispatcher import Dispatcher
from gateway.drain import DrainingDoor
from gateway.encoding.encoder import Encoders
from gateway.encoding.files import TokenizerFiles
from gateway.encoding.local_models import LocalModels
from gateway.encoding.model_files import ModelFiles
from gateway.encoding_report import EncodingReport
from gateway.fleet import Fleet, FleetTable
from gateway.hang_watch import HangWatch
from gateway.health import CHECKS_AT_ONCE_MAX, HealthCheck
from gateway.ids_probe import IdsProbe
from gateway.ids_sender import IdsSender
from gateway.ledger import Ledger
from gateway.load_publisher import LoadPublisher
from gateway.load_reader import LoadReader
from gateway.logs import use_lines
from gateway.lookup import ChunkLookup
from gateway.metrics import EngineGauges, GatewayMetrics, ModelFilesGauge, RateGauges
from gateway.model_list import ModelList
from gateway.openai_api import OpenAiApi
from gateway.parity.parity import Parity
from gateway.parity.self_checks import SelfChecks
from gateway.prefetch import Prefetcher
from gateway.prefill_watch import PrefillWatch
from gateway.preparation import Preparation
from gateway.prompts import Prompts
from gateway.rates import ObservedRates
from gateway.reload import Apply, Reload
from gateway.response_homes import ResponseHomes
from gateway.routing.assumed import AssumedPlacements
from gateway.routing.overlay import Overlay
from gateway.routing.policies import POLICIES
from gateway.sent_prompts import SentPrompts
from gateway.servers import Doors, Listeners, Loop, listen_for, run_until_stopped, server, signalled
from gateway.shared_load import EngineLoad, EngineLoads
from gateway.sibling_notes import SiblingNotes
from gateway.stored_responses import StoredResponses
from gateway.trace_recorder import TraceRecorder
from gateway.upstream import Upstream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the gateway knows of the fleet and of its own work, and what keeps that up to date."""

    metrics: GatewayMetrics
    ledger: Ledger
    loads: EngineLoads
    sent: SentPrompts
    watch: PrefillWatch
    encoders: Encoders
    local_models: LocalModels
    self_checks: SelfChecks
    probe: IdsProbe
    fleet: Fleet
    publisher: LoadPublisher
    load_reader: LoadReader
    assumer: AssumedPublisher

    @property
    def loops(self) -> tuple[Loop, ...]:
        """What runs beside the servers."""
        return (
            self.fleet,
            self.encoders,
            self.local_models,
            self.probe,
            self.publisher,
            self.load_reader,
            self.assumer,
        )


@dataclass(frozen=True, slots=True)
class _Served:
    """What answers clients and operators, and the loops behind that."""

    data: OpenAiApi
    aliases: Aliases
    access: AccessLog
    admission: Admission
    sources: EngineSources
    hangs: HangWatch
    admin: FastAPI
    loops: tuple[Loop, ...]


async def run(
    config: GatewayConfig,
    ready: Callable[[], None] = lambda: None,
    listeners: Listeners | None = None,
    reread: Callable[[], GatewayConfig] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises `PortTaken`, or `DirectoryError` for a URL that makes no sense.

    `listeners` are sockets that are there already, as one of several processes has them. With SIGHUP the configuration
    is read again by `reread`, which raises `Rejected`. The end: readiness goes first and new requests are refused;
    running ones have `drain_s` seconds (a second signal cuts that short); then the loops are stopped and the clients
    closed.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    clock = time.monotonic
    listeners = listeners or listen_for(config.listen)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        directory = RedisDirectory.connect(
            config.directory.url.get_secret_value(), key_prefix=config.directory.key_prefix, clock=clock
        )
        stack.push_async_callback(directory.aclose)
        limits = httpx.Limits(max_connections=CHECKS_AT_ONCE_MAX * 2)
        control = await stack.enter_async_context(httpx.AsyncClient(limits=limits, trust_env=False))
        upstream = await stack.enter_async_context(Upstream(config.timeouts))
        known = _known(config, directory, control, clock, listeners.worker)
        stack.callback(known.encoders.close)
        served = _served(config, directory, control, upstream, known, clock, stop.is_set, listeners)
        reload = Reload(
            config, reread or (lambda: config), _applied(known, served, upstream), known.metrics.count_reload
        )
        doors = Doors(server(DrainingDoor(served.data, stop.is_set)), server(served.admin))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: signalled(stop, doors.data))
        loop.add_signal_handler(signal.SIGHUP, reload.run)
        said = config.listen
        logger.info("serving at %s:%d, admin at %s:%d", said.bind, said.port, said.bind, said.admin)
        loops = (*known.loops, *served.loops)
        await run_until_stopped(loops, doors, listeners, stop, lambda: reload.config.limits.drain_s, ready)


def _applied(known: _Known, served: _Served, upstream: Upstream) -> dict[str, Apply]:
    """What of a configuration can be changed while the gateway runs, and how."""

    def models(config: GatewayConfig) -> None:
        served.aliases.configure(config.models)
        served.data.configure(config)

    def logs(config: GatewayConfig) -> None:
        use_lines(config.logs.format)
        served.access.configure(config.logs)

    def engines(config: GatewayConfig) -> None:
        served.sources.configure(config.engines, config.hardware.tables())

    def timeouts(config: GatewayConfig) -> None:
        upstream.configure(config.timeouts)
        served.hangs.configure(config.timeouts.probe_s)

    def limits(config: GatewayConfig) -> None:
        served.data.configure(config)
        served.admission.configure(config.limits)

    return {
        "limits": limits,
        "models": models,
        "logs": logs,
        "timeouts": timeouts,
        "engines": engines,
        "hardware": engines,
        "log_level": lambda config: logging.getLogger().setLevel(config.log_level.upper()),
    }


def _known(
    config: GatewayConfig,
    directory: RedisDirectory,
    control: httpx.AsyncClient,
    clock: Callable[[], float],
    worker: int | None,
) -> _Known:
    ledger, metrics, sent = Ledger(clock), GatewayMetrics(), _sent_prompts(config, clock)
    loads, watch = EngineLoads(ledger, clock), PrefillWatch(ObservedRates(clock), metrics)
    encoders, local_models, self_checks = _encoders(config, control, metrics)
    probe = IdsProbe(config.encoding.send_ids, encoders, control, clock)
    fleet = Fleet(
        directory,
        HealthCheck(control),
        clock,
        on_change=lambda table: _tell(table, encoders, local_models, probe, sent, watch),
        static=config.engines,
        on_name_taken=metrics.degraded.labels("name_taken").inc,
        on_unread=metrics.directory_errors.labels("members").inc,
        files_of=local_models.files_of,
        on_gateways=loads.take,
        hardware=config.hardware.tables(),
        own_lives=lambda: assumer.own_lives,
    )
    name = _registration(config, worker)
    publisher, load_reader, assumer = _publishers(name, directory, ledger, loads, sent.assumed, fleet, metrics)
    _register_gauges(metrics, fleet, loads, watch)
    return _Known(
        metrics,
        ledger,
        loads,
        sent,
        watch,
        encoders,
        local_models,
        self_checks,
        probe,
        fleet,
        publisher,
        load_reader,
        assumer,
    )


def _discovery(config: GatewayConfig, known: _Known) -> tuple[EngineSources, Discovery]:
    def take(engines: tuple[EngineConfig, ...], hardware: Hardware) -> None:
        known.local_models.configure(engines)
        known.sent.configure(_kv_tokens(engines))
        known.fleet.configure(engines, hardware)

    sources = EngineSources(config.engines, config.hardware.tables(), take)
    return sources, Discovery(config.kubernetes, sources, known.metrics.discovery_failures.inc)


def _hang_watch(config: GatewayConfig, known: _Known, upstream: Upstream, clock: Callable[[], float]) -> HangWatch:
    def wait_s(engine: str) -> float:
        return known.loads.of(engine).wait_s

    note_hung = known.metrics.degraded.labels("engine_hangs").inc
    return HangWatch(known.fleet, upstream, wait_s, config.timeouts.probe_s, clock, on_hung=note_hung)


def _served(
    config: GatewayConfig,
    directory: RedisDirectory,
    control: httpx.AsyncClient,
    upstream: Upstream,
    known: _Known,
    clock: Callable[[], float],
    is_draining: Callable[[], bool],
    listeners: Listeners,
) -> _Served:
    fleet, metrics, sent = known.fleet, known.metrics, known.sent
    lookup, prefetcher = ChunkLookup(directory, clock, metrics.lookup_pauses.inc), Prefetcher(control)
    parity = Parity(fleet, directory, known.encoders, known.self_checks, metrics, clock)
    homes, sender = ResponseHomes(clock), IdsSender(upstream, known.probe)
    prompts = Prompts(known.encoders, lookup)
    preparation = Preparation(fleet, prompts, lookup, parity, homes, metrics, clock, are_assumed=sent.assumed.is_on)
    policy, recorder = POLICIES[config.routing.policy](), _recorder(config, clock, listeners.worker)
    dispatcher = Dispatcher(policy, known.ledger, known.loads, sent, known.watch, prefetcher, metrics, clock)
    aliases, hangs = Aliases(config.models, fleet, homes), _hang_watch(config, known, upstream, clock)
    admission = Admission(config.limits, known.ledger.running, metrics)
    metrics.requests_waiting.set_function(lambda: admission.waiting)
    completion = Completion(
        fleet, aliases, admission, preparation, dispatcher, sender, parity, homes, recorder, hangs, metrics, clock
    )
    sources, discovery = _discovery(config, known)
    stored = StoredResponses(homes, fleet, upstream, known.ledger)
    access = AccessLog(config.logs, clock)
    data = OpenAiApi(completion, stored, fleet, ModelList(fleet, aliases), metrics, access, config, clock, is_draining)
    admin = create_admin_api(
        completion,
        fleet,
        lookup,
        EncodingReport(known.encoders, known.local_models),
        known.probe,
        known.loads,
        known.publisher,
        known.watch,
        parity,
        discovery,
        metrics,
        is_draining,
        config.limits.body_bytes_max,
    )
    notes = () if listeners.siblings is None else (SiblingNotes(homes, listeners.siblings),)
    loops = (prefetcher, parity, recorder, hangs, discovery, *notes)
    return _Served(data, aliases, access, admission, sources, hangs, admin, loops)


def _encoders(
    config: GatewayConfig, control: httpx.AsyncClient, metrics: GatewayMetrics
) -> tuple[Encoders, LocalModels, SelfChecks]:
    self_checks = SelfChecks(metrics)
    files = TokenizerFiles(config.files_folder, control, metrics.degraded.labels("damaged_file").inc)
    encoders = Encoders(
        files,
        cache_bytes_max=config.encoding.cache_mb * 2**20,
        on_mismatch=self_checks.mismatch,
        on_match=self_checks.match,
        on_encoded=metrics.count_encoded,
    )
    metrics.tokenizer_cache_bytes.set_function(encoders.cache_bytes)
    metrics.registry.register(ModelFilesGauge(lambda: [each.state for _, each, _ in encoders.progress()]))
    local_models = LocalModels(config.engines, files, lambda wanted: encoders.find(wanted) is not None)
    return encoders, local_models, self_checks


def _registration(config: GatewayConfig, worker: int | None) -> GatewayRegistration:
    """How other gateways know this one; each of several processes is one of its own."""
    listen, part = config.listen, "" if worker is None else f"/{worker}"
    name = f"{socket.gethostname()}:{listen.port}{part}"
    return GatewayRegistration(name, f"http://{listen.bind}:{listen.admin}")


def _publishers(
    name: GatewayRegistration,
    directory: RedisDirectory,
    ledger: Ledger,
    loads: EngineLoads,
    assumed: AssumedPlacements,
    fleet: Fleet,
    metrics: GatewayMetrics,
) -> tuple[LoadPublisher, LoadReader, AssumedPublisher]:
    def count(op: str) -> None:
        metrics.directory_errors.labels(op).inc()

    loads_told = LoadPublisher(directory, name, ledger, loads, time.monotonic, on_error=count)
    assumer = AssumedPublisher(directory, name, assumed, lambda: fleet.table, time.monotonic, on_error=count)
    return loads_told, LoadReader(directory, loads, on_error=count), assumer


def _tell(
    table: FleetTable,
    encoders: Encoders,
    local_models: LocalModels,
    probe: IdsProbe,
    sent: SentPrompts,
    watch: PrefillWatch,
) -> None:
    encoders.want([*_wanted(table), *local_models.wanted()])
    probe.see(table)
    sent.keep(table)
    watch.see(table)


def _recorder(config: GatewayConfig, clock: Callable[[], float], worker: int | None) -> TraceRecorder:
    """Each of several processes has a file of its own."""
    file = config.trace.file
    if file is not None and worker is not None:
        file = file.with_name(f"{file.stem}.{worker}{file.suffix}")
    return TraceRecorder(file, config.trace.mb * 2**20, clock)


def _sent_prompts(config: GatewayConfig, clock: Callable[[], float]) -> SentPrompts:
    assumed = AssumedPlacements(config.routing.assumed_s)
    return SentPrompts(Overlay(), assumed, clock, config.routing.on_its_way_s, _kv_tokens(config.engines))


def _kv_tokens(engines: Sequence[EngineConfig]) -> dict[str, int]:
    return {each.engine: each.kv_tokens for each in engines if each.kv_tokens is not None}


def _wanted(table: FleetTable) -> list[tuple[ModelFiles, str]]:
    """Of engines with an agent, which may be away."""
    views = [view for view in table.engines.values() if view.registration is not None]
    return [(files, view.agent_url) for view in views if (files := view.files) is not None]


def _register_gauges(metrics: GatewayMetrics, fleet: Fleet, loads: EngineLoads, watch: PrefillWatch) -> None:
    metrics.registry.register(EngineGauges(lambda: _engine_loads(fleet, loads)))
    metrics.registry.register(RateGauges(lambda: watch.reports(fleet.table)))


def _engine_loads(fleet: Fleet, loads: EngineLoads) -> list[tuple[str, EngineLoad, EngineLoad]]:
    return [(engine, loads.of_own(engine), loads.of_others(engine)) for engine in fleet.table.engines]
