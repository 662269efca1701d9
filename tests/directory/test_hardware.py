"""The tables of models and accelerators, and what users add to them."""

import pytest

from directory.hardware import ACCELERATORS, MODELS, Accelerator, Hardware, ModelSpec, UnknownHardware, dense

HARDWARE = Hardware()


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("qwen2.5-7b", 57_344),
        ("gemma-2-9b", 344_064),
        ("deepseek-v3", 70_272),
        ("gpt-oss-120b", 73_728),
    ],
)
def test_a_token_leaves_as_many_bytes_as_published(name: str, kv_bytes: int) -> None:
    assert HARDWARE.model(name).shape().kv_bytes_per_token == kv_bytes
    assert HARDWARE.model(name).shape(kv_value_bytes=1).kv_bytes_per_token == kv_bytes // 2


def test_only_active_parameters_compute_a_token() -> None:
    assert HARDWARE.model("gpt-oss-120b").shape().parameters == pytest.approx(5.1e9)
    assert HARDWARE.model("llama-3.1-8b").shape().parameters == pytest.approx(8.03e9)


def test_an_h100_has_the_400_teraflops_of_the_break_even_arithmetic() -> None:
    assert HARDWARE.accelerator("h100").useful_flops() == pytest.approx(4e14, rel=0.02)
    assert HARDWARE.accelerator("h100").useful_flops(8, is_8_bit=True) == pytest.approx(64e14, rel=0.02)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_model_is_of_a_size_that_its_layers_can_have(model: ModelSpec) -> None:
    """A layer has four to forty times d_model**2 parameters, or the table has a slip; of experts, the active ones."""
    assert 3 < model.active_parameters / (model.layers * model.d_model**2) < 60
    assert model.active_parameters <= model.parameters
    assert 64 <= model.kv_values <= 2 * 16 * 256


@pytest.mark.parametrize("device", ACCELERATORS.values(), ids=ACCELERATORS)
def test_every_accelerator_has_more_arithmetic_than_memory_accesses(device: Accelerator) -> None:
    assert 20 < device.flops_16_bit / device.memory_bytes_per_s < 500
    assert device.flops_16_bit <= device.flops_8_bit <= 2.1 * device.flops_16_bit


@pytest.mark.parametrize(
    ("name", "near"), [("llama-3.1-8B", "llama-3.1-8b"), ("qwen3-8", "qwen3-8b"), ("gpt-oss", "gpt-oss-20b")]
)
def test_an_unknown_model_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    with pytest.raises(UnknownHardware, match=f"did you mean {near}"):
        HARDWARE.model(name)


def test_an_unknown_accelerator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownHardware, match="no accelerator is known as 'H100-SXM'; did you mean h100"):
        HARDWARE.accelerator("H100-SXM")


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
        ("deepseek-ai/DeepSeek-V3.1", None),
        ("my-llama-3.1-8b", None),
        ("gpt-4o", None),
    ],
)
def test_a_served_id_names_its_model_or_none(served: str, name: str | None) -> None:
    assert HARDWARE.shape_served(["unknown", served]) == (MODELS[name].shape() if name else None)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("AMD Instinct MI300X", "mi300x"),
        ("", None),
    ],
)
def test_a_drivers_name_for_a_device_is_understood_or_not_guessed(driver: str, name: str | None) -> None:
    assert HARDWARE.device(driver) == (ACCELERATORS[name] if name else None)


def test_what_a_user_adds_is_found_and_stands_before_the_tables() -> None:
    own = dense(9, 40, 4096, 8, 128)
    hardware = Hardware({"house-9b": own, "llama-3.1-8b": own}, {"tpu-v9": Accelerator(1e15, 2e15, 1e12)})
    assert hardware.model("house-9b") is hardware.model("llama-3.1-8b") is own
    assert hardware.shape_served(["us/House-9B-chat"]) == own.shape()
    assert hardware.accelerator("tpu-v9").useful_flops() == pytest.approx(4e14)
