"""Parts are kept running, whoever reads what is said of them, and whatever becomes of their logs."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.warmroute.fleets import is_alive
from warmroute import run_folder
from warmroute.processes import Part, Supervisor

FOREVER = (sys.executable, "-c", "import signal; signal.pause()")


async def restarted(part: Part) -> None:
    async with asyncio.timeout(30):
        while part.restarts != 1 or part.pid is None:
            await asyncio.sleep(0.02)


def deaf(_: str) -> None:
    raise BrokenPipeError


@pytest.mark.parametrize("trouble", ["nobody listens", "the logs are removed", "the logs can't be had"])
async def test_a_part_is_started_again_whatever_becomes_of_texts_and_logs(tmp_path: Path, trouble: str) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    supervisor = Supervisor(deaf if trouble == "nobody listens" else lambda _: None)
    part = Part("part", FOREVER, logs / "part.log")
    await supervisor.start(part)
    try:
        if trouble != "nobody listens":
            shutil.rmtree(logs)
        if trouble == "the logs can't be had":
            logs.write_bytes(b"a file in their place")
        assert part.pid is not None
        os.kill(part.pid, signal.SIGKILL)
        await restarted(part)
        assert is_alive(part.pid)
    finally:
        await supervisor.close()


@pytest.mark.parametrize("content", [b"", b"somebody's lock"])
def test_only_our_own_folders_are_swept(tmp_path: Path, content: bytes) -> None:
    theirs, ours = tmp_path / "warmroute-thesis", tmp_path / "warmroute-abcdef"
    for folder in (theirs, ours):
        folder.mkdir()
        (folder / "text").write_bytes(b"precious")
        (folder / "lock").write_bytes(content)
    (theirs / run_folder.LOCK_NAME).write_bytes(content)
    (ours / run_folder.LOCK_NAME).write_bytes(run_folder.LOCK_CONTENT)
    run_folder.sweep(tmp_path)
    assert (theirs / "text").exists()
    assert not ours.exists()
