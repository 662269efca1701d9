"""Nothing of a part outlives it: processes of its group, and shared memory that only they mapped."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warmroute.fleets import is_alive, until
from warmroute.process_group import SHARED_MEMORY, GroupRemains, end_group, members, remains
from warmroute.processes import Part, Supervisor

GROUP = """
import subprocess, sys, time
from multiprocessing import shared_memory
ours = shared_memory.SharedMemory(create=True, size=4096)
if sys.argv[1] == "leader":
    with subprocess.Popen([sys.executable, "-c", sys.argv[2], "member", sys.argv[2]], stdout=subprocess.PIPE) as member:
        print(ours.name, member.stdout.readline().decode().strip(), flush=True)
        member.wait()
else:
    print(ours.name, flush=True)
    time.sleep(600)
"""
"""Two processes of one group with a segment each."""


def command() -> list[str]:
    return [sys.executable, "-c", GROUP, "leader", GROUP]


@pytest.fixture
def leader() -> Iterator[tuple[subprocess.Popen[bytes], list[Path]]]:
    with subprocess.Popen(command(), stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        names = process.stdout.readline().decode().split()
        seen = remains(process.pid)
        yield process, [SHARED_MEMORY / name for name in names]
        process.kill()
        process.wait()
        end(seen)


def end(seen: GroupRemains) -> None:
    for pause_s in end_group(seen):
        time.sleep(pause_s)


def test_members_are_the_processes_of_the_group_alone(leader: tuple[subprocess.Popen[bytes], list[Path]]) -> None:
    process, _ = leader
    assert process.pid in members(process.pid)
    assert os.getpid() not in members(process.pid)
    assert len(members(process.pid)) >= 2


def test_the_files_that_members_map_are_seen(leader: tuple[subprocess.Popen[bytes], list[Path]]) -> None:
    process, files = leader
    assert len(files) == 2
    assert remains(process.pid).files >= set(files)


def test_when_the_leader_is_killed_the_others_and_all_files_go(
    leader: tuple[subprocess.Popen[bytes], list[Path]],
) -> None:
    process, files = leader
    pids = members(process.pid)
    process.kill()
    process.wait()
    assert any(is_alive(pid) for pid in pids), "a member outlives its leader"
    end(GroupRemains(process.pid))
    assert members(process.pid) == []
    assert not any(is_alive(pid) for pid in pids)
    assert not [file for file in files if file.exists()]


def test_files_go_even_where_everything_was_killed_at_once(leader: tuple[subprocess.Popen[bytes], list[Path]]) -> None:
    """Then no tracker of Python's is left to remove them."""
    process, files = leader
    seen = remains(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not members(process.pid), 30, "all are dead")
    assert all(file.exists() for file in files)
    for _ in end_group(seen):
        raise AssertionError("there is nobody to wait for")
    assert not any(file.exists() for file in files)


def test_files_of_others_stay(leader: tuple[subprocess.Popen[bytes], list[Path]]) -> None:
    process, _ = leader
    with subprocess.Popen(command(), stdout=subprocess.PIPE, start_new_session=True) as other:
        assert other.stdout is not None
        files = [SHARED_MEMORY / name for name in other.stdout.readline().decode().split()]
        process.kill()
        process.wait()
        end(GroupRemains(process.pid))
        assert all(file.exists() for file in files)
        other.kill()
        other.wait()
        end(GroupRemains(other.pid))
        assert not any(file.exists() for file in files)


async def test_a_restarted_part_begins_without_what_its_predecessor_left(tmp_path: Path) -> None:
    own = tmp_path / "staging"
    own.touch()
    supervisor = Supervisor(lambda text: None)
    part = Part("group", command(), tmp_path / "log", leftovers=(own,))
    await supervisor.start(part)
    first = part.pid
    assert first is not None
    try:
        until(lambda: len(part.log_path.read_bytes().split()) == 2, 30, "the group is there")
        files = [SHARED_MEMORY / name for name in part.log_path.read_text().split()]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(30):
            while part.restarts == 0:
                await asyncio.sleep(0.05)
        assert members(first) == []
        assert not any(file.exists() for file in files)
        assert not own.exists()
    finally:
        second = part.pid
        await supervisor.close()
    assert second is not None
    assert members(second) == []
