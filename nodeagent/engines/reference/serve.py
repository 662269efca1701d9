"""Builds the engine from its options and serves it; stops in order on SIGTERM and SIGINT."""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn

from nodeagent.client import ChunkClient, EngineHello
from nodeagent.engines.reference.chunk_store import ChunkStore, ChunkWriter, NoStore
from nodeagent.engines.reference.errors import EngineError
from nodeagent.engines.reference.gpu_tier import GpuTier
from nodeagent.engines.reference.loaded_model import LoadedModel, default_model_path, load
from nodeagent.engines.reference.metrics import EngineMetrics
from nodeagent.engines.reference.prefix_cache import NoPrefixCache, PrefixCache, TieredPrefixCache
from nodeagent.engines.reference.scheduler import Scheduler
from nodeagent.engines.reference.server import create_app
from nodeagent.engines.reference.service import EngineService

log = logging.getLogger(__name__)

DRAIN_S = 3
TP_RANK = 0
_BACKLOG = 128


class _Server(uvicorn.Server):
    """Leaves the signals to `serve`, so that a stop ends with exit status 0 after everything is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(options: argparse.Namespace) -> int:
    """Load, listen, serve. Raises `EngineError` where the engine can't start."""
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = _listen(options.bind, options.port)
    with listener:
        path = options.model if options.model is not None else default_model_path()
        began_s = time.perf_counter()
        loaded = load(path, options.served_model_name, options.threads)
        log.info("loaded %s in %.1f s", loaded.name, time.perf_counter() - began_s)
        port = listener.getsockname()[1]
        service = build_service(
            loaded,
            engine=options.engine,
            url=options.url or f"http://{options.bind}:{port}",
            door=options.door,
            gpu_chunks=0 if options.no_gpu_tier else options.gpu_chunks,
            use_cache=not options.no_cache,
        )
        config = uvicorn.Config(
            create_app(service),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
            backlog=_BACKLOG,
        )
        log.info("%s serves %s at http://%s:%d", options.engine, loaded.name, options.bind, port)
        asyncio.run(_run(_Server(config), listener))
    return 0


def build_service(
    loaded: LoadedModel, *, engine: str, url: str, door: str | None, gpu_chunks: int, use_cache: bool
) -> EngineService:
    """Put the engine together: with a store where there is a door, without any cache where none is wanted."""
    metrics = EngineMetrics(loaded.name)
    gpu = GpuTier(gpu_chunks if use_cache else 0)
    store: ChunkStore = NoStore()
    if door is not None:
        store = ChunkClient(door, describe(loaded, engine, url, gpu), gpu.inventory)
    cache: PrefixCache = NoPrefixCache()
    if use_cache:
        writer = ChunkWriter(store, metrics.count_write)
        cache = TieredPrefixCache(
            loaded.identity, TP_RANK, loaded.chunk_tokens, gpu, store, writer, loaded.speed.prefill_s
        )
    scheduler = Scheduler(loaded.model, loaded.tokenizer, cache, loaded.chunk_tokens, metrics, loaded.speed)
    return EngineService(loaded, scheduler, cache, gpu, store, metrics, int(time.time()))


def describe(loaded: LoadedModel, engine: str, url: str, gpu: GpuTier) -> EngineHello:
    """What the engine says of itself at the agent's door."""
    return EngineHello(
        engine=engine,
        url=url,
        models=(loaded.name,),
        identity=loaded.identity,
        tp_rank=TP_RANK,
        shape=loaded.model.shape,
        chunk_tokens=loaded.chunk_tokens,
        chunk_bytes=loaded.chunk_bytes,
        context_tokens=loaded.context_tokens,
        tokenizer_files=loaded.files.as_mapping(),
        flops=loaded.speed.flops,
        kv_tokens=gpu.chunks_max * loaded.chunk_tokens or None,
    )


async def _run(server: _Server, listener: socket.socket) -> None:
    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop)
    await server.serve(sockets=[listener])


def _listen(bind: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((bind, port), backlog=_BACKLOG)
        return socket.socket(fileno=listener.detach())  # now it knows its protocol, so asyncio sets TCP_NODELAY
    except OSError as error:
        raise EngineError(f"can't listen on {bind}:{port}: {error.strerror}") from error
