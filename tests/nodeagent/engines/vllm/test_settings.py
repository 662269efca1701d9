"""What a launch line says to warmroute: read strictly, and refused by the field's name."""

import json
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.vllm.launch import BLOCK_TOKENS, EngineLaunch, launch_line
from nodeagent.engines.vllm.settings import (
    OWN_FIELDS,
    STAGING_CHUNKS_MIN,
    EngineSettings,
    SettingsRefused,
    check_staging,
    read_settings,
)

LEAST = {"door": "/d.sock", "engine": "e", "url": "http://10.0.0.7:8000"}


def test_three_fields_are_enough_and_the_others_have_defaults() -> None:
    assert read_settings(LEAST) == EngineSettings("/d.sock", "e", "http://10.0.0.7:8000")
    assert read_settings({**LEAST, "staging_gb": 0.3}).staging_bytes == 300_000_000


def test_what_is_given_is_what_is_read() -> None:
    given: dict[str, Any] = {"staging_gb": 8, "chunk_tokens": 512, "offload_replies": True, "flops": 1e14}
    settings = read_settings({**LEAST, **given})
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize(
    "url", ["http://gpu-07:8000", "https://gpu_07.rack.local", "http://[::1]:8000/", "http://h.:1"]
)
def test_a_url_of_an_engine_is_accepted(url: str) -> None:
    assert read_settings({**LEAST, "url": url, "door": "/" + "d" * 106, "engine": "gpu-07:a@x_1.b"}).url == url


def test_what_the_connector_itself_puts_there_is_passed_over() -> None:
    assert read_settings({**LEAST, **dict.fromkeys(OWN_FIELDS, "anything")}) == read_settings(LEAST)


def test_our_own_launch_line_is_read() -> None:
    launch = EngineLaunch(Path("/v"), Path("/m"), "m", "e", 8101, Path("/s"), Path("/p"), Path("/d.sock"), 0.3)
    words = launch_line(launch).arguments
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    settings = read_settings(transfer["kv_connector_extra_config"])
    assert (settings.door, settings.engine, settings.url) == ("/d.sock", "e", "http://127.0.0.1:8101")
    assert settings.url == launch.url
    assert settings.staging_bytes == 300_000_000
    assert settings.chunk_tokens % BLOCK_TOKENS == 0


@pytest.mark.parametrize("name", sorted(LEAST))
@pytest.mark.parametrize("value", [None, "", 7], ids=["nothing", "empty", "a number"])
def test_a_field_that_must_be_a_text_is_named(name: str, value: Any) -> None:
    with pytest.raises(SettingsRefused, match=f": {name} must be a text"):
        read_settings({**LEAST, name: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "10.0.0.7:8000"),
        ("url", "http://10.0.0.7:8000/v1"),
        ("url", "http://10.0.0.7:8000/v1/"),
        *[("url", f"http://{rest}") for rest in ("127.0.0.1:99999", "127.0.0.1:80a", "[::1", "a..b:80", "a b:80", "")],
        *[("url", f"http://{rest}") for rest in ("h:80/x", "h:80?x", "u@h:80", "h:", "h:0")],
        ("url", "ftp://h:80"),
        *[("door", value) for value in ("agent.sock", "/" + "d" * 107, "/" + "\u00e9" * 54)],
        *[("engine", value) for value in ("a b", "a/b", "a|b", "\u00e9", "-a", "a\n", "e" * 129)],
        *[("staging_gb", value) for value in (0, -1, "4", True, None, float("nan"), float("inf"))],
        *[("flops", value) for value in (0, "much", False)],
        *[("chunk_tokens", value) for value in (0, 256.0, "256", True)],
        *[("offload_replies", value) for value in ("yes", 1, None)],
    ],
    ids=str,
)
def test_what_is_no_such_value_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(SettingsRefused, match=f": {field} must be "):
        read_settings({**LEAST, field: value})


def test_a_field_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(SettingsRefused, match="dram_gb is not known; known are door, engine, url"):
        read_settings({**LEAST, "dram_gb": 4})


def test_a_staging_area_of_hardly_a_chunk_is_refused() -> None:
    check_staging(STAGING_CHUNKS_MIN, 1_000_000)
    with pytest.raises(SettingsRefused, match=r": staging_gb must hold at least 4 chunks of 500000000 bytes, 2 GB"):
        check_staging(STAGING_CHUNKS_MIN - 1, 500_000_000)
