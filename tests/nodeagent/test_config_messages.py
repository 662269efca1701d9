"""What an operator is told of a value that an agent can't have: the field, what was written, what would be right."""

import pytest

from nodeagent.config import AgentConfig
from nodeagent.errors import PeersUnavailable
from nodeagent.metrics import AgentMetrics
from nodeagent.peers.exchange import PeerExchange
from warmroute.configuration import ConfigurationError, load

KEY = "1" * 32
TOKEN = "0123456789abcdef" * 4


def loaded(folder, text, environment=None):
    path = folder / "agent.yaml"
    path.write_text(text)
    return load(AgentConfig, path, environment or {}, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dram: {gb: 64GB}", "dram.gb: must be a number, without a unit, not 64GB"),
        ("dram: {share: 50%}", "dram.share: must be a number, without a unit, not 50%"),
        ("dram: {gb: }", "dram.gb: must be a number"),
        ("dram: {numa_node: near}", "dram.numa_node: must be a whole number, without a unit, not near"),
        ("dram: {numa_node: 0.5}", "dram.numa_node: must be a whole number"),
        ("dram: {verify_reads: maybe}", "dram.verify_reads: must be true or false, not maybe"),
        (f"dram: {{gb: {'9' * 50}x}}", "dram.gb: must be a number, without a unit"),
        ("nvme: {path: /b, gb: 1, pinned: [xyz]}", "nvme.pinned.0: a directory key is 32 hex digits"),
        (f"nvme: {{path: /b, gb: 1, pinned: [{KEY}]}}", "nvme.pinned.0: must be a text: put it in quotes"),
        (
            "nvme: {paths: [{path: /b/c, gb: 1}, {path: /b, gb: 1}]}",
            "nvme: paths names /b/c, which lies in /b; each drive has a folder of its own",
        ),
        ("peers: {fetch: on}", "peers.fetch: must be 'auto' or 'off'"),
        ("listen: {admin_token: 12345678123456781}", "listen.admin_token: must be a text: put it in quotes"),
    ],
)
def test_a_wrong_value_is_told_in_one_sentence(tmp_path, text, says):
    with pytest.raises(ConfigurationError) as refused:
        loaded(tmp_path, text)
    assert str(refused.value) == says


def test_a_token_of_digits_is_asked_for_in_quotes_and_not_repeated(tmp_path):
    with pytest.raises(ConfigurationError, match="one of digits only is put in quotes") as refused:
        loaded(tmp_path, f"peers: {{token: {KEY}}}")
    assert KEY not in str(refused.value)


def test_neighbours_of_like_names_are_two_drives(tmp_path):
    assert len(loaded(tmp_path, "nvme: {paths: [{path: /b, gb: 1}, {path: /bc, gb: 1}]}").nvme.drives) == 2


def test_peers_off_may_be_written_as_yaml_reads_it(tmp_path):
    assert not loaded(tmp_path, f"peers: {{token: {TOKEN}, fetch: off}}").peers.may_fetch


def test_lists_in_variables_are_json():
    environment = {
        "WARMROUTE_NVME__PATHS": '[{"path": "/a", "gb": 1}, {"path": "/b", "gb": 2}]',
        "WARMROUTE_NVME__PINNED": f'["{KEY}"]',
    }
    nvme = load(AgentConfig, None, environment, {}).nvme
    assert [drive.quota_bytes for drive in nvme.drives] == [1_000_000_000, 2_000_000_000]
    assert nvme.pinned == (KEY,)


def test_a_certificate_that_is_not_there_is_named(tmp_path):
    gone = tmp_path / "gone.pem"
    config = loaded(tmp_path, f"peers: {{token: {TOKEN}, tls: {{ca: {gone}}}}}")
    with pytest.raises(PeersUnavailable, match=f"peers.tls.ca: {gone} can't be used: No such file"):
        PeerExchange(config.peers, AgentMetrics()).__enter__()
