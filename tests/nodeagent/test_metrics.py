"""The agent's metrics: all there at 0 from the start, and each right against a plain count of one host's life."""

import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nodeagent
from nodeagent.client import PutResult
from nodeagent.messages import PutOutcome
from nodeagent.metrics import (
    EVICTION_REASONS,
    PROMOTION_REFUSALS,
    PUT_REFUSALS,
    SOURCES,
    TIERS,
    WRITE_REFUSALS,
    AgentMetrics,
)
from nodeagent.tiers.chunk_file import file_bytes, name_of
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    read,
    running_agent,
    storage_key,
)

TOKENS = 16
FILE_BYTES = file_bytes(CHUNK_BYTES)
FIXED_NAMES = {
    "tier_tokens_requested_total": [{}],
    "tier_hit_tokens_total": [{"tier": tier, "source": source} for tier in TIERS for source in SOURCES],
    "tier_bytes_used": [{"tier": tier} for tier in TIERS],
    "tier_bytes_limit": [{"tier": tier} for tier in TIERS],
    "tier_read_seconds_count": [{"tier": tier} for tier in TIERS],
    "tier_write_bytes_total": [{"tier": tier} for tier in TIERS],
    "checksum_failures_total": [{}],
    "deadline_misses_total": [{}],
    "evictions_total": [{"tier": tier, "reason": reason} for tier in TIERS for reason in EVICTION_REASONS[tier]],
    "admission_refused_total": [{"reason": each} for each in PUT_REFUSALS + PROMOTION_REFUSALS + WRITE_REFUSALS],
    "announced_chunks": [{"tier": tier} for tier in ("gpu", *TIERS)],
    "announce_lag_seconds_count": [{}],
}
"""Those of the design that don't depend on there being a drive, with their labels."""
SOURCE = Path(nodeagent.__file__).parent


@pytest.mark.parametrize("name", FIXED_NAMES)
def test_every_series_is_there_before_the_first_event(name):
    registry = AgentMetrics().registry
    for labels in FIXED_NAMES[name]:
        assert registry.get_sample_value(f"warmroute_{name}", labels) == 0


def test_every_reason_that_the_source_gives_is_one_that_begins_at_zero():
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py") if "engines" not in path.parts)
    named = set(re.findall(r'(?:admission_refused\.labels|self\._refuse)\("(\w+)"', source))
    named |= set(re.findall(r'return "(nvme_\w+)"', (SOURCE / "tiers" / "write_pause.py").read_text()))
    outcomes = {each.value for each in PutOutcome} - {"granted", "stored", "have"}
    promoted = {f"promote_{each.value}" for each in PutOutcome} - {
        "promote_granted",
        "promote_stored",
        "promote_corrupt",
        "promote_forgotten",  # counted as "forgotten", as a put's is
    }
    assert named >= {"endurance", "nvme_paused", "other_bits"}, "the patterns find them"
    assert named | outcomes | promoted == set(PUT_REFUSALS + PROMOTION_REFUSALS + WRITE_REFUSALS)
    evictions = re.findall(r'evictions\.labels\(\s*("dram"|DRAM|NVME),\s*"(\w+)"', source)
    assert evictions
    for tier, reason in evictions:
        assert reason in EVICTION_REASONS["nvme" if tier == "NVME" else "dram"]


def scraped(agent):
    port = agent.agent._host.lives.registration.agent_url
    with urllib.request.urlopen(f"{port}/metrics", timeout=WAIT_S) as answer:
        return answer.read().decode()


def test_a_drive_without_a_budget_says_that_it_has_no_limit_and_one_with_says_what_is_left(tmp_path):
    free, rated = str(tmp_path / "free"), str(tmp_path / "rated")
    paths = [
        {"path": free, "gb": 1e-3},
        {"path": rated, "gb": 1e-3, "capacity_gb": 1.0, "dwpd": 1.0},
    ]
    with running_agent(tmp_path, nvme_paths=paths) as agent:
        text = scraped(agent)
        assert f'warmroute_nvme_write_budget_bytes{{drive="{free}"}} +Inf' in text
        assert math.isfinite(agent.metric("warmroute_nvme_write_budget_bytes", drive=rated))
        assert f'warmroute_nvme_write_budget_bytes{{drive="{rated}"}} ' in text


class Life:
    """What was done to a host, counted plainly, beside what its metrics say."""

    def __init__(self, agent, client) -> None:
        self.agent, self.client = agent, client
        self.expected = Counter()

    def value(self, name, **labels):
        return self.agent.metric(f"warmroute_{name}", **labels)

    def put(self, name, parent=None, position=0):
        free = SLOTS - self.agent.tier()["bytes_used"] // CHUNK_BYTES
        assert self.client.put(label(name, parent, position), payload(name), WAIT_S) is PutResult.STORED
        self.expected["stored"] += 1
        self.expected["evicted"] += not free

    def read(self, name, *, tier):
        chunks = self.client.open([storage_key(name)], WAIT_S)
        self.expected["requested"] += 1
        if tier is None:
            assert not chunks
            self.expected["missed"] += 1
            return
        assert [chunk.tier for chunk in chunks] == [tier]
        assert self.client.read_into(chunks[0], memoryview(bytearray(CHUNK_BYTES)))
        self.client.close(chunks)
        self.expected[f"hit {tier}"] += 1
        self.expected["dram reads"] += 1
        eventually(lambda: self.agent.tier()["references"] == 0, "the close")

    def check(self):
        expected = self.expected
        counts = {
            "requested": self.value("tier_tokens_requested_total") / TOKENS,
            "missed": self.value("tier_missed_tokens_total") / TOKENS,
            "hit dram": self.value("tier_hit_tokens_total", tier="dram", source="local") / TOKENS,
            "hit nvme": self.value("tier_hit_tokens_total", tier="nvme", source="local") / TOKENS,
            "stored": self.value("tier_write_bytes_total", tier="dram") / CHUNK_BYTES,
            "evicted": self.value("evictions_total", tier="dram", reason="demand"),
            "dram reads": self.value("tier_read_seconds_count", tier="dram"),
            "nvme reads": self.value("tier_read_seconds_count", tier="nvme"),
            "written": self.value("tier_write_bytes_total", tier="nvme") / CHUNK_BYTES,
            "corrupt files": self.value("evictions_total", tier="nvme", reason="corrupt"),
            "bad checksums": self.value("checksum_failures_total"),
            "conflicts": self.value("admission_refused_total", reason="conflict"),
            "too large": self.value("admission_refused_total", reason="refused"),
        }
        assert counts == {name: expected[name] for name in counts}
        assert counts["requested"] == counts["hit dram"] + counts["hit nvme"] + counts["missed"]


def queued(agent):
    return agent.status()["tiers"]["nvme"]["queued_writes"]


def test_each_metric_is_right_against_a_plain_count_of_a_hosts_life(tmp_path):
    folder = tmp_path / "nvme"
    with (
        running_agent(tmp_path, nvme_path=str(folder), nvme_bytes=100 * FILE_BYTES, nvme_write="through") as agent,
        connected(agent.config.door, gpu=[bytes(16)]) as client,
    ):
        life = Life(agent, client)
        names = [f"m{number}" for number in range(SLOTS + 3)]
        for name in names:
            life.put(name)
            eventually(lambda: queued(agent) == 0, "the write")
        eventually(lambda: agent.status()["tiers"]["nvme"]["chunks"] == len(names), "the files")
        life.expected["written"] = len(names)
        life.check()
        life.read(names[-1], tier="dram")
        life.read("never stored", tier=None)
        life.read(names[0], tier="nvme")
        life.expected["nvme reads"] += 1
        life.expected["evicted"] += 1
        life.check()
        # What is in DRAM and on disk, by bytes.
        assert life.value("tier_bytes_used", tier="dram") == agent.tier()["bytes_used"] == SLOTS * CHUNK_BYTES
        assert life.value("tier_bytes_limit", tier="dram") == agent.config.dram.quota_bytes
        assert life.value("tier_bytes_used", tier="nvme") == len(names) * FILE_BYTES
        assert life.value("tier_bytes_limit", tier="nvme") == 100 * FILE_BYTES
        # A file that rots is a miss, counted once where it is found.
        rotten = next(path for path in folder.rglob("*") if path.name.startswith(name_of(storage_key(names[1])).hex()))
        content = bytearray(rotten.read_bytes())
        content[-5000] ^= 1
        rotten.write_bytes(content)
        life.read(names[1], tier=None)
        life.expected.update({"corrupt files": 1, "bad checksums": 1, "evicted": 1})
        # Other bytes under a key that is held, and a chunk that no slot holds.
        assert client.put(label(names[-1]), payload("else"), WAIT_S) is PutResult.REFUSED
        assert client.put(label("large"), payload("large", CHUNK_BYTES + 4096), WAIT_S) is PutResult.REFUSED
        life.expected.update({"conflicts": 1, "too large": 1})
        life.check()
        eventually(lambda: life.value("announced_chunks", tier="gpu") == 1, "the engine's own tier")
        eventually(lambda: life.value("announced_chunks", tier="dram") == agent.tier()["chunks"], "dram")
        assert life.value("announced_chunks", tier="nvme") == len(names) - 1
        assert life.value("announce_lag_seconds_count") > 0
        client.stop()
        eventually(lambda: life.value("announced_chunks", tier="gpu") == 0, "an engine's chunks go when it goes")


OPENS_AND_WAITS = """
import sys
from tests.nodeagent.running import connected, make_hello, storage_key, WAIT_S
with connected(sys.argv[1], make_hello("engine-2")) as client:
    print(len(client.open([storage_key(name) for name in sys.argv[2:]], WAIT_S)), flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_engine_had_opened_and_not_read_is_missed(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        for position, name in enumerate("abc"):
            client.put(label(name, "abc"[position - 1] if position else None, position), payload(name), WAIT_S)
        with subprocess.Popen(
            [sys.executable, "-c", OPENS_AND_WAITS, agent.config.door, "a", "b", "c", "d"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        ) as engine:
            assert engine.stdout.readline() == b"3\n"
            assert agent.metric("warmroute_tier_missed_tokens_total") == TOKENS
            engine.send_signal(signal.SIGKILL)
        eventually(lambda: agent.tier()["references"] == 0, "the end of its references")
        assert agent.metric("warmroute_tier_tokens_requested_total") == 4 * TOKENS
        assert agent.metric("warmroute_tier_missed_tokens_total") == 4 * TOKENS
        assert read(client, "a") == payload("a")


CHAIN = [f"p{number}" for number in range(2 * SLOTS)]


def test_requested_is_hits_and_misses_whatever_engines_do(tmp_path):
    """Two engines put, open runs whole and in pieces, copy some of it, and give back."""
    path = str(tmp_path / "nvme")
    with (
        running_agent(tmp_path, nvme_path=path, nvme_bytes=10 * FILE_BYTES, nvme_write="through") as agent,
        connected(agent.config.door) as first,
        connected(agent.config.door, make_hello("engine-2", chunk_tokens=2 * TOKENS)) as second,
    ):
        asked = Counter()

        @settings(max_examples=25, deadline=None)
        @given(
            st.sampled_from((1, 2)), st.integers(0, len(CHAIN)), st.integers(1, 12), st.integers(0, 12), st.booleans()
        )
        def act(who, start, length, copied, in_pieces):
            client = (first, second)[who - 1]
            for position in range(start, min(start + 3, len(CHAIN))):
                parent = CHAIN[position - 1] if position else None
                client.put(label(CHAIN[position], parent, position), payload(CHAIN[position]), WAIT_S)
            keys = [storage_key(name) for name in CHAIN[start : start + length]]
            piece = client.open_piece(keys, WAIT_S) if in_pieces else None
            chunks = piece.chunks if piece is not None else client.open(keys, WAIT_S)
            asked["tokens"] += who * TOKENS * (len(chunks) if piece is not None and piece.goes_on else len(keys))
            for chunk in chunks[:copied]:
                assert client.read_into(chunk, memoryview(bytearray(CHUNK_BYTES)))
            client.close(chunks)
            eventually(lambda: agent.tier()["references"] == 0, "the close")
            hits = sum(
                agent.metric("warmroute_tier_hit_tokens_total", tier=tier, source=source)
                for tier in TIERS
                for source in SOURCES
            )
            requested = agent.metric("warmroute_tier_tokens_requested_total")
            assert requested == hits + agent.metric("warmroute_tier_missed_tokens_total") == asked["tokens"]

        act()
