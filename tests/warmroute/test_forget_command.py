"""`warmroute forget`: asks every host's agent, shows what each did, and names those that didn't confirm."""

import asyncio
import contextlib
import io
import json
import signal
import socket
import time
import unittest.mock

import pytest

from directory.members import HostRegistration, Load, draw_incarnation
from directory.redis_directory import RedisDirectory
from tests.directory.fleet_samples import ENGINE, IDENTITY
from tests.directory.stands import running_valkey
from tests.nodeagent.forget_calls import call, held, key, put_chain
from tests.nodeagent.running import connected, running_agent
from warmroute.cli import main

TOKEN = "a token of the agent's, ünïcode"
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def server():
    with running_valkey() as server:
        yield f"redis://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forget")
    with running_agent(folder, admin_token=TOKEN) as agent:
        yield agent


@pytest.fixture
def prefix(request):
    """A fleet of each test's own."""
    return f"t{abs(hash(request.node.name)):x}"[:20]


def register(server, prefix, hosts, engines=()):
    async def fill():
        directory = RedisDirectory.connect(server, key_prefix=prefix, clock=time.monotonic)
        for each in (*(HostRegistration(host, url) for host, url in hosts), *engines):
            await directory.register(draw_incarnation(), each, Load(), 60)
        await directory.aclose()

    asyncio.run(fill())


def ask(server, prefix, *words, stdin="", token=TOKEN):
    out, err = io.StringIO(), io.StringIO()
    environment = {"WARMROUTE_LISTEN__ADMIN_TOKEN": token} if token else {}
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        unittest.mock.patch("sys.stdin", io.StringIO(stdin)),
        unittest.mock.patch.dict("os.environ", environment),
    ):
        status = main(["forget", *words, "--redis", server, "--key-prefix", prefix])
    return status, out.getvalue(), err.getvalue()


def url_of(agent):
    return next(iter(agent.call(agent.directory.members()))).registration.agent_url


def test_every_host_is_asked_and_one_that_does_not_answer_is_named(server, prefix, agent):
    register(server, prefix, [("h1", url_of(agent)), ("h2", NOBODY)])
    with connected(agent.config.door) as client:
        put_chain(client, "ab")
        status, out, err = ask(server, prefix, "--keys", key("b"), "--json")
        assert status == 1
        first, second = json.loads(out)
        assert (first["host"], first["trouble"]) == ("h1", None)
        assert first["receipt"]["forgotten"]["dram"]["chunks"] == 1
        assert (second["host"], second["receipt"]) == ("h2", None)
        assert "not confirmed by h2" in err
        assert held(agent, "ab") == "a"
        status, out, err = ask(server, prefix, "--keys", key("a"), "--host", "h1")
        assert (status, err) == (0, "")
        assert out.splitlines()[1].split()[:3] == ["h1", "yes", "1"]
        assert held(agent, "ab") == ""


def test_a_salt_comes_by_stdin_and_its_line_end_is_not_part_of_it(server, prefix, agent):
    register(server, prefix, [("h1", url_of(agent))])
    with connected(agent.config.door) as client:
        put_chain(client, "st", salt="tenant")
        assert ask(server, prefix, "--salt-stdin", stdin="tenant\n")[0] == 0
        assert held(agent, "st") == ""


def test_token_ids_come_from_a_file_with_their_identity(server, prefix, agent, tmp_path):
    register(server, prefix, [("h1", url_of(agent))])
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(list(range(300))))
    (tmp_path / "salt").write_text("tenant\n")
    words = ["--token-ids", str(file), "--salt-file", str(tmp_path / "salt"), "--json"]
    status, out, _ = ask(server, prefix, *words, "--identity", "ab" * 32)
    assert status == 0
    assert json.loads(out)[0]["receipt"]["by"] == "token_ids"
    fields = dict.fromkeys(("model_id", "weights_sha", "tokenizer_sha", "kv_dtype", "layout"), "x")
    assert ask(server, prefix, *words, "--identity", json.dumps(fields), "--kept-tokens", "16")[0] == 0
    status, out, err = ask(server, prefix, *words)
    assert status == 2
    assert err.count("nothing was done") == 1
    assert "need the identity" in json.loads(out)[0]["trouble"]


@pytest.mark.parametrize("digest", [IDENTITY.fleet_digest(), IDENTITY.shard_digest(1)], ids=["fleet", "shard"])
def test_a_digest_is_told_to_every_host_by_the_fields_of_the_engine_that_has_it(server, prefix, agent, digest):
    words = ["--identity", digest.hex()]
    register(server, prefix, [("h1", url_of(agent))])
    status, out, err = ask(server, prefix, *words)
    assert (status, "give the identity's fields" in out, "not confirmed by h1" in err) == (1, True, True)
    register(server, prefix, [], [ENGINE])
    assert ask(server, prefix, *words)[0] == 0
    assert ask(server, prefix, "--salt-stdin", *words, stdin="s")[0] == 0


def test_without_the_agents_token_nothing_is_forgotten(server, prefix, agent):
    register(server, prefix, [("h1", url_of(agent))])
    status, out, err = ask(server, prefix, "--salt-stdin", stdin="s", token=None)
    assert status == 1
    assert "401" in out
    assert "admin token" in out
    assert TOKEN not in out + err
    assert call(agent, {"salt": "s"})[0] == 401
    assert call(agent, {"salt": "s"}, headers={"authorization": "Bearer x"})[0] == 401
    for method, path in (("POST", "/pins"), ("DELETE", "/pins"), ("POST", "/engines/e/reset_prefix_cache")):
        assert call(agent, {"keys": []}, path=path, method=method)[0] == 401
    assert call(agent, {"keys": []}, path="/prefetch")[0] == 202
    assert call(agent, {"salt": "s"}, headers={"authorization": f"Bearer {TOKEN}".encode()})[0] == 200


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--keys", "ab"], 2, "a directory key is 32 hex digits, not 'ab'"),
        (["--identity", "ab"], 2, "--identity must be"),
        (["--identity", "[1]"], 2, "--identity must be"),
        (["--identity", '{"model": "m"}'], 2, "refused (400)"),
        ([], 2, "say what to forget"),
        (["--keys", "ab" * 16, "--host", "h9"], 2, "no host of the name h9"),
        (["--identity", "{"], 2, "--identity must be"),
        (["--token-ids", "/nowhere"], 2, "forget: /nowhere can't be read: No such file"),
        (["--salt-file", "/dev/null"], 2, "--salt-file says of which salt --token-ids are"),
        (["--token-ids", "-"], 2, "--token-ids must hold"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(server, prefix, agent, words, status, says):
    register(server, prefix, [("h1", url_of(agent)), ("h2", url_of(agent))])
    done, out, err = ask(server, prefix, *words)
    assert (done, out) == (status, "")
    assert says in err
    assert err.count("\n") == 1


def test_where_no_host_is_registered_nobody_confirms(server, prefix):
    status, out, err = ask(server, prefix, "--keys", "ab" * 16)
    assert (status, out) == (1, "")
    assert f"no host is registered under the key prefix {prefix}: nobody was asked" in err


async def interrupted(*_):
    """Ctrl-C while a host is asked."""
    signal.raise_signal(signal.SIGINT)
    await asyncio.Event().wait()


def test_who_keeps_it_waiting_is_named_and_it_can_be_broken_off(server, prefix, monkeypatch):
    monkeypatch.setattr("warmroute.forget_command.QUIET_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        register(server, prefix, [("h1", f"http://127.0.0.1:{silent.getsockname()[1]}")])
        monkeypatch.setattr("warmroute.forget_command.ANSWER_WAIT_S", 0.2)
        status, _, err = ask(server, prefix, "--keys", "ab" * 16)
        assert status == 1
        assert "waiting for h1, for up to 0.2 s" in err
        monkeypatch.setattr("warmroute.forget_command._ask", interrupted)
        status, _, err = ask(server, prefix, "--keys", "ab" * 16)
    assert (status, err.count("\n")) == (130, 1)
    assert "nothing is confirmed" in err
