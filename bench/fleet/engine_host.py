"""The process of all simulated engines: `python -m bench.fleet.engine_host FILE`, where a JSON file describes them.

Each engine has a port for HTTP, one for its KV events and one for their replay. With a door it attaches to the agent of
its host, and says there what an engine's connector says: its own configuration, and a speed that is only believed.
"""

import asyncio
import contextlib
import gc
import math
import random
import signal
import sys
import time
from pathlib import Path

import msgspec
import uvloop
import zmq.asyncio
from aiohttp import web

from bench.fleet.engine import SimulatedEngine
from bench.fleet.engine_api import CONTEXT_TOKENS, MODEL, EngineApi, Known
from bench.fleet.kv_events import TOPIC, KvEventPublisher
from bench.fleet.scale import Scale
from bench.fleet.words import tokenizer_files
from directory.identity import Identity
from nodeagent.client import ChunkClient
from nodeagent.engine_hello import EngineHello
from nodeagent.engines.vllm.description import GPU_FLOPS
from nodeagent.messages import KvEventSource
from warmroute.replay.hardware import FleetPlan, TierBlocks

CHUNK_BYTES = 1 << 16
"""What an engine says a chunk has; none is stored outside of `gpu`, so this costs nothing."""


class EnginePorts(msgspec.Struct, frozen=True):
    """Where one engine listens, on this machine alone."""

    http: int
    events: int
    replay: int

    @property
    def url(self) -> str:
        """Where routers reach it."""
        return f"http://127.0.0.1:{self.http}"

    @property
    def events_endpoint(self) -> str:
        """Where its KV events are."""
        return f"tcp://127.0.0.1:{self.events}"

    @property
    def replay_endpoint(self) -> str:
        """Where its last KV events are."""
        return f"tcp://127.0.0.1:{self.replay}"


class HostPlan(msgspec.Struct, frozen=True):
    """What the process is told. `engine_spread` is the deviation of the logarithm of engines' speeds."""

    ports: list[EnginePorts]
    gpu_blocks: int
    trace_tokens: int
    real_s: float
    engine_spread: float
    seed: int
    door: str | None = None


def hello(name: str, ports: EnginePorts, scale: Scale, plan: FleetPlan) -> EngineHello:
    """What the engine says at the door."""
    files = tokenizer_files()
    source = KvEventSource(ports.events_endpoint, ports.replay_endpoint, TOPIC.decode(), scale.block_tokens)
    return EngineHello(
        engine=name,
        url=ports.url,
        models=(MODEL,),
        identity=Identity(MODEL, "bench", "bench", "bf16", "bench"),
        tp_rank=0,
        shape=scale.shape(plan.model),
        chunk_tokens=scale.block_tokens,
        chunk_bytes=CHUNK_BYTES,
        context_tokens=CONTEXT_TOKENS,
        tokenizer_files=files,
        flops=GPU_FLOPS,
        renderer="vllm",
        events=source,
    )


async def serve(host: HostPlan) -> None:
    """Until SIGTERM."""
    scale, drawn, known = Scale(host.trace_tokens, host.real_s), random.Random(host.seed), Known()
    plan = FleetPlan(nodes=len(host.ports), blocks=TierBlocks(host.gpu_blocks, 0, 0))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        tasks = []
        for number, ports in enumerate(host.ports):
            slowness = math.exp(drawn.gauss(0, host.engine_spread))
            publisher = KvEventPublisher(context, ports.events_endpoint, ports.replay_endpoint)
            stack.callback(publisher.close)
            has_agent = host.door is not None
            engine = SimulatedEngine(plan, scale, slowness, publisher.publish, time.monotonic, has_agent)
            tasks += [group.create_task(engine.run()), group.create_task(publisher.answer_replays())]
            runner = web.AppRunner(EngineApi(engine, known).app(), access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", ports.http, backlog=1024).start()
            if host.door is not None:
                client = ChunkClient(host.door, hello(f"engine-{number}", ports, scale, plan), list)
                stack.callback(client.stop)
        gc.freeze()
        await ended.wait()
        for task in tasks:
            task.cancel()


def main() -> None:
    """Read the description, and serve it."""
    uvloop.run(serve(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=HostPlan)))


if __name__ == "__main__":
    main()
