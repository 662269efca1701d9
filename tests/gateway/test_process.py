"""`warmroute gateway` as a process: it lives without a directory, says so, and ends in order."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx

from tests.warmroute.fleets import free_port, until


@contextlib.contextmanager
def gateway_process(port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "warmroute.cli", "gateway"]
    command += ["--redis", f"redis://127.0.0.1:{free_port()}", "--port", str(port)]
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
        for base in (port, port + 1):
            assert httpx.get(f"http://127.0.0.1:{base}/healthz").status_code == 200
            assert httpx.get(f"http://127.0.0.1:{base}/readyz").status_code == 503
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with gateway_process(taken.getsockname()[1]) as process:
            _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.decode().startswith("warmroute gateway: can't listen on 127.0.0.1:")
    assert errors.count(b"\n") == 1
