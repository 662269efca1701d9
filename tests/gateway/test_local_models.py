"""Models' folders on the gateway's machine: found, read as the engine would, watched."""

import asyncio
import json
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from gateway.config import EngineConfig
from gateway.encoding import local_models
from gateway.encoding.files import TokenizerFiles
from gateway.encoding.local_model import LocalModel, read_local_model
from gateway.encoding.local_models import RETRY_POLLS, LocalModels, Look, find_folder, look
from gateway.encoding.model_files import ModelFiles
from tests.gateway.assembly import eventually
from tests.gateway.pipelines import PIPELINES
from tests.test_two_renderers import CONTENTS

CONFIG = {
    "tokenizer_class": "TokenizersBackend",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": "{{ messages }}",
}


def model_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "tokenizer.json").write_text(json.dumps(PIPELINES["gemma"]()))
    return folder


def test_a_reference_engines_files_are_taken_as_they_are(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    model = read_local_model(tmp_path, "reference")
    assert (model.renderer, model.contents) == ("reference", CONTENTS)


def test_a_class_that_works_as_its_file_says_is_read_without_transformers(tmp_path: Path) -> None:
    model = read_local_model(model_folder(tmp_path), "sglang")
    assert model.renderer == "sglang"
    assert json.loads(model.contents["tokenizer.json"]) == PIPELINES["gemma"]()


def test_another_major_version_of_transformers_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__dict__["__version__"] = "4.57.1"
    monkeypatch.setitem(sys.modules, "transformers", old)
    assert (
        json.loads(read_local_model(model_folder(tmp_path), "vllm").contents["tokenizer.json"]) == PIPELINES["gemma"]()
    )
    with pytest.raises(ValueError, match="transformers 5 isn't installed"):
        read_local_model(model_folder(tmp_path, tokenizer_class="GPT2Tokenizer"), "vllm")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, "tokenizer_class 'GPT2Tokenizer' needs transformers"),
        ({"tokenizer_class": None}, "tokenizer_class None"),
        ({"add_bos_token": True}, "add_bos_token in tokenizer_config.json"),
        ({"bos_token": "<another>"}, "bos_token isn't a plain special token"),
        ({"eos_token": {"content": "</s>", "lstrip": True}}, "eos_token isn't"),
        ({"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "auto_map in"),
    ],
)
def test_what_transformers_might_change_is_not_guessed(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    if find_spec("transformers"):
        pytest.skip("transformers is installed: it is asked instead")
    with pytest.raises(ValueError, match=said):
        read_local_model(model_folder(tmp_path, **changes), "vllm")


@pytest.mark.parametrize(
    ("config", "names", "renderer"),
    [
        ({"model_type": "llama", "architectures": ["DeepseekV32ForCausalLM"]}, [], "vllm-own"),
        ({"model_type": "llama", "architectures": ["KimiK3ForConditionalGeneration"]}, [], "vllm-unknown"),
        ({"model_type": "llama"}, ["consolidated.safetensors", "tekken.json"], "vllm-unknown"),
        ({"model_type": "llama"}, ["tekken.json"], "vllm"),
    ],
)
def test_who_renders_is_told_from_the_model(
    tmp_path: Path, config: dict[str, object], names: list[str], renderer: str
) -> None:
    model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in names:
        (tmp_path / name).touch()
    model = read_local_model(tmp_path, "vllm")
    assert model.renderer == renderer
    assert bool(model.contents) == (renderer != "vllm-unknown") == (not model.reason)


def hub(folder: Path, commit: str = "abc") -> Path:
    snapshot = folder / "models--org--name" / "snapshots" / commit
    model_folder(snapshot)
    (folder / "models--org--name" / "refs").mkdir(exist_ok=True)
    (folder / "models--org--name" / "refs" / "main").write_text(commit)
    return snapshot


def test_a_hub_id_is_found_in_the_cache_and_follows_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    old = hub(tmp_path)
    assert find_folder("org/name") == find_folder("org/name@main") == find_folder("org/name@abc") == old
    new = hub(tmp_path, "def")
    assert find_folder("org/name") == new
    assert find_folder("org/name@abc") == old


@pytest.mark.parametrize(
    "name",
    ["~nobody-of-this-name/x", "org/absent", "org/name@absent", "name", "../etc/passwd", "org/../name", "a/b/c", "@"],
)
def test_what_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub(tmp_path)
    with pytest.raises(ValueError, match=r"neither a folder|nothing is downloaded|home directory"):
        find_folder(name)


def test_a_change_of_any_file_that_counts_is_seen(tmp_path: Path) -> None:
    model_folder(tmp_path)
    seen = look(tmp_path)
    (tmp_path / "README.md").touch()
    assert look(tmp_path) == seen
    for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
        (tmp_path / name).write_text("{}")
        assert look(tmp_path) != seen
        seen = look(tmp_path)
    os.utime(tmp_path / "tokenizer.json", (1, 1))
    assert look(tmp_path) != seen


def test_a_link_that_leads_nowhere_is_no_file(tmp_path: Path) -> None:
    seen = look(model_folder(tmp_path))
    (tmp_path / "tokenizer.model").symlink_to("../../blobs/absent")
    assert look(tmp_path) == seen


class Reading:
    """A place that is looked after by hand: each look is one step of the loop."""

    def __init__(self, folder: Path, loaded: set[ModelFiles]) -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(404)))
        engine = EngineConfig(url="http://e:1", tokenizer=str(folder), kind="reference")
        self.files = TokenizerFiles(folder / "cache", client)
        self.models = LocalModels([engine], self.files, loaded.__contains__)

    async def look(self) -> None:
        (place,) = self.models._places.values()
        await self.models._look_after(place)

    @property
    def wanted(self) -> list[ModelFiles]:
        return [files for files, _ in self.models.wanted()]


async def test_the_old_files_serve_until_the_new_are_loaded_and_half_a_copy_is_not_read(tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    loaded: set[ModelFiles] = set()
    reading = Reading(tmp_path, loaded)
    await reading.look()
    (old,) = reading.wanted
    assert reading.models.files_of("e:1") is None
    assert reading.models.state("e:1") == "loading"
    loaded.add(old)
    assert reading.models.files_of("e:1") == old
    assert reading.models.state("e:1") is None
    assert await reading.files.get(dict(old.digests)["tokenizer.json"], []) == CONTENTS["tokenizer.json"]

    (tmp_path / "chat_template.jinja").write_text("half a templ")
    await reading.look()
    assert reading.wanted == [old], "it may still be copied"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    await reading.look()
    assert reading.wanted == [old]
    await reading.look()
    _, new = reading.wanted
    assert reading.models.files_of("e:1") == old
    loaded.add(new)
    assert reading.models.files_of("e:1") == new
    assert reading.wanted == [new]

    (tmp_path / "tokenizer_config.json").unlink()
    for _ in range(2):
        await reading.look()
    assert "tokenizer_config.json" in str(reading.models.state("e:1"))
    assert reading.models.files_of("e:1") == new


async def test_a_folder_that_is_not_there_yet_is_taken_when_it_is(tmp_path: Path) -> None:
    loaded: set[ModelFiles] = set()
    reading = Reading(tmp_path / "later", loaded)
    await reading.look()
    assert "neither a folder nor a hub id" in str(reading.models.state("e:1"))
    assert reading.wanted == []
    (tmp_path / "later").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / "later" / name).write_bytes(content)
    for _ in range(2):
        await reading.look()
    assert len(reading.wanted) == 1


async def test_a_folder_that_could_not_be_read_for_want_of_a_process_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = [BlockingIOError("no more processes"), ValueError("not now")]

    async def read(folder: Path, kind: str) -> LocalModel:
        if failures:
            raise failures.pop(0)
        return LocalModel(kind, CONTENTS)

    monkeypatch.setattr(local_models, "read_apart", read)
    (tmp_path / "tokenizer.json").write_text("{}")
    reading = Reading(tmp_path, set())
    for said in ("no more processes", "not now", "loading"):
        for _ in range(RETRY_POLLS + 1):
            await reading.look()
        assert said in str(reading.models.state("e:1"))
    assert len(reading.wanted) == 1


async def test_a_file_system_that_does_not_answer_holds_up_no_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, hung = threading.Event(), model_folder(tmp_path / "hung")
    looks_as_ever = local_models.look

    def look_or_hang(folder: Path) -> Look:
        if folder == hung:
            answers.wait()
        return looks_as_ever(folder)

    monkeypatch.setattr(local_models, "look", look_or_hang)
    engines = [
        EngineConfig(url=f"http://{name}:1", tokenizer=str(model_folder(tmp_path / name)), kind="sglang")
        for name in ("hung", "well")
    ]
    async with httpx.AsyncClient() as client:
        models = LocalModels(engines, TokenizerFiles(tmp_path / "cache", client), lambda files: True)
        watching = asyncio.create_task(models.run())
        try:
            await eventually(lambda: models.files_of("well:1") is not None)
            assert models.files_of("hung:1") is None
        finally:
            answers.set()
            watching.cancel()
            await asyncio.wait({watching})


async def test_folders_that_are_configured_later_are_watched_and_those_left_out_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    looks_as_ever = local_models.look

    def look_and_note(folder: Path) -> Look:
        looked.append(folder.name)
        return looks_as_ever(folder)

    async def no_pause(_: float) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(local_models, "look", look_and_note)
    stays, goes, comes = (
        EngineConfig(url=f"http://{name}:1", tokenizer=str(model_folder(tmp_path / name)), kind="sglang")
        for name in ("stays", "goes", "comes")
    )
    async with httpx.AsyncClient() as client:
        models = LocalModels([stays, goes], TokenizerFiles(tmp_path / "cache", client), lambda files: True, no_pause)
        watching = asyncio.create_task(models.run())
        try:
            await eventually(lambda: None not in (models.files_of("stays:1"), models.files_of("goes:1")))
            kept = models.files_of("stays:1")
            models.configure([stays])
            models.configure([stays, comes])
            assert models.files_of("stays:1") is kept, "nothing is loaded once more"
            assert models.files_of("goes:1") is None
            await eventually(lambda: models.files_of("comes:1") is not None)
            looked.clear()
            await eventually(lambda: looked.count("stays") > 3 and looked.count("comes") > 3)
            assert "goes" not in looked
            models.configure([comes])
            models.configure([comes, stays])  # left out and back again before anybody looked
            await eventually(lambda: models.files_of("stays:1") is not None)
        finally:
            watching.cancel()
            await asyncio.wait({watching})
