"""`warmroute doctor` at a fleet of `warmroute up`: right while all is well, not where a part hangs or a flag is odd."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.warmroute.doctor_parts import Report, doctor
from tests.warmroute.fleets import RunningFleet, directory_url, running_fleet, until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WARMROUTE_FILES_FOLDER", str(tmp_path / "files"))
    return


def examine(fleet: RunningFleet, *words: str) -> Report:
    return doctor("--gateway", fleet.url, "--directory", directory_url(fleet.parts()["gateway"]), *words)


def test_a_fleet_is_right_and_an_agent_that_hangs_is_found(tmp_path: Path) -> None:
    with running_fleet(tmp_path) as fleet:
        report = examine(fleet)
        assert [each for each in report.findings if each["verdict"] == "wrong"] == []
        assert report.status == 0
        assert len(report.of("cache", "right")) == 4
        assert "17 requests compared" in report.words("ids", "right", "engine-2")
        quick = ("--only", "identities", "--only", "gateway")
        agent = fleet.parts()["host-1"]
        os.kill(agent, signal.SIGSTOP)
        try:
            until(lambda: "lapsed" in examine(fleet, *quick).words("identities", subject="host-1"), 30, "it is found")
            assert "whether its agent runs" in examine(fleet, *quick).words("identities", subject="host-1")
        finally:
            os.kill(agent, signal.SIGCONT)
        until(lambda: examine(fleet, *quick).status == 0, 60, "all is right again")


def test_a_fleet_that_keeps_nothing_is_found(tmp_path: Path) -> None:
    with running_fleet(tmp_path, "--no-cache", engines=1) as fleet:
        report = examine(fleet, "--only", "cache")
        assert report.status == 1
        assert "turn prefix caching on" in report.words("cache", subject="engine-1")
