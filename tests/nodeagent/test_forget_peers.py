"""A host that has forgotten doesn't fetch it from one that hasn't, and learns of which salt a fetched chunk is."""

from nodeagent.client import PutResult
from tests.nodeagent.forget_calls import forget, held, key, link
from tests.nodeagent.peering import at_rest, fetched, forgive, pair, refused
from tests.nodeagent.running import WAIT_S, eventually, payload


def put_salted(engine, *names):
    for name in names:
        assert engine.put(link(name, salt="tenant"), payload(name), WAIT_S) is PutResult.STORED


def test_what_is_forgotten_is_not_fetched_from_a_peer_that_still_has_it(tmp_path, monkeypatch):
    forgive(monkeypatch)
    with pair(tmp_path) as two:
        put_salted(two.far_engine, "a", "b")
        forget(two.near, salt="tenant")
        forget(two.near, keys=[key("b")])
        for number, name in enumerate("ab", start=1):
            two.hint(name)
            eventually(lambda number=number: refused(two.near, "put_forgotten") == number, "the refusal")
        assert two.near.metric("warmroute_admission_refused_total", reason="forgotten") == 2
        assert (fetched(two.near), held(two.near, "ab"), held(two.far, "ab")) == (0, "", "ab")
        at_rest(two.near)


def test_a_fetched_chunk_is_forgotten_with_its_salt(tmp_path):
    with pair(tmp_path) as two:
        put_salted(two.far_engine, "a")
        two.hint("a")
        eventually(lambda: fetched(two.near) == 1, "the fetch")
        assert forget(two.near, salt="another")["remains"]["salt_unknown"] == 0
        assert forget(two.near, salt="tenant")["forgotten"]["dram"]["chunks"] == 1
        assert held(two.near, "a") == ""
