"""What operators are told of lives: one that can't be begun or renewed, why, and when it is over."""

import logging
from typing import Never

import pytest

from directory.errors import DirectoryError
from tests.nodeagent.publishing import staged


async def refuse(*_: object) -> Never:
    raise DirectoryError("the server refused a call: no permissions")


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[int]:
    return [record.levelno for record in caplog.records if part in record.getMessage()]


async def test_a_registration_that_is_refused_is_said_once_counted_and_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    async with staged() as stage:
        lives = stage.publisher.lives
        with monkeypatch.context() as patched:
            for call in ("register", "renew"):
                patched.setattr(stage.directory, call, refuse)
            stage.publisher.doubt("calendar")
            await stage.time.advance(10)
            assert lives.trouble is not None
            assert "no permissions" in lives.trouble
            assert said(caplog, "doesn't take the registration of host-1") == [logging.WARNING]
            assert stage.sample("warmroute_degraded_total", reason="directory") == 1
            assert stage.sample("warmroute_directory_errors_total", op="register") > 0
        await stage.time.advance(10)
        assert lives.trouble is None
        assert said(caplog, "takes the registration of host-1 again") == [logging.INFO]


async def test_each_new_life_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with staged() as stage:
        stage.directory.flush()
        await stage.time.advance(10)
    begun = [record.getMessage() for record in caplog.records if "host-1 begins the life" in record.getMessage()]
    assert [text.rpartition("reason: ")[2] for text in begun] == ["start", "unknown"]
