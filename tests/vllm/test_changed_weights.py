"""KV never bears the name of other weights: neither of files that changed around the load, nor of a living engine's."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.directory.stands import running_valkey
from tests.vllm.engines import RunningEngine, model_folder, models_folder, python_of_vllm, running_engines
from tests.vllm.fleet import CHUNK_TOKENS, AgentProcess, ask, document, reset
from tests.warmroute.fleets import until

pytestmark = pytest.mark.timeout(600)
OTHER_WEIGHTS = """
import sys
from safetensors.torch import save_file, load_file
tensors = {name: tensor * 1.5 if name.endswith("v_proj.weight") else tensor for name, tensor in
           load_file(sys.argv[1]).items()}
save_file(tensors, sys.argv[2], metadata={"format": "pt"})
"""


@dataclass(frozen=True)
class Host:
    agent: AgentProcess
    living: RunningEngine
    turned: RunningEngine
    other_weights: Path


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Two engines: one whose weights will change, and one whose model is a link that is turned at once."""
    with models_folder() as models:
        yield from started(tmp_path_factory.mktemp("v"), models)


def started(folder: Path, models: Path) -> Iterator[Host]:
    living, first, other = models / "living", models / "first", models / "other.safetensors"
    for copy in (living, first):
        shutil.copytree(model_folder(), copy)
    subprocess.run([python_of_vllm(), "-c", OTHER_WEIGHTS, str(living / "model.safetensors"), str(other)], check=True)
    link = models / "link"
    link.symlink_to(first)
    with running_valkey() as server:
        agent = AgentProcess("h1", folder, server.connection_url, dram_gb=0.6, nvme_gb=1)
        try:
            doors = {"living": agent.door, "turned": agent.door}
            served = {"living": living, "turned": link}
            with running_engines(
                folder, doors, models=served, when_begun=lambda begun: turn(link, living, begun)
            ) as made:
                until(lambda: agent.is_attached("living"), 90, "it is attached")
                yield Host(agent, made["living"], made["turned"], other)
        finally:
            agent.end()


def turn(link: Path, target: Path, engines: dict[str, RunningEngine]) -> None:
    """Let the link point elsewhere while the engine loads from it."""

    def is_loading() -> bool:
        assert engines["turned"].process.poll() is None, engines["turned"].tail()
        return "Starting to load model" in engines["turned"].log.read_text(errors="replace")

    until(is_loading, 240, "the engine loads")
    new = link.with_suffix(".new")
    new.symlink_to(target)
    os.replace(new, link)


def test_a_model_that_was_turned_while_it_was_loaded_has_no_name(host: Host) -> None:
    log = host.turned.log
    until(lambda: "works without its host's tiers" in log.read_text(errors="replace"), 60, "the engine says why")
    assert "Restart the engine" in log.read_text(errors="replace")
    assert not host.agent.is_attached("turned")
    assert ask(host.turned.url, "One and one is", max_tokens=2).text


def test_a_living_engines_changed_weights_load_and_store_nothing(host: Host) -> None:
    engine, prompt = host.living, document("tides")
    first = ask(engine.url, prompt, max_tokens=16)
    host.agent.until_written(4)
    reset(engine.launch)
    again = ask(engine.url, prompt, max_tokens=16)
    assert (again.cached_tokens, again.text) == (4 * CHUNK_TOKENS, first.text)
    os.replace(host.other_weights, engine.launch.model / "model.safetensors")
    called = httpx.post(f"{engine.url}/collective_rpc", json={"method": "reload_weights"}, timeout=120, trust_env=False)
    assert called.status_code == 200, called.text
    reset(engine.launch, with_staging=False)  # its staging rows hold KV of the old weights
    changed = ask(engine.url, prompt, max_tokens=16)
    assert changed.cached_tokens == 0
    assert changed.text != first.text, "they are other weights"
    reset(engine.launch)
    after = ask(engine.url, prompt + " More.", max_tokens=16)
    assert after.cached_tokens == 0
    unseen = ask(engine.url, prompt, max_tokens=16, cache_salt="nobody has it")
    assert unseen.text == changed.text
    assert host.agent.status()["tiers"]["dram"]["chunks"] == 4, "nothing was stored under the old name"
    log = engine.log.read_text(errors="replace")
    assert "the weights of this engine have changed or may have (reload_weights)" in log
