"""Asks a running agent to forget, as an operator does; and chains of chunks to be forgotten."""

import http.client
import json
from urllib.parse import urlsplit

from msgspec.structs import replace

from directory.identity import Scope
from nodeagent.client import ChunkClient, ChunkLabel, PutResult
from nodeagent.tiers.chunk_file import file_bytes, name_of
from tests.nodeagent.running import CHUNK_BYTES, WAIT_S, eventually, label, payload, storage_key

FILE_BYTES = file_bytes(CHUNK_BYTES)


def call(agent, body, *, path="/forget", headers=None, method="POST"):
    """The answer's status, and its JSON."""
    url = urlsplit(next(iter(agent.call(agent.directory.members()))).registration.agent_url)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=WAIT_S)
    try:
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def forget(agent, **asked):
    """The receipt of a request that is confirmed."""
    status, receipt = call(agent, asked)
    assert status == 200, receipt
    assert receipt["is_confirmed"]
    return receipt


def key(name: str) -> str:
    return storage_key(name)[:16].hex()


def link(name: str, parent: str | None = None, position: int = 0, *, salt: str | None = None) -> ChunkLabel:
    return replace(label(name, parent, position), salt_tag=Scope(salt=salt).salt_tag)


def put(client: ChunkClient, *labels: ChunkLabel, names: str) -> list[PutResult]:
    return [client.put(each, payload(name), WAIT_S) for each, name in zip(labels, names, strict=True)]


def put_chain(client: ChunkClient, names: str, *, salt: str | None = None) -> None:
    """Each letter a chunk that follows the one before."""
    for position, name in enumerate(names):
        chunk = link(name, names[position - 1] if position else None, position, salt=salt)
        assert client.put(chunk, payload(name), WAIT_S) in (PutResult.STORED, PutResult.ALREADY)


def place(folder, name):
    text = name_of(storage_key(name)).hex()
    return folder / text[:2] / text[2:4] / text


def on_disk(folder, names):
    return "".join(name for name in names if place(folder, name).exists())


def written(agent, folder, names):
    eventually(lambda: on_disk(folder, names) == names, "the files")
    eventually(lambda: agent.status()["tiers"]["nvme"]["chunks"] >= len(names), "the index")


def held(agent, names):
    """Which of these are found in DRAM or on disk."""

    def find():
        tier, nvme = agent.agent._tier.hierarchy, agent.agent._nvme
        return "".join(
            name
            for name in names
            if (tier is not None and tier.find(storage_key(name)) is not None)
            or (nvme is not None and nvme.holds(storage_key(name)))
        )

    return agent.on_loop(find)
