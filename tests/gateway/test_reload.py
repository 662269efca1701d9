"""A configuration that is read again: checked before it is applied, and only what can change changes."""

import logging

import pytest

from gateway.config import EngineConfig, GatewayConfig, LimitsConfig, RoutingConfig, TimeoutsConfig
from gateway.reload import Rejected, Reload


class Setup:
    def __init__(self) -> None:
        self.next: GatewayConfig | Exception = GatewayConfig()
        self.applied: list[str] = []
        self.counted: list[str] = []
        applied = {"limits": self.apply_limits, "engines": self.apply_engines, "hardware": self.apply_engines}
        self.reload = Reload(GatewayConfig(), self.reread, applied, self.counted.append)

    def reread(self) -> GatewayConfig:
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    def apply_limits(self, config: GatewayConfig) -> None:
        self.applied.append(f"limits {config.limits.body_bytes_max}")

    def apply_engines(self, config: GatewayConfig) -> None:
        self.applied.append(f"engines {[each.url for each in config.engines]}")


def test_what_changed_is_applied_and_in_force() -> None:
    setup = Setup()
    setup.next = GatewayConfig(limits=LimitsConfig(body_bytes_max=2048), engines=(EngineConfig(url="http://a:1"),))
    setup.reload.run()
    assert sorted(setup.applied) == ["engines ['http://a:1']", "limits 2048"]
    assert setup.reload.config == setup.next
    setup.reload.run()
    assert len(setup.applied) == 2, "nothing changed since"
    assert setup.counted == ["ok", "ok"]


def test_a_wrong_one_changes_nothing_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    before = setup.reload.config
    setup.next = Rejected("limits.drain_s: must be a number")
    setup.reload.run()
    assert (setup.applied, setup.counted, setup.reload.config) == ([], ["rejected"], before)
    assert "limits.drain_s: must be a number" in caplog.text


def test_what_needs_a_restart_is_said_and_not_taken_for_in_force(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup()
    setup.next = GatewayConfig(
        limits=LimitsConfig(body_bytes_max=2048),
        routing=RoutingConfig(policy="sticky"),
        timeouts=TimeoutsConfig(idle_s=1),
    )
    with caplog.at_level(logging.WARNING):
        setup.reload.run()
    assert setup.applied == ["limits 2048"]
    assert "changes of timeouts, routing apply after a restart only" in caplog.text
    assert setup.reload.config == GatewayConfig(limits=LimitsConfig(body_bytes_max=2048))
