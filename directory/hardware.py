"""Models and accelerators by name: what an engine's speed is taken for until its first tokens were seen.

Shapes are those of the models' public `config.json`; accelerators' rates are their vendors' for dense matrices (half of
what is printed "with sparsity"). Of that a prefill gets a share: `USEFUL_SHARE`, by which an H100 has the 400 TFLOP/s
of the published break-even arithmetic. These are starting points, not measurements: observation corrects them.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from directory.costs import ModelShape

USEFUL_SHARE = 0.4
_VARIANT = re.compile(
    r"instruct|chat|it|base|thinking|hf|fp8|fp4|bf16|awq|gptq|int[48]|w\da\d+|dynamic|v?\d[\d.]*|turbo"
)
"""What may follow a model's name in an id without changing its shape: tuning, quantization, versions."""
Found = TypeVar("Found")


class UnknownHardware(ValueError):
    """No model or accelerator has this name; the message names the nearest."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's shape. `active_parameters` of `parameters` compute a token: all, but for mixtures of experts.

    `kv_values` are kept for each token and layer: keys and values of all heads, or the compressed ones of MLA.
    """

    parameters: float
    active_parameters: float
    layers: int
    d_model: int
    kv_values: int

    def shape(self, kv_value_bytes: int = 2) -> ModelShape:
        """What its arithmetic depends on, with KV of so many bytes a value."""
        kv_bytes = self.layers * self.kv_values * kv_value_bytes
        return ModelShape(self.active_parameters, self.layers, self.d_model, kv_bytes)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device: FLOP/s of dense matrices in 16 and in 8 bits, as published; bytes/s of its memory, 0 if unknown."""

    flops_16_bit: float
    flops_8_bit: float
    memory_bytes_per_s: float = 0.0

    def useful_flops(self, devices: int = 1, is_8_bit: bool = False) -> float:
        """What prefills get of `devices` of them that share every layer."""
        return USEFUL_SHARE * devices * (self.flops_8_bit if is_8_bit else self.flops_16_bit)


def dense(billions: float, layers: int, d_model: int, kv_heads: int, head_dim: int) -> ModelSpec:
    """A model of which every parameter computes every token."""
    return experts(billions, billions, layers, d_model, kv_heads, head_dim)


def experts(
    billions: float, active_billions: float, layers: int, d_model: int, kv_heads: int, head_dim: int
) -> ModelSpec:
    """A mixture of experts, with grouped attention."""
    return ModelSpec(billions * 1e9, active_billions * 1e9, layers, d_model, 2 * kv_heads * head_dim)


def _device(tflops: float, tflops_8_bit: float, gb_per_s: float) -> Accelerator:
    return Accelerator(tflops * 1e12, tflops_8_bit * 1e12, gb_per_s * 1e9)


MODELS: Mapping[str, ModelSpec] = {
    "llama-3.2-1b": dense(1.24, 16, 2048, 8, 64),
    "llama-3.2-3b": dense(3.21, 28, 3072, 8, 128),
    "llama-3.1-8b": dense(8.03, 32, 4096, 8, 128),
    "llama-3.1-70b": dense(70.6, 80, 8192, 8, 128),
    "llama-3.3-70b": dense(70.6, 80, 8192, 8, 128),
    "llama-3.1-405b": dense(406, 126, 16384, 8, 128),
    "qwen2.5-0.5b": dense(0.494, 24, 896, 2, 64),
    "qwen2.5-1.5b": dense(1.54, 28, 1536, 2, 128),
    "qwen2.5-7b": dense(7.62, 28, 3584, 4, 128),
    "qwen2.5-14b": dense(14.8, 48, 5120, 8, 128),
    "qwen2.5-32b": dense(32.8, 64, 5120, 8, 128),
    "qwen2.5-72b": dense(72.7, 80, 8192, 8, 128),
    "qwen3-0.6b": dense(0.596, 28, 1024, 8, 128),
    "qwen3-4b": dense(4.02, 36, 2560, 8, 128),
    "qwen3-8b": dense(8.19, 36, 4096, 8, 128),
    "qwen3-14b": dense(14.8, 40, 5120, 8, 128),
    "qwen3-32b": dense(32.8, 64, 5120, 8, 128),
    "qwen3-30b-a3b": experts(30.5, 3.3, 48, 2048, 4, 128),
    "qwen3-235b-a22b": experts(235, 22, 94, 4096, 4, 128),
    "mistral-7b": dense(7.25, 32, 4096, 8, 128),
    "mistral-nemo-12b": dense(12.2, 40, 5120, 8, 128),
    "mistral-small-24b": dense(23.6, 40, 5120, 8, 128),
    "mixtral-8x7b": experts(46.7, 12.9, 32, 4096, 8, 128),
    "gemma-2-9b": dense(9.24, 42, 3584, 8, 256),
    "gemma-2-27b": dense(27.2, 46, 4608, 16, 128),
    "gemma-3-12b": dense(12.2, 48, 3840, 8, 256),
    "gemma-3-27b": dense(27.4, 62, 5376, 16, 128),
    "deepseek-v2-lite": ModelSpec(15.7e9, 2.4e9, 27, 2048, 512 + 64),
    "deepseek-v3": ModelSpec(671e9, 37e9, 61, 7168, 512 + 64),
    "deepseek-r1": ModelSpec(671e9, 37e9, 61, 7168, 512 + 64),
    "gpt-oss-20b": experts(20.9, 3.6, 24, 2880, 8, 64),
    "gpt-oss-120b": experts(116.8, 5.1, 36, 2880, 8, 64),
}
"""Of models with sliding windows the KV of all layers counts, as if none had one."""

ACCELERATORS: Mapping[str, Accelerator] = {
    "v100": _device(125, 125, 900),
    "t4": _device(65, 65, 320),
    "a10": _device(125, 125, 600),
    "a10g": _device(70, 70, 600),
    "a100": _device(312, 312, 2039),
    "l4": _device(121, 242, 300),
    "l40s": _device(362, 733, 864),
    "rtx-3090": _device(71, 71, 936),
    "rtx-4090": _device(165, 330, 1008),
    "h20": _device(148, 296, 4000),
    "h100": _device(989, 1979, 3350),
    "h100-pcie": _device(756, 1513, 2000),
    "h100-nvl": _device(835, 1671, 3938),
    "h200": _device(989, 1979, 4800),
    "b200": _device(2250, 4500, 8000),
    "mi300x": _device(1307, 2615, 5300),
    "mi325x": _device(1307, 2615, 6000),
}
"""Those without arithmetic in 8 bits compute such models in 16."""


class Hardware:
    """The tables, and what a user adds to them. A name of the user's own stands before the table's."""

    def __init__(
        self,
        models: Mapping[str, ModelSpec] | None = None,
        accelerators: Mapping[str, Accelerator] | None = None,
    ) -> None:
        self._models = {**MODELS, **(models or {})}
        self._accelerators = {**ACCELERATORS, **(accelerators or {})}

    def model(self, name: str) -> ModelSpec:
        """The model of this name. Raises `UnknownHardware`."""
        return _named("model", self._models, name)

    def accelerator(self, name: str) -> Accelerator:
        """The accelerator of this name. Raises `UnknownHardware`."""
        return _named("accelerator", self._accelerators, name)

    def shape_served(self, ids: Iterable[str]) -> ModelShape | None:
        """Of the model that an engine's ids name, such as `meta-llama/Llama-3.1-8B-Instruct`; the first that do."""
        return next((model.shape() for each in ids if (model := self._model_of(each)) is not None), None)

    def device(self, name: str) -> Accelerator | None:
        """The accelerator that a driver calls by `name`, such as `NVIDIA H100 80GB HBM3`; the longest name in it."""
        words = re.split(r"[^a-z0-9]+", name.lower())
        known = [each for each in self._accelerators if set(each.split("-")) <= set(words)]
        return self._accelerators[max(known, key=len)] if known else None

    def _model_of(self, served: str) -> ModelSpec | None:
        plain = re.sub(r"[_\s]+", "-", served.rsplit("/", 1)[-1].lower()).replace("meta-llama-", "llama-")
        for name in sorted(self._models, key=len, reverse=True):
            if plain.startswith(name.lower()):
                rest = plain[len(name) :]
                if not rest or (rest[0] == "-" and all(map(_VARIANT.fullmatch, rest[1:].split("-")))):
                    return self._models[name]
        return None


def _named(kind: str, table: Mapping[str, Found], name: str) -> Found:
    if name not in table:
        near = difflib.get_close_matches(name.lower(), table, n=1, cutoff=0.0)
        raise UnknownHardware(f"no {kind} is known as {name!r}; did you mean {near[0]}?")
    return table[name]
