"""What must share nothing, shares nothing: adapters, and other weights under the same model's name."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.directory.stands import running_valkey
from tests.vllm.engines import RunningEngine, model_folder, models_folder, python_of_vllm, running_engines
from tests.vllm.fleet import ANSWER_BOUND_S, CHUNK_TOKENS, MODEL, AgentProcess, ask, document, reset
from tests.warmroute.fleets import until

pytestmark = pytest.mark.timeout(900)
ADAPTER = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file, load_file
model, folder = Path(sys.argv[1]), Path(sys.argv[2])
torch.manual_seed(1)
tensors = {}
for layer in range(30):
    for name, width in (("q_proj", 576), ("v_proj", 192)):
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{at}.lora_A.weight"] = torch.randn(8, 576) * 0.05
        tensors[f"{at}.lora_B.weight"] = torch.randn(width, 8) * 0.05
save_file(tensors, folder / "adapter_model.safetensors")
"""
OTHER_WEIGHTS = """
import sys
from pathlib import Path
from safetensors.torch import save_file, load_file
path = Path(sys.argv[1]) / "model.safetensors"
tensors = load_file(path)
for name in list(tensors):
    if name.endswith("v_proj.weight"):
        tensors[name] = tensors[name] * 1.5
save_file(tensors, path, metadata={"format": "pt"})
"""


@dataclass(frozen=True)
class Host:
    agent: AgentProcess
    stock: RunningEngine
    tuned: RunningEngine


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with models_folder() as models:
        yield from started(tmp_path_factory.mktemp("v"), models)


def started(folder: Path, models: Path) -> Iterator[Host]:
    """Two engines on one host: of the model, and of another under its name that has an adapter."""
    adapter, tuned = folder / "adapter", models / "tuned"
    adapter.mkdir()
    shutil.copytree(model_folder(), tuned)
    subprocess.run([python_of_vllm(), "-c", ADAPTER, str(tuned), str(adapter)], check=True)
    subprocess.run([python_of_vllm(), "-c", OTHER_WEIGHTS, str(tuned)], check=True)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(tuned)}))
    with running_valkey() as server:
        agent = AgentProcess("h1", folder, server.connection_url, dram_gb=0.6, nvme_gb=1)
        lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"ad1={adapter}")
        try:
            doors = {"stock": agent.door, "tuned": agent.door}
            models = {"tuned": tuned}
            with running_engines(folder, doors, models=models, flags_of={"tuned": lora}) as engines:
                until(lambda: agent.is_attached("stock") and agent.is_attached("tuned"), 90, "both are attached")
                yield Host(agent, engines["stock"], engines["tuned"])
        finally:
            agent.end()


def test_other_weights_under_the_same_name_share_nothing(host: Host) -> None:
    prompt = document("tides")
    first = ask(host.stock.url, prompt, max_tokens=16)
    host.agent.until_written(4)
    other = ask(host.tuned.url, prompt, max_tokens=16)
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    assert other.text != first.text, "they are other weights"
    host.agent.until_written(8)
    for engine, answer in ((host.stock, first), (host.tuned, other)):
        reset(engine.launch)
        again = ask(engine.url, prompt, max_tokens=16)
        assert again.cached_tokens == 4 * CHUNK_TOKENS
        assert again.text == answer.text


def test_an_adapters_kv_is_neither_stored_on_the_host_nor_announced(host: Host) -> None:
    prompt = document("lamps")
    chunks = host.agent.status()["tiers"]["dram"]["chunks"]
    announced = host.agent.engine("tuned")["gpu_chunks"]
    tuned = ask(host.tuned.url, prompt, max_tokens=16, model="ad1")
    again = ask(host.tuned.url, prompt, max_tokens=16, model="ad1")
    assert again.cached_tokens >= 4 * CHUNK_TOKENS, "the engine itself has it"
    assert again.text == tuned.text
    reset(host.tuned.launch)
    plain = ask(host.tuned.url, prompt, max_tokens=16)
    assert plain.cached_tokens == 0
    assert plain.text != tuned.text
    host.agent.until_written(chunks + 4)
    assert host.agent.status()["tiers"]["dram"]["chunks"] == chunks + 4, "the plain prompt's chunks alone"
    until(lambda: host.agent.engine("tuned")["gpu_chunks"] == 4, 30, "the plain prompt's chunks alone")
    assert announced <= 8
    reset(host.tuned.launch)
    third = ask(host.tuned.url, prompt, max_tokens=16, model="ad1")
    assert (third.cached_tokens, third.text) == (0, tuned.text)
    assert MODEL != "ad1"


def test_a_forgotten_salt_is_served_to_nobody_and_another_salt_still_is(host: Host) -> None:
    prompt = document("bells")
    chunks = host.agent.status()["tiers"]["dram"]["chunks"]
    kept, gone = ({"cache_salt": salt} for salt in ("kept", "gone"))
    first = ask(host.stock.url, prompt, max_tokens=16, **kept)
    ask(host.stock.url, prompt, max_tokens=16, **gone)
    host.agent.until_written(chunks + 8)
    asked = {"salt": "gone", "reset_engines": True}
    receipt = httpx.post(f"{host.agent.url}/forget", json=asked, timeout=ANSWER_BOUND_S, trust_env=False).json()
    assert receipt["is_confirmed"], receipt
    assert receipt["forgotten"]["dram"]["chunks"] == receipt["forgotten"]["nvme"]["chunks"] == 4, receipt
    assert receipt["remains"]["salt_unknown"] == 0, receipt
    reset(host.stock.launch)
    for salt, tokens in ((gone, 0), (kept, 4 * CHUNK_TOKENS)):
        again = ask(host.stock.url, prompt, max_tokens=16, **salt)
        assert (again.cached_tokens, again.text) == (tokens, first.text), salt
    reset(host.stock.launch)
    late = ask(host.stock.url, prompt, max_tokens=16, **gone)
    assert late.cached_tokens == 0, "what the engine computed within the term isn't kept"
    assert host.agent.metric("warmroute_admission_refused_total") > 0
