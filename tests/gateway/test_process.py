"""`warmroute gateway` as a process: it lives without a directory, says so, and ends in order."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import httpx
import redis

from directory.members import Member
from directory.redis_directory import RedisDirectory
from tests.directory.stands import running_valkey
from tests.warmroute.fleets import free_port, until


@contextlib.contextmanager
def gateway_process(port: int, directory_port: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "warmroute.cli", "gateway"]
    command += ["--redis", f"redis://127.0.0.1:{directory_port or free_port()}", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def get(url: str) -> httpx.Response | None:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False)
    return None


def test_without_a_directory_it_is_alive_and_not_ready_and_ends_on_sigterm() -> None:
    port = free_port()
    with gateway_process(port) as process:
        until(lambda: get(f"http://127.0.0.1:{port + 1}/healthz") is not None, 30, "it is alive")
        until(lambda: "unavailable" in httpx.get(f"http://127.0.0.1:{port + 1}/fleet").json()["directory"], 30, "said")
        until(lambda: "unavailable" in httpx.get(f"http://127.0.0.1:{port + 1}/fleet").json()["reports"], 30, "said")
        for base in (port, port + 1):
            assert httpx.get(f"http://127.0.0.1:{base}/healthz").status_code == 200
            assert httpx.get(f"http://127.0.0.1:{base}/readyz").status_code == 503
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_two_gateways_know_of_each_other_until_one_ends() -> None:
    with running_valkey() as server:
        one, other = free_port(), free_port()
        with gateway_process(one, server.port), gateway_process(other, server.port) as ending:

            def known_to(port: int) -> list[str]:
                said = get(f"http://127.0.0.1:{port + 1}/fleet")
                return [row["gateway"].rpartition(":")[2] for row in said.json()["other_gateways"]] if said else []

            until(lambda: (known_to(one), known_to(other)) == ([str(other)], [str(one)]), 30, "each knows the other")
            assert httpx.get(f"http://127.0.0.1:{one + 1}/fleet").json()["reports"] == "ok"
            with redis.Redis(port=server.port, protocol=2) as raw:
                until(lambda: "cmdstat_hmget" in raw.info("commandstats"), 30, "they are read by themselves")
            ending.send_signal(signal.SIGTERM)
            assert ending.wait(20) == 0
            rows = asyncio.run(_members(server.port))
            assert sorted(row.retired for row in rows) == [False, True]
            until(lambda: known_to(one) == [], 30, "it isn't believed any more")


async def _members(directory_port: int) -> Sequence[Member]:
    directory = RedisDirectory.connect(f"redis://127.0.0.1:{directory_port}")
    try:
        return await directory.members()
    finally:
        await directory.aclose()


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with gateway_process(taken.getsockname()[1]) as process:
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.decode().startswith("warmroute gateway: can't listen on 127.0.0.1:")
    assert errors.count(b"\n") == 1
