"""The cache of files on disk: bounded, shared, and harmless whatever lies in it."""

import asyncio
import errno
import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.encoding import files as files_module
from gateway.encoding.file_cache import LEFTOVER_S, FileCache
from gateway.encoding.files import FILE_BYTES_MAX, FileUnavailable, TokenizerFiles

CONTENT = b"the content"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
AGENT = "http://agent:1"


class Fetching:
    """Files from a folder, or from an agent that has them all; what was damaged is counted."""

    def __init__(self, folder: Path) -> None:
        self.fetches = self.damaged = 0
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.files = TokenizerFiles(folder, client, self._note)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.fetches += 1
        return httpx.Response(200, content=CONTENT)

    def _note(self) -> None:
        self.damaged += 1


def a_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def other_content(path: Path) -> None:
    path.write_bytes(b"bit rot")


def endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)


def nothing(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize("put", [a_link, a_link_to_itself, a_pipe, other_content, endless, nothing])
async def test_what_is_wrong_in_the_folder_is_fetched_anew_replaced_and_counted(tmp_path: Path, put: object) -> None:
    put(tmp_path / DIGEST)  # type: ignore[operator]
    fetching = Fetching(tmp_path)
    async with asyncio.timeout(10):
        assert await fetching.files.get(DIGEST, [AGENT]) == CONTENT
    assert (fetching.fetches, fetching.damaged) == (1, 1)
    assert not (tmp_path / DIGEST).is_symlink()
    assert (tmp_path / DIGEST).read_bytes() == CONTENT
    assert await fetching.files.get(DIGEST, []) == CONTENT
    assert (fetching.fetches, fetching.damaged) == (1, 1)


async def test_a_link_is_not_followed_though_it_leads_to_the_right_content(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(CONTENT)
    (tmp_path / DIGEST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileUnavailable):
        await Fetching(tmp_path).files.get(DIGEST, [])


@pytest.mark.parametrize("digest", ["../secret", "/etc/hostname", "", "a" * 63, "A" * 64, "a" * 65, ".."])
async def test_what_is_no_digest_is_neither_a_path_nor_a_url(tmp_path: Path, digest: str) -> None:
    (tmp_path / "secret").write_bytes(b"a secret")
    fetching = Fetching(tmp_path / "files")
    with pytest.raises(FileUnavailable, match="sha256"):
        await fetching.files.get(digest, [AGENT])
    assert fetching.fetches == 0


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
async def test_a_folder_that_takes_nothing_costs_a_fetch_and_keeps_no_half_file(
    tmp_path: Path, fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(fault, "on purpose")

    monkeypatch.setattr(os, "replace", refuse)
    fetching = Fetching(tmp_path)
    for number in range(2):
        assert await fetching.files.get(DIGEST, [AGENT]) == CONTENT
        assert fetching.fetches == number + 1
    assert list(tmp_path.iterdir()) == []


async def test_an_agent_that_sends_for_ever_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "FETCH_BOUND_S", 0.05)

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.005)

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=drip()))
    async with asyncio.timeout(10), httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(FileUnavailable, match="TimeoutError"):
            await TokenizerFiles(tmp_path, client).get(DIGEST, [AGENT])


async def test_what_is_held_here_needs_neither_folder_nor_agent(tmp_path: Path) -> None:
    fetching = Fetching(tmp_path)
    assert await fetching.files.hold("me", {"a": CONTENT}) == {"a": DIGEST}
    assert await fetching.files.get(DIGEST, []) == CONTENT
    await fetching.files.hold("me", {})
    with pytest.raises(FileUnavailable):
        await fetching.files.get(DIGEST, [])


names = st.sampled_from([format(number, "x") * 64 for number in range(8)])


@given(st.lists(st.tuples(names, st.integers(0, 120), st.booleans()), max_size=30))
@settings(max_examples=40, deadline=None)
def test_the_folder_stays_within_its_bound_and_the_latest_stays(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    caches = FileCache(folder, bytes_max=300), FileCache(folder, bytes_max=300)
    for number, (name, size, is_other) in enumerate(steps):
        cache = caches[is_other]
        if cache.read(name, 1000) is None:
            cache.write(name, bytes(size))
        assert len(cache.read(name, 1000) or b"") <= size or (folder / name).exists()
        os.utime(folder / name, (number, number))  # the order of use, without waiting for the clock
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 300


def test_the_longest_unused_goes_first_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, bytes_max=250)
    (tmp_path / "notes.txt").write_bytes(bytes(1000))
    (tmp_path / ("d" * 64)).mkdir()
    for age, letter in enumerate("cab"):
        cache.write(letter * 64, bytes(80))
        os.utime(tmp_path / (letter * 64), (age, age))
    assert cache.read("c" * 64, 1000) == bytes(80), "a use, now"
    cache.write("e" * 64, bytes(80))
    kept = {path.name[0] for path in tmp_path.iterdir()}
    assert kept == {"n", "d", "c", "b", "e"}


def test_leftovers_of_a_writer_that_died_go_and_those_of_one_that_writes_stay(tmp_path: Path) -> None:
    (tmp_path / ".new-old").touch()
    (tmp_path / ".new-now").touch()
    then = time.time() - LEFTOVER_S - 10
    os.utime(tmp_path / ".new-old", (then, then))
    FileCache(tmp_path).write("a" * 64, b"x")
    assert {path.name for path in tmp_path.iterdir()} == {".new-now", "a" * 64}
