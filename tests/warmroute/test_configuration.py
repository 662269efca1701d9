"""Configuration: strict, documented, from file, variables and flags in that order, and never showing a secret."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import GatewayConfig
from nodeagent.config import AgentConfig
from warmroute.cli import main
from warmroute.configuration import ConfigurationError, effective, fields, load, without_password
from warmroute.configuration_page import PARTS, page


def loaded(tmp_path: Path, text: str, name: str = "g.yaml", environment: Any = None, **flags: Any) -> GatewayConfig:
    path = tmp_path / name
    path.write_text(text)
    dotted = {key.replace("__", "."): value for key, value in flags.items()}
    return load(GatewayConfig, path, environment or {}, dotted)


YAML = "listen: {port: 9000}\nengines:\n  - url: http://e:1/\n  - {url: 'https://f:2', name: mine, models: [m]}\n"
TOML = """
[listen]
port = 9000
[[engines]]
url = "http://e:1/"
[[engines]]
url = "https://f:2"
name = "mine"
models = ["m"]
"""


def test_yaml_and_toml_say_the_same(tmp_path: Path) -> None:
    config = loaded(tmp_path, YAML)
    assert config == loaded(tmp_path, TOML, "g.toml")
    assert config.listen.admin == 9001
    assert [engine.engine for engine in config.engines] == ["e:1", "mine"]


def test_variables_stand_above_the_file_and_flags_above_both(tmp_path: Path) -> None:
    environment = {"WARMROUTE_LISTEN__PORT": "9100", "WARMROUTE_LIMITS__DRAIN_S": "2.5", "OTHER": "x"}
    assert loaded(tmp_path, YAML, environment=environment).listen.port == 9100
    assert loaded(tmp_path, YAML, environment=environment).limits.drain_s == 2.5
    assert loaded(tmp_path, YAML, environment=environment, listen__port=9200).listen.port == 9200
    assert loaded(tmp_path, YAML, listen__port=None).listen.port == 9000
    engines = {"WARMROUTE_ENGINES": '[{"url": "http://g:3"}]'}
    assert [engine.url for engine in loaded(tmp_path, YAML, environment=engines).engines] == ["http://g:3"]


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, "") == GatewayConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("listne: {port: 1}", "listne is not known; did you mean listen?"),
        ("listen: {prot: 1}", "listen.prot is not known; did you mean listen.port?"),
        ("engines: [{ulr: x, url: 'http://e:1'}]", "engines.0.ulr is not known; did you mean engines.url?"),
        ("listen: {port: 0}", "listen.port"),
        ("listen: {port: many}", "listen.port"),
        ("listen: {port: 9, admin_port: 9}", "admin_port must differ from port (9)"),
        ("listen: {port: 65535}", "admin_port must be given"),
        ("timeouts: {first_byte_s: 1}", "must not be below connect_s"),
        ("engines: [{url: 'ftp://e'}]", "engines.0.url: must be http://host:port"),
        ("engines: [{url: 'http://e:1/v1'}]", "without /v1"),
        ("engines: [{url: 'http://e:1'}, {url: 'http://e:1'}]", "two engines are named 'e:1'"),
        ("[1, 2]", "must hold keys and values"),
        ("listen: 5", "listen: must hold keys and values"),
        ("engines: {url: 'http://e:1'}", "engines: must be a list"),
        ("engines: ['http://e:1']", "engines.0: must hold keys and values"),
        ("engines: [{name: e}]", "engines.0.url: must be given"),
        ("a: b: c", "g.yaml, line 1, column 5: "),
        ("listen: {port: 9}\nlisten: {bind: h}", "line 2, column 1: the key listen is written twice"),
        ("[" * 5000, "nested too deep"),
        ("log_level: 2024-13-45", "month must be in"),
        ("listen: {port: " + "9" * 5000 + "}", "g.yaml"),
        ("limits: {drain_s: .inf}", "limits.drain_s"),
        ("engines: [{url: 'http://h:99999'}]", "engines.0.url"),
        ("engines: [{url: 'http://a b'}]", "engines.0.url"),
        ('engines: [{url: "http://a:1", name: "a\\nb"}]', "engines.0.name: must be 1 to 200 printable characters"),
        ("engines: [{url: 'http://a:1', name: ''}]", "engines.0.name"),
        ('engines: [{url: "http://a:1", api_key: "a\\nb"}]', "engines.0.api_key: must be printable ASCII"),
        (
            "engines: [{url: 'http://e:1', shape: llama-3-8b}]",
            "no model is known as 'llama-3-8b'; did you mean llama-3",
        ),
        ("engines: [{url: 'http://e:1', accelerator: H100}]", "known as 'H100'; did you mean h100?"),
        ("hardware: {models: [{name: m, parameters: 0}]}", "hardware.models.0.parameters"),
        ("hardware: {accelerators: [{name: a}]}", "hardware.accelerators.0.tflops: must be given"),
        ("log_level: loud", "log_level: must be 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        loaded(tmp_path, text)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WARMROUTE_LISTEN__PROT": "1"}, "WARMROUTE_LISTEN__PROT is not known; did you mean WARMROUTE_LISTEN__PORT?"),
        ({"WARMROUTE_ENGINES": "[1"}, "engines is not valid JSON"),
        ({"WARMROUTE_ENGINES": "http://e:1"}, "engines: must be a list; in a variable, JSON"),
        ({"WARMROUTE_LISTEN__PORT": "x"}, "listen.port"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says.replace("?", r"\?")):
        loaded(tmp_path, "", environment=environment)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml can't be read"):
        load(GatewayConfig, tmp_path / "nowhere.yaml", {}, {})


def test_every_field_is_documented() -> None:
    for part, kind in PARTS.items():
        names = [name for name, _ in fields(kind)]
        for name, field in fields(kind):
            is_section = any(other.startswith(f"{name}.") for other in names)
            assert is_section or field.description, (part, name)


def test_check_prints_what_is_in_force_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text("directory: {url: 'redis://me:hunter2@r:1/0'}\nengines: [{url: 'http://e:1', api_key: hunter3}]\n")
    command = [sys.executable, "-m", "warmroute.cli", "gateway", "--config", str(path), "--check", "--port", "9000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "hunter" not in done.stdout
    shown = yaml.safe_load(done.stdout)
    assert shown["directory"]["url"] == "redis://me:***@r:1/0"
    assert shown["engines"][0]["api_key"] == "***"
    assert shown["listen"]["port"] == 9000


def test_the_page_is_what_the_fields_say() -> None:
    written = (Path(__file__).parents[2] / "CONFIGURATION.md").read_text()
    assert written == page(), "run make docs"


def test_what_check_prints_can_be_read_again(tmp_path: Path) -> None:
    config = loaded(tmp_path, YAML)
    assert effective(loaded(tmp_path, effective(config))) == effective(config)
    assert yaml.safe_load(effective(config))["listen"]["admin_port"] == 9001


def test_a_wrong_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text("listen: {prot: 1}")
    command = [sys.executable, "-m", "warmroute.cli", "gateway", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "warmroute gateway: the key listen.prot is not known; did you mean listen.port?\n"


AGENT_YAML = """
host: gpu-07
door: /tmp/door.sock
directory: {url: 'redis://:hunter2@r:1'}
dram: {gb: 48}
nvme: {path: /mnt/kv, gb: 1500, write: through}
"""


def test_an_agent_is_configured_by_file_variables_and_flags_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(AGENT_YAML)
    config = load(AgentConfig, path, {"WARMROUTE_DRAM__GB": "64"}, {"nvme.gb": 0.5})
    assert config.host == "gpu-07"
    assert config.dram.quota_bytes == 64_000_000_000
    assert config.nvme.quota_bytes == 500_000_000
    assert config.nvme.path == Path("/mnt/kv")
    assert yaml.safe_load(effective(config))["state_folder"] == "/tmp/door.sock.state"


@pytest.mark.parametrize("part", ["agent", "directory"])
def test_each_part_checks_its_configuration_without_secrets(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(AGENT_YAML if part == "agent" else "directory: {url: 'redis://:hunter2@r:1'}\n")
    assert main([part, "--config", str(path), "--check"]) == 0
    shown = capsys.readouterr().out
    assert "hunter2" not in shown
    assert yaml.safe_load(shown)["directory"]["url"] == "redis://:***@r:1"


@pytest.mark.parametrize(
    ("part", "text", "says"),
    [
        ("agent", "nvme: {path: x}", "nvme: gb must be given with path"),
        ("agent", "nvme: {path: x, gb: 1, paths: [{path: y, gb: 1}]}", "nvme: give either path and gb, or paths"),
        (
            "agent",
            "nvme: {paths: [{path: /mnt/a, gb: 1}, {path: /mnt/../mnt/a, gb: 2}]}",
            "names the folder /mnt/a twice",
        ),
        (
            "agent",
            "nvme: {paths: [{path: /mnt/a, bg: 1}]}",
            "the key nvme.paths.0.bg is not known; did you mean nvme.paths.gb?",
        ),
        ("agent", "dram: {gib: 4}", "the key dram.gib is not known; did you mean dram.gb?"),
        ("agent", "dram: {gb: lots}", "dram.gb: "),
        ("directory", "directory: {uri: x}", "the key directory.uri is not known; did you mean directory.url?"),
    ],
)
def test_what_is_wrong_for_a_part_is_one_sentence(
    tmp_path: Path, part: str, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    assert main([part, "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"warmroute {part}: ")
    assert says in said
    assert said.count("\n") == 1


def test_variables_that_kubernetes_makes_for_a_service_of_our_name_are_no_configuration() -> None:
    environment = {
        "WARMROUTE_SERVICE_HOST": "10.0.0.1",
        "WARMROUTE_SERVICE_PORT_HTTP": "8000",
        "WARMROUTE_PORT": "tcp://10.0.0.1:8000",
        "WARMROUTE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WARMROUTE_GATEWAY_SERVICE_HOST": "10.0.0.2",
        "WARMROUTE_GATEWAY_PORT": "tcp://10.0.0.2:8000",
        "WARMROUTE_LISTEN__PORT": "9000",
    }
    assert load(GatewayConfig, None, environment, {}).listen.port == 9000


def test_an_address_in_brackets_is_a_text() -> None:
    assert load(GatewayConfig, None, {"WARMROUTE_LISTEN__BIND": "[::1]"}, {}).listen.bind == "[::1]"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:hunter2@r:1/0", "redis://me:***@r:1/0"),
        ("redis://r:1?password=hunter2", "redis://r:1?***"),
        ("redis://u:hunter2[w@h", "***"),
        ("redis://r:1", "redis://r:1"),
        ("redis://me@r:1", "redis://me@r:1"),
        ("redis://u:hunter2/x@h:1", "***"),
        ("redis://u:hunter2#x@h:1", "***"),
        ("redis://u:hunter2#x", "***"),
        ("redis://u:hunter2?x@h:1", "***"),
        ("redis-cluster://me:hunter2@r:1,[::1]:2,s", "redis-cluster://me:***@r:1,[::1]:2,s"),
        (
            "redis-sentinel://:hunter2@r,s/m/1?sentinel_password=hunter2",
            "redis-sentinel://:***@r,s/m/1?sentinel_password=***",
        ),
        ("unix://me:hunter2@/run/r.sock?db=1", "unix://me:***@/run/r.sock?db=1"),
        ("rediss://r?ssl_ca_certs=/ca.pem&pw=hunter2", "rediss://r?***"),
        ("unix:///run/r.sock", "unix:///run/r.sock"),
    ],
)
def test_a_password_is_hidden_wherever_it_stands(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("part", ["agent", "gateway", "directory"])
def test_check_refuses_a_url_that_the_start_would_refuse(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([part, "--check", "--redis", "redis:/127.0.0.1"]) == 2
    assert capsys.readouterr().err.startswith(f"warmroute {part}: the directory's URL must begin with redis://")
    assert main([part, "--check", "--redis", "redis://h", "--key-prefix", "team-b"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["directory"]["key_prefix"] == "team-b"


@pytest.mark.parametrize("part", ["agent", "gateway"])
def test_the_directory_command_reads_the_file_of_another_part(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    section = "directory: {url: 'redis://r:1', key_prefix: team-b%s}\n"
    if part == "agent":
        rest = "".join(line for line in AGENT_YAML.splitlines(True) if not line.startswith("directory"))
        path.write_text(section % ", walk_interval_s: 60" + rest)
    else:
        path.write_text(section % "" + YAML)
    monkeypatch.setenv("WARMROUTE_LISTEN__PORT", "9000")
    assert main(["directory", "--config", str(path), "--check"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown == {"directory": {"url": "redis://r:1", "key_prefix": "team-b"}}
    path.write_text(path.read_text() + "lisen: {port: 1}\n")
    assert main(["directory", "--config", str(path)]) == 2
    assert "lisen" in capsys.readouterr().err
