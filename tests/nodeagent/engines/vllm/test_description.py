"""A launch line that can't be exact is refused at the engine's start, by the name of its flag."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nodeagent.engines.vllm.description import (
    CPU_FLOPS,
    GPU_FLOPS,
    believed_flops,
    check_launch,
    count_parameters,
    expert_share,
    kv_cache_tokens,
    reachable,
)
from nodeagent.engines.vllm.launch import BLOCK_TOKENS, EngineLaunch, launch_line
from nodeagent.engines.vllm.settings import EngineSettings, SettingsRefused

VECTORS = Path(__file__).parents[3] / "vectors"
SETTINGS = EngineSettings("/d.sock", "e", "http://127.0.0.1:1")


def configured(**changes: Any) -> Any:
    """vLLM's configuration, as far as it is checked; `changes` are `section__field`."""
    sections: dict[str, dict[str, Any]] = {
        "transfer": {"kv_load_failure_policy": "recompute", "kv_role": "kv_both"},
        "events": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": None,
        },
        "cache": {"enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256", "block_size": 32},
    }
    for name, value in changes.items():
        section, field = name.split("__")
        sections[section][field] = value
    made = {name: SimpleNamespace(**fields) for name, fields in sections.items()}
    return SimpleNamespace(
        kv_transfer_config=made["transfer"], kv_events_config=made["events"], cache_config=made["cache"]
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://[::]:5557", "ipc:///run/e.events", "ipc:///" + "n" * 106])
def test_a_publisher_that_binds_is_accepted(endpoint: str) -> None:
    check_launch(configured(events__endpoint=endpoint), SETTINGS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"transfer__kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"transfer__kv_role": "kv_producer"}, "kv_role"),
        ({"cache__enable_prefix_caching": False}, "prefix caching"),
        ({"events__enable_kv_cache_events": False}, "--kv-events-config"),
        ({"events__endpoint": "tcp://127.0.0.1:5557"}, "nobody would hear it"),
        ({"events__endpoint": "inproc://kv"}, "endpoint inproc://kv can't be heard"),
        ({"events__endpoint": "tcp://*:0"}, "endpoint tcp://\\*:0 has no fixed port"),
        ({"events__endpoint": "tcp://*:65536"}, "no fixed port"),
        ({"events__endpoint": "ipc:///" + "n" * 107}, "endpoint .* more than 107 bytes"),
        ({"events__replay_endpoint": "tcp://*:*"}, "replay_endpoint tcp://\\*:\\* has no fixed port"),
        ({"events__replay_endpoint": "tcp://*:0"}, "replay_endpoint .* no fixed port"),
        ({"events__replay_endpoint": "inproc://r"}, "replay_endpoint .* can't be heard"),
        ({"cache__prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED"),
        ({"cache__block_size": 96}, "--block-size 96"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_exact_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsRefused, match=named):
        check_launch(configured(**changes), SETTINGS)


def test_hashes_of_64_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    with pytest.raises(SettingsRefused, match="VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES must be 0"):
        check_launch(configured(), SETTINGS)


def test_our_own_launch_line_is_accepted() -> None:
    launch = EngineLaunch(Path("/v"), Path("/m"), "m", "e", 1, Path("/s"), Path("/p"), Path("/d.sock"))
    words = launch_line(launch).arguments
    events = json.loads(words[words.index("--kv-events-config") + 1])
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    check_launch(
        configured(
            events__endpoint=events["endpoint"],
            events__replay_endpoint=events["replay_endpoint"],
            transfer__kv_role=transfer["kv_role"],
            transfer__kv_load_failure_policy=transfer["kv_load_failure_policy"],
            cache__block_size=BLOCK_TOKENS,
        ),
        SETTINGS,
    )


@pytest.mark.parametrize(
    ("endpoint", "rank", "reached"),
    [
        ("tcp://*:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://[::]:5557", 3, "tcp://127.0.0.1:5560"),
        ("ipc:///run/kv.events", 0, "ipc:///run/kv.events"),
    ],
)
def test_a_neighbour_connects_to_where_a_rank_binds(endpoint: str, rank: int, reached: str) -> None:
    assert reachable(endpoint, rank) == reached


@pytest.mark.parametrize(
    ("device", "devices", "quantization", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 1, None, 0.4 * 989e12),
        ("NVIDIA H100 80GB HBM3", 8, "fp8", 8 * 0.4 * 1979e12),
        ("NVIDIA A10", 2, "awq", 2 * 0.4 * 125e12),
        ("NVIDIA X9000", 2, None, 2 * GPU_FLOPS),
        ("", 1, None, GPU_FLOPS),
    ],
)
def test_a_device_is_believed_to_be_as_fast_as_its_name_says(
    device: str, devices: int, quantization: str | None, flops: float
) -> None:
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        parallel_config=SimpleNamespace(tensor_parallel_size=devices),
        model_config=SimpleNamespace(quantization=quantization),
    )
    assert believed_flops(config, device) == pytest.approx(flops)
    config.device_config.device_type = "cpu"
    assert believed_flops(config, device) == CPU_FLOPS


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 0.25),
        ({"num_experts": 128, "num_experts_per_tok": 8}, 1 / 16),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, 1 / 32),
        ({"num_experts": None, "num_experts_per_tok": None}, 1.0),
        ({}, 1.0),
    ],
    ids=["mixtral", "qwen", "deepseek", "dense, with fields", "dense"],
)
def test_the_active_share_of_experts_is_read_from_the_models_configuration(config: Any, share: float) -> None:
    assert expert_share(SimpleNamespace(**config)) == pytest.approx(share)


def test_only_the_experts_that_compute_a_token_count(tmp_path: Path) -> None:
    shapes = {
        "__metadata__": {},
        "model.embed_tokens.weight": {"shape": [10, 4]},
        "model.layers.0.mlp.shared_experts.up_proj.weight": {"shape": [4, 4]},
        "model.layers.0.mlp.experts.7.up_proj.weight": {"shape": [8, 4]},
        "model.layers.0.mlp.experts.gate_up_proj_blocks": {"shape": [8, 4], "dtype": "U8"},
    }
    header = json.dumps(shapes).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert count_parameters(tmp_path) == 40 + 16 + 32 + 64
    assert count_parameters(tmp_path, 0.25) == 40 + 16 + 8 + 16


@pytest.mark.parametrize(
    ("recorded", "tokens"), [("vllm_metrics.txt", 46_592), ("vllm_metrics_offloading.txt", 23_296)]
)
def test_what_its_kv_cache_holds_is_what_vllm_counted(recorded: str, tokens: int) -> None:
    """vLLM shows the fields of its cache configuration as labels of a metric."""
    lines = (VECTORS / recorded).read_text().split("\n")
    (sample,) = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    fields = {name: int(value) if value.isdigit() else None for name, value in re.findall(r'(\w+)="([^"]*)"', sample)}
    assert fields["num_gpu_blocks"] * fields["block_size"] == tokens
    assert kv_cache_tokens(SimpleNamespace(**fields)) == tokens


@pytest.mark.parametrize("fields", [{"kv_cache_size_tokens": None}, {"kv_cache_size_tokens": 0}, {}], ids=str)
def test_nothing_is_known_of_a_kv_cache_that_vllm_does_not_count(fields: dict[str, int | None]) -> None:
    assert kv_cache_tokens(SimpleNamespace(**fields)) is None
