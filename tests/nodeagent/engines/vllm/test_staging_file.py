"""What a killed engine leaves in shared memory goes, and nothing else does."""

from pathlib import Path

import pytest

from nodeagent.engines.vllm.staging_file import remove_staging_file, staging_path


def test_the_name_is_vllms() -> None:
    assert staging_path("abc") == "/dev/shm/vllm_offload_abc.mmap"


def test_a_dead_engines_file_is_removed_once(tmp_path: Path) -> None:
    file = tmp_path / "vllm_offload_abc.mmap"
    file.write_bytes(b"rows")
    assert remove_staging_file(str(file), tmp_path)
    assert not file.exists()
    assert not remove_staging_file(str(file), tmp_path)


@pytest.mark.parametrize(
    "name", ["other.mmap", "vllm_offload_abc", "below/vllm_offload_abc.mmap", "vllm_offload_/x.mmap"]
)
def test_what_isnt_one_is_left_alone(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"")
    assert not remove_staging_file(str(file), tmp_path)
    assert file.exists()


def test_a_link_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"")
    link = tmp_path / "vllm_offload_abc.mmap"
    link.symlink_to(target)
    assert not remove_staging_file(str(link), tmp_path)
    assert target.exists()
