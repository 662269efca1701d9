"""Labels that come apart from their chunks, after these were forgotten: they take them along, and what follows."""

import pytest

from nodeagent.labels import ChunkLabel
from nodeagent.messages import PutOutcome
from tests.nodeagent.forgetful_host import forgetful_host, soon
from tests.nodeagent.running import label, storage_key

A = frozenset([storage_key("a")[:16]])
CHAIN = {"a": label("a"), "b": label("b", "a", 1), "c": label("c", "b", 2)}


def bare(name):
    return ChunkLabel(storage_key(name), None, None, 0)


def learn(host, name):
    host.dram.labels.note(CHAIN[name], host.dram)
    host.nvme.learn(CHAIN[name])


def held(host):
    return [name for name in CHAIN if host.is_held(storage_key(name))]


@pytest.mark.parametrize("is_in_dram", [True, False], ids=["dram", "disk"])
@pytest.mark.parametrize("late", ["abc", "cba", "a", "b"])
async def test_a_label_that_comes_late_takes_along_what_follows(tmp_path, is_in_dram, late):
    async with forgetful_host(tmp_path) as host:
        for name, known in CHAIN.items():
            assert await host.put(name, bare(name) if name in late else known) is PutOutcome.STORED
            if not is_in_dram:
                host.evict(storage_key(name))
        await host.forget(directory_keys=A)
        for name in late:
            learn(host, name)
        await soon(lambda: not held(host))
        assert not any(host.announced.get((bit, storage_key(name)[:16])) for name in CHAIN for bit in (2, 4))


async def test_a_label_of_a_chunk_that_is_not_here_tells_what_follows_it(tmp_path):
    async with forgetful_host(tmp_path) as host:
        for name in "bc":
            await host.put(name, CHAIN[name])
        await host.forget(directory_keys=A)
        assert held(host) == ["b", "c"], "nothing tells"
        learn(host, "a")
        await soon(lambda: not held(host))


async def test_a_put_that_is_refused_tells_what_follows_it(tmp_path):
    async with forgetful_host(tmp_path) as host:
        await host.put("c", CHAIN["c"])
        await host.forget(directory_keys=A)
        assert [await host.put(name, CHAIN[name]) for name in "ab"] == [PutOutcome.FORGOTTEN] * 2
        await soon(lambda: not held(host))
