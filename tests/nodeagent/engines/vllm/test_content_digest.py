"""A digest is of content, never of a name; what is remembered of a large file counts only while it is that file."""

import hashlib
import os
from pathlib import Path

import pytest

from nodeagent.engines.vllm import content_digest
from nodeagent.engines.vllm.content_digest import ContentUnknown, HashingStopped, file_digest, weights_digest


@pytest.fixture(autouse=True)
def small_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_digest, "EDGE_BYTES", 4)


def model(folder: Path, weights: bytes, settings: bytes = b"{}") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_bytes(settings)
    (folder / "README.md").write_bytes(os.urandom(8))
    return folder


def test_a_files_digest_is_its_contents_whether_remembered_or_not(tmp_path: Path) -> None:
    for content in (b"", b"short", b"a long one " * 100):
        file = tmp_path / "file"
        file.write_bytes(content)
        for _ in range(2):
            assert file_digest(file, tmp_path / "cache") == hashlib.sha256(content).hexdigest()


def test_other_content_of_the_same_size_and_time_is_another_digest(tmp_path: Path) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_bytes(b"head" + b"a" * 100 + b"tail")
    before, status = file_digest(file, cache), file.stat()
    with file.open("r+b") as same:  # the same inode; only ctime tells
        same.seek(50)
        same.write(b"b")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_digest(file, cache) != before


def test_what_is_remembered_is_used_and_damage_of_it_is_not(tmp_path: Path) -> None:
    file, cache = tmp_path / "file", tmp_path / "cache"
    file.write_bytes(b"x" * 1_000)
    true = file_digest(file, cache)
    (entry,) = cache.iterdir()
    entry.write_text("0" * 64)
    assert file_digest(file, cache) == "0" * 64, "it isn't hashed again in this boot"
    entry.write_text("half")
    assert file_digest(file, cache) == true


def test_weights_and_settings_count_and_other_files_and_the_folders_name_do_not(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = weights_digest(model(tmp_path / "a", b"weights" * 9), cache)
    assert weights_digest(model(tmp_path / "b", b"weights" * 9), cache) == first
    assert weights_digest(model(tmp_path / "c", b"Weights" * 9), cache) != first
    assert weights_digest(model(tmp_path / "d", b"weights" * 9, b'{"rope": 2}'), cache) != first


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "modeling_own.py", "params.json", "other.pth"])
def test_what_is_loaded_beside_the_weights_counts(tmp_path: Path, name: str) -> None:
    folder, cache = model(tmp_path / "a", b"weights"), tmp_path / "cache"
    before = weights_digest(folder, cache)
    (folder / name).write_bytes(b"{}")
    assert weights_digest(folder, cache) != before


def test_hashing_stops_within_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_digest, "READ_BYTES", 10)
    folder, asked = model(tmp_path / "a", b"w" * 1_000), iter([False, False, True])
    with pytest.raises(HashingStopped):
        weights_digest(folder, tmp_path / "cache", lambda: next(asked))
    assert not (tmp_path / "cache").exists(), "half a file has no digest"


def test_a_folder_without_weights_or_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ContentUnknown, match="holds no weights"):
        weights_digest(tmp_path / "empty", tmp_path / "cache")
    with pytest.raises(ContentUnknown, match="can't be read"):
        weights_digest(tmp_path / "nowhere", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file")
    file = tmp_path / "file"
    file.write_bytes(b"y" * 1_000)
    assert file_digest(file, tmp_path / "cache") == hashlib.sha256(b"y" * 1_000).hexdigest()
