"""Turns a GGUF file into a model folder that vLLM loads. Run by vLLM's own Python: `convert_gguf.py FILE FOLDER`.

transformers reads the file but won't save what it read ("quantized with GGUF and is not serializable"): hence a
fresh model of the same shape takes the weights over. They are stored in bfloat16; the chat template comes along.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

_NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path")


def convert(gguf: Path, folder: Path) -> None:
    """Write the folder. Raises `ValueError` when the file isn't a Llama-like model with all its weights."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if not isinstance(read, LlamaForCausalLM):
        raise ValueError(f"{gguf} holds a {type(read).__name__}, not a Llama")
    config = {name: value for name, value in read.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    model = LlamaForCausalLM(LlamaConfig(**config | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
