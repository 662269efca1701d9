"""`warmroute doctor`: faults planted in a small real fleet are found, with their mend; before, it is quiet."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from directory.members import EngineRegistration, HostRegistration, Load, draw_incarnation
from directory.redis_directory import RedisDirectory
from nodeagent.engines.reference.gpu_tier import Floats, GpuChanges, GpuTier
from nodeagent.engines.reference.loaded_model import LoadedModel, load
from nodeagent.engines.reference.render import ChatRenderer
from nodeagent.engines.reference.service import EngineService
from tests.directory.stands import running_valkey
from tests.free_port import free_port
from tests.gateway.samples import engine_registration
from tests.nodeagent.engines import tiny_model
from tests.warmroute.doctor_parts import (
    Parts,
    Report,
    agent_config,
    changed,
    doctor,
    gateway_config,
    write_files,
)
from warmroute.cli import main

TERM_S = 60.0


@dataclass(frozen=True)
class Ward:
    """The fleet, and what the doctor said of it while all was well."""

    parts: Parts
    folder: Path
    loaded: LoadedModel
    files: Path
    redis_url: str
    gateway: str
    door: str
    healthy: Report

    def examine(self, *only: str) -> Report:
        words = ("--gateway", self.gateway, "--directory", self.redis_url)
        return doctor(*words, *(word for check in only for word in ("--only", check)))

    @contextlib.contextmanager
    def registered(self, *registrations: EngineRegistration | HostRegistration) -> Iterator[None]:
        """Others' registrations in the directory, for as long as the test goes on."""
        lives = {draw_incarnation(): each for each in registrations}

        async def act(is_end: bool) -> None:
            directory = RedisDirectory.connect(self.redis_url, clock=time.monotonic)
            for life, registration in lives.items():
                if is_end:
                    await directory.retire(life)
                else:
                    await directory.register(life, registration, Load(), TERM_S)
            await directory.aclose()

        asyncio.run(act(is_end=False))
        try:
            yield
        finally:
            asyncio.run(act(is_end=True))


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    folder = tmp_path_factory.mktemp("d")
    path = tiny_model.write_gguf(folder / "tiny.gguf")
    loaded = load(path, "tiny", threads=1, chunk_tokens=tiny_model.CHUNK_TOKENS)
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("WARMROUTE_FILES_FOLDER", str(folder / "files"))
        server = stack.enter_context(running_valkey())
        redis_url = f"redis://127.0.0.1:{server.port}"
        parts = stack.enter_context(Parts())
        agent = agent_config(folder, redis_url, nvme={"path": str(folder / "nvme"), "gb": 0.01})
        stack.enter_context(parts.agent(agent))
        stack.enter_context(parts.engine(loaded, door=agent.door))
        gateway = stack.enter_context(parts.gateway(gateway_config(folder, redis_url), engines=1))
        healthy = doctor("--gateway", gateway, "--directory", redis_url)
        yield Ward(
            parts, folder, loaded, write_files(folder / "model", loaded), redis_url, gateway, agent.door, healthy
        )


def test_all_is_right_in_a_healthy_fleet(ward: Ward) -> None:
    assert [each for each in ward.healthy.findings if each["verdict"] == "wrong"] == []
    assert ward.healthy.status == 0
    checks = {each["check"] for each in ward.healthy.findings if each["verdict"] == "right"}
    assert checks == {"gateway", "directory", "identities", "agents", "ids", "cache", "clocks"}
    assert "keys of a conversation are those of the engine's ids" in ward.healthy.words("ids", "right")


BOS, EOS = "<|im_start|>", "<|im_end|>"


class SpoiltTier(GpuTier):
    """Holds other bytes than it was given."""

    def insert(self, keys: Any, directory_key: bytes, payload: Floats) -> GpuChanges:
        return super().insert(keys, directory_key, payload[::-1].copy())


def spoil(service: EngineService) -> None:
    service._gpu = service._cache._gpu = SpoiltTier(64)  # type: ignore[attr-defined]


def later(app: Any) -> Callable[..., Any]:
    """The application on a machine whose clock is ahead."""

    async def shifted(scope: Any, receive: Any, send: Any) -> None:
        async def send_later(message: Any) -> None:
            if message["type"] == "http.response.start":
                date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 90)).encode()
                message["headers"] = [(b"date", date), *message["headers"]]
            await send(message)

        await app(scope, receive, send_later)

    return shifted


@dataclass(frozen=True)
class OddEngines:
    """Engines without an agent, a fault in each but one; what the doctor says of each, by the fault's name."""

    report: Report
    names: dict[str, str]

    def words(self, which: str, check: str, verdict: str = "wrong") -> str:
        return self.report.words(check, verdict, self.names[which])


@pytest.fixture(scope="module")
def odd(ward: Ward) -> Iterator[OddEngines]:
    template = tiny_model.TEMPLATE.replace("'<|im_start|>' +", "'<|im_start|> ' +")
    with_other_template = changed(ward.loaded, renderer=ChatRenderer(template, BOS, EOS))
    with_bos_twice = changed(ward.loaded, renderer=ChatRenderer("{{ bos_token }}" + tiny_model.TEMPLATE, BOS, EOS))
    engines: dict[str, tuple[LoadedModel, dict[str, Any]]] = {
        "none": (ward.loaded, {}),
        "template": (with_other_template, {}),
        "bos": (with_bos_twice, {}),
        "no cache": (ward.loaded, {"use_cache": False}),
        "spoilt": (ward.loaded, {"change": spoil}),
        "clock": (ward.loaded, {"change_app": later}),
    }
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(ward.parts.engine(loaded, **how)) for name, (loaded, how) in engines.items()}
        words = [word for url in urls.values() for word in ("--engine", url)]
        report = doctor(*words, "--tokenizer", str(ward.files))
        yield OddEngines(report, {name: url.partition("://")[2] for name, url in urls.items()})


def test_an_engine_without_a_fault_is_right(odd: OddEngines) -> None:
    assert odd.report.status == 1
    for check in ("ids", "cache", "clocks"):
        assert odd.words("none", check) == ""
    assert "the gateway's tokens are the engine's" in odd.words("none", "ids", "right")
    assert "the same greedy answer cold, from the cache and under a salt" in odd.words("none", "cache", "right")


def test_an_engines_other_chat_template_is_found(odd: OddEngines) -> None:
    assert "another chat template" in odd.words("template", "ids")
    assert "--chat-template" in odd.words("template", "ids")
    assert "(requests: plain, system" in odd.words("template", "ids")
    assert "Unicode text" not in odd.words("template", "ids"), "completions have no template"


def test_a_beginning_token_that_is_there_twice_is_found(odd: OddEngines) -> None:
    assert "the beginning token '<|im_start|>' in front twice" in odd.words("bos", "ids")
    assert "add_bos_token" in odd.words("bos", "ids")


def test_a_cache_that_is_off_is_found(odd: OddEngines) -> None:
    assert "none was cached the second time" in odd.words("no cache", "cache")
    assert "without --no-cache" in odd.words("no cache", "cache")


def test_another_answer_from_the_cache_is_found(odd: OddEngines) -> None:
    assert "OTHER OUTPUT FROM THE CACHE" in odd.words("spoilt", "cache")
    assert "computed again as at first" in odd.words("spoilt", "cache")
    assert "take this engine out of the fleet" in odd.words("spoilt", "cache")


def test_a_clock_that_is_off_is_found(odd: OddEngines) -> None:
    assert "its clock is 9" in odd.words("clock", "clocks")
    assert "s ahead of the others'" in odd.words("clock", "clocks")
    assert "chrony" in odd.words("clock", "clocks")


def test_engines_with_other_tokenizers_are_found(ward: Ward) -> None:
    files = ward.folder / "other.gguf"
    other = load(
        tiny_model.write_gguf(files, pre_tokenizer="gpt-2"), "tiny", threads=1, chunk_tokens=tiny_model.CHUNK_TOKENS
    )
    assert not ward.healthy.of("identities")
    with ward.parts.engine(other, "engine-2", door=ward.door):
        report = until_found(ward, "identities", "different tokenizer")
    assert "engine-1" in report.words("identities")
    assert "engine-2" in report.words("identities")
    assert "--served-model-name" in report.words("identities")


def until_found(ward: Ward, check: str, words: str) -> Report:
    """An engine registers a moment after it serves."""
    ends_at = time.monotonic() + 20
    while True:
        report = doctor("--directory", ward.redis_url, "--only", check)
        if words in report.words(check) or time.monotonic() > ends_at:
            assert words in report.words(check)
            return report


def test_a_name_that_is_taken_twice_is_found(ward: Ward) -> None:
    with ward.registered(engine_registration("engine-1", "http://127.0.0.1:9", "host-9", models=())):
        report = doctor("--directory", ward.redis_url, "--only", "identities")
    assert "engine-1: 2 engines go by this name, at http://127.0.0.1:" in report.words("identities")
    assert "a name of its own" in report.words("identities")


def test_chunks_that_are_no_multiple_of_blocks_are_found(ward: Ward) -> None:
    odd = engine_registration("engine-9", "http://127.0.0.1:9", chunk_tokens=256, models=())
    object.__setattr__(odd, "page_tokens", 48)
    with ward.registered(odd):
        report = doctor("--directory", ward.redis_url, "--only", "identities")
    assert "page_tokens must divide chunk_tokens (256), not be 48" in report.words("identities")
    assert "must be a multiple of the engine's block size" in report.words("identities")


def test_an_agent_that_cant_be_reached_is_found(ward: Ward) -> None:
    assert not ward.healthy.of("agents")
    with ward.registered(HostRegistration("host-9", f"http://127.0.0.1:{free_port()}")):
        report = ward.examine("agents")
    assert "host-9: no agent answers" in report.words("agents")
    assert "listen.url" in report.words("agents")


def test_an_agent_that_anybody_may_make_forget_is_found(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its address weren't loopback: tests stay on this machine."""
    monkeypatch.setattr("warmroute.doctor.agents.is_loopback", lambda url: False)
    assert "without an admin token" in ward.examine("agents").words("agents")
    config = agent_config(ward.folder, ward.redis_url, "host-2", listen={"port": free_port(), "admin_token": "t" * 16})
    with ward.parts.agent(config) as url:
        report = doctor("--agent", url, "--only", "agents")
    assert report.status == 0
    assert "listen.admin_token" not in report.words("agents")


def test_a_drive_without_direct_io_is_found(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ward.healthy.of("agents", "note")
    monkeypatch.setattr("nodeagent.tiers.self_test._check_flags", refuse_direct)
    config = agent_config(ward.folder, ward.redis_url, "host-3", nvme={"path": str(ward.folder / "n3"), "gb": 0.01})
    with ward.parts.agent(config) as url:
        report = doctor("--agent", url, "--only", "agents", "--strict")
    assert report.status == 1
    assert "takes no O_DIRECT (errno 22, EINVAL)" in report.words("agents", "note")
    assert "ext4 or XFS" in report.words("agents", "note")


def refuse_direct(fd: int, io: Any) -> None:
    if type(io).__name__ == "DirectIo":
        raise OSError(22, "Invalid argument")


def test_a_server_that_throws_records_away_is_found(ward: Ward) -> None:
    assert not ward.healthy.of("directory")
    with redis.Redis.from_url(ward.redis_url) as client:
        client.config_set("maxmemory", "200mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            report = doctor("--directory", ward.redis_url, "--only", "directory")
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert "allkeys-lru throws records and the fleet's table away" in report.words("directory")
    assert "CONFIG SET maxmemory-policy noeviction" in report.words("directory")


def test_functions_that_arent_loaded_and_rights_that_lack_are_found() -> None:
    with running_valkey() as server, redis.Redis(port=server.port) as client:
        url = f"redis://127.0.0.1:{server.port}"
        assert main(["directory", "load", "--redis", url]) == 0
        assert doctor("--directory", url, "--only", "directory").status == 0
        client.execute_command("ACL", "SETUSER", "reader", "on", ">pass", "~*", "+@read", "+info", "+time", "+hello")
        report = doctor("--directory", f"redis://reader:pass@127.0.0.1:{server.port}", "--only", "directory")
        assert "this login may not write" in report.words("directory", "note")
        client.execute_command("FUNCTION", "FLUSH")
        report = doctor("--directory", url, "--only", "directory")
    assert report.status == 1
    assert "functions aren't loaded" in report.words("directory")
    assert "warmroute directory load" in report.words("directory")


class Strange:
    """Answers every path, each time with the next of these bodies."""

    BODIES = (
        b"",
        b"[]",
        b"1",
        b'"x"',
        b"{",
        b'{"data": [{"id": "m"}]}',
        b"\xff",
        b"[" * 10_000,
        b"vllm:cache_config_info{ 1",
        b'{"engines": [1, {}, {"url": []}], "hosts": {}}',
        b'{"data": 5, "tiers": {"nvme": {"drives": [1]}}, "unix_time_s": "x"}',
        b'{"tokens": ["x"], "usage": 5, "choices": {}, "tiers": [], "engines": [{"engine": {}}], "version": 1}',
    )

    def __init__(self, keeps: dict[str, bytes]) -> None:
        self._keeps, self._count = keeps, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self._count += 1
        body = self._keeps.get(scope["path"]) or self.BODIES[self._count % len(self.BODIES)]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"date", b"never")]})
        await send({"type": "http.response.body", "body": body})


def test_strange_answers_are_findings(ward: Ward) -> None:
    strange = Strange({"/v1/models": b'{"data": [5, {"id": 5}, {"id": "m", "max_model_len": "x"}]}'})
    with ward.parts.app(strange) as url:
        for kind in ("vllm", "sglang", "reference") * 2:
            parts = ("--engine", url, "--admin", url, "--agent", url, "--kind", kind)
            checks = ("settings", "cache", "agents", "gateway", "clocks")
            report = doctor(*parts, *(word for check in checks for word in ("--only", check)))
            assert report.status in (1, 2)
            assert all(each["says"] for each in report.findings)


@pytest.mark.parametrize(
    ("part", "only", "check", "says"),
    [
        ("--gateway", "cache", "gateway", "--admin URL"),
        ("--engine", "cache", "cache", "doesn't answer"),
        ("--agent", "cache", "cache", "it needs an engine: --engine URL"),
        ("--agent", "directory", "directory", "it needs --directory URL"),
    ],
)
def test_a_check_that_cant_be_made_says_why(part: str, only: str, check: str, says: str) -> None:
    report = doctor(part, f"http://127.0.0.1:{free_port()}", "--only", only)
    assert report.status == 2
    assert says in report.words(check, "not checked")


def test_an_error_is_told_by_its_message(ward: Ward) -> None:
    report = doctor("--gateway", ward.gateway, "--admin", ward.gateway, "--only", "gateway")
    assert "answered 404: '/fleet' is not served here; it is on the admin port ->" in report.words(
        "gateway", "not checked"
    )


def test_engines_without_an_agent_are_compared_with_the_folder_that_is_given(ward: Ward, tmp_path: Path) -> None:
    with ward.parts.engine(ward.loaded) as engine:
        row = {"engine": "alone", "url": engine, "state": "ready", "encoding": "no agent"}
        fleet = json.dumps({"directory": "ok", "lookups": "ok", "engines": [row]}).encode()
        with ward.parts.app(Strange({"/fleet": fleet, "/metrics": b""})) as admin:
            compared = doctor("--admin", admin, "--tokenizer", str(ward.files), "--only", "ids")
            wanting = doctor("--admin", admin, "--tokenizer", str(tmp_path), "--only", "ids")
    assert "requests compared" in compared.words("ids", "right", "alone")
    assert "give --tokenizer the folder that the engine's model was loaded from" in wanting.words("ids")


def locked(app: Any) -> Callable[..., Any]:
    """The application behind a key."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (b"authorization", b"Bearer sesame") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
        else:
            await app(scope, receive, send)

    return guarded


def test_an_engine_that_asks_for_a_key_is_given_it(ward: Ward, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    with ward.parts.engine(ward.loaded, change_app=locked) as url:
        without = doctor("--engine", url, "--only", "settings", "--only", "cache")
        given = doctor("--engine", url, "--only", "cache", "--api-key-file", str(key))
    assert without.status == 2
    assert "it asks for a key: --api-key-file" in without.words("settings", "not checked")
    assert given.status == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "say what to look at"),
        (("--gateway", "http://gateway"), "has no port"),
        (("--engine", "10.0.0.5:8000"), "--engine 10.0.0.5:8000: must be http://host:port"),
        (("--engine", "http://e:1", "--tokenizer", "/nowhere"), "--tokenizer /nowhere is no folder"),
        (("--agent", "http://a:1", "--tokenizer", "/"), "--tokenizer goes with --engine URL"),
        (("--engine", "http://e:1", "--api-key-file", "/nowhere"), "--api-key-file /nowhere can't be read"),
        (("--directory", "http://d"), "redis://"),
    ],
)
def test_senseless_questions_are_refused_in_one_sentence(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("warmroute doctor: ")
    assert says in error
    assert error.count("\n") == 1
