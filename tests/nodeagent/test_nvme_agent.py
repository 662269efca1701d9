"""The NVMe tier through the door: what DRAM lost is read from disk, also after a restart; bad files are misses."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from directory.tiers import Tier
from nodeagent.client import ChunkLabel, PutResult
from nodeagent.tiers import quarantine
from nodeagent.tiers.chunk_file import HEADER_BYTES, file_bytes, name_of
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.running import (
    CHUNK_BYTES,
    SLOTS,
    WAIT_S,
    connected,
    eventually,
    label,
    payload,
    read,
    running_agent,
    storage_key,
)
from warmroute.cli import main

FILE_BYTES = file_bytes(CHUNK_BYTES)
NAMES = [f"n{number}" for number in range(3 * SLOTS)]


def chain(name: str) -> ChunkLabel:
    position = NAMES.index(name)
    return label(name, NAMES[position - 1] if position else None, position)


def nvme(folder, files=1_000, write="through"):
    return {"nvme_path": str(folder / "nvme"), "nvme_bytes": files * FILE_BYTES, "nvme_write": write}


def path_of(folder, name):
    text = name_of(storage_key(name)).hex()
    return folder / "nvme" / text[:2] / text[2:4] / text


def nvme_status(agent):
    return agent.status()["tiers"]["nvme"]


def put_chain(agent, client, names=NAMES):
    for name in names:
        assert client.put(chain(name), payload(name), WAIT_S) is PutResult.STORED
        eventually(lambda: nvme_status(agent)["queued_writes"] == 0, "the write")
    eventually(lambda: nvme_status(agent)["chunks"] >= len(names), "the chunks on disk")


def read_chain(client, names=NAMES):
    """Read as an engine does that wants more than DRAM holds: a run, then the next. Returns tiers, in order."""
    tiers = []
    while len(tiers) < len(names):
        chunks = client.open([storage_key(name) for name in names[len(tiers) :]], WAIT_S)
        if not chunks:
            break
        for name, chunk in zip(names[len(tiers) :], chunks, strict=False):
            target = bytearray(chunk.length)
            assert client.read_into(chunk, memoryview(target))
            assert target == payload(name)
        tiers += [chunk.tier for chunk in chunks]
        client.close(chunks)
    return tiers


def test_a_conversation_larger_than_dram_hits_nvme_with_the_same_bytes_and_again_after_a_restart(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)
        tiers = read_chain(client)
        assert len(tiers) == len(NAMES)
        assert tiers.count("nvme") >= len(NAMES) - SLOTS
        hits = {
            tier: agent.metric("warmroute_tier_hit_tokens_total", tier=tier, source="local")
            for tier in ("dram", "nvme")
        }
        eventually(
            lambda: (
                agent.metric("warmroute_tier_hit_tokens_total", tier="nvme", source="local") == 16 * tiers.count("nvme")
            ),
            f"hits by tier ({hits})",
        )
        eventually(lambda: agent.tier()["references"] == 0, "the closes")
        requested = agent.metric("warmroute_tier_tokens_requested_total")
        missed = agent.metric("warmroute_tier_missed_tokens_total")
        hit = sum(
            agent.metric("warmroute_tier_hit_tokens_total", tier=tier, source="local") for tier in ("dram", "nvme")
        )
        assert requested == hit + missed
        eventually(lambda: agent.believed(storage_key(NAMES[0])[:16]) & Tier.NVME, "the placement")
        eventually(lambda: agent.tier()["references"] == 0, "the closes")
        assert agent.tier()["reservations"] == 0
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        eventually(lambda: nvme_status(agent)["chunks"] == len(NAMES), "the index")
        eventually(lambda: agent.believed(storage_key(NAMES[-1])[:16]) == Tier.NVME, "the placement")
        assert read_chain(client) == ["nvme"] * len(NAMES)
        assert nvme_status(agent)["bytes_used"] == len(NAMES) * FILE_BYTES


def test_what_was_never_hit_is_not_written_and_the_first_hit_writes_it(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path, write="hit")) as agent, connected(agent.config.door) as client:
        for name in "ab":
            client.put(label(name), payload(name), WAIT_S)
        assert read(client, "a") == payload("a")
        eventually(lambda: path_of(tmp_path, "a").exists(), "the file")
        eventually(lambda: agent.believed(storage_key("a")[:16]) == Tier.DRAM | Tier.NVME, "both placements")
        assert nvme_status(agent)["chunks"] == 1
        assert not path_of(tmp_path, "b").exists()
        eventually(lambda: agent.believed(storage_key("b")[:16]) == Tier.DRAM, "the other's placement")
        assert agent.metric("warmroute_tier_write_bytes_total", tier="nvme") == CHUNK_BYTES


@pytest.mark.parametrize("how", ["payload", "header", "truncated", "deleted", "another chunk's", "longer"])
def test_a_bad_file_is_a_miss_that_goes_and_is_withdrawn(tmp_path, how):
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)
        victim = NAMES[1]
        path = path_of(tmp_path, victim)
        data = bytearray(path.read_bytes())
        if how == "payload":
            data[HEADER_BYTES + 77] ^= 1
        elif how == "header":
            data[50] ^= 1
        elif how == "truncated":
            del data[-4_096:]
        elif how == "another chunk's":
            data = bytearray(path_of(tmp_path, NAMES[2]).read_bytes())
        elif how == "longer":
            data += b"\0" * 4_096
        path.unlink() if how == "deleted" else path.write_bytes(data)
        opened = client.open([storage_key(name) for name in NAMES], WAIT_S)
        assert [chunk.storage_key for chunk in opened] == [storage_key(NAMES[0])]
        client.close(opened)
        eventually(lambda: not path.exists(), "the file's end")
        eventually(lambda: agent.believed(storage_key(victim)[:16]) == 0, "the withdrawal")
        assert agent.metric("warmroute_checksum_failures_total") == (how != "deleted")
        eventually(lambda: nvme_status(agent)["bytes_used"] == (len(NAMES) - 1) * FILE_BYTES, "the account")
        assert client.put(chain(victim), payload(victim), WAIT_S) is PutResult.STORED
        eventually(lambda: path.exists(), "the file's return")
        assert read_chain(client)[1] in ("dram", "nvme")


def test_other_bytes_for_a_key_that_only_nvme_holds_are_refused(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)
        assert agent.on_loop(lambda: agent.agent._tier.hierarchy.find(storage_key(NAMES[0]))) is None
        assert client.put(chain(NAMES[0]), payload("other"), WAIT_S) is PutResult.REFUSED
        assert agent.metric("warmroute_put_conflicts_total") == 1
        assert read(client, NAMES[0]) == payload(NAMES[0])


def test_a_label_that_becomes_known_later_survives_a_restart(tmp_path):
    key = storage_key("a")
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        assert client.put(ChunkLabel(key, None, None, 0), payload("a"), WAIT_S) is PutResult.STORED
        eventually(lambda: nvme_status(agent)["chunks"] == 1, "the file")
        assert agent.believed(key[:16]) == 0
        assert client.put(label("a"), payload("a"), WAIT_S) is PutResult.ALREADY
        eventually(lambda: agent.believed(key[:16]) == Tier.DRAM | Tier.NVME, "the placements")
        eventually(lambda: key[:16] in path_of(tmp_path, "a").read_bytes()[:HEADER_BYTES][104:120], "the header")
    with running_agent(tmp_path, **nvme(tmp_path)) as agent:
        eventually(lambda: agent.believed(key[:16]) == Tier.NVME, "the placement")


def test_the_quota_bounds_the_folder_with_what_was_there_before(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)
    with running_agent(tmp_path, **nvme(tmp_path, files=10)) as agent, connected(agent.config.door) as client:
        for number in range(20):
            name = f"more{number}"
            assert client.put(label(name), payload(name), WAIT_S) is PutResult.STORED
            eventually(lambda name=name: path_of(tmp_path, name).exists(), "the file")
        on_disk = [path for path in (tmp_path / "nvme").rglob("*") if len(path.name) == 64]
        assert len(on_disk) <= 10
        eventually(lambda: nvme_status(agent)["bytes_used"] == len(on_disk) * FILE_BYTES, "the account")
        eventually(lambda: agent.believed(storage_key(NAMES[0])[:16]) == 0, "the withdrawal")
        assert read(client, "more19") == payload("more19")


def test_a_hint_reads_chunks_into_dram(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)
        url = next(iter(agent.call(agent.directory.members()))).registration.agent_url
        body = json.dumps({"keys": [storage_key(name)[:16].hex() for name in [*NAMES[:2], "unknown"]]}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/prefetch", body), timeout=WAIT_S) as answer:
            assert (answer.status, json.loads(answer.read())) == (202, {"accepted": 2})
        eventually(lambda: agent.metric("warmroute_prefetched_chunks_total") == 2, "the loads")
        chunks = client.open([storage_key(name) for name in NAMES[:2]], WAIT_S)
        assert [chunk.tier for chunk in chunks] == ["dram", "dram"]
        client.close(chunks)


def test_two_who_open_one_chunk_at_once_read_it_once(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)

        async def both():
            lower = agent.agent._lower
            runs = await asyncio.gather(*(lower.open_run([storage_key(NAMES[0])], WAIT_S) for _ in range(5)))
            held = agent.agent._tier.hierarchy.find(storage_key(NAMES[0])).references
            for run in runs:
                run.let_go()
            return held, agent.agent._tier.hierarchy.find(storage_key(NAMES[0])).references

        assert agent.call(both()) == (5, 0)
        assert agent.metric("warmroute_tier_read_seconds_count", tier="nvme") == 1


def test_an_open_without_time_takes_what_is_in_dram_and_the_read_still_lands(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)

        async def hurried():
            run = await agent.agent._lower.open_run([storage_key(NAMES[0])], 0.0)
            keys = list(run.keys)
            run.let_go()
            return keys

        assert agent.call(hurried()) == []
        eventually(
            lambda: agent.on_loop(lambda: agent.agent._tier.hierarchy.find(storage_key(NAMES[0]))) is not None,
            "the chunk",
        )
        assert agent.tier()["reservations"] == 0


def test_a_conversation_on_two_drives_is_hit_after_a_restart_and_half_of_it_without_one_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "RETRY_FIRST_S", 0.02)
    paths = [str(tmp_path / name) for name in ("one", "two")]
    options = {"nvme_paths": paths, "nvme_bytes": 1_000 * FILE_BYTES, "nvme_write": "through"}
    with running_agent(tmp_path, **options) as agent, connected(agent.config.door) as client:
        put_chain(agent, client)
        shown = nvme_status(agent)["drives"]
        assert [drive["drive"] for drive in shown] == paths
        assert all(drive["is_up"] and drive["chunks"] > 0 for drive in shown)
        assert nvme_status(agent)["bytes_used"] == len(NAMES) * FILE_BYTES
    with running_agent(tmp_path, **options) as agent, connected(agent.config.door) as client:
        eventually(lambda: nvme_status(agent)["chunks"] == len(NAMES), "the index")
        assert read_chain(client) == ["nvme"] * len(NAMES)
        second = agent.agent._nvme.drives[1]
        lost = agent.on_loop(lambda: [name for name in NAMES if storage_key(name) in second.index])
        (tmp_path / "two").rename(tmp_path / "away")
        agent.on_loop(lambda: second.fail("told to"))
        eventually(lambda: agent.believed(storage_key(lost[0])[:16]) & Tier.NVME == 0, "the withdrawal")
        assert not nvme_status(agent)["drives"][1]["is_up"]
        assert agent.metric("warmroute_nvme_drive_up", drive=paths[1]) == 0
        kept = next(name for name in NAMES if name not in lost)
        assert read(client, kept) == payload(kept)
        (tmp_path / "away").rename(tmp_path / "two")
        eventually(lambda: nvme_status(agent)["chunks"] == len(NAMES), "the drive's return")
        eventually(lambda: agent.believed(storage_key(lost[0])[:16]) & Tier.NVME, "the placement")
        assert all(read(client, name) == payload(name) for name in lost)


def test_a_second_agent_on_one_folder_is_refused_in_one_sentence(tmp_path, capsys):
    arguments = ["--host", "h", "--door", str(tmp_path / "other.sock"), "--redis", "redis://127.0.0.1:1"]
    with running_agent(tmp_path, **nvme(tmp_path)):
        assert main(["agent", *arguments, "--nvme", str(tmp_path / "nvme"), "--nvme-gb", "1"]) == 2
    assert "belongs to another agent" in capsys.readouterr().err.strip().splitlines()[-1]


WRITER = """
import sys, xxhash
from nodeagent.tiers.chunk_file import FileHeader, UNKNOWN_IDENTITY
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.clients import label, payload
store = FolderStore(sys.argv[1])
store.open()
for number in range(500):
    data = payload(f"k{number}", 200_000)
    store.put(FileHeader(label(f"k{number}"), UNKNOWN_IDENTITY, 200_000, xxhash.xxh3_128_digest(data)), data)
    print(number, flush=True)
"""


def test_killed_while_it_writes_it_starts_again_and_no_byte_is_wrong(tmp_path):
    folder = tmp_path / "nvme"
    payloads = {storage_key(f"k{number}"): payload(f"k{number}", 200_000) for number in range(500)}
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE) as writer:
            for _ in range(20):
                assert writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            writer.wait(WAIT_S)
    files = [path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64]
    store, target = FolderStore(str(folder)), bytearray(200_000)
    store.open()
    for found in store.listing().files:
        key = store.header(found.name).label.storage_key
        store.read_into(key, memoryview(target))
        assert target == payloads[key]
    store.close()
    with running_agent(tmp_path, dram_bytes=8 << 20, **nvme(tmp_path, files=20_000)) as agent:  # room for all 500
        eventually(lambda: not nvme_status(agent)["is_restoring"], "the index")
        assert nvme_status(agent)["chunks"] == len(files) >= 20
        assert agent.metric("warmroute_checksum_failures_total") == 0
        assert not list(folder.rglob("*.tmp"))


def test_without_nvme_nothing_of_it_shows(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        client.put(label("a"), payload("a"), WAIT_S)
        assert read(client, "a") == payload("a")
        assert set(agent.status()["tiers"]) == {"dram"}
        assert agent.agent._load().tier_bytes_limit.keys() == {Tier.DRAM}
        assert os.listdir(tmp_path) == ["door.sock"]
