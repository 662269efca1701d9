"""A running agent forgets: in DRAM, in files and in the directory, at once, for good, and with a receipt."""

import contextlib
import errno
import socket
from urllib.parse import urlsplit

import pytest

from directory.chunks import chunk_keys, directory_key, pack_tokens
from directory.identity import Scope
from directory.tiers import Tier
from nodeagent.client import ChunkLabel, PutResult
from nodeagent.forget_api import BODIES_MAX
from nodeagent.tiers import quarantine
from nodeagent.tiers.chunk_file import name_of
from nodeagent.tiers.file_store import FolderStore
from tests.nodeagent.forget_calls import (
    FILE_BYTES,
    call,
    forget,
    held,
    key,
    link,
    on_disk,
    place,
    put_chain,
    written,
)
from tests.nodeagent.running import (
    CHUNK_BYTES,
    WAIT_S,
    connected,
    eventually,
    make_hello,
    payload,
    read,
    running_agent,
    storage_key,
)

IDENTITY = make_hello().identity
FIELDS = {
    "model_id": "tiny",
    "weights_sha": "w" * 8,
    "tokenizer_sha": "t" * 8,
    "kv_dtype": "float32",
    "layout": "test-1",
}


def nvme(folder, name="nvme", **more):
    return {"nvme_path": str(folder / name), "nvme_bytes": 1_000 * FILE_BYTES, "nvme_write": "through", **more}


def test_what_follows_a_forgotten_chunk_is_forgotten_and_what_comes_before_stays(tmp_path):
    folder = tmp_path / "nvme"
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door, gpu=[]) as client:
        put_chain(client, "abcd")
        put_chain(client, "abx")
        put_chain(client, "z")
        written(agent, folder, "abcdxz")
        eventually(lambda: agent.believed(storage_key("d")[:16]) == Tier.DRAM | Tier.NVME, "the placement")
        receipt = forget(agent, keys=[key("c"), key("x")])
        assert held(agent, "abcdxz") == on_disk(folder, "abcdxz") == "abz"
        assert all(agent.believed(storage_key(name)[:16]) == 0 for name in "cdx")
        assert read(client, "c") is None
        assert read(client, "b") == payload("b")
        assert receipt["forgotten"] == {
            "dram": {"chunks": 3, "bytes": 3 * CHUNK_BYTES},
            "nvme": {"chunks": 3, "bytes": 3 * FILE_BYTES},
            "files_removed": 3,
            "puts": 0,
            "loads": 0,
            "writes": 0,
            "placements": 6,
        }
        assert receipt["kept_in"] == ["state folder", str(folder)]
        assert agent.metric("warmroute_evictions_total", tier="nvme", reason="forgotten") == 3
        for name, parent in (("c", "b"), ("d", "c"), ("new", "d")):
            assert client.put(link(name, parent, 3), payload(name), WAIT_S) is PutResult.REFUSED
        assert agent.metric("warmroute_admission_refused_total", reason="forgotten") == 3
        assert client.put(link("y", "b", 2), payload("y"), WAIT_S) is PutResult.STORED
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        eventually(lambda: not agent.status()["tiers"]["nvme"]["is_restoring"], "the index")
        assert held(agent, "abcdxyz") == "abyz"
        assert client.put(link("c", "b", 2), payload("c"), WAIT_S) is PutResult.REFUSED
        assert client.put(link("d", "c", 3), payload("d"), WAIT_S) is PutResult.REFUSED


def test_a_salt_is_forgotten_whatever_the_model_and_no_other_salt_is(tmp_path):
    folder = tmp_path / "nvme"
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(client, "ab", salt="tenant")
        put_chain(client, "c", salt="other")
        put_chain(client, "d")
        assert client.put(ChunkLabel(storage_key("e"), None, None, 0), payload("e"), WAIT_S) is PutResult.STORED
        written(agent, folder, "abcde")
        receipt = forget(agent, salt="tenant")
        assert held(agent, "abcde") == on_disk(folder, "abcde") == "cde"
        assert (receipt["remains"]["salt_unknown"], receipt["remains"]["unlabelled"]) == (2, 2), "in two tiers"
        assert client.put(link("f", salt="tenant"), payload("f"), WAIT_S) is PutResult.REFUSED
        assert client.put(link("f", salt="other"), payload("f"), WAIT_S) is PutResult.STORED
        late = ChunkLabel(storage_key("e"), storage_key("e")[:16], None, 0, Scope(salt="tenant").salt_tag)
        agent.on_loop(lambda: agent.agent._tier.hierarchy.learn(late) or agent.agent._lower.learn(late))
        assert held(agent, "e") == "", "what turns out to be of the salt later goes then"
        eventually(lambda: on_disk(folder, "e") == "", "the file's end")
        texts = [path.read_bytes() for path in tmp_path.rglob("warmroute.tombstones")]
        assert len(texts) == 2
        assert not any(b"tenant" in text for text in texts)


def test_an_identity_beside_a_salt_narrows_it(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        put_chain(client, "a", salt="tenant")
        forget(agent, salt="tenant", identity=FIELDS | {"layout": "another"})
        assert held(agent, "a") == "a"
        assert forget(agent, salt="tenant", identity=FIELDS)["forgotten"]["dram"]["chunks"] == 1
        assert held(agent, "a") == ""


@pytest.mark.parametrize("given", [FIELDS, IDENTITY.fleet_digest().hex(), IDENTITY.shard_digest(0).hex()])
def test_an_identity_is_forgotten_by_its_fields_and_by_the_fleets_or_a_shards_digest(tmp_path, given):
    with running_agent(tmp_path) as agent, connected(agent.config.door, gpu=[b"g" * 16]) as client:
        put_chain(client, "ab")
        eventually(lambda: agent.status()["engines"][0]["gpu_chunks"] == 1, "the inventory")
        receipt = forget(agent, identity=given)
        assert held(agent, "ab") == ""
        assert receipt["forgotten"]["dram"]["chunks"] == 2
        assert receipt["remains"]["engines"] == [{"engine": "engine-1", "gpu_chunks": 1, "reset": None}]
        assert client.put(link("new"), payload("new"), WAIT_S) is PutResult.REFUSED
        assert forget(agent, identity=FIELDS | {"layout": "other"})["forgotten"]["dram"]["chunks"] == 0


def test_a_digest_that_no_engine_here_tells_of_is_not_confirmed(tmp_path):
    """The engine is gone, and only it knew that the fleet's digest goes with its shard's, of which the chunks are."""
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(client, "ab")
        written(agent, tmp_path / "nvme", "ab")
    with running_agent(tmp_path, **nvme(tmp_path)) as agent:
        eventually(lambda: held(agent, "ab") == "ab", "the index")
        status, receipt = call(agent, {"identity": IDENTITY.fleet_digest().hex()})
        assert (status, receipt["is_confirmed"], receipt["remains"]["identity_unknown"]) == (503, False, True)
        assert held(agent, "ab") == "ab"
        receipt = forget(agent, identity=FIELDS)
        assert (receipt["forgotten"]["nvme"]["chunks"], held(agent, "ab")) == (2, "")


def test_the_chunks_of_token_ids_are_forgotten_but_those_that_are_kept(tmp_path):
    tokens, scope = list(range(70)), Scope(salt="tenant")
    shard = chunk_keys(scope.root(IDENTITY.shard_digest(0)), pack_tokens(tokens), 16)
    fleet = chunk_keys(scope.root(IDENTITY.fleet_digest()), pack_tokens(tokens), 16)
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        for place_, (own, named) in enumerate(zip(shard, fleet, strict=True)):
            above = shard[place_ - 1] if place_ else None
            chunk = ChunkLabel(own, directory_key(named), above, place_, scope.salt_tag)
            assert client.put(chunk, payload(f"{place_}"), WAIT_S) is PutResult.STORED
        asked = {"token_ids": tokens, "identity": FIELDS, "salt": "tenant"}
        assert forget(agent, **asked | {"salt": "other"})["forgotten"]["dram"]["chunks"] == 0
        of_shard = asked | {"identity": IDENTITY.shard_digest(0).hex(), "kept_tokens": 48}
        assert forget(agent, **of_shard)["forgotten"]["dram"]["chunks"] == 1, "an engine here tells whose it is"
        assert forget(agent, **asked, kept_tokens=40)["forgotten"]["dram"]["chunks"] == 1
        assert len(client.open(shard, WAIT_S)) == 2
        eventually(lambda: agent.tier()["chunks"] == 2)
        unlabelled = ChunkLabel(shard[2], None, None, 2)
        assert client.put(unlabelled, payload("2"), WAIT_S) is PutResult.REFUSED, "also by what its bytes go by"


def test_a_chunk_that_is_read_stays_readable_until_it_is_closed_and_leaves_no_byte(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        put_chain(client, "ab")
        (opened,) = client.open([storage_key("a")], WAIT_S)
        receipt = forget(agent, keys=[key("a")])
        assert receipt["remains"]["open_references"] == {"chunks": 1, "bytes": CHUNK_BYTES}
        assert client.open([storage_key("a")], WAIT_S) == []
        target = bytearray(CHUNK_BYTES)
        assert client.read_into(opened, memoryview(target))
        assert target == payload("a")
        client.close([opened])
        eventually(lambda: all(not any(slot) for slot in slots(agent)), "zeros")
        assert agent.tier()["bytes_used"] == 0


def test_slots_of_chunks_that_were_evicted_before_are_zeroed_as_well(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        put_chain(client, "ab")
        agent.on_loop(lambda: evict_all(agent))
        assert any(any(slot) for slot in slots(agent))
        forget(agent, keys=[key("a")])
        assert not any(any(slot) for slot in slots(agent))
        put_chain(client, "c")
        assert read(client, "c") == payload("c")


def slots(agent):
    def look():
        arena = agent.agent._tier.hierarchy.arena
        views = [arena.view(slot, arena.slot_bytes) for slot in range(arena.slots)]
        data = [bytes(view) for view in views]
        for view in views:
            view.release()
        return data

    return agent.on_loop(look)


def evict_all(agent):
    hierarchy = agent.agent._tier.hierarchy
    hierarchy.free(hierarchy.take_victims(100))


def test_a_file_that_cannot_be_removed_is_counted_and_tried_again_and_not_indexed_at_the_next_start(
    tmp_path, monkeypatch
):
    real, stuck = FolderStore.remove, {name_of(storage_key("a"))}

    def remove(store, name):
        if name in stuck:
            raise PermissionError(errno.EACCES, "told to")
        real(store, name)

    monkeypatch.setattr(FolderStore, "remove", remove)
    folder = tmp_path / "nvme"
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(client, "abc")
        written(agent, folder, "abc")
        receipt = forget(agent, keys=[key("a")])
        assert (receipt["remains"]["files_unremoved"], receipt["forgotten"]["files_removed"]) == (1, 2)
        assert held(agent, "abc") == ""
        assert read(client, "a") is None
    with running_agent(tmp_path, **nvme(tmp_path)) as agent:
        eventually(lambda: not agent.status()["tiers"]["nvme"]["is_restoring"], "the index")
        assert held(agent, "abc") == ""
        assert on_disk(folder, "abc") == "a"
        forget(agent, keys=[key("z")])
        stuck.clear()
    with running_agent(tmp_path, **nvme(tmp_path)) as agent:
        eventually(lambda: on_disk(folder, "abc") == "", "the file's end")


def test_what_a_drive_in_quarantine_holds_is_not_served_when_it_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr(quarantine, "RETRY_FIRST_S", 0.02)
    paths = [str(tmp_path / name) for name in ("one", "two")]
    options = {"nvme_paths": paths, "nvme_bytes": 1_000 * FILE_BYTES, "nvme_write": "through"}
    names = "abcdefgh"
    with running_agent(tmp_path, **options) as agent, connected(agent.config.door) as client:
        put_chain(client, names)
        eventually(lambda: agent.status()["tiers"]["nvme"]["chunks"] == len(names), "the files")
        second = agent.agent._nvme.drives[1]
        away = [name for name in names if place(tmp_path / "two", name).exists()]
        assert 0 < len(away) < len(names)
        (tmp_path / "two").rename(tmp_path / "away")
        agent.on_loop(lambda: second.fail("told to"))
        receipt = forget(agent, keys=[key(names[1])])
        assert receipt["remains"]["drives_away"] == [paths[1]]
        assert receipt["kept_in"] == ["state folder", paths[0]]
        assert receipt["not_kept_in"] == [paths[1]]
        (tmp_path / "away").rename(tmp_path / "two")
        eventually(lambda: second.is_up and not second.is_restoring, "the drive's return")
        assert held(agent, names) in ("", names[0])
        eventually(lambda: not [name for name in away if name != names[0] and on_disk(tmp_path / "two", name)], "files")
        eventually(lambda: (tmp_path / "two" / "warmroute.tombstones").exists(), "the tombstone there, too")


def test_a_drive_that_was_unplugged_over_a_restart_tells_and_is_told_what_was_forgotten(tmp_path):
    with running_agent(tmp_path, **nvme(tmp_path, "one")) as agent, connected(agent.config.door) as client:
        put_chain(client, "ab")
        written(agent, tmp_path / "one", "ab")
    with running_agent(tmp_path, **nvme(tmp_path, "two")) as agent:
        forget(agent, salt="unused")
        forget(agent, keys=[key("b")])
    with running_agent(tmp_path, **nvme(tmp_path, "one")) as agent:
        eventually(lambda: not agent.status()["tiers"]["nvme"]["is_restoring"], "the index")
        assert held(agent, "ab") == "a"
        eventually(lambda: on_disk(tmp_path / "one", "ab") == "a", "the file's end")


def test_tombstones_that_cannot_be_believed_keep_their_drive_out_of_use(tmp_path):
    folder = tmp_path / "nvme"
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(client, "a")
        written(agent, folder, "a")
        forget(agent, keys=[key("z")])
    data = bytearray((folder / "warmroute.tombstones").read_bytes())
    data[-1] ^= 1
    (folder / "warmroute.tombstones").write_bytes(data)
    with running_agent(tmp_path, **nvme(tmp_path)) as agent:
        eventually(lambda: not agent.status()["tiers"]["nvme"]["drives"][0]["is_up"], "the quarantine")
        assert "warmroute.tombstones" in agent.status()["tiers"]["nvme"]["drives"][0]["failure"]
        assert held(agent, "a") == ""


def test_where_it_cannot_be_kept_that_is_said_and_the_request_is_not_confirmed(tmp_path, monkeypatch):
    folder = tmp_path / "nvme"
    with running_agent(tmp_path, **nvme(tmp_path)) as agent, connected(agent.config.door) as client:
        put_chain(client, "a")
        written(agent, folder, "a")

        def refuse(*_):
            raise OSError(errno.ENOSPC, "told to")

        monkeypatch.setattr("nodeagent.tiers.file_store.write_tombstones", refuse)
        monkeypatch.setattr("nodeagent.tiers.tombstone_file.write_tombstones", refuse)
        status, receipt = call(agent, {"keys": [key("a")]})
        assert (status, receipt["is_confirmed"], receipt["kept_in"]) == (503, False, [])
        assert held(agent, "a") == "", "what can be done is done"


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (b"{", "can't be read"),
        ({}, "exactly one of"),
        ({"keys": []}, "$.keys"),
        ({"keys": ["ab"]}, "$.keys[0]"),
        ({"keys": ["ab" * 16], "salt": "s"}, "exactly one of"),
        ({"keys": ["ab" * 16], "identity": "ab" * 32}, "exactly one of"),
        ({"identity": "ab" * 16}, "64 hex digits"),
        ({"identity": "00" * 32}, "64 hex digits"),
        ({"identity": {"model_id": "m"}}, "weights_sha"),
        ({"identity": FIELDS | {"model_id": ""}}, "model_id"),
        ({"identity": FIELDS | {"tp_size": 5_000}}, "tp_size"),
        ({"identity": "ab" * 32, "lora": "ab" * 32}, "lora goes with token_ids"),
        ({"salt": ""}, "salt must not be empty"),
        ({"salt": "s", "kept_tokens": 3}, "kept_tokens goes with token_ids"),
        ({"token_ids": [1] * 300}, "need the identity"),
        ({"token_ids": [1] * 255, "identity": "ab" * 32}, "no full chunk"),
        ({"token_ids": [1] * 300, "identity": "ab" * 32, "kept_tokens": 256}, "no full chunk"),
        ({"token_ids": [1] * 300, "identity": FIELDS | {"tp_size": 1_024}, "chunk_tokens": 1}, "at a time"),
        ({"token_ids": [-1], "identity": "ab" * 32}, "$.token_ids[0]"),
        ({"saltt": "s"}, "saltt"),
    ],
    ids=str,
)
def test_what_does_not_say_what_to_forget_is_refused_in_a_sentence(lone_agent, asked, named):
    status, answer = call(lone_agent, asked)
    assert status == 400
    assert named in answer["detail"]


def test_bodies_that_do_not_end_take_no_more_memory_than_a_few(lone_agent):
    url = urlsplit(next(iter(lone_agent.call(lone_agent.directory.members()))).registration.agent_url)
    with contextlib.ExitStack() as stack:
        for _ in range(BODIES_MAX):
            slow = stack.enter_context(socket.create_connection((url.hostname, url.port)))
            slow.sendall(b"POST /forget HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n{")
        eventually(lambda: call(lone_agent, {"salt": "s"})[0] == 503, "the refusal")
        assert "being read" in call(lone_agent, {"salt": "s"})[1]["detail"]
    eventually(lambda: call(lone_agent, {"salt": "s"})[0] == 200, "the next turn")


@pytest.fixture(scope="module")
def lone_agent(tmp_path_factory):
    with running_agent(tmp_path_factory.mktemp("lone")) as agent:
        yield agent
