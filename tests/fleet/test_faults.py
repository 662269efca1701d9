"""A fleet whose parts are killed and hang while it serves: no request fails, and what comes back is used again."""

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.warmroute.fleets import (
    MODEL,
    RunningFleet,
    children,
    is_alive,
    is_serving,
    left_behind,
    running_fleet,
    until,
)

pytestmark = pytest.mark.timeout(600)


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
