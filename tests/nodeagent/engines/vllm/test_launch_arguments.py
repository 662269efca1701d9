"""What vLLM runs with is put into words that are the same on every host; what can't be named is refused by its flag."""

import enum
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from nodeagent.engines.vllm.content_digest import ContentUnknown
from nodeagent.engines.vllm.launch_arguments import (
    HARMLESS,
    HASHED,
    REFUSED,
    canonical,
    check_arguments,
    configuration_digest,
)
from nodeagent.engines.vllm.settings import SettingsRefused


class Settings:
    """A model's configuration, as transformers has it."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        self.auto_map = values.get("auto_map")

    def to_dict(self) -> dict[str, Any]:
        return self.values


def configured(**changes: Any) -> Any:
    """vLLM's configuration with every field that is hashed or looked at; `changes` are `section__field`."""
    made: dict[str, Any] = {}
    for path in {path for paths in HASHED.values() for path in paths}:
        if path.count(".") == 1:
            section, field = path.split(".")
            made.setdefault(section, {})[field] = None
    made["model_config"] |= {"hf_config": Settings(rope_theta=1.0), "hf_text_config": Settings(), "model": "/m"}
    made["model_config"] |= {"model_weights": "", "model_class_overrides": {}, "code_revision": None, "revision": None}
    made["model_config"] |= {"multimodal_config": None}
    made["load_config"] |= {"load_format": "auto", "model_loader_extra_config": {}}
    made["parallel_config"] |= {"worker_cls": "vllm.w.Worker", "worker_extension_cls": "", "enable_elastic_ep": False}
    made["parallel_config"]["distributed_executor_backend"] = "mp"
    made["scheduler_config"]["scheduler_cls"] = None
    for name, value in changes.items():
        section, field = name.split("__")
        made[section][field] = value
    whole = {name: SimpleNamespace(**fields) for name, fields in made.items()}
    whole |= dict.fromkeys(("attention_config", "mamba_config", "engram_config", "performance_mode"), None)
    whole |= {"additional_config": {}, "weight_transfer_config": None, "diffusion_config": None}
    whole |= {"ec_transfer_config": None, "speculative_config": None}
    return SimpleNamespace(**whole)


def test_a_plain_configuration_is_accepted_and_has_one_digest() -> None:
    check_arguments(configured(), {})
    assert configuration_digest(configured(), {}) == configuration_digest(configured(), {})


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__hf_config": Settings(rope_theta=2.0)},
        {"model_config__max_model_len": 7},
        {"model_config__original_max_model_len": -1},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"load_config__ignore_patterns": ["model-1*"]},
        {"parallel_config__decode_context_parallel_size": 2},
        {"kernel_config__moe_backend": "triton"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_shapes_kv_makes_another_digest(changes: dict[str, Any]) -> None:
    assert configuration_digest(configured(**changes), {}) != configuration_digest(configured(), {})


def test_a_variable_of_vllms_makes_another_digest() -> None:
    plain = configuration_digest(configured(), {})
    assert configuration_digest(configured(), {"VLLM_CPU_INT4_W4A8": True}) != plain


def test_where_a_model_lies_makes_none() -> None:
    moved = configured(model_config__hf_config=Settings(rope_theta=1.0, _name_or_path="/n", _commit_hash="c"))
    assert configuration_digest(moved, {}) == configuration_digest(configured(), {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *[({"load_config__load_format": name}, "--load-format") for name in ("dummy", "npcache", "tensorizer", "mine")],
        ({"load_config__model_loader_extra_config": {"tensorizer_uri": "s3"}}, "--model-loader-extra-config"),
        ({"model_config__model_weights": "s3://w"}, "--model-weights"),
        ({"model_config__model_class_overrides": {"A": "m:B"}}, "--model-class-overrides"),
        ({"model_config__code_revision": "other"}, "--code-revision"),
        ({"parallel_config__worker_cls": "mine.Worker"}, "--worker-cls"),
        ({"parallel_config__worker_extension_cls": "mine.Extension"}, "--worker-extension-cls"),
        ({"parallel_config__distributed_executor_backend": "mine.Executor"}, "--distributed-executor-backend"),
        ({"scheduler_config__scheduler_cls": "mine.Scheduler"}, "--scheduler-cls"),
        ({"parallel_config__enable_elastic_ep": True}, "--enable-elastic-ep"),
    ],
    ids=str,
)
def test_what_cannot_be_named_is_refused_by_its_flag(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsRefused, match=named):
        check_arguments(configured(**changes), {})


def test_code_and_drafts_from_elsewhere_are_refused() -> None:
    remote = Settings(auto_map={"AutoModel": "someone/else--modeling.Model"})
    with pytest.raises(SettingsRefused, match="--trust-remote-code"):
        check_arguments(configured(model_config__hf_config=remote, model_config__trust_remote_code=True), {})
    drafting = configured()
    drafting.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model="/draft"))
    with pytest.raises(SettingsRefused, match=r"--spec-model .*speculative_config\.model"):
        check_arguments(drafting, {})
    drafting.speculative_config.draft_model_config.model = "/m"
    check_arguments(drafting, {})


@pytest.mark.parametrize("name", ["VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_USE_MODELSCOPE"])
def test_variables_that_let_anything_in_are_refused(name: str) -> None:
    with pytest.raises(SettingsRefused, match=name):
        check_arguments(configured(), {name: "1"})


def test_another_vllm_without_a_field_has_no_identity() -> None:
    other = configured()
    del other.cache_config.cache_dtype
    with pytest.raises(ContentUnknown, match=r"no cache_config\.cache_dtype"):
        configuration_digest(other, {})


def test_an_argument_stands_in_one_table_once() -> None:
    harmless = " ".join(HARMLESS.values()).split()
    assert len(set(harmless)) == len(harmless)
    assert not set(harmless) & {*HASHED, *REFUSED}


class Colour(enum.Enum):
    """A setting of few values."""

    RED = "red"


@dataclass
class Part:
    """A section of a configuration."""

    size: int = 3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Colour.RED, "red"),
        ({"b": (1, 2.5), "a": {"y", "x"}}, {"a": ["x", "y"], "b": [1, 2.5]}),
        (Part(), {"size": 3}),
        (PurePosixPath("/a"), "/a"),
        (Part, f"{__name__}.Part"),
        (None, None),
    ],
    ids=str,
)
def test_a_value_has_one_form(value: Any, said: Any) -> None:
    assert canonical(value, "field") == said


def test_code_has_no_form() -> None:
    with pytest.raises(ContentUnknown, match="hf_overrides holds a function"):
        canonical({"f": test_code_has_no_form}, "hf_overrides")
