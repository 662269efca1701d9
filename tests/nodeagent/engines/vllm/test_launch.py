"""The launch line is one that our own connector accepts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from nodeagent.engines.vllm.launch import EngineLaunch, launch_line

LAUNCH = EngineLaunch(
    command=Path("/v/bin/vllm"),
    model=Path("/m"),
    served_model_name="small",
    name="engine-1",
    port=8101,
    scratch=Path("/s"),
    package=Path("/p"),
    door=Path("/d.sock"),
    staging_gb=0.3,
)
PLAIN = replace(LAUNCH, door=None, package=None)


def option(launch: EngineLaunch, flag: str) -> str:
    words = launch_line(launch).arguments
    return words[words.index(flag) + 1]


def transfer(launch: EngineLaunch) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(option(launch, "--kv-transfer-config"))
    return found


def test_a_miss_never_fails_a_request() -> None:
    assert transfer(LAUNCH)["kv_load_failure_policy"] == "recompute"
    assert transfer(LAUNCH)["kv_role"] == "kv_both"


def test_the_connector_is_found_where_the_package_is() -> None:
    assert launch_line(LAUNCH).environment["PYTHONPATH"] == "/p"
    assert transfer(LAUNCH)["kv_connector_module_path"] == "warmroute_engine.vllm"


def test_events_are_published_and_repeated_with_whole_hashes() -> None:
    for launch in (LAUNCH, PLAIN):
        events = json.loads(option(launch, "--kv-events-config"))
        assert events["enable_kv_cache_events"] is True
        assert events["endpoint"] == "ipc:///s/engine-1.events"
        assert events["replay_endpoint"] == "ipc:///s/engine-1.replay"
        assert launch_line(launch).environment["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0"


def test_an_engine_without_a_door_has_no_connector_and_no_path_of_its_parents() -> None:
    line = launch_line(PLAIN)
    assert "--kv-transfer-config" not in line.arguments
    assert line.environment["PYTHONPATH"] == ""


def test_engines_of_two_fleets_have_staging_files_of_their_own() -> None:
    assert LAUNCH.staging_file == Path(f"/dev/shm/vllm_offload_{transfer(LAUNCH)['engine_id']}.mmap")
    assert replace(LAUNCH, port=8201).staging_file != LAUNCH.staging_file


def test_flags_and_environment_of_the_caller_win() -> None:
    launch = replace(LAUNCH, flags=("--block-size", "64"), environment={"OMP_NUM_THREADS": "7", "X": "y"})
    line = launch_line(launch)
    assert line.arguments[-2:] == ("--block-size", "64")
    assert line.environment["OMP_NUM_THREADS"] == "7"
    assert line.environment["X"] == "y"
