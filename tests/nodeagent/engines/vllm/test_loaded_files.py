"""What was there before the engine began, unchanged, is what it loaded; all else is refused and said by name."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.vllm import description
from nodeagent.engines.vllm.content_digest import ContentUnknown
from nodeagent.engines.vllm.description import loaded_weights_digest
from nodeagent.engines.vllm.loaded_files import LOCAL_MARGIN_S, LoadedFiles, process_started_at

TICK_S = 0.001


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model behind a link: models/link -> real/model."""
    folder = tmp_path / "real" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "link").symlink_to("../real/model")
    other = tmp_path / "real" / "other"
    shutil.copytree(folder, other)
    return tmp_path / "models" / "link"


def begun_after(path: Path) -> LoadedFiles:
    """As of an engine that began as soon after everything below `path` as may be."""
    newest = max(os.lstat(each).st_ctime for each in [path, *path.rglob("*"), path.parent])
    return loaded(newest + LOCAL_MARGIN_S + TICK_S)


def loaded(started_at: float) -> LoadedFiles:
    """As of an engine that began then, with all of this host's files on its own clock."""
    place = Path(tempfile.gettempdir())
    return LoadedFiles(started_at, frozenset(os.stat(each).st_dev for each in (place, *place.parents)))


def later_than(path: Path, started_at: float) -> None:
    """Let the file system's clock pass; it is coarse."""
    probe = path / "probe"
    while True:
        probe.write_bytes(b"")
        at = probe.stat().st_ctime
        probe.unlink()
        if at > started_at:
            return


def digest(link: Path, files: LoadedFiles) -> str:
    return loaded_weights_digest(link, None, link.parent / "cache", files, lambda: False)


def turn(link: Path) -> None:
    link.with_name("new").symlink_to("../real/other")
    os.replace(link.with_name("new"), link)


def replace_file(link: Path) -> None:
    copy = link.resolve().parent / "copy"
    shutil.copy2(link / "model.safetensors", copy)
    os.replace(copy, link / "model.safetensors")


def write_within(link: Path) -> None:
    file = link / "model.safetensors"
    times = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def add_file(link: Path) -> None:
    (link / "model-2.safetensors").write_bytes(b"more")


def swap_folders(link: Path) -> None:
    real = link.resolve().parent
    (real / "model").rename(real / "away")
    (real / "other").rename(real / "model")


def swap_folders_above(link: Path) -> None:
    real = link.resolve().parent
    shutil.copytree(real, real.with_name("new"))
    real.rename(real.with_name("away"))
    real.with_name("new").rename(real)


CHANGES = [turn, replace_file, write_within, add_file, swap_folders, swap_folders_above]


def test_what_is_older_than_the_engine_is_hashed(model: Path, tmp_path: Path) -> None:
    assert len(digest(model, begun_after(tmp_path))) == 64


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changed_since_the_engine_began_is_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    started_at = time.time() + LOCAL_MARGIN_S / 10
    later_than(tmp_path, started_at)
    change(model)
    with pytest.raises(ContentUnknown, match="Restart the engine"):
        digest(model, loaded(started_at + LOCAL_MARGIN_S))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_while_it_is_hashed_is_refused(
    model: Path, tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = loaded(time.time() + 1_000)  # as of a clock that was set wrong: nothing seems to be new
    whole = description.weights_digest

    def hash_and_change(*given: Any) -> str:
        found = whole(*given)
        change(model)
        return found

    monkeypatch.setattr(description, "weights_digest", hash_and_change)
    with pytest.raises(ContentUnknown, match="changed while it was hashed"):
        digest(model, files)


def test_a_folder_above_may_get_entries(model: Path, tmp_path: Path) -> None:
    quiet = tmp_path / "real"
    started_at = time.time() + LOCAL_MARGIN_S / 10
    later_than(tmp_path / "models", started_at)
    (quiet / "stranger").mkdir()
    assert len(digest(quiet / "model", loaded(started_at + LOCAL_MARGIN_S))) == 64


def test_a_folder_above_may_get_entries_while_files_are_hashed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, whole = begun_after(tmp_path), description.weights_digest

    def hash_and_change(*given: Any) -> str:
        found = whole(*given)
        later_than(tmp_path / "real", time.time())
        (tmp_path / "real" / "stranger").mkdir()
        return found

    monkeypatch.setattr(description, "weights_digest", hash_and_change)
    assert len(digest(model.resolve(), files)) == 64


def test_a_file_servers_clock_has_a_wider_margin(model: Path, tmp_path: Path) -> None:
    started_at = max(os.lstat(each).st_ctime for each in tmp_path.rglob("*")) + 10
    with pytest.raises(ContentUnknown, match="Restart the engine 300 s after"):
        digest(model, LoadedFiles(started_at, frozenset()))


def test_links_that_lead_round_in_a_circle_are_said(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ContentUnknown, match="too many links"):
        loaded(time.time() + 1_000).seen(tmp_path / "a", [])


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    assert before - 86_400 < process_started_at() < before
    assert abs(process_started_at() - process_started_at()) < 1
