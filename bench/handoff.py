"""What handing a resident chunk over costs, at the client: a real door, and an agent in a process of its own.

    python -m bench.handoff [--mib 8] [--rounds 5] [--operations 400] [--json]

`message` is a round trip of one small message between two processes, by blocking calls: what no hand-off can undercut.
`open and close` is the hand-off itself, of 1 and of 64 chunks in one run: no payload moves. `copied` adds the client's
copy into memory of its own without checksums (`dram.verify_reads: false`), `verified` the copy with them. All take
turns, a round after another. Microseconds of wall time (median and 99th percentile) and of CPU at either side, each of
a whole operation; the agent's CPU is what the kernel accounts, in steps of 10 ms over all of a row's operations.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from directory.costs import ModelShape
from directory.identity import Identity
from directory.memory import MemoryDirectory
from nodeagent.agent import Agent
from nodeagent.client import ChunkClient, ChunkLabel, EngineHello, OpenedChunk, PutResult
from nodeagent.config import AgentConfig

WAIT_S = 30.0
RUNS = (1, 64)
MESSAGE_BYTES = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def serve(door: str, quota_bytes: int, verify_reads: bool) -> None:
    """The agent's process: everything of an agent but a directory in another process."""
    config = AgentConfig.model_validate(
        {
            "host": "bench",
            "door": door,
            "directory": {"url": "redis://unused"},
            "dram": {"gb": quota_bytes / 1e9, "verify_reads": verify_reads},
        }
    )
    agent = Agent(config, MemoryDirectory(time.monotonic))
    asyncio.run(agent.run(lambda: print("ready", flush=True)))


def echo(place: str) -> None:
    """The other side of `message`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(1)
        print("ready", flush=True)
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(MESSAGE_BYTES):
                connection.sendall(data)


@contextlib.contextmanager
def other_process(*arguments: str) -> Iterator[int]:
    command = [sys.executable, "-m", "bench.handoff", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "it says why on stderr"
            yield process.pid
        finally:
            process.terminate()


@contextlib.contextmanager
def client_at(door: str, chunk_bytes: int) -> Iterator[ChunkClient]:
    hello = EngineHello(
        engine="bench",
        url="http://127.0.0.1:9",
        models=("m",),
        identity=Identity("m", "w", "t", "bf16", "bench-1", 1),
        tp_rank=0,
        shape=ModelShape(8e9, 32, 4096, 131_072),
        chunk_tokens=256,
        chunk_bytes=chunk_bytes,
        context_tokens=131_072,
        tokenizer_files={"tokenizer.json": b"{}"},
        flops=1e12,
    )
    client = ChunkClient(door, hello, list)
    try:
        assert client.wait_connected(WAIT_S), "the agent didn't let us in"
        payload = memoryview(bytearray(os.urandom(1 << 20) * -(-chunk_bytes // (1 << 20))))[:chunk_bytes]
        for number in range(max(RUNS)):
            payload[:8] = number.to_bytes(8, "little")
            parent = key_of(number - 1) if number else None
            label = ChunkLabel(key_of(number), key_of(number)[:16], parent, number)
            assert client.put(label, payload, WAIT_S) is PutResult.STORED, "the agent took no chunk"
        yield client
    finally:
        client.stop()


@dataclass(slots=True)
class Row:
    """One kind of operation, by `work`; `pid` is the process at the other side."""

    name: str
    chunks: int
    work: Callable[[], None]
    pid: int
    walls_s: list[float] = field(default_factory=list)
    own_cpu_s: float = 0.0
    other_cpu_s: float = 0.0

    def run(self, operations: int) -> None:
        own, other = time.process_time(), cpu_of(self.pid)
        for _ in range(operations):
            began = time.perf_counter()
            self.work()
            self.walls_s.append(time.perf_counter() - began)
        self.own_cpu_s += time.process_time() - own
        self.other_cpu_s += cpu_of(self.pid) - other

    def figures(self) -> dict[str, Any]:
        count = len(self.walls_s)
        return {
            "what": self.name,
            "chunks": self.chunks,
            "operations": count,
            "median_us": statistics.median(self.walls_s) * 1e6,
            "p99_us": statistics.quantiles(self.walls_s, n=100)[98] * 1e6,
            "client_cpu_us": self.own_cpu_s / count * 1e6,
            "other_cpu_us": self.other_cpu_s / count * 1e6,
        }


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rows_of(trusting: ChunkClient, careful: ChunkClient, pids: Sequence[int], chunk_bytes: int) -> Iterator[Row]:
    target = memoryview(bytearray(chunk_bytes))

    def hand_over(client: ChunkClient, chunks: int, use: Callable[[OpenedChunk], bool]) -> Callable[[], None]:
        keys = [key_of(number) for number in range(chunks)]

        def work() -> None:
            opened = client.open(keys, WAIT_S)
            assert len(opened) == chunks, "all of them are resident"
            assert all(use(chunk) for chunk in opened), "all of them are good"
            client.close(opened)

        return work

    for chunks in RUNS:
        yield Row("open and close", chunks, hand_over(careful, chunks, lambda _: True), pids[1])
        for name, client, pid in (("copied", trusting, pids[0]), ("verified", careful, pids[1])):
            yield Row(
                name,
                chunks,
                hand_over(client, chunks, lambda chunk, client=client: client.read_into(chunk, target)),  # type: ignore[misc]
                pid,
            )


def measure(mib: float, rounds: int, operations: int) -> list[dict[str, Any]]:
    chunk_bytes = round(mib * (1 << 20))
    quota_bytes = (max(RUNS) + 2) * (chunk_bytes + 8_192)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-handoff-")))
        pids, clients = [], []
        for name in ("trusting", "careful"):
            door = str(folder / name)
            pids.append(opened.enter_context(other_process("--agent", door, str(quota_bytes), name)))
            clients.append(opened.enter_context(client_at(door, chunk_bytes)))
        echoing = opened.enter_context(other_process("--echo", str(folder / "echo")))
        connection = opened.enter_context(socket.socket(socket.AF_UNIX))
        connection.connect(str(folder / "echo"))

        def message() -> None:
            connection.sendall(bytes(MESSAGE_BYTES))
            connection.recv(MESSAGE_BYTES)

        rows = [Row("message", 0, message, echoing), *rows_of(clients[0], clients[1], pids, chunk_bytes)]
        for row in rows:
            row.work()
        for _ in range(rounds):
            for row in rows:
                moves = row.name in ("copied", "verified")
                row.run(max(1, operations // (row.chunks * 4)) if moves else operations)
        return [row.figures() for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=8.0, help="MiB of a chunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", type=int, default=400, help="hand-offs a round; fewer where bytes are copied")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--agent", nargs=3, metavar=("DOOR", "BYTES", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--echo", metavar="PLACE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent:
        door, quota_bytes, kind = options.agent
        serve(door, int(quota_bytes), kind == "careful")
        return
    if options.echo:
        echo(options.echo)
        return
    result = measure(options.mib, options.rounds, options.operations)
    if options.json:
        print(json.dumps({"mib": options.mib, "rows": result}, indent=1))
        return
    print("what            chunks  median us     p99 us  client CPU us  other CPU us")
    for row in result:
        print(
            f"{row['what']:15} {row['chunks']:6} {row['median_us']:10,.0f} {row['p99_us']:10,.0f}"
            f" {row['client_cpu_us']:14,.0f} {row['other_cpu_us']:13,.0f}"
        )


if __name__ == "__main__":
    main()
