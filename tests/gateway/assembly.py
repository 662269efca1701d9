"""A gateway put together for tests: the real parts, MemoryDirectory, real sockets towards clients and engines."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import httpx
import uvicorn

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.interface import Batch, DirectoryReader, DirectoryWriter
from directory.members import GatewayRegistration, draw_incarnation
from directory.memory import MemoryDirectory
from directory.placements import partition_of
from directory.tiers import Tier
from gateway.access_log import AccessLog
from gateway.admin_api import create_admin_api
from gateway.admission import Admission
from gateway.aliases import Aliases
from gateway.assumed_publisher import AssumedPublisher
from gateway.completion import Completion
from gateway.config import (
    EngineConfig,
    GatewayConfig,
    LimitsConfig,
    LogsConfig,
    ModelsConfig,
    RoutingConfig,
    TimeoutsConfig,
)
from gateway.discovery.discovery import Discovery
from gateway.discovery.engine_sources import EngineSources
from gateway.dispatcher import Dispatcher
from gateway.encoding.encoder import Encoder, Encoders, build_renderer
from gateway.encoding.files import TokenizerFiles
from gateway.encoding.local_models import LocalModels
from gateway.encoding.model_files import ModelFiles
from gateway.encoding.prompt_tokenizer import Shared, WholeTexts
from gateway.encoding_report import EncodingReport
from gateway.fleet import Fleet, FleetTable
from gateway.hang_watch import HangWatch
from gateway.health import HealthCheck
from gateway.ids_probe import IdsProbe
from gateway.ids_sender import IdsSender
from gateway.ledger import Ledger
from gateway.load_publisher import LoadPublisher
from gateway.lookup import ChunkLookup
from gateway.metrics import GatewayMetrics, RateGauges
from gateway.model_list import ModelList
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
from gateway.routing.policies import POLICIES, Policy
from gateway.sent_prompts import SentPrompts
from gateway.servers import Server
from gateway.servers import server as production_server
from gateway.shared_load import EngineLoads
from gateway.stored_responses import StoredResponses
from gateway.trace_recorder import TraceRecorder
from gateway.upstream import Upstream
from tests.gateway.mock_engine import MockEngine
from tests.gateway.samples import ENGINE_LOAD, HOST_LOAD, IDENTITY, engine_registration, host_registration

TEMPLATE = "{% for message in messages %}{{ message['role'] + ':' + message['content'] + ';' }}{% endfor %}"
TERM_S = 60.0


class ByteBackend:
    """One token a byte: enough of a tokenizer to route by."""

    name: ClassVar[str] = "bytes"
    inline_chars_max: ClassVar[int] = 16_000
    piece_chars: ClassVar[int] = 1024
    is_quick: ClassVar[bool] = False

    def encode(self, text: str, add_special_tokens: bool = False) -> bytes:
        return pack_tokens(list(text.encode()))

    def encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        return [self.encode(text) for text in texts]


class FixedEncoders(Encoders):
    """Encoders that are there at once; all are `encoder`, where one is given."""

    encoder: Encoder | None = None
    built: dict[str, Encoder]

    def find(self, files: ModelFiles) -> Encoder:
        if self.encoder is not None:
            return self.encoder
        if files.renderer not in self.built:
            tokenizer = WholeTexts(ByteBackend(), Shared.of(self._pool), "for tests")
            contents = {"chat_template.jinja": TEMPLATE.encode(), "tokenizer_config.json": b"{}"}
            self.built[files.renderer] = Encoder(tokenizer, build_renderer(files.renderer, contents), 10**6)
        return self.built[files.renderer]


@dataclass
class TestGateway:
    """A serving gateway and the parts a test looks into."""

    __test__ = False
    url: str
    fleet: Fleet
    ledger: Ledger
    metrics: GatewayMetrics
    directory: DirectoryWriter
    admin: object
    lives: dict[str, bytes]
    probe: IdsProbe
    publisher: LoadPublisher
    loads: EngineLoads
    assumer: AssumedPublisher
    completion: Completion
    aliases: Aliases

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def hold(self, text: str, life: str, tier: Tier, chunks: int = 9999) -> None:
        """Announce that `life` (an engine's or a host's name) holds the leading chunks of a prompt's text."""
        keys = chunk_keys(IDENTITY.fleet_digest(), ByteBackend().encode(text), 4)[:chunks]
        for number, key in enumerate(map(directory_key, keys)):
            batch = Batch(self.lives[life], partition_of(key), number + 1, ((key, int(tier)),), 60.0)
            await self.directory.place(batch)


@contextlib.asynccontextmanager
async def gateway_for(
    engines: Sequence[MockEngine],
    timeouts: TimeoutsConfig | None = None,
    body_bytes_max: int = 2**20,
    body_timeout_s: float = 5.0,
    static: Sequence[EngineConfig] = (),
    clock: Callable[[], float] = time.monotonic,
    writer: DirectoryWriter | None = None,
    reader: DirectoryReader | None = None,
    renderer: str = "reference",
    encoder: Encoder | None = None,
    sends_ids: bool = False,
    routing: RoutingConfig | None = None,
    static_files: ModelFiles | None = None,
    agent_url: str = "http://127.0.0.1:1",
    sender: IdsSender | None = None,
    policy: Policy | None = None,
    trace_file: Path | None = None,
    kv_tokens: int | None = None,
    models: ModelsConfig | None = None,
    logs: LogsConfig | None = None,
    pause: Callable[[float], Awaitable[None]] | None = None,
    limits: LimitsConfig | None = None,
) -> AsyncIterator[TestGateway]:
    """A gateway that serves `engines`, each on a host of its own, all of the kind that `renderer` names.

    The directory is one in memory, or else `reader` is the gateway's side of it and `writer` the agents'. The engines
    in `static` have no agent; `static_files` are then what is configured as their tokenizer. `agent_url` is all
    hosts', `kv_tokens` what each engine's KV cache holds. `pause` is what it does between two attempts: a turn of the
    loop, if it isn't given. `limits` are how many requests are admitted.
    """
    memory = MemoryDirectory(clock)
    directory = writer or memory
    seen = reader or memory
    lives = {}
    for engine in engines:
        host = f"host-{engine.name}"
        lives[host], lives[engine.name] = draw_incarnation(), draw_incarnation()
        await directory.register(lives[host], host_registration(host, agent_url), HOST_LOAD, TERM_S)
        registration = engine_registration(engine.name, engine.url, host, renderer=renderer, kv_tokens=kv_tokens)
        await directory.register(lives[engine.name], registration, ENGINE_LOAD, TERM_S)
    given = (limits or LimitsConfig()).model_dump()
    limits = LimitsConfig(**{**given, "body_bytes_max": body_bytes_max, "body_timeout_s": body_timeout_s})
    config = GatewayConfig(
        limits=limits,
        engines=tuple(static),
        routing=routing or RoutingConfig(),
        models=models or ModelsConfig(),
        logs=logs or LogsConfig(),
    )
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        files = TokenizerFiles(config.files_folder, control)
        encoders = FixedEncoders(files)
        encoders.encoder, encoders.built = encoder, {}
        stack.callback(encoders.close)
        probe = IdsProbe(sends_ids, encoders, control, clock)
        ledger, metrics = Ledger(clock), GatewayMetrics()
        loads = EngineLoads(ledger, clock)
        watch = PrefillWatch(ObservedRates(clock), metrics)
        configured = {each.engine: each.kv_tokens for each in config.engines if each.kv_tokens is not None}
        assumed = AssumedPlacements(config.routing.assumed_s)
        sent = SentPrompts(Overlay(), assumed, clock, config.routing.on_its_way_s, configured)

        def tell(table: FleetTable) -> None:
            probe.see(table)
            sent.keep(table)
            watch.see(table)

        fleet = Fleet(
            seen,
            HealthCheck(control),
            clock,
            static=config.engines,
            on_change=tell,
            files_of=lambda engine: static_files,
            on_gateways=loads.take,
            hardware=config.hardware.tables(),
            own_lives=lambda: assumer.own_lives,
        )
        metrics.registry.register(RateGauges(lambda: watch.reports(fleet.table)))
        name = GatewayRegistration(f"gateway-{draw_incarnation().hex()}", "http://127.0.0.1:1")
        publisher = LoadPublisher(directory, name, ledger, loads, clock)
        assumer = AssumedPublisher(directory, name, assumed, lambda: fleet.table, clock)
        upstream_timeouts = timeouts or TimeoutsConfig()
        upstream = await stack.enter_async_context(Upstream(upstream_timeouts))
        lookup = ChunkLookup(seen, clock)
        prefetcher = Prefetcher(control)
        hinting = asyncio.create_task(prefetcher.run())
        stack.callback(hinting.cancel)
        parity = Parity(fleet, seen, encoders, SelfChecks(metrics), metrics, clock)
        comparing = asyncio.create_task(parity.run())
        stack.callback(comparing.cancel)
        homes, prompts = ResponseHomes(clock), Prompts(encoders, lookup)
        sender = sender or IdsSender(upstream, probe)
        preparation = Preparation(fleet, prompts, lookup, parity, homes, metrics, clock, sent.assumed.is_on)
        policy = policy or POLICIES[config.routing.policy]()
        dispatcher = Dispatcher(policy, ledger, loads, sent, watch, prefetcher, metrics, clock)
        recorder = TraceRecorder(trace_file, 2**20, clock)
        recording = asyncio.create_task(recorder.run())
        stack.push_async_callback(_ended, recording)
        aliases, sleep = Aliases(config.models, fleet, homes), pause or _take_a_turn
        hangs = HangWatch(fleet, upstream, ledger.wait_s, upstream_timeouts.probe_s, clock)
        looking = asyncio.create_task(hangs.run())
        stack.push_async_callback(_ended, looking)
        admission = Admission(limits, ledger.running, metrics)
        completion = Completion(
            fleet,
            aliases,
            admission,
            preparation,
            dispatcher,
            sender,
            parity,
            homes,
            recorder,
            hangs,
            metrics,
            clock,
            sleep,
        )
        stored = StoredResponses(homes, fleet, upstream, ledger)
        models_listed, access = ModelList(fleet, aliases), AccessLog(config.logs, clock)
        api = OpenAiApi(completion, stored, fleet, models_listed, metrics, access, config, clock, lambda: False)
        await fleet.refresh()
        await fleet.check_health()
        report = EncodingReport(encoders, LocalModels((), files, lambda wanted: False))
        limit = body_bytes_max
        discovery = Discovery((), EngineSources(static, config.hardware.tables(), lambda engines, hardware: None))
        admin = create_admin_api(
            completion,
            fleet,
            lookup,
            report,
            probe,
            loads,
            publisher,
            watch,
            parity,
            discovery,
            metrics,
            lambda: False,
            limit,
        )
        url = await stack.enter_async_context(serving(api))
        yield TestGateway(
            url, fleet, ledger, metrics, directory, admin, lives, probe, publisher, loads, assumer, completion, aliases
        )


async def _take_a_turn(pause_s: float) -> None:
    await asyncio.sleep(0)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def serving(app: object) -> AsyncIterator[str]:
    """The application behind uvicorn on a free port."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    as_in_use = production_server(app).config
    as_in_use.timeout_graceful_shutdown = 2
    server = _Server(as_in_use)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await eventually(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.has_to_end.set()
        await task


class _Server(Server):
    """Ends at once when it has to: uvicorn's own looks for that ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_to_end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.has_to_end.wait()


async def eventually(holds: object, bound_s: float = 20.0) -> None:
    """Wait until `holds()` is true, at most `bound_s`."""
    async with asyncio.timeout(bound_s):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)
