"""What the connector registers as `tokenizer.json` encodes as vLLM's own call does, whatever class the model names."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from gateway.encoding.encode_pool import EncodePool
from gateway.encoding.local_model_reader import read_apart
from gateway.encoding.nasty_texts import nasty_texts
from gateway.encoding.prompt_tokenizer import load_tokenizer
from gateway.encoding.self_check import SelfCheck
from tests.gateway.pipelines import PIPELINES, smollm2
from tests.vllm.engines import python_of_vllm
from warmroute.vllm.installation import launch_environment

pytestmark = pytest.mark.timeout(600)
BOUND_S = 300.0
TEXTS = [text[:3000] for text in nasty_texts(["<|im_start|>", "<|im_end|>", "<s>", "</s>"], 150, seed=11)]
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
}
CLASSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as its file says": ({"tokenizer_class": "TokenizersBackend", **SPECIAL}, smollm2()),
    "GPT-2's class": ({"tokenizer_class": "GPT2Tokenizer", **SPECIAL}, smollm2()),
    "a begin put before": ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **SPECIAL}, smollm2()),
    "a begin in its file": ({"tokenizer_class": "TokenizersBackend", **SPECIAL}, dict(smollm2(), post_processor=BEGIN)),
    "legacy Llama": (
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        dict(PIPELINES["legacy llama"](), post_processor=None),
    ),
    "legacy Llama, both put around": (
        {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": True,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
        dict(PIPELINES["legacy llama"](), post_processor=None),
    ),
    "tokens that its file lacks": (
        {"tokenizer_class": "TokenizersBackend", **SPECIAL, "additional_special_tokens": ["<more>"]},
        smollm2(),
    ),
}
"""By what is special: `tokenizer_config.json`, and the pipeline in `tokenizer.json`."""


def answers(folders: dict[str, Path], environment: dict[str, str], imported: list[Path]) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root, *imported)))
    done = subprocess.run(
        [python_of_vllm(), str(Path(__file__).with_name("tokenizer_answers.py"))],
        input=json.dumps({"folders": {name: str(folder) for name, folder in folders.items()}, "texts": TEXTS}),
        env=launch_environment(os.environ) | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for number, (name, (config, pipeline)) in enumerate(CLASSES.items()):
        made[name] = tmp_path_factory.mktemp(f"model{number}")
        (made[name] / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
        (made[name] / "tokenizer_config.json").write_text(json.dumps(config))
        (made[name] / "tokenizer.json").write_text(json.dumps(pipeline))
    return made


@pytest.fixture(scope="module")
def of_vllm(folders: dict[str, Path]) -> dict[str, Any]:
    return answers(folders, {}, [])


@pytest.fixture(scope="module")
def pool() -> Iterator[EncodePool]:
    pool = EncodePool()
    yield pool
    pool.close()


def gateways_ids(content: bytes, pool: EncodePool) -> list[list[int]]:
    async def encoded() -> list[list[int]]:
        tokenizer, _ = await load_tokenizer(content, pool, SelfCheck(pool, lambda: None), 2**20)
        ids = [await tokenizer.encode(text, adds) for text in TEXTS for adds in (False, True)]
        return [list(memoryview(each).cast("I")) for each in ids]

    return asyncio.run(encoded())


@pytest.mark.parametrize("name", CLASSES)
def test_the_gateway_encodes_as_vllm_calls(name: str, of_vllm: dict[str, Any], pool: EncodePool) -> None:
    answer = of_vllm[name]
    assert answer["reason"] == ""
    assert gateways_ids(answer["files"]["tokenizer.json"].encode(), pool) == answer["ids"]


def test_the_folders_own_file_would_be_wrong_for_some(
    folders: dict[str, Path], of_vllm: dict[str, Any], pool: EncodePool
) -> None:
    for name in ("GPT-2's class", "legacy Llama"):
        assert gateways_ids((folders[name] / "tokenizer.json").read_bytes(), pool) != of_vllm[name]["ids"]


def test_fastokens_changes_neither_the_ids_nor_the_files(
    folders: dict[str, Path], of_vllm: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("fastokens", f"{distribution('fastokens').name}-{distribution('fastokens').version}.dist-info"):
        (tmp_path / name).symlink_to(distribution("fastokens").locate_file(name))  # type: ignore[arg-type]
    supported = {name: folder for name, folder in folders.items() if "Llama" not in name}
    fast = answers(supported, {"VLLM_USE_FASTOKENS": "1"}, [tmp_path])
    assert all("fastokens" in each["backend"] for each in fast.values()), "the patch is there"
    for name in supported:
        assert fast[name]["files"] == of_vllm[name]["files"], name
        pairs = [pair for pair in zip(fast[name]["ids"], of_vllm[name]["ids"], strict=True) if pair[0] is not None]
        assert len(pairs) > len(TEXTS), "fastokens refuses only bytes that the vocabulary lacks"
        assert all(one == other for one, other in pairs), name


@pytest.mark.parametrize("name", CLASSES)
def test_a_gateway_reads_the_folder_as_vllm_does(
    name: str, folders: dict[str, Path], of_vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHOME", raising=False)
    model = asyncio.run(read_apart(folders[name], "vllm", python_of_vllm()))
    assert model.reason == ""
    assert json.loads(model.contents["tokenizer.json"]) == json.loads(of_vllm[name]["files"]["tokenizer.json"])
    assert json.loads(model.contents["tokenizer_config.json"]) == json.loads(
        of_vllm[name]["files"]["tokenizer_config.json"]
    )


def test_without_transformers_only_what_it_would_not_change_is_read(
    folders: dict[str, Path], of_vllm: dict[str, Any]
) -> None:
    model = asyncio.run(read_apart(folders["as its file says"], "vllm"))
    assert json.loads(model.contents["tokenizer.json"])["model"] == smollm2()["model"]
    for name in ("GPT-2's class", "a begin put before", "legacy Llama", "tokens that its file lacks"):
        with pytest.raises(ValueError, match="transformers"):
            asyncio.run(read_apart(folders[name], "vllm"))
