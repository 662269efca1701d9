"""`warmroute up`, as a user runs it: one sentence for what stands in the way. Its demo is in tests/fleet."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.free_port import free_port
from tests.warmroute.fleets import left_behind, refused, up
from warmroute.cli import main

pytestmark = pytest.mark.timeout(600)


def test_what_stands_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    no_model = tmp_path.parent / "no_model.gguf"
    no_model.write_bytes(b"hello")
    assert "GGUF" in refused(tmp_path, "--model", str(no_model))
    assert "can't be read" in refused(tmp_path, "--model", str(tmp_path / "nowhere"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in refused(tmp_path, port=port)
    assert "can't be used" in refused(tmp_path, "--redis", f"redis://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--redis", "http://nonsense"], "redis"),
        (["--engines", "0"], "--engines"),
        (["--exit"], "--demo"),
        (["--key-prefix", "a:b"], "--key-prefix"),
        (["--engines", "1000"], "memory"),
        (["--engine-kind", "vllm", "--engines", "1000"], "memory"),
        (["--engine-kind", "vllm", "--no-cache"], "--no-cache"),
        (["--engine-kind", "vllm", "--engine", "http://127.0.0.1:1"], "--engine-kind"),
        (["--dram-gb", "0"], "--dram-gb"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_options_that_make_no_sense_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["up", "--port", str(free_port()), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("warmroute up: ")
    assert says in said.lower()
    assert said.count("\n") == 1
    assert left_behind(tmp_path) == []


def test_a_model_that_only_looks_like_one_is_one_sentence(tmp_path: Path) -> None:
    fake = tmp_path.parent / "fake.gguf"
    fake.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64)
    process = up(tmp_path, "--model", str(fake))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "Traceback" not in errors
    assert "fake.gguf" in errors.splitlines()[-1]
    assert left_behind(tmp_path) == []


def test_keys_is_quick_to_answer() -> None:
    """A subcommand doesn't pay for the imports of others."""
    code = "import sys, warmroute.cli; print(sorted(set(sys.modules) & {'numpy', 'fastapi', 'aiohttp', 'redis'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
