"""Which engines say that their chats come from the model's template: those for which it is true."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeagent.engines.vllm.description import renderer_of


@pytest.mark.parametrize(
    ("mode", "kind", "files", "renderer"),
    [
        ("auto", "llama", ["model.safetensors", "tokenizer.json"], "vllm"),
        ("hf", "mistral", ["consolidated.safetensors", "tekken.json"], "vllm"),
        ("auto", "mistral", ["consolidated.safetensors", "tekken.json"], "vllm-unknown"),
        ("auto", "mistral", ["consolidated-00001.safetensors", "tokenizer.model.v3"], "vllm-unknown"),
        ("auto", "mistral", ["model.safetensors", "tekken.json"], "vllm"),
        ("mistral", "mistral", [], "vllm-unknown"),
        ("auto", "gpt_oss", ["tokenizer.json"], "vllm-own"),
        ("deepseek_v32", "deepseek_v32", ["tokenizer.json"], "vllm-own"),
        ("kimi_k3", "kimi_k3", [], "vllm-unknown"),
    ],
)
def test_the_renderer_is_told_from_mode_model_and_files(
    tmp_path: Path, mode: str, kind: str, files: list[str], renderer: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    model = SimpleNamespace(tokenizer_mode=mode, hf_config=SimpleNamespace(model_type=kind))
    assert renderer_of(model, tmp_path) == renderer
