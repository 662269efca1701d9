"""How large the DRAM tier is, and of what: said once, and shown as it is in force."""

import pytest

from nodeagent.config import GB, AgentConfig, DramConfig
from nodeagent.tiers.arena_memory import ArenaWish
from nodeagent.tiers.machine_memory import MachineMemory
from warmroute.configuration import ConfigurationError, effective, load


def test_a_gigabyte_is_the_default():
    assert DramConfig().quota_bytes == GB
    assert DramConfig().in_force() == {}
    assert DramConfig().wish == ArenaWish("auto", None)


def test_a_share_is_one_of_what_this_process_may_have(monkeypatch):
    monkeypatch.setattr(MachineMemory, "total_bytes", lambda self: 64_000_000_000)
    config = load(AgentConfig, None, {"WARMROUTE_DRAM__SHARE": "0.75"}, {})
    assert config.dram.quota_bytes == 48_000_000_000
    assert "gb: 48.0\n  share: 0.75" in effective(config)


@pytest.mark.parametrize(
    ("dram", "sentence"),
    [
        ({"gb": 1, "share": 0.5}, "dram: gb and share can't both be given"),
        ({"share": 1}, "dram.share: must be less than 1"),
        ({"share": 0}, "dram.share: must be greater than 0"),
        ({"huge_pages": "some"}, "dram.huge_pages: must be 'auto', 'on' or 'off'"),
        ({"huge_pages": 1}, "dram.huge_pages"),
        ({"numa_node": -1}, "dram.numa_node"),
        ({"verify_reads": "perhaps"}, "dram.verify_reads"),
    ],
)
def test_what_can_not_be_is_refused_and_the_field_named(dram, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        load(AgentConfig, None, {}, {"dram": dram})


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_on_and_off_may_be_written_as_yaml_reads_them(tmp_path, written, meant):
    (tmp_path / "agent.yaml").write_text(f"dram: {{huge_pages: {written}}}")
    assert load(AgentConfig, tmp_path / "agent.yaml", {}, {}).dram.huge_pages == meant
