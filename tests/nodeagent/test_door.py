"""Who is let in, what is answered, and that garbage costs its own connection only."""

import os
import socket
import stat
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from directory.costs import ModelShape
from directory.identity import Identity
from nodeagent.client import PutResult
from nodeagent.door import Door
from nodeagent.errors import DoorUnavailable
from nodeagent.messages import (
    DOOR_VERSION,
    LENGTH_BYTES,
    MESSAGE_BYTES_MAX,
    AgentMessage,
    Message,
    Open,
    Refused,
    Welcome,
    decode_agent,
    frame,
    preamble,
)
from tests.nodeagent.running import (
    CHUNK_BYTES,
    CLIENT,
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


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    with running_agent(tmp_path_factory.mktemp("door")) as running:
        yield running


class RawClient:
    """A connection that says exactly what it is told to say."""

    def __init__(self, door: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(door)

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes | Message) -> None:
        try:
            for part in parts:
                self.socket.sendall(frame(part) if isinstance(part, Message) else part)
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self) -> AgentMessage | None:
        header = self._exactly(LENGTH_BYTES)
        return decode_agent(self._exactly(int.from_bytes(header, "big"))) if header else None

    def is_closed_by_the_agent(self) -> bool:
        try:
            while self.socket.recv(65_536):
                pass
        except ConnectionResetError:
            return True
        return True

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self.socket.recv(length - len(data))
            if not part:
                return b""
            data += part
        return data


def refusal(agent, *said) -> str:
    with RawClient(agent.config.door) as raw:
        raw.send(*said)
        answer = raw.receive()
        assert isinstance(answer, Refused)
        assert raw.is_closed_by_the_agent()
        return answer.reason


def test_the_socket_is_this_users_alone(agent):
    assert stat.S_IMODE(os.stat(agent.config.door).st_mode) == 0o600


def test_a_client_of_another_version_is_told_so(agent):
    assert f"version {DOOR_VERSION + 1}" in refusal(agent, preamble(DOOR_VERSION + 1))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        pytest.param({"identity": Identity("m", "w", "t", "f", "l", 2)}, "tp_size 2", id="shards"),
        pytest.param({"tp_rank": 1}, "tp_rank", id="a rank outside its size"),
        pytest.param({"key_scheme": "mine"}, "key_scheme", id="an unknown scheme"),
        pytest.param({"chunk_tokens": 0}, "chunk_tokens", id="no chunk size"),
        pytest.param({"models": ()}, "models", id="no model"),
        pytest.param({"engine": ""}, "engine", id="no name"),
        pytest.param({"flops": 0.0}, "flops", id="no rate"),
        pytest.param({"flops": float("nan")}, "flops", id="a rate that is no number"),
        pytest.param({"flops": float("inf")}, "flops", id="an infinite rate"),
        pytest.param({"shape": ModelShape(float("inf"), 2, 8, 32)}, "shape", id="an infinite model"),
        pytest.param({"shape": ModelShape(1e6, -2, 8, 32)}, "shape", id="a model of fewer layers than none"),
        *(
            pytest.param({"url": url}, "url", id=url)
            for url in (
                "http://127.0.0.1:99999",
                "http://127.0.0.1:80a",
                "http://127.0.0.1:0",
                "http://[::1",
                "http://gpu..07:8000",
                "http://exa mple:80",
                "http://",
                "ftp://gpu-07:8000",
                "gpu-07:8000",
            )
        ),
    ],
)
def test_a_description_that_must_not_be_registered_is_refused_and_the_field_named(agent, changes, word):
    reason = refusal(agent, preamble(), make_hello("odd", **changes).message(CLIENT))
    assert word.split()[0] in reason or "`$[" in reason
    assert all(each["engine"] != "odd" for each in agent.status()["engines"])


def test_an_identity_with_a_delimiter_in_a_field_is_refused(agent):
    honest = make_hello("forger", identity=Identity("a-b", "w", "t", "f", "l", 1)).message(CLIENT)
    forged = frame(honest).replace(b"a-b", b"a|b")
    assert "model_id" in refusal(agent, preamble(), forged)


def test_a_hello_comes_first(agent):
    assert "hello" in refusal(agent, preamble(), Open(1, []))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(st.binary(min_size=1, max_size=300), st.sampled_from(["first", "after the preamble", "after the hello"]))
def test_garbage_costs_its_own_connection_and_nothing_else(agent, garbage, when):
    with RawClient(agent.config.door) as raw:
        if when != "first":
            raw.send(preamble())
        if when == "after the hello":
            raw.send(make_hello("garbled").message(CLIENT))
            assert isinstance(raw.receive(), Welcome)
            raw.send(len(garbage).to_bytes(LENGTH_BYTES, "big"))
        raw.send(garbage)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.is_closed_by_the_agent()
    with connected(agent.config.door, make_hello("witness")) as client:
        assert client.put(label("w"), payload("w"), WAIT_S) in (PutResult.STORED, PutResult.ALREADY)


def test_a_message_that_claims_too_much_is_not_waited_for(agent):
    with RawClient(agent.config.door) as raw:
        raw.send(preamble(), struct.pack(">I", MESSAGE_BYTES_MAX + 1))
        assert isinstance(raw.receive(), Refused | None)
        assert raw.is_closed_by_the_agent()


def test_a_run_has_one_answer_for_each_key_that_leads(agent):
    with connected(agent.config.door, make_hello("writer")) as client:
        for name in ("p", "q"):
            client.put(label(name), payload(name), WAIT_S)
    with RawClient(agent.config.door) as raw:
        raw.send(preamble(), make_hello("asker").message(CLIENT))
        assert isinstance(raw.receive(), Welcome)
        raw.receive()
        for names, length in (("pq", 2), ("pxq", 1), ("x", 0), ("", 0)):
            raw.send(Open(7, [storage_key(name) for name in names]))
            answer = raw.receive()
            assert (answer.id, len(answer.chunks)) == (7, length)
    assert agent.tier()["references"] == 3, "a lost connection alone ends none"


def test_an_engine_with_larger_chunks_works_on_without_the_tier(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as small:
        assert small.put(label("a"), payload("a"), WAIT_S) is PutResult.STORED
        with connected(agent.config.door, make_hello("large", chunk_bytes=CHUNK_BYTES + 1), gpu=[b"g" * 16]) as large:
            assert large.is_connected
            assert large.put(label("b"), payload("b"), WAIT_S) is PutResult.REFUSED
            assert large.open([storage_key("a")], WAIT_S) == []
            eventually(lambda: agent.believed(b"g" * 16) == 1, "its gpu tier")
        assert agent.metric("warmroute_degraded_total", reason="dram_unavailable") == 1
        assert read(small, "a") == payload("a")


def test_an_agent_that_can_not_have_the_memory_lives_on_without_the_tier(tmp_path):
    with running_agent(tmp_path, dram_bytes=1 << 49) as agent:
        with connected(agent.config.door, gpu=[b"g" * 16]) as client:
            assert client.put(label("a"), payload("a"), WAIT_S) is PutResult.REFUSED
            eventually(lambda: agent.believed(b"g" * 16) == 1, "its gpu tier")
        assert agent.metric("warmroute_degraded_total", reason="dram_unavailable") == 1


def test_a_put_whose_connection_goes_while_its_bytes_are_checked_is_still_accounted(tmp_path):
    with running_agent(tmp_path) as agent, connected(agent.config.door) as client:
        for number in range(3 * SLOTS):
            link = client._attachment.link
            client.put(label(f"{number}"), payload(f"{number}"), 0.001)
            link.shut()
            eventually(lambda link=link: (now := client._attachment) and now.link is not link, "another connection")
        eventually(lambda: agent.tier()["reservations"] == 0, "every reservation's end")
        for number in range(SLOTS):
            assert client.put(label(f"x{number}"), payload(f"x{number}"), WAIT_S) is PutResult.STORED


def door_at(path) -> Door:
    return Door(str(path), None, None)


def test_a_dead_agents_socket_file_is_replaced_and_removed_at_the_end(tmp_path):
    path = tmp_path / "door.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    door = door_at(path)
    door.open()
    door.close()
    assert not path.exists()


def test_a_living_agents_socket_is_left_alone(agent):
    with pytest.raises(DoorUnavailable, match="already"):
        door_at(agent.config.door).open()
    with connected(agent.config.door, make_hello("witness")) as client:
        assert client.is_connected


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(DoorUnavailable, match="no socket"):
        door_at(path).open()
    assert path.read_text() == "data"


@pytest.mark.parametrize("path", ["x" * 200, "/nowhere/at/all/door.sock"])
def test_an_unusable_path_is_a_clear_error(path):
    with pytest.raises(DoorUnavailable):
        door_at(path).open()


def test_a_door_removes_only_its_own_file(tmp_path):
    path = tmp_path / "door.sock"
    first = door_at(path)
    first.open()
    path.unlink()
    path.write_text("another's")
    first.close()
    assert path.read_text() == "another's"


def gpu_chunks(agent) -> dict[str, int]:
    engines = agent.status()["engines"]
    return {each["engine"]: each["gpu_chunks"] for each in engines if each["engine"] in ("one", "two")}


def test_gpu_changes_of_an_engine_are_its_own(agent):
    with connected(agent.config.door, make_hello("one"), gpu=[b"1" * 16]) as one:
        with connected(agent.config.door, make_hello("two"), gpu=[b"1" * 16]):
            eventually(lambda: agent.believed(b"1" * 16) == 1, "the placement")
            one.report_gpu([], [b"1" * 16])
            eventually(lambda: gpu_chunks(agent) == {"one": 0, "two": 1}, "one engine's removal")
            eventually(
                lambda: agent.believed(b"1" * 16) == 1, "the other's placement, whose term a busy agent let lapse"
            )
