"""Real file systems of a test's own: small ones, broken ones. Mounting needs privileges; without them tests skip."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def command(*words: str) -> bool:
    """Whether a command could be run and ended well."""
    try:
        return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """`mount OPTIONS folder`, unmounted in the end whatever still uses it."""
    folder.mkdir()
    if not command("mount", *options, str(folder)):
        pytest.skip(f"mount {' '.join(options)} needs privileges that aren't here")
    try:
        yield folder
    finally:
        assert command("umount", "--lazy", str(folder))


@contextmanager
def image_mounted(folder: Path, size_bytes: int) -> Iterator[Path]:
    """An ext4 file system in a file beside the folder, `folder.img`, without blocks reserved for root."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    if not command("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)):
        pytest.skip("mkfs.ext4 isn't here")
    with mounted(folder, "-t", "ext4", "-o", "loop", str(image)):
        folder.chmod(0o700)
        yield folder
