"""What an agent is told about peers: off until there is a token, whole or refused, and its secret never shown."""

import re
import socket
import ssl
from pathlib import Path

import pytest
import yaml

import nodeagent
from nodeagent.config import AgentConfig, PeersConfig
from nodeagent.errors import PeersUnavailable
from nodeagent.hints import PeerHint, read_address
from nodeagent.metrics import AgentMetrics
from nodeagent.peers.exchange import PeerExchange
from tests.directory.certificates import make_certificate
from warmroute.configuration import ConfigurationError, effective, load

TOKEN = "0123456789abcdef" * 4


def loaded(folder, text, environment=None):
    path = folder / "agent.yaml"
    path.write_text(text)
    return load(AgentConfig, path, environment or {}, {})


def test_peers_are_off_until_there_is_a_token(tmp_path):
    off = loaded(tmp_path, "")
    assert (off.peers.may_fetch, off.peers.listen.port) == (False, None)
    assert yaml.safe_load(effective(off))["peers"]["fetch"] == "off"
    on = loaded(tmp_path, "", {"WARMROUTE_PEERS__TOKEN": TOKEN})
    assert on.peers.may_fetch
    assert yaml.safe_load(effective(on))["peers"]["fetch"] == "auto"
    assert not loaded(tmp_path, f"peers: {{token: {TOKEN}, fetch: 'off'}}").peers.may_fetch


def test_the_token_is_never_shown(tmp_path):
    config = loaded(tmp_path, f"peers: {{token: {TOKEN}, listen: {{port: 8301, bind: 10.0.0.7}}}}")
    shown = effective(config)
    assert yaml.safe_load(shown)["peers"]["token"] == "***"
    assert TOKEN not in shown + repr(config)


@pytest.mark.parametrize(
    ("peers", "says"),
    [
        ("{listen: {port: 1}}", "peers: token must be given with listen.port"),
        ("{fetch: auto}", "peers: token must be given with fetch auto"),
        ("{fetch: always}", "peers.fetch: must be 'auto' or 'off'"),
        ("{token: short}", "peers.token: a token is a text of 32 to 512"),
        ("{token: 'redis://with-a-scheme-that-would-be-shown'}", "peers.token: a token is a text of 32 to 512"),
        (f"{{token: {'7' * 40}}}", "peers.token: a token is a text of 32 to 512"),
        (f"{{token: {TOKEN}, listen: {{port: 1, bind: 0.0.0.0}}}}", "address must be given with bind 0.0.0.0"),
        (f"{{token: {TOKEN}, listen: {{port: 1, address: nowhere}}}}", "peers.listen.address: an address is host:port"),
        (f"{{token: {TOKEN}, listen: {{address: 'a:1'}}}}", "peers.listen: port must be given with address"),
        (f"{{token: {TOKEN}, tls: {{cert: c}}}}", "peers.tls: cert and key must be given together"),
        (f"{{token: {TOKEN}, tls: {{cert: c, key: k}}}}", "peers.tls: ca must be given with cert"),
        (f"{{token: {TOKEN}, tls: {{ca: c}}, listen: {{port: 1}}}}", "peers: tls.cert and tls.key must be given"),
    ],
)
def test_what_is_not_whole_is_refused_by_name_and_without_the_secret(tmp_path, peers, says):
    with pytest.raises(ConfigurationError) as refused:
        loaded(tmp_path, f"peers: {peers}")
    assert says in str(refused.value)
    assert TOKEN not in str(refused.value)
    assert "7777" not in str(refused.value)


def exchange(**fields):
    return PeerExchange(PeersConfig.model_validate({"token": TOKEN} | fields), AgentMetrics())


@pytest.mark.parametrize(("bind", "shown"), [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:")])
def test_the_address_is_the_one_that_is_bound_or_the_one_that_is_given(bind, shown):
    if bind == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with exchange(listen={"port": 0, "bind": bind}) as bound:
        assert bound.address.startswith(shown)
        assert str(read_address(bound.address)) == bound.address
    with exchange(listen={"port": 0, "address": "gpu-07:8301"}) as named:
        assert named.address == "gpu-07:8301"
    with exchange() as none:
        assert none.address is None


def test_a_port_that_is_taken_is_an_error_that_names_it():
    with exchange(listen={"port": 0}) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(PeersUnavailable, match=f"port {port}: Address already in use"):
            exchange(listen={"port": port}).__enter__()


def test_certificates_that_cannot_be_read_are_an_error(tmp_path):
    certificate = make_certificate(tmp_path, "agent")
    (tmp_path / "noise.pem").write_bytes(b"noise")
    ca, key, noise = str(certificate.certificate), str(certificate.key), str(tmp_path / "noise.pem")
    for tls in ({"ca": str(tmp_path / "none")}, {"ca": noise}, {"ca": ca, "cert": noise, "key": key}):
        with pytest.raises(PeersUnavailable, match=r"peers\.tls\.(ca|cert and key): .* can't be used"):
            exchange(tls=tls).__enter__()
    with exchange(tls={"ca": ca, "cert": ca, "key": key}) as whole:
        assert isinstance(whole._serving, ssl.SSLContext)


def test_hints_where_nothing_is_fetched_are_counted():
    given = PeerHint(read_address("a:1"), (b"k" * 16,))
    with exchange(fetch="off") as off:
        assert (off.prefetch(given), off.cancel(given), off.rates()) == (0, 0, {})
        assert off._metrics.registry.get_sample_value("warmroute_peer_hints_refused_total", {"reason": "off"}) == 1


def test_the_example_for_operators_is_a_configuration_and_its_metrics_are_there(tmp_path):
    page = (Path(nodeagent.__file__).parent / "PEERS.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1].replace("0f5c…", TOKEN)
    config = loaded(tmp_path, example)
    assert (config.peers.listen.port, config.peers.may_fetch) == (8301, True)
    named = set(re.findall(r"warmroute_[a-z_]+", page))
    there = {sample.name for family in AgentMetrics().registry.collect() for sample in family.samples}
    families = {family.name for family in AgentMetrics().registry.collect()}
    assert not {name for name in named if name not in there and name.removesuffix("_total") not in families}
    assert len(named) == 6
