"""Every argument of the installed vLLM has been thought of, and what shapes KV makes another identity."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nodeagent.engines.vllm.launch_arguments import HARMLESS, HASHED, REFUSED
from tests.vllm.engines import model_folder, python_of_vllm

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
ASK = """
import dataclasses, json, sys
from nodeagent.engines.vllm.launch_arguments import check_arguments, configuration_digest
from nodeagent.engines.vllm.settings import SettingsRefused
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

print(json.dumps(sorted(field.name for field in dataclasses.fields(AsyncEngineArgs))))
plain = {"model": sys.argv[1], "dtype": "float32", "block_size": 32, "max_model_len": 4096, "enforce_eager": True}
for changes in json.loads(sys.argv[2]):
    config = EngineArgs(**{**plain, **changes}).create_engine_config()
    try:
        check_arguments(config, {})
        print(json.dumps(configuration_digest(config, {})))
    except SettingsRefused as refused:
        print(json.dumps(f"refused: {refused}"))
"""


def asked(changes: list[dict[str, Any]]) -> list[Any]:
    """vLLM's arguments, then for each change of a plain launch its configuration's digest, or why it is refused."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python_of_vllm(), "-c", ASK, str(model_folder()), json.dumps(changes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", '"'))]


def test_each_argument_is_hashed_refused_or_has_a_reason(tmp_path: Path) -> None:
    other = tmp_path / "config.json"
    settings = json.loads((model_folder() / "config.json").read_text())
    other.write_text(json.dumps({**settings, "rope_parameters": {"rope_theta": 1_000.0, "rope_type": "default"}}))
    different: list[dict[str, Any]] = [
        {},
        {"hf_config_path": str(tmp_path)},
        {"hf_overrides": {"rms_norm_eps": 0.5}},
        {"max_model_len": 2048},
        {"dtype": "bfloat16"},
        {"load_format": "safetensors"},
        {"attention_config": {"use_prefill_query_quantization": True}},
    ]
    same: list[dict[str, Any]] = [{"max_num_seqs": 3, "seed": 7, "kv_cache_memory_bytes": 1 << 29}]
    refused: list[dict[str, Any]] = [
        {"load_format": "dummy"},
        {"load_format": "npcache"},
        {"worker_extension_cls": "tests.Extension"},
        {"weight_transfer_config": {"backend": "nccl"}},
    ]
    arguments, *answers = asked([*different, *same, *refused])
    thought_of = [*HASHED, *(set(REFUSED) - set(HASHED)), *" ".join(HARMLESS.values()).split()]
    assert sorted(thought_of) == arguments
    assert len(answers) == len(different) + len(same) + len(refused)
    digests = answers[: len(different)]
    assert not [each for each in digests if each.startswith("refused")]
    assert len(set(digests)) == len(different)
    assert answers[len(different)] == digests[0]
    for changes, answer in zip(refused, answers[-len(refused) :], strict=True):
        (flag,) = changes
        assert answer.startswith(f"refused: --{flag.replace('_', '-')} "), answer
