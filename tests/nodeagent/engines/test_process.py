"""The engine as a process: how it starts, refuses to start, and stops."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.free_port import free_port

COMMAND = [sys.executable, "-m", "nodeagent.engines.reference", "--engine", "e1", "--threads", "1"]
START_S, STOP_S = 60, 20


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=START_S) as response:
        return bytes(response.read())


@contextmanager
def running(path: Path, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*COMMAND, "--model", str(path), "--port", str(port), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if b" serves " in line), None)
            assert said is not None, "it ended before it served"
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def fail(*options: str, **variables: str) -> str:
    result = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, timeout=START_S, env=os.environ | variables, check=False
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    return result.stderr


def test_it_serves_and_a_sigterm_ends_it_in_order(tiny_path: Path) -> None:
    port = free_port()
    with running(tiny_path, port) as process:
        assert json.loads(get(port, "/v1/models"))["data"][0]["id"] == "smollm2-135m-instruct"
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_a_stop_during_a_stream_doesnt_wait_for_its_end(tiny_path: Path) -> None:
    port = free_port()
    with running(tiny_path, port, "--no-cache") as process, socket.create_connection(("127.0.0.1", port)) as caller:
        body = b'{"prompt":"hello","max_tokens":400,"ignore_eos":true,"stream":true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Length: {len(body)}\r\n\r\n"
        caller.sendall(head.encode() + body)
        assert caller.recv(20).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0


def test_a_file_that_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("hello")
    error = fail("--port", "0", "--model", str(path))
    assert error.strip().splitlines()[-1] == f"reference engine: {path} is not a GGUF model file"


def test_a_port_in_use_is_one_sentence(tiny_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        error = fail("--port", str(port), "--model", str(tiny_path))
    assert f"can't listen on 127.0.0.1:{port}" in error
