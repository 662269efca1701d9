"""vLLM's installation where its registry has none: a virtual environment of its own, which isn't the installed one."""

import os
import subprocess
from pathlib import Path

import pytest

from warmroute.vllm import installation
from warmroute.vllm.installation import InstallationError, home_folder, install


def test_a_registry_without_vllm_is_told_by_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real steps: a venv, and a pip that finds nothing."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(installation, "TRIES_MAX", 1)
    with pytest.raises(InstallationError, match=r"No matching distribution found for torch==2.13.0\+cpu"):
        install(gguf, [].append, tmp_path)
    log = (home_folder(tmp_path) / "install.log").read_text()
    assert "pip install" in log
    assert subprocess.run([home_folder(tmp_path) / "venv" / "bin" / "python", "--version"], check=True)
