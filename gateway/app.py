"""The gateway's composition root: builds every part, runs the loops and the two servers, and ends them in order."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import httpx
import uvicorn
from prometheus_client import disable_created_metrics

from directory.members import GatewayRegistration
from directory.redis_directory import RedisDirectory
from gateway.admin_api import create_admin_api
from gateway.assumed_publisher import AssumedPublisher
from gateway.client_connection import ClientConnection
from gateway.completion import Completion
from gateway.config import GatewayConfig
from gateway.dispatcher import Dispatcher
from gateway.encoding.encoder import Encoders
from gateway.encoding.files import TokenizerFiles
from gateway.encoding.local_models import LocalModels
from gateway.encoding.model_files import ModelFiles
from gateway.encoding_report import EncodingReport
from gateway.fleet import Fleet, FleetTable
from gateway.health import CHECKS_AT_ONCE_MAX, HealthCheck
from gateway.ids_probe import IdsProbe
from gateway.ids_sender import IdsSender
from gateway.ledger import Ledger
from gateway.load_publisher import LoadPublisher
from gateway.load_reader import LoadReader
from gateway.lookup import ChunkLookup
from gateway.metrics import EngineGauges, GatewayMetrics, ModelFilesGauge, RateGauges
from gateway.openai_api import OpenAiApi
from gateway.parity.parity import Parity
from gateway.parity.self_checks import SelfChecks
from gateway.prefetch import Prefetcher
from gateway.prefill_watch import PrefillWatch
from gateway.preparation import Preparation
from gateway.prompts import Prompts
from gateway.rates import ObservedRates
from gateway.response_homes import ResponseHomes
from gateway.routing.assumed import AssumedPlacements
from gateway.routing.overlay import Overlay
from gateway.routing.policies import POLICIES
from gateway.sent_prompts import SentPrompts
from gateway.shared_load import EngineLoad, EngineLoads
from gateway.stored_responses import StoredResponses
from gateway.trace_recorder import TraceRecorder
from gateway.upstream import Upstream

logger = logging.getLogger(__name__)


class PortTaken(Exception):
    """A port can't be bound; the message says which and why."""


async def run(config: GatewayConfig, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT. Raises `PortTaken`, or `DirectoryError` for a URL that makes no sense.

    The end: readiness goes first; running requests have `drain_s` seconds (a second signal cuts that short); then the
    loops are stopped and the clients closed.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    clock = time.monotonic
    data_socket = _listen(config.listen.bind, config.listen.port)
    admin_socket = _listen(config.listen.bind, config.listen.admin)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        directory = RedisDirectory.connect(
            config.directory.url.get_secret_value(), key_prefix=config.directory.key_prefix, clock=clock
        )
        stack.push_async_callback(directory.aclose)
        limits = httpx.Limits(max_connections=CHECKS_AT_ONCE_MAX * 2)
        control = await stack.enter_async_context(httpx.AsyncClient(limits=limits, trust_env=False))
        ledger, metrics, sent = Ledger(clock), GatewayMetrics(), _sent_prompts(config, clock)
        loads, watch = EngineLoads(ledger, clock), PrefillWatch(ObservedRates(clock), metrics)
        encoders, local_models, self_checks = _encoders(config, control, metrics)
        stack.callback(encoders.close)
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
        publisher, load_reader, assumer = _publishers(config, directory, ledger, loads, sent.assumed, fleet, metrics)
        _register_gauges(metrics, fleet, loads, watch)
        upstream = await stack.enter_async_context(Upstream(config.timeouts))
        lookup, prefetcher = ChunkLookup(directory, clock, metrics.lookup_pauses.inc), Prefetcher(control)
        parity = Parity(fleet, directory, encoders, self_checks, metrics, clock)
        homes, sender, prompts = ResponseHomes(clock), IdsSender(upstream, probe), Prompts(encoders, lookup)
        preparation = Preparation(fleet, prompts, lookup, parity, homes, metrics, clock, are_assumed=sent.assumed.is_on)
        policy, recorder = POLICIES[config.routing.policy](), _recorder(config, clock)
        dispatcher = Dispatcher(policy, ledger, loads, sent, watch, prefetcher, metrics, clock)
        completion = Completion(fleet, preparation, dispatcher, sender, parity, homes, recorder, metrics, clock)
        stored = StoredResponses(homes, fleet, upstream, ledger)
        data = _server(OpenAiApi(completion, stored, fleet, metrics, config, clock, stop.is_set), config.limits.drain_s)
        limit, report = config.limits.body_bytes_max, EncodingReport(encoders, local_models)
        admin_app = create_admin_api(
            completion, fleet, lookup, report, probe, loads, publisher, watch, parity, metrics, stop.is_set, limit
        )
        admin = _server(admin_app, 1.0)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: _signalled(stop, data))
        listen = config.listen
        logger.info("serving at %s:%d, admin at %s:%d", listen.bind, listen.port, listen.bind, listen.admin)
        loops = (fleet, encoders, local_models, prefetcher, parity, probe, publisher, load_reader, assumer, recorder)
        await _run_until_stopped(loops, ((data, data_socket), (admin, admin_socket)), stop, ready)


class _Loop(Protocol):
    async def run(self) -> None: ...


async def _run_until_stopped(
    loops: Sequence[_Loop],
    doors: Sequence[tuple[uvicorn.Server, socket.socket]],
    stop: asyncio.Event,
    ready: Callable[[], None],
) -> None:
    """Run them all; then end the servers, one after the other, and the loops."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop.run()) for loop in loops]
        serving = [(server, tasks.create_task(server.serve(sockets=[door]))) for server, door in doors]
        _freeze()
        ready()
        await stop.wait()
        for server, task in serving:
            server.should_exit = True
            await task
        for task in running:
            task.cancel()


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


def _publishers(
    config: GatewayConfig,
    directory: RedisDirectory,
    ledger: Ledger,
    loads: EngineLoads,
    assumed: AssumedPlacements,
    fleet: Fleet,
    metrics: GatewayMetrics,
) -> tuple[LoadPublisher, LoadReader, AssumedPublisher]:
    listen = config.listen
    name = GatewayRegistration(f"{socket.gethostname()}:{listen.port}", f"http://{listen.bind}:{listen.admin}")

    def count(op: str) -> None:
        metrics.directory_errors.labels(op).inc()

    loads_told = LoadPublisher(directory, name, ledger, loads, time.monotonic, on_error=count)
    assumer = AssumedPublisher(directory, name, assumed, lambda: fleet.table, time.monotonic, on_error=count)
    return loads_told, LoadReader(directory, loads, on_error=count), assumer


def _freeze() -> None:
    """What was imported stays: looking through it for garbage would hold every stream for 30 ms now and then."""
    gc.collect()
    gc.freeze()


def _signalled(stop: asyncio.Event, data: uvicorn.Server) -> None:
    if stop.is_set():
        data.force_exit = True
    stop.set()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the composition root decides the order of the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def _server(app: object, drain_s: float) -> _Server:
    return _Server(
        uvicorn.Config(
            app,  # type: ignore[arg-type]
            lifespan="off",
            http=ClientConnection,
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
    )


def _listen(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    # The protocol is spelled out: asyncio sets TCP_NODELAY only where it knows that this is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bind, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PortTaken(f"can't listen on {bind}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


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


def _recorder(config: GatewayConfig, clock: Callable[[], float]) -> TraceRecorder:
    return TraceRecorder(config.trace.file, config.trace.mb * 2**20, clock)


def _sent_prompts(config: GatewayConfig, clock: Callable[[], float]) -> SentPrompts:
    kv_tokens = {each.engine: each.kv_tokens for each in config.engines if each.kv_tokens is not None}
    assumed = AssumedPlacements(config.routing.assumed_s)
    return SentPrompts(Overlay(), assumed, clock, config.routing.on_its_way_s, kv_tokens)


def _wanted(table: FleetTable) -> list[tuple[ModelFiles, str]]:
    """Of engines with an agent, which may be away."""
    views = [view for view in table.engines.values() if view.registration is not None]
    return [(files, view.agent_url) for view in views if (files := view.files) is not None]


def _register_gauges(metrics: GatewayMetrics, fleet: Fleet, loads: EngineLoads, watch: PrefillWatch) -> None:
    metrics.registry.register(EngineGauges(lambda: _engine_loads(fleet, loads)))
    metrics.registry.register(RateGauges(lambda: watch.reports(fleet.table)))


def _engine_loads(fleet: Fleet, loads: EngineLoads) -> list[tuple[str, EngineLoad, EngineLoad]]:
    return [(engine, loads.of_own(engine), loads.of_others(engine)) for engine in fleet.table.engines]
