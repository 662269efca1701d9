"""The composition root of the node agent: everything is made here, runs in one task group, and ends in order."""

import asyncio
import contextlib
import logging
import math
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter

from directory.interface import DirectoryWriter
from directory.members import HostRegistration, Load
from directory.redis_directory import RedisDirectory
from directory.tiers import Tier
from nodeagent.config import AgentConfig, DriveConfig
from nodeagent.door import Door
from nodeagent.engines.vllm.follower import VllmFollower
from nodeagent.engines.vllm.prefix_reset import reset_prefix_cache
from nodeagent.errors import AgentError
from nodeagent.files import FileShelf
from nodeagent.forget_parts import ForgetParts
from nodeagent.hints import Hints
from nodeagent.host_rates import HostRates, time_memory
from nodeagent.http_api import HttpServer, create_api, listen
from nodeagent.inventory import Inventory
from nodeagent.labels import ChunkLabel
from nodeagent.loop_threads import LoopThreads
from nodeagent.metrics import AgentMetrics
from nodeagent.peers.exchange import PeerExchange
from nodeagent.processes import Holder, Process, ProcessWatch
from nodeagent.publisher import Publisher
from nodeagent.registration import Clock, Lives, Sleep
from nodeagent.roster import Roster
from nodeagent.session import Session
from nodeagent.tiers.admission import Admission
from nodeagent.tiers.budgeted_store import BudgetedStore
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.drive import Drive
from nodeagent.tiers.drives import NvmeTier
from nodeagent.tiers.file_store import FolderStore, Store
from nodeagent.tiers.file_writer import FileWriter
from nodeagent.tiers.promotion import LowerTier, NoLowerTier, Promotion, status_of
from nodeagent.tiers.quarantine import keep
from nodeagent.tiers.restore import FILES_PER_S
from nodeagent.tiers.write_policy import WRITE_POLICIES, Pins

WITHDRAW_WAIT_S = 0.05
HOST_KEYS_MAX = 16_000_000
LIFE_BYTES = 16
SWITCH_INTERVAL_S = 0.001
"""How long threads that index a drive may keep the event loop waiting: it must answer engines during a start."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


class HttpUnavailable(AgentError):
    """The HTTP port can't be had; the message says why."""


async def run(config: AgentConfig, *, ready: Callable[[], None] | None = None) -> bool:
    """Run an agent until SIGTERM, SIGINT, or cancellation. `ready` is called once door and HTTP are open.

    Returns `False` where a drive or a resolver hangs: a thread waits for it, which an interpreter that ends would join.

    A directory that doesn't answer is not fatal: the agent serves its engines and keeps trying. Raises `AgentError`
    where the door or the port can't be had, and `DirectoryError` for a malformed URL.
    """
    directory = RedisDirectory.connect(
        config.directory.url.get_secret_value(), key_prefix=config.directory.key_prefix, clock=time.monotonic
    )
    agent, switch_interval_s = Agent(config, directory), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loop, threads = asyncio.get_running_loop(), LoopThreads()
    for number in SIGNALS:
        loop.add_signal_handler(number, agent.stop)
    try:
        await agent.run(ready)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        sys.setswitchinterval(switch_interval_s)
        await directory.aclose()
        are_back = threads.close()
    return are_back and not agent.has_hanging_threads


class Agent:
    """One host's agent, around a directory that its caller opens and closes.

    `clock` and `sleep` are the time of everything that speaks to the directory.
    """

    def __init__(
        self,
        config: AgentConfig,
        directory: DirectoryWriter,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._config = config
        self._directory = directory
        self._clock = clock
        self._sleep = sleep
        self._metrics = AgentMetrics()
        self._files = FileShelf()
        self._forgetting = ForgetParts(config, self._metrics, sleep)
        self._budgeted: list[BudgetedStore] = []
        self._nvme: NvmeTier | None = None
        self._pins = Pins(bytes.fromhex(key) for key in config.nvme.pinned)
        self._lower: LowerTier = NoLowerTier()
        self._promotion: Promotion
        self._peers = PeerExchange(config.peers, self._metrics)
        self._nvme_writing: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._is_ready = False
        self.has_hanging_threads = False

    def stop(self) -> None:
        """Ask the agent to end in good order."""
        self._stopping.set()

    async def run(self, ready: Callable[[], None] | None = None) -> None:
        """Run until `stop` or cancellation; `ready` and what is raised are as for `run` of this module."""
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(self._listen())
            opened.enter_context(self._peers)
            self._host = self._host_publisher(listener)
            opened.callback(self._close_stores)
            await self._open_drives()
            await self._forgetting.read(self._nvme)
            nvme = self._nvme
            self._rates = HostRates(
                await asyncio.to_thread(time_memory), None if nvme is None else lambda: nvme.read_cost
            )
            async with asyncio.TaskGroup() as group:
                await self._run_in(group, listener, ready)

    def status(self) -> dict[str, Any]:
        """What `/status` shows: lives, tiers, engines, and how much is pending."""
        hierarchy = self._tier.hierarchy
        nvme = self._nvme
        return {
            "host": self._config.host,
            "directory": self._host.trouble or "ok",
            "incarnations": _names(self._host),
            "pending_keys": self._host.pending_keys,
            "load_costs": self._rates.status(),
            "tiers": {
                Tier.DRAM.label: {
                    "bytes_used": self._tier.used_bytes,
                    "bytes_limit": self._tier.quota_bytes,
                    "chunks": len(hierarchy) if hierarchy is not None else 0,
                    "slots": hierarchy.arena.slots if hierarchy is not None else 0,
                    "references": hierarchy.open_references if hierarchy is not None else 0,
                    "reservations": hierarchy.open_reservations if hierarchy is not None else 0,
                    **self._tier.memory_status(),
                },
                **({Tier.NVME.label: self._nvme_status(nvme)} if nvme is not None else {}),
            },
            "peers": self._peers.status(),
            "engines": [
                {
                    "engine": engine.name,
                    "url": engine.registration.url,
                    "models": list(engine.registration.models),
                    "identity": engine.registration.identity.fleet_digest().hex(),
                    "process": engine.process.pid,
                    "is_connected": engine.connection is not None,
                    "directory": engine.publisher.trouble or "ok",
                    "incarnations": _names(engine.publisher),
                    "pending_keys": engine.publisher.pending_keys,
                    "gpu_chunks": len(engine.publisher.inventory),
                    "gpu_is_known": engine.events is None or self._follower.is_known(engine.name),
                    "running": engine.running,
                    "waiting": engine.waiting,
                }
                for engine in self._roster.engines
            ],
        }

    async def _run_in(
        self, group: asyncio.TaskGroup, listener: socket.socket, ready: Callable[[], None] | None
    ) -> None:
        """Build bottom up, serve, then end top down: readiness, door, engines, host's life, tiers, HTTP."""
        host, config = self._host, self._config
        withdrawn = partial(_await_withdrawn, host)
        self._tier = tier = DramTier(
            config.dram.quota_bytes,
            partial(host.record_in, int(Tier.DRAM)),
            withdrawn,
            group,
            self._metrics,
            wish=config.dram.wish,
            verify_reads=config.dram.verify_reads,
            tombstones=self._forgetting.tombstones,
        )
        nvme_loops = self._add_nvme(group)
        roster = self._roster = self._make_roster(group)
        self._watch_announced(host, roster)
        self._peers.start(group, tier, lambda: self._lower, roster)
        processes = ProcessWatch(self._process_gone)
        life = secrets.token_bytes(LIFE_BYTES)
        door = Door(
            config.door,
            processes,
            lambda peer: Session(peer, life, processes, roster, tier, self._lower, self._metrics),
        )
        door.open()
        forget_api, forgetting = self._forgetting.begin(tier, roster, self._follower, host, withdrawn, group)
        http = self._http(listener, forget_api)
        steady = (host.run(), tier.keep_free(), self._follower.clear_leftovers(), *forgetting)
        loops = [group.create_task(each) for each in steady] + nvme_loops
        serving = group.create_task(door.serve())
        web = group.create_task(http.run_until_stopped())
        try:
            self._is_ready = True
            bind, port = listener.getsockname()[:2]
            logger.info("the agent of host %s is ready at %s, HTTP at %s port %d", config.host, config.door, bind, port)
            if ready is not None:
                ready()
            await self._stopping.wait()
        finally:
            self._is_ready = False
            roster.stop()
            await _end([serving])
            door.close()
            processes.close()
            await roster.close()
            await self._peers.stop()
            await _end(loops)
            await host.stop()
            await self._close_nvme()
            if not self.has_hanging_threads:
                await tier.close()
            http.should_exit = True
            await asyncio.wait([web])

    def _make_roster(self, group: asyncio.TaskGroup) -> Roster:
        self._follower = VllmFollower(
            self._config.state, self._tier.labels, _BothTiers(self._tier, self._lower), self._metrics, sleep=self._sleep
        )
        return Roster(
            self._config.host,
            self._directory,
            self._files,
            group,
            clock=self._clock,
            sleep=self._sleep,
            metrics=self._metrics,
            walk_interval_s=self._config.directory.walk_interval_s,
            rates=self._rates,
            follow=self._follower,
        )

    def _http(self, listener: socket.socket, forget_api: APIRouter) -> HttpServer:
        api = create_api(
            self._files,
            self._metrics.registry,
            lambda: self._is_ready,
            self.status,
            Hints(self._lower, self._peers),
            partial(reset_prefix_cache, self._roster, self._follower),
            self._pins if self._nvme is not None else None,
            forget_api,
            self._forgetting.admin_token,
        )
        return HttpServer(api, listener)

    async def _open_drives(self) -> None:
        """Make the tier behind DRAM, if there is one. Raises `TierUnavailable` where a drive mustn't be used."""
        config = self._config.nvme
        if not config.drives:
            return
        nvme = self._nvme = NvmeTier(partial(self._host.record_in, int(Tier.NVME)))
        for each in config.drives:
            drive = Drive(
                self._make_store(each),
                each.quota_bytes,
                nvme.note_change,
                partial(_await_withdrawn, self._host),
                self._metrics,
                name=str(each.path),
                min_free_bytes=config.min_free_bytes,
                read_threads=config.read_threads,
                tombstones=self._forgetting.tombstones,
            )
            nvme.add(drive, FileWriter(drive, self._metrics))

        refusals = await asyncio.gather(*(drive.open() for drive in nvme.drives), return_exceptions=True)
        for refusal in refusals:
            if refusal is not None:
                raise refusal

    def _add_nvme(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Set the tier behind DRAM going, if there is one; returns the loops that may be cancelled at any moment."""
        nvme = self._nvme
        if nvme is None:
            return []
        admission = Admission(WRITE_POLICIES[self._config.nvme.write](), self._pins, self._tier, nvme)
        promotion = self._lower = self._promotion = Promotion(self._tier, nvme, admission, group, self._metrics)
        self._tier.on_stored = promotion.note_stored
        self._nvme_writing = [group.create_task(writer.run()) for writer in nvme.writers]
        files_per_s = FILES_PER_S / len(nvme.drives)
        keeping = [
            group.create_task(keep(drive, nvme.withdraw, self._metrics, files_per_s=files_per_s))
            for drive in nvme.drives
        ]
        return [*keeping, group.create_task(promotion.run())]

    async def _close_nvme(self) -> None:
        """Before the arena goes: reads and the write in hand use its slots. Where they hang it stays, to the end."""
        if self._nvme is not None:
            await self._promotion.close()
            self.has_hanging_threads = not await self._nvme.close(self._nvme_writing)

    def _close_stores(self) -> None:
        for drive in self._nvme.drives if self._nvme is not None else ():
            if not drive.has_jobs:
                drive.store.close()

    def _nvme_status(self, nvme: NvmeTier) -> dict[str, Any]:
        return status_of(nvme, self._promotion) | {
            "write": self._config.nvme.write,
            "pinned_keys": len(self._pins),
            "write_budgets": [
                {
                    "drive": each.drive,
                    "bytes_per_day": each.day_bytes,
                    "bytes_available": each.available_bytes,
                    "bytes_written_today": each.written_today_bytes,
                }
                for each in self._budgeted
            ],
        }

    def _make_store(self, config: DriveConfig) -> Store:
        drive, store = str(config.path), FolderStore(str(config.path), fsync=self._config.nvme.fsync)
        if config.day_bytes is None:
            self._metrics.write_budget_bytes.labels(drive).set(math.inf)
            logger.info("writes to %s have no endurance budget: its capacity_gb and dwpd aren't given", drive)
            return store
        budgeted = BudgetedStore(store, drive, drive, config.day_bytes)
        self._budgeted.append(budgeted)
        metrics = self._metrics
        metrics.write_budget_day_bytes.labels(drive).set(config.day_bytes)
        metrics.write_budget_bytes.labels(drive).set_function(lambda: budgeted.available_bytes)
        metrics.written_today_bytes.labels(drive).set_function(lambda: budgeted.written_today_bytes)
        return budgeted

    def _watch_announced(self, host: Publisher, roster: Roster) -> None:
        announced = self._metrics.announced_chunks
        for tier in (Tier.DRAM, Tier.NVME) if self._nvme is not None else (Tier.DRAM,):
            announced.labels(tier.label).set_function(partial(host.announced_in, tier))
        announced.labels(Tier.GPU.label).set_function(
            lambda: sum(engine.publisher.announced_keys for engine in roster.engines)
        )

    def _listen(self) -> socket.socket:
        bind, port = self._config.listen.bind, self._config.listen.port
        try:
            return listen(bind, port)
        except OSError as error:
            raise HttpUnavailable(f"the agent's HTTP can't listen on {bind} port {port}: {error.strerror}") from error

    def _host_publisher(self, listener: socket.socket) -> Publisher:
        bind, port = listener.getsockname()[:2]
        address = f"[{bind}]" if ":" in bind else bind
        url = self._config.listen.url or f"http://{address}:{port}"
        registration = HostRegistration(self._config.host, url, self._peers.address)
        return Publisher(
            self._directory,
            Lives(self._directory, registration, self._load, self._sleep, self._metrics),
            Inventory(HOST_KEYS_MAX),
            clock=self._clock,
            sleep=self._sleep,
            metrics=self._metrics,
            walk_interval_s=self._config.directory.walk_interval_s,
        )

    def _load(self) -> Load:
        used, limit = {Tier.DRAM: self._tier.used_bytes}, {Tier.DRAM: self._tier.quota_bytes}
        if self._nvme is not None:
            used[Tier.NVME], limit[Tier.NVME] = self._nvme.used_bytes, self._nvme.quota_bytes
        rates = self._rates.rates(sum(engine.flops for engine in self._roster.engines))
        return Load(
            rates,
            used,
            limit,
            is_directory_full=self._host.refusals.is_full,
            peer_bytes_per_s=self._peers.rates(),
        )

    def _process_gone(self, process: Process) -> None:
        self._roster.process_gone(process)
        if self._tier.hierarchy is not None:
            hierarchy = self._tier.hierarchy
            released = 0
            for client, chunk_tokens in process.clients.items():
                ended = hierarchy.release_holder(Holder(process, client))
                self._metrics.tokens_missed.inc(ended * chunk_tokens)
                released += ended
            self._tier.account()
            if released:
                logger.info("process %d has ended; its %d references are released", process.pid, released)


class _BothTiers:
    """Where a label that has become known belongs."""

    def __init__(self, dram: DramTier, lower: LowerTier) -> None:
        self._dram, self._lower = dram, lower

    def learn(self, label: ChunkLabel) -> None:
        """See `Labelled`."""
        self._dram.learn(label)
        self._lower.learn(label)


def _names(publisher: Publisher) -> list[str]:
    return [incarnation.hex() for incarnation in publisher.lives.incarnations]


async def _await_withdrawn(host: Publisher, keys: Sequence[bytes]) -> None:
    """Give the directory a moment to hear that keys are gone; a slow one must not hold memory up."""
    try:
        async with asyncio.timeout(WITHDRAW_WAIT_S):
            await host.settled(keys)
    except TimeoutError:
        return


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
