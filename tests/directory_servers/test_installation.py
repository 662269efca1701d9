"""The stage's server is installed, or missed in one sentence; nothing is started, and a machine's own policy stays."""

import os
from pathlib import Path

import pytest

from tests.directory_servers import installation

APT_GET = """#!/bin/sh
echo "$1" >> {folder}/asked
[ "$1" = install ] || exit 0
cat {folder}/policy > {folder}/policy-seen
[ "$(grep -c install {folder}/asked)" -ge {works_at} ] && exit 0
echo "E: no such package" >&2
exit 100
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with commands; where Debian's policy is, too."""
    monkeypatch.setenv("PATH", f"{tmp_path}/commands:/bin")
    monkeypatch.setattr(installation, "COMMANDS", ("a-redis-server",))
    monkeypatch.setattr(installation, "SERVICE_POLICY", tmp_path / "policy")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (tmp_path / "commands").mkdir()
    return tmp_path


def put(folder: Path, name: str, text: str) -> None:
    (folder / "commands" / name).write_text(text)
    (folder / "commands" / name).chmod(0o755)


def put_apt_get(folder: Path, works_at: int) -> None:
    put(folder, "apt-get", APT_GET.format(folder=folder, works_at=works_at))


def test_nothing_is_installed_where_the_commands_are(folder: Path) -> None:
    put_apt_get(folder, works_at=1)
    put(folder, "a-redis-server", "#!/bin/sh\n")
    installation.install()
    assert not (folder / "asked").exists()


def test_without_apt_it_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder / "commands"))
    assert installation.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("a-redis-server missing (Debian's packages redis-server, redis-sentinel, redis-tools)")
    assert said.count("\n") == 1


def test_who_is_not_root_is_told_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_apt_get(folder, works_at=1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert installation.main() == 1
    assert "sudo apt-get install redis-server" in capsys.readouterr().err
    assert not (folder / "asked").exists()


def test_a_hiccup_is_forgiven_once_and_no_service_is_started(folder: Path) -> None:
    put_apt_get(folder, works_at=2)
    installation.install()
    assert (folder / "asked").read_text().split() == ["install", "update", "install"]
    assert (folder / "policy-seen").read_text().endswith("exit 101\n")
    assert not (folder / "policy").exists()


def test_what_apt_says_is_passed_on_after_the_second_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_apt_get(folder, works_at=3)
    assert installation.main() == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("apt-get can't install them: E: no such package")


def test_a_machines_own_policy_stays(folder: Path) -> None:
    put_apt_get(folder, works_at=1)
    (folder / "policy").write_text("#!/bin/sh\nexit 0\n")
    installation.install()
    assert (folder / "policy").read_text() == "#!/bin/sh\nexit 0\n"
