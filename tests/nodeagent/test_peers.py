"""Chunks between two agents: what arrives is what was stored, once, and only where it pays and there is room."""

import threading

import pytest

from directory.identity import Identity
from directory.members import HostRegistration
from directory.tiers import Tier
from nodeagent.client import PutResult
from nodeagent.hints import PeerHint, read_address
from nodeagent.peers import fetcher, worth
from nodeagent.tiers.chunk_file import file_bytes
from tests.directory.certificates import make_certificate
from tests.nodeagent.peering import (
    FETCHING,
    SERVING,
    SLOTS,
    TOKENS,
    StrangePeer,
    at_rest,
    failed,
    fetched,
    forgive,
    good,
    hint,
    lone,
    pair,
    put,
    refused,
)
from tests.nodeagent.running import (
    CHUNK_BYTES,
    WAIT_S,
    connected,
    eventually,
    label,
    make_hello,
    payload,
    read,
    storage_key,
)


def hits(agent, source, tier="dram"):
    return agent.metric("warmroute_tier_hit_tokens_total", tier=tier, source=source)


def test_a_chunk_that_another_host_stored_is_fetched_and_read_byte_for_byte(tmp_path):
    with pair(tmp_path) as two:
        put(two.far_engine, "a", "b")
        assert read(two.near_engine, "a") is None
        assert two.hint("a", "b") == 2
        eventually(lambda: fetched(two.near) == 2, "the fetches")
        for name in "ab":
            assert read(two.near_engine, name) == payload(name)
        eventually(lambda: hits(two.near, "peer") == 2 * TOKENS, "the first hits")
        assert hits(two.near, "local") == 0
        assert read(two.near_engine, "a") == payload("a")
        eventually(lambda: hits(two.near, "local") == TOKENS, "a second hit, which is local")
        assert hits(two.near, "peer") == 2 * TOKENS
        requested = two.near.metric("warmroute_tier_tokens_requested_total")
        assert requested == 3 * TOKENS + two.near.metric("warmroute_tier_missed_tokens_total")
        eventually(lambda: two.near.believed(storage_key("a")[:16]) == Tier.DRAM, "the placement")
        moved = {"received": two.near, "sent": two.far}
        for direction, agent in moved.items():
            assert agent.metric("warmroute_peer_bytes_total", direction=direction) == 2 * CHUNK_BYTES
            at_rest(agent)


def test_a_chunk_that_a_peer_has_on_disk_only_is_read_for_the_other(tmp_path):
    far = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 1_000 * file_bytes(CHUNK_BYTES), "nvme_write": "through"}
    with pair(tmp_path, far=far) as two:
        put(two.far_engine, "a")
        eventually(lambda: two.far.status()["tiers"]["nvme"]["chunks"] == 1, "the file")
        hierarchy = two.far.agent._tier.hierarchy
        two.far.on_loop(lambda: hierarchy.drop(hierarchy.find(storage_key("a"))))
        assert two.hint("a") == 1
        eventually(lambda: fetched(two.near) == 1, "the fetch")
        assert read(two.near_engine, "a") == payload("a")
        at_rest(two.far)


def test_between_agents_with_certificates_everything_goes_by_tls(tmp_path):
    certificate = make_certificate(tmp_path, "agent")
    tls = {"ca": str(certificate.certificate)}
    own = tls | {"cert": str(certificate.certificate), "key": str(certificate.key)}
    far, near = {"peers": SERVING | {"tls": own}}, {"peers": FETCHING | {"tls": tls}}
    with pair(tmp_path, far=far, near=near) as two:
        put(two.far_engine, "a", "b", "c")
        assert two.hint("a", "b", "c") == worth.PROBE_CHUNKS
        eventually(lambda: fetched(two.near) == 2, "the fetches")
        for name in "ab":
            assert read(two.near_engine, name) == payload(name)
        with lone(tmp_path, host="without") as (without, _):
            assert hint(without, two.address, "a") == 1
            eventually(lambda: failed(without, "unreachable") == 1, "the failure")
            at_rest(without)
    other = make_certificate(tmp_path, "other")
    (tmp_path / "second").mkdir()
    near = {"peers": FETCHING | {"tls": {"ca": str(other.certificate)}}}
    with pair(tmp_path / "second", far=far, near=near) as two:
        put(two.far_engine, "a")
        assert two.hint("a") == 1
        eventually(lambda: failed(two.near, "unreachable") == 1, "the refusal")
        assert read(two.near_engine, "a") is None


def test_a_host_says_where_peers_fetch_and_how_fast_they_were(tmp_path):
    with pair(tmp_path) as two:
        put(two.far_engine, "a")
        assert two.hint("a") == 1

        def hosts(agent):
            members = agent.call(agent.directory.members())
            return [each for each in members if isinstance(each.registration, HostRegistration)]

        assert {each.registration.peer_address for each in hosts(two.far)} == {two.address}
        assert [each.registration.peer_address for each in hosts(two.near)] == [None]
        eventually(lambda: hosts(two.near)[0].load.peer_bytes_per_s.get(two.address, 0) > 0, "the rate")
        assert two.near.status()["peers"]["bytes_per_s"].keys() == {two.address}


def test_without_configuration_nothing_listens_and_no_hint_is_followed(tmp_path):
    with pair(tmp_path, near={"peers": None}) as two:
        put(two.far_engine, "a")
        assert two.near.agent._peers.address is None
        assert two.hint("a") == 0
        assert refused(two.near, "off") == 1
        assert two.near.status()["peers"]["fetch"] == "off"


@pytest.mark.parametrize("wrong", ["x" * 64, "t" * 63])
def test_who_has_another_token_gets_nothing_and_leaves_the_peer_alone(tmp_path, wrong):
    with pair(tmp_path, near={"peers": {"token": wrong}}) as two:
        put(two.far_engine, "a")
        assert two.hint("a") == 1
        eventually(lambda: failed(two.near, "refused") == 1, "the refusal")
        assert failed(two.far, "refused") == 1
        assert two.hint("a") == 0
        assert refused(two.near, "left_alone") == 1
        assert read(two.near_engine, "a") is None
        at_rest(two.near)


def test_a_peer_with_another_token_is_believed_nothing(tmp_path):
    with StrangePeer(good("a"), token="x" * 64) as peer, lone(tmp_path) as (agent, _):
        assert hint(agent, peer.address, "a") == 1
        eventually(lambda: failed(agent, "refused") == 1, "the refusal")
        assert peer.asked == 0


def test_a_chunk_of_an_identity_that_no_engine_here_has_is_not_given(tmp_path):
    other = make_hello("near-1", identity=Identity("tiny", "w" * 8, "t" * 8, "float32", "another layout", 1))
    with pair(tmp_path, near_hello=other) as two:
        put(two.far_engine, "a")
        assert two.hint("a") == 1
        eventually(lambda: refused(two.near, "absent") == 1, "the answer")
        assert two.near.tier()["chunks"] == 0
        assert read(two.near_engine, "a") is None
        at_rest(two.near)
        at_rest(two.far)


def test_an_engine_of_several_finds_its_own_identitys_chunk(tmp_path):
    other = make_hello("near-2", identity=Identity("tiny", "w" * 8, "t" * 8, "float32", "another layout", 1))
    with pair(tmp_path) as two, connected(two.near.config.door, other):
        put(two.far_engine, "a")
        assert two.hint("a") == 1
        eventually(lambda: fetched(two.near) == 1, "the fetch")
        assert read(two.near_engine, "a") == payload("a")


class Late:
    """Answers with chunk `a` once it may."""

    def __init__(self, names="a"):
        self.may_answer = threading.Event()
        self.names = iter(names)

    def __call__(self, ask):
        assert self.may_answer.wait(WAIT_S)
        return good(next(self.names))(ask)


def test_two_who_want_one_chunk_fetch_it_once(tmp_path):
    late = Late("ba")
    slow = make_hello(flops=1e3)
    with StrangePeer(late) as peer, lone(tmp_path, slow) as (agent, engine):
        late.may_answer.set()
        assert hint(agent, peer.address, "b") == 1
        eventually(lambda: fetched(agent) == 1, "the probe")
        late.may_answer.clear()
        assert hint(agent, peer.address, "a", "a") == 1
        eventually(lambda: peer.asked == 2, "the question")
        assert hint(agent, peer.address, "a") == 0
        late.may_answer.set()
        eventually(lambda: fetched(agent) == 2, "the fetch")
        assert hint(agent, peer.address, "a") == 0
        assert peer.asked == 2
        assert read(engine, "a") == payload("a")
        at_rest(agent)


def cancel(agent, address, *names):
    given = PeerHint(read_address(address), tuple(storage_key(name)[:16] for name in names))
    return agent.on_loop(lambda: agent.agent._peers.cancel(given))


def test_a_hint_that_is_taken_back_is_not_followed_unless_others_gave_it_or_it_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(worth, "PROBE_CHUNKS", 5)
    monkeypatch.setattr(fetcher, "CONNECTIONS_PER_PEER_MAX", 1)
    late = Late("abc")
    with StrangePeer(late) as peer, lone(tmp_path) as (agent, engine):
        assert hint(agent, peer.address, "a", "b", "c", "d") == 4
        assert hint(agent, peer.address, "b") == 0
        eventually(lambda: peer.asked == 1, "the first question")
        assert agent.status()["peers"]["waiting"] == 3
        assert cancel(agent, peer.address, "a", "b", "d", "unknown") == 1
        assert refused(agent, "cancelled") == 1
        late.may_answer.set()
        eventually(lambda: fetched(agent) == 3, "what is begun, and what others want")
        assert peer.asked == 3
        for name in "abc":
            assert read(engine, name) == payload(name)
        at_rest(agent)


def test_a_hint_is_bounded_by_a_share_of_the_slots(tmp_path, monkeypatch):
    monkeypatch.setattr(worth, "PROBE_CHUNKS", 1_000)
    late = Late("abc")
    with StrangePeer(late, end="close") as peer, lone(tmp_path) as (agent, _):
        names = [f"n{number}" for number in range(SLOTS)]
        assert hint(agent, peer.address, *names) == SLOTS // fetcher.ROOM_FRACTION
        assert refused(agent, "queue_full") == SLOTS - SLOTS // fetcher.ROOM_FRACTION
        late.may_answer.set()


def test_a_chunk_that_waited_too_long_is_not_fetched_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(fetcher, "CONNECTIONS_PER_PEER_MAX", 1)
    monkeypatch.setattr(fetcher, "WISH_S", 0.0)
    with StrangePeer(good("a")) as peer, lone(tmp_path) as (agent, _):
        assert hint(agent, peer.address, "a", "b") == 2
        eventually(lambda: refused(agent, "late") == 2, "the drops")
        assert peer.accepted == 0
        at_rest(agent)


def test_where_engines_hold_most_slots_nothing_is_fetched_and_nothing_given(tmp_path):
    names = [f"n{number}" for number in range(SLOTS - 4)]
    with pair(tmp_path) as two:
        put(two.far_engine, *names)
        held = two.far_engine.open([storage_key(name) for name in names], WAIT_S)
        assert two.hint("n0") == 1
        eventually(lambda: refused(two.near, "absent") == 1, "the answer")
        two.far_engine.close(held)
        at_rest(two.far)
        own = [f"m{number}" for number in range(SLOTS - 4)]
        put(two.near_engine, *own)
        held = two.near_engine.open([storage_key(name) for name in own], WAIT_S)
        assert two.hint("n0") == 0
        assert refused(two.near, "no_room") == 1
        two.near_engine.close(held)
        at_rest(two.near)


def test_of_more_peers_than_are_remembered_the_one_hinted_at_longest_ago_is_forgotten_unless_it_is_busy(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fetcher, "PEERS_KNOWN_MAX", 1)
    late = Late()
    with StrangePeer(late) as busy, StrangePeer(good("b")) as other, lone(tmp_path) as (agent, _):
        assert hint(agent, busy.address, "a") == 1
        eventually(lambda: busy.asked == 1, "the question")
        assert hint(agent, other.address, "b") == 0
        assert refused(agent, "too_many_peers") == 1
        late.may_answer.set()
        eventually(lambda: fetched(agent) == 1, "the fetch")
        assert agent.status()["peers"]["bytes_per_s"].keys() == {busy.address}
        assert hint(agent, other.address, "b") == 1
        eventually(lambda: fetched(agent) == 2, "the other's")
        assert agent.status()["peers"]["bytes_per_s"].keys() == {other.address}


def test_before_an_engine_came_nothing_is_fetched(tmp_path):
    with StrangePeer(good("a")) as peer, lone(tmp_path) as (agent, engine):
        engine.stop()
        eventually(lambda: not agent.status()["engines"], "the goodbye")
        assert hint(agent, peer.address, "a") == 0
        assert refused(agent, "no_engine") == 1
        assert peer.accepted == 0


@pytest.mark.parametrize(("flops", "follows"), [(1e6, True), (1e18, False)], ids=["slow to compute", "fast"])
def test_beyond_a_probe_only_what_beats_computing_is_fetched(tmp_path, flops, follows):
    with pair(tmp_path, near_hello=make_hello("near-1", flops=flops)) as two:
        names = [f"n{number}" for number in range(8)]
        put(two.far_engine, *names)
        assert two.hint(*names[:4]) == worth.PROBE_CHUNKS
        assert refused(two.near, "unmeasured") == 2
        eventually(lambda: fetched(two.near) == worth.PROBE_CHUNKS, "the probe")
        assert two.hint(*names[4:]) == (4 if follows else 0)
        assert refused(two.near, "slower") == (0 if follows else 4)
        if follows:
            eventually(lambda: fetched(two.near) == worth.PROBE_CHUNKS + 4, "the others")
        assert read(two.near_engine, "n7") == (payload("n7") if follows else None)
        at_rest(two.near)


def test_connections_are_used_again_and_one_that_ended_meanwhile_costs_nothing(tmp_path, monkeypatch):
    forgive(monkeypatch)
    names = iter("abc")
    with StrangePeer(lambda ask: good(next(names))(ask), end="close") as peer, lone(tmp_path) as (agent, _):
        for number, name in enumerate("ab", 1):
            assert hint(agent, peer.address, name) == 1
            eventually(lambda number=number: fetched(agent) == number, "the fetch")
        assert peer.accepted == 2
    (tmp_path / "pair").mkdir()
    with pair(tmp_path / "pair") as two:
        put(two.far_engine, "a", "b")
        for number, name in enumerate("ab", 1):
            two.hint(name)
            eventually(lambda number=number: fetched(two.near) == number, "the fetch")
        assert two.far.status()["peers"]["connections"] == 1


def test_a_chunk_that_an_engine_stores_meanwhile_is_not_fetched_over_it(tmp_path):
    late = Late()
    with StrangePeer(late) as peer, lone(tmp_path) as (agent, engine):
        assert hint(agent, peer.address, "a") == 1
        eventually(lambda: peer.asked == 1, "the question")
        put(engine, "a")
        late.may_answer.set()
        eventually(lambda: refused(agent, "put_busy") == 1, "the end of the fetch")
        assert fetched(agent) == 0
        assert read(engine, "a") == payload("a")
        eventually(lambda: hits(agent, "local") == TOKENS, "a local hit")
        at_rest(agent)


def test_other_bytes_than_lie_on_this_hosts_disk_are_not_taken(tmp_path):
    late = Late()
    nvme = {"nvme_path": str(tmp_path / "nvme"), "nvme_bytes": 100 * file_bytes(CHUNK_BYTES), "nvme_write": "through"}
    with StrangePeer(late) as peer, lone(tmp_path, **nvme) as (agent, engine):
        assert hint(agent, peer.address, "a") == 1
        eventually(lambda: peer.asked == 1, "the question")
        assert engine.put(label("a"), payload("other bytes"), WAIT_S) is PutResult.STORED
        eventually(lambda: agent.status()["tiers"]["nvme"]["chunks"] == 1, "the file")
        hierarchy = agent.agent._tier.hierarchy
        agent.on_loop(lambda: hierarchy.drop(hierarchy.find(storage_key("a"))))
        late.may_answer.set()
        eventually(lambda: refused(agent, "put_conflict") == 1, "the refusal")
        assert read(engine, "a") == payload("other bytes")
        at_rest(agent)
