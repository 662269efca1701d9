"""Digests of a model's files by their content, so that a name never stands for bytes.

A large file is hashed once per boot of the host: the digest is kept under its device, inode, size, mtime and ctime and
the host's boot id. Because reproducible images give equal sizes and mtimes, its first and last MiB are hashed afresh
each time and belong to what must be equal.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SETTINGS_FILES = ("config.json", "params.json", "quantize_config.json", "hf_quant_config.json")
SETTINGS_SUFFIXES = (".index.json", ".py")
"""What shapes the computation beside the weights: settings, which of the files are loaded, and the model's own code."""
EDGE_BYTES = 1 << 20
READ_BYTES = 8 << 20
THREADS = 8


class ContentUnknown(Exception):
    """A model's files can't be read, or there are none; the message says which."""


class HashingStopped(Exception):
    """The engine ends; the digest isn't wanted any more."""


def digests_folder() -> Path:
    """Where digests of large files are kept: `$XDG_CACHE_HOME/warmroute/digests`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "warmroute" / "digests"


def model_files(folder: Path) -> list[Path]:
    """The weight and settings files of a model's folder, by name. Raises `ContentUnknown` without weights."""
    files = sorted(path for path in _files(folder) if _shapes_kv(path))
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise ContentUnknown(f"{folder} holds no weights ({', '.join(WEIGHT_SUFFIXES)})")
    return files


def weights_digest(folder: Path, cache: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Hex sha256 over names and content digests of a model's files. Raises `ContentUnknown`, `HashingStopped`."""
    files = model_files(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda path: file_digest(path, cache, is_stopped), files))
    whole = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        whole.update(f"{path.name}\0{digest}\n".encode())
    return whole.hexdigest()


def file_digest(path: Path, cache: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Hex sha256 of a file's content, from `cache` where the file is known to be the same since this boot.

    Asks `is_stopped` before each block of `READ_BYTES`, and raises `HashingStopped`.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size <= 2 * EDGE_BYTES:
                return hashlib.sha256(file.read()).hexdigest()
            edges = hashlib.sha256(file.read(EDGE_BYTES))
            file.seek(-EDGE_BYTES, os.SEEK_END)
            edges.update(file.read(EDGE_BYTES))
            named = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, _boot())
            entry = cache / hashlib.sha256(json.dumps([*named, edges.hexdigest()]).encode()).hexdigest()
            with contextlib.suppress(OSError):
                known = entry.read_text()
                if len(known) == 2 * hashlib.sha256().digest_size:
                    return known
            file.seek(0)
            whole = hashlib.sha256()
            while data := file.read(READ_BYTES):
                if is_stopped():
                    raise HashingStopped
                whole.update(data)
    except OSError as error:
        raise ContentUnknown(f"{path} can't be read: {error.strerror}") from error
    _keep(entry, whole.hexdigest())
    return whole.hexdigest()


def _shapes_kv(path: Path) -> bool:
    return path.suffix in WEIGHT_SUFFIXES or path.name in SETTINGS_FILES or path.name.endswith(SETTINGS_SUFFIXES)


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise ContentUnknown(f"the model's folder {folder} can't be read: {error.strerror}") from error


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.urandom(16).hex()


def _keep(entry: Path, digest: str) -> None:
    """A cache that can't be written costs time at the next start, nothing else."""
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = entry.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(digest)
        temporary.replace(entry)
