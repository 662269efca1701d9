"""`warmroute up`, as a user runs it: the demo, faults while it serves, and a clean end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.warmroute.fleets import (
    MODEL,
    RunningFleet,
    children,
    free_port,
    is_alive,
    is_serving,
    left_behind,
    running_fleet,
    until,
    up,
)

DEMO_BOUND_S = 400
pytestmark = pytest.mark.timeout(600)


def play_demo(temporary: Path, *options: str) -> list[dict[str, Any]]:
    process = up(temporary, "--demo", "--exit", "--json", *options)
    output, errors = process.communicate(timeout=DEMO_BOUND_S)
    assert process.returncode == 0, errors
    assert left_behind(temporary) == []
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return play_demo(tmp_path_factory.mktemp("demo"))


def test_a_second_turn_computes_only_what_is_new(demo: list[dict[str, Any]]) -> None:
    first, second = demo[0], demo[1]
    assert first["prompt_tokens"] > 2_400
    assert first["cached_tokens"] == 0
    assert second["engine"] == first["engine"]
    assert second["prompt_tokens"] - second["cached_tokens"] < 2 * 256


def test_a_second_reader_goes_to_the_engine_that_holds_the_document(demo: list[dict[str, Any]]) -> None:
    assert demo[2]["engine"] == demo[0]["engine"]
    assert demo[2]["reason"] == "prefix"
    assert demo[2]["cached_tokens"] >= 2_048


def test_a_restarted_engine_hits_its_hosts_dram(demo: list[dict[str, Any]]) -> None:
    assert demo[3]["engine"] == demo[0]["engine"]
    assert demo[3]["tier_tokens"].startswith("dram=")
    assert demo[3]["cached_tokens"] >= 2_048


def test_the_prediction_is_what_the_engine_reports(demo: list[dict[str, Any]]) -> None:
    for row in demo:
        tiers = [] if row["tier_tokens"] == "none" else row["tier_tokens"].split(",")
        assert sum(int(tier.split("=")[1]) for tier in tiers) == row["cached_tokens"], row


def test_the_demos_texts_equal_those_of_a_run_without_any_cache(demo: list[dict[str, Any]], tmp_path: Path) -> None:
    cold = play_demo(tmp_path, "--no-cache")
    assert [row["cached_tokens"] for row in cold] == [0] * len(demo)
    assert [row["text"] for row in cold] == [row["text"] for row in demo]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    temporary = tmp_path_factory.mktemp("fleet")
    with running_fleet(temporary) as fleet:
        yield fleet
        pids = children(fleet.process.pid)
        fleet.process.send_signal(signal.SIGINT)
        fleet.process.communicate(timeout=60)
    assert fleet.process.returncode == 0
    assert not any(is_alive(pid) for pid in pids)
    assert left_behind(temporary) == []


def chat(fleet: RunningFleet, content: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    return httpx.post(
        f"{fleet.url}/v1/chat/completions",
        json=body,
        headers={"x-warmroute-explain": "1"},
        timeout=120,
        trust_env=False,
    )


def test_a_question_is_answered_and_explained(fleet: RunningFleet) -> None:
    answer = chat(fleet, "What is the capital of France?", max_tokens=16)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert answer.headers["x-warmroute-engine"] in ("engine-1", "engine-2")
    assert answer.headers["x-warmroute-reason"] == "load"


@pytest.mark.parametrize(
    "request_body",
    [
        {"prompt": "The capital of France is"},
        {"prompt": [504, 3575, 282, 4649, 314]},
        {"prompt": "long " * 300},
        {"prompt": list(range(300, 900))},
    ],
    ids=["text", "ids", "long text", "long ids"],
)
def test_completions_take_text_and_token_ids(fleet: RunningFleet, request_body: dict[str, Any]) -> None:
    body = {"model": MODEL, "max_tokens": 2, "temperature": 0, **request_body}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_no_request_fails_when_an_engine_is_killed_under_load(fleet: RunningFleet) -> None:
    """kill -9 while requests run on it: each is answered, by the other engine where need be."""
    parts = fleet.parts()
    prompts = [f"Write a sentence about the number {number}." for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(chat, fleet, prompt, max_tokens=24) for prompt in prompts]
        until(lambda: all(row["inflight_requests"] for row in fleet.fleet()["engines"]), 60, "both engines are busy")
        os.kill(parts["engine-2"], signal.SIGKILL)
        assert [answer.result().status_code for answer in answers] == [200] * len(prompts)
    until(lambda: is_serving(fleet), 120, "the killed engine serves again")
    assert fleet.parts()["engine-2"] != parts["engine-2"]
    fleet.until_directory_equals_inventories()


def test_a_killed_agent_costs_no_request_and_comes_back(fleet: RunningFleet) -> None:
    parts = fleet.parts()
    os.kill(parts["host-1"], signal.SIGKILL)
    for number in range(4):
        assert chat(fleet, f"Say {number}.", max_tokens=4).status_code == 200
    until(lambda: fleet.parts().get("host-1", parts["host-1"]) != parts["host-1"], 30, "the agent runs again")
    document = "A sentence about lamps and tides. " * 120
    first = chat(fleet, document, max_tokens=4)
    second = chat(fleet, document, max_tokens=4)
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second.headers["x-warmroute-engine"] == first.headers["x-warmroute-engine"]
    fleet.until_directory_equals_inventories()


def test_the_directory_may_be_killed_and_requests_go_on(fleet: RunningFleet) -> None:
    parts = fleet.parts()
    os.kill(parts["valkey"], signal.SIGKILL)
    for number in range(4):
        assert chat(fleet, f"Say {number} once more.", max_tokens=4).status_code == 200
    until(lambda: fleet.parts().get("valkey", parts["valkey"]) != parts["valkey"], 30, "the server runs again")
    until(lambda: fleet.fleet()["directory"] == "ok", 30, "the table is read again")
    until(lambda: is_serving(fleet), 30, "the engines are registered again")
    fleet.until_directory_equals_inventories()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs: it keeps its connections and answers nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def state_of(fleet: RunningFleet, engine: str) -> str:
    return next(row["state"] for row in fleet.fleet()["engines"] if row["engine"] == engine)


def test_requests_leave_an_engine_that_hangs_and_it_is_used_again(fleet: RunningFleet) -> None:
    pid = fleet.parts()["engine-1"]
    prompts = [f"Write a sentence about the letter {letter}." for letter in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(chat, fleet, prompt, max_tokens=16) for prompt in prompts]
        until(lambda: all(row["inflight_requests"] for row in fleet.fleet()["engines"]), 60, "both engines are busy")
        with stopped(pid):
            assert [answer.result().status_code for answer in answers] == [200] * len(prompts)
            assert state_of(fleet, "engine-1") != "ready"
    until(lambda: is_serving(fleet), 30, "the engine serves again")
    fleet.until_directory_equals_inventories()


def lost(fleet: RunningFleet, part: str) -> bool:
    """Whether `/fleet` says that a part is lost."""
    table = fleet.fleet()
    if part == "valkey":
        return bool(table["directory"] != "ok")
    return any(row["host"] == part and row["state"] == "lapsed" for row in table["hosts"])


@pytest.mark.parametrize("part", ["host-1", "valkey"], ids=["agent", "directory"])
def test_requests_do_not_wait_for_what_hangs_beside_them(fleet: RunningFleet, part: str) -> None:
    degraded = fleet.metric(fleet.admin_url, "warmroute_degraded_total")
    with stopped(fleet.parts()[part]):
        for number in range(6):
            assert chat(fleet, f"Count to {number} for {part}. " + "So be it. " * 90, max_tokens=4).status_code == 200
        until(lambda: lost(fleet, part), 30, "the fleet says what is lost")
        if part == "valkey":
            assert fleet.metric(fleet.admin_url, "warmroute_degraded_total") > degraded
    until(lambda: not lost(fleet, part), 30, "what hung is back")
    document = f"A sentence about {part}, lamps and tides. " * 90
    until(
        lambda: chat(fleet, document, max_tokens=2).headers["x-warmroute-matched-tokens"] != "0", 60, "exact hits again"
    )
    fleet.until_directory_equals_inventories()


def refused(temporary: Path, *options: str, port: int | None = None) -> str:
    process = up(temporary, *options, port=port)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("warmroute up: ")
    assert errors.count("\n") == 1, errors
    assert left_behind(temporary) == []
    return errors


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
    assert "doesn't answer" in refused(tmp_path, "--redis", f"redis://127.0.0.1:{free_port()}")
    assert "redis" in refused(tmp_path, "--redis", "http://nonsense").lower()
    assert "--engines" in refused(tmp_path, "--engines", "0")
    assert "--demo" in refused(tmp_path, "--exit")
    assert "memory" in refused(tmp_path, "--engines", "1000")
    assert "memory" in refused(tmp_path, "--engine-kind", "vllm", "--engines", "1000")
    assert "--no-cache" in refused(tmp_path, "--engine-kind", "vllm", "--no-cache")
    assert "--engine-kind" in refused(tmp_path, "--engine-kind", "vllm", "--engine", "http://127.0.0.1:1")
    assert "--dram-gb" in refused(tmp_path, "--dram-gb", "0")


def test_a_model_that_only_looks_like_one_is_one_sentence(tmp_path: Path) -> None:
    fake = tmp_path.parent / "fake.gguf"
    fake.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64)
    process = up(tmp_path, "--model", str(fake))
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "Traceback" not in errors
    assert "fake.gguf" in errors.splitlines()[-1]
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_runs_on_when_it_is_ended_while_starting(tmp_path: Path, number: signal.Signals) -> None:
    process = up(tmp_path)
    until(lambda: len(children(process.pid)) >= 4, 30, "parts were started")
    pids = children(process.pid)
    process.send_signal(number)
    process.communicate(timeout=60)
    until(lambda: not any(is_alive(pid) for pid in pids), 30, "every part has ended")
    assert left_behind(tmp_path) == []
    if number is not signal.SIGKILL:
        assert process.returncode == 0


def test_twenty_starts_and_stops_leave_nothing_whether_ended_or_killed(tmp_path: Path) -> None:
    for number in range(20):
        process = up(tmp_path)
        wanted = 2 + number % 6
        until(lambda: len(children(process.pid)) >= wanted, 60, "parts were started")  # noqa: B023
        pids = children(process.pid)
        process.send_signal(signal.SIGKILL if number % 2 else signal.SIGINT)
        process.communicate(timeout=60)
        until(lambda: not any(is_alive(pid) for pid in pids), 60, "every part has ended")  # noqa: B023
    assert left_behind(tmp_path) == []


def test_keys_is_quick_to_answer() -> None:
    """A subcommand doesn't pay for the imports of others."""
    import sys

    code = "import sys, warmroute.cli; print(sorted(set(sys.modules) & {'numpy', 'fastapi', 'aiohttp', 'redis'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
