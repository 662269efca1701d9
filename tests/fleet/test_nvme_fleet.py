"""The NVMe tier under a real model: a conversation that DRAM can't hold comes back from files with the same tokens."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nodeagent.tiers.chunk_file import HEADER_BYTES, decode_header
from tests.warmroute.fleets import MODEL, RunningFleet, is_serving, running_fleet, until

pytestmark = pytest.mark.timeout(600)
CHUNK_TOKENS = 256
DRAM_GB, NVME_GB = 0.05, 0.15
"""Four chunks, and twelve: the model's chunk has 11.8 MB."""


def conversation(topic: str) -> str:
    """About seven chunks of text."""
    return " ".join(f"Sentence {number} about {topic} says that it is a good thing." for number in range(125))


def ask(fleet: RunningFleet, content: str) -> tuple[str, int, dict[str, int]]:
    """The answer's text, the cached tokens that the engine reports, and the tokens that were predicted by tier."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0}
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions",
        json={**body, "max_tokens": 12},
        headers={"x-warmroute-explain": "1"},
        timeout=180,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    tiers = answer.headers["x-warmroute-tier-tokens"]
    predicted = {} if tiers == "none" else {name: int(n) for name, n in (each.split("=") for each in tiers.split(","))}
    details = answer.json()["usage"]["prompt_tokens_details"]
    return answer.json()["choices"][0]["message"]["content"], details["cached_tokens"], predicted


def restart(fleet: RunningFleet, *parts: str) -> None:
    """kill -9, and wait until the successors serve and have announced what they hold."""
    before = fleet.parts()
    for part in parts:
        os.kill(before[part], signal.SIGKILL)
    until(lambda: all(fleet.parts().get(part, before[part]) != before[part] for part in parts), 60, "successors")
    until(lambda: attached_process(fleet) == fleet.parts()["engine-1"], 120, "the engine is attached")
    until(lambda: is_serving(fleet), 120, "the fleet serves again")
    until(lambda: fleet.agent_status("host-1")["tiers"]["nvme"]["is_restoring"] is False, 60, "the index")
    fleet.until_directory_equals_inventories()


def expected(fleet: RunningFleet, content: str) -> dict[str, int]:
    """The tokens that would be matched by tier, were it sent now."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{fleet.admin_url}/route/explain", json=body, trust_env=False).json()
    tiers: dict[str, int] = answer["candidates"][0]["tier_tokens"]
    return tiers


def attached_process(fleet: RunningFleet) -> int | None:
    with contextlib.suppress(httpx.HTTPError):
        return next((each["process"] for each in fleet.agent_status("host-1")["engines"] if each["is_connected"]), None)
    return None


def files(fleet: RunningFleet) -> list[Path]:
    return [path for path in (fleet.temporary / "nvme").rglob("*") if path.is_file() and len(path.name) == 64]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    temporary = tmp_path_factory.mktemp("fleet")
    options = ("--dram-gb", str(DRAM_GB), "--nvme", str(temporary / "nvme"), "--nvme-gb", str(NVME_GB))
    with running_fleet(temporary, *options, "--nvme-write", "through", engines=1) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def cold(fleet: RunningFleet) -> tuple[str, int]:
    """The text that is computed without any cache, and how many full chunks its prompt has."""
    text, cached, predicted = ask(fleet, conversation("tides"))
    assert (cached, predicted) == (0, {})
    until(lambda: len(files(fleet)) >= 6, 30, "the chunks are written")
    fleet.until_directory_equals_inventories()
    chunks = len(files(fleet))
    assert fleet.agent_status("host-1")["tiers"]["dram"]["slots"] < chunks
    return text, chunks


def test_what_dram_cannot_hold_is_hit_on_nvme_with_the_same_tokens(fleet: RunningFleet, cold: tuple[str, int]) -> None:
    text, chunks = cold
    restart(fleet, "engine-1")
    again, cached, predicted = ask(fleet, conversation("tides"))
    assert again == text
    assert cached == chunks * CHUNK_TOKENS == sum(predicted.values())
    assert predicted["nvme"] >= (chunks - 4) * CHUNK_TOKENS
    assert fleet.metric(fleet.agent_url("host-1"), 'warmroute_tier_hit_tokens_total{source="local",tier="nvme"}') > 0


def test_after_a_restart_of_agent_and_engine_all_of_it_is_hit_on_nvme(
    fleet: RunningFleet, cold: tuple[str, int]
) -> None:
    text, chunks = cold
    restart(fleet, "engine-1", "host-1")
    until(lambda: expected(fleet, conversation("tides")).keys() == {"nvme"}, 30, "the killed lives have ended")
    again, cached, predicted = ask(fleet, conversation("tides"))
    assert again == text
    assert predicted == {"nvme": chunks * CHUNK_TOKENS}
    assert cached == chunks * CHUNK_TOKENS


def test_a_flipped_bit_is_a_miss_and_the_right_tokens_come_out(fleet: RunningFleet, cold: tuple[str, int]) -> None:
    text, chunks = cold
    fleet.until_directory_equals_inventories()
    bad = 3
    path = next(path for path in files(fleet) if decode_header(path.read_bytes()[:HEADER_BYTES]).label.position == bad)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 1_000)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + 1_000)
        file.write(bytes([byte ^ 1]))
    restart(fleet, "engine-1", "host-1")
    again, cached, predicted = ask(fleet, conversation("tides"))
    assert again == text
    assert sum(predicted.values()) == chunks * CHUNK_TOKENS
    assert cached == bad * CHUNK_TOKENS
    assert fleet.metric(fleet.agent_url("host-1"), "warmroute_checksum_failures_total") == 1
    # What was computed is kept again, and the next restart finds it.
    until(lambda: len(files(fleet)) == chunks, 30, "the chunks are written again")
    restart(fleet, "engine-1", "host-1")
    again, cached, _ = ask(fleet, conversation("tides"))
    assert (again, cached) == (text, chunks * CHUNK_TOKENS)


def test_a_full_quota_costs_the_oldest_chunks_and_no_request(fleet: RunningFleet, cold: tuple[str, int]) -> None:
    text, _ = cold
    for topic in ("lamps", "ferries"):
        ask(fleet, conversation(topic))
    fleet.until_directory_equals_inventories()
    assert sum(path.stat().st_size for path in files(fleet)) <= NVME_GB * 1e9
    assert fleet.agent_status("host-1")["tiers"]["nvme"]["chunks"] <= 12
    restart(fleet, "engine-1", "host-1")
    _, cached, _ = ask(fleet, conversation("ferries"))
    assert cached > 0
    again, _, _ = ask(fleet, conversation("tides"))
    assert again == text
    fleet.until_directory_equals_inventories()
