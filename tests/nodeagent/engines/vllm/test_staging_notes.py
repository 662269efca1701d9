"""Staging files of engines that ended with their agent go with the next one; those of the living, and others', stay."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeagent.config import AgentConfig
from nodeagent.engines.vllm.process_life import process_life
from nodeagent.engines.vllm.staging_notes import NOTE_SUFFIX, StagingNotes
from tests.nodeagent.engines.vllm.publishing_engine import publishing
from tests.nodeagent.running import connected, eventually, make_hello, running_agent

NAME = "a" * 32


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def notes(tmp_path: Path, shared: Path) -> StagingNotes:
    return StagingNotes(tmp_path / "state", shared)


def staged(shared: Path, name: str = "e1") -> Path:
    file = shared / f"vllm_offload_{name}.mmap"
    file.write_bytes(bytes(4_096))
    return file


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def noted(notes: StagingNotes, file: Path) -> None:
    """As an agent notes it of an engine that is killed then."""
    with process() as engine:
        assert notes.keep(NAME, str(file), engine.pid, process_life(engine.pid))


def test_a_file_of_a_process_that_is_gone_is_removed_with_its_note(
    notes: StagingNotes, shared: Path, tmp_path: Path
) -> None:
    file = staged(shared)
    noted(notes, file)
    assert notes.sweep() == 1
    assert not file.exists()
    assert list((tmp_path / "state").iterdir()) == []
    assert notes.sweep() == 0


def test_a_file_of_a_living_process_stays(notes: StagingNotes, shared: Path) -> None:
    file = staged(shared)
    with process() as engine:
        notes.keep(NAME, str(file), engine.pid, process_life(engine.pid))
        assert notes.sweep() == 0
        assert file.exists()
    assert notes.sweep() == 1


def test_another_process_under_the_same_number_is_another(notes: StagingNotes, shared: Path) -> None:
    file = staged(shared)
    notes.keep(NAME, str(file), os.getpid(), b"the life of who had this number before")
    assert notes.sweep() == 1
    assert not file.exists()


def test_a_file_that_a_successor_has_made_anew_stays(notes: StagingNotes, shared: Path) -> None:
    file = staged(shared)
    noted(notes, file)
    file.rename(shared / "kept, so that its inode isn't given away")
    staged(shared)
    assert notes.sweep() == 0
    assert file.exists()


def test_a_file_that_somebody_has_mapped_stays_until_nobody_has() -> None:
    # On tmpfs, where staging files are: other file systems may tell another device in /proc/PID/maps.
    shared = Path("/dev/shm")
    file = shared / f"vllm_offload_test-{os.getpid()}.mmap"
    state = shared / f"notes-{os.getpid()}"
    file.write_bytes(bytes(4_096))
    notes = StagingNotes(state, shared)
    try:
        noted(notes, file)
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4_096):
            assert notes.sweep() == 0
            assert file.exists()
        assert notes.sweep() == 1
    finally:
        file.unlink(missing_ok=True)
        for each in state.iterdir():
            each.unlink()
        state.rmdir()


def test_only_staging_files_are_noted_and_removed(notes: StagingNotes, shared: Path, tmp_path: Path) -> None:
    other = shared / "precious"
    other.write_bytes(b"x")
    for path in (str(other), str(shared / "vllm_offload_missing.mmap"), "/dev/shm/vllm_offload_\0.mmap", ""):
        assert not notes.keep(NAME, path, 1, b"life")
    noted(notes, staged(shared))
    note = tmp_path / "state" / f"{NAME}{NOTE_SUFFIX}"
    note.write_bytes(note.read_bytes().replace(b"vllm_offload_e1.mmap", b"precious"))
    assert notes.sweep() == 0
    assert other.exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff" * 9, b"[" * 4_000, b'{"path":"\\u0000","device":1,"inode":1,"pid":-1,"life":""}'],
    ids=repr,
)
def test_a_note_that_is_damaged_costs_nothing(notes: StagingNotes, shared: Path, tmp_path: Path, data: bytes) -> None:
    file = staged(shared)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / f"b{NOTE_SUFFIX}").write_bytes(data)
    noted(notes, file)
    assert notes.sweep() == 1


@pytest.fixture
def in_shared_memory() -> Iterator[Path]:
    file = staged(Path("/dev/shm"), f"test-{os.getpid()}")
    yield file
    file.unlink(missing_ok=True)


def test_an_agent_removes_at_its_start_what_an_engine_left_behind(tmp_path: Path, in_shared_memory: Path) -> None:
    state = AgentConfig.model_validate({"host": "h", "door": str(tmp_path / "door.sock")}).state
    noted(StagingNotes(state), in_shared_memory)
    with running_agent(tmp_path):
        eventually(lambda: not in_shared_memory.exists(), "the file goes")


async def test_an_agent_notes_the_file_of_an_engine_that_is_attached_and_leaves_it_while_it_lives(
    tmp_path: Path, in_shared_memory: Path
) -> None:
    async with publishing() as engine:
        hello = make_hello(events=replace(engine.source, staging_path=str(in_shared_memory)))
        for _ in range(2):
            with running_agent(tmp_path) as agent, connected(agent.config.door, hello):
                eventually(lambda: list(agent.config.state.glob(f"*{NOTE_SUFFIX}")), "the note")
        assert in_shared_memory.exists()
