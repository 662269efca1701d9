"""What a model's folder says of how its engines encode: the files that an agent would give, had they one.

vLLM and SGLang load a tokenizer by transformers' AutoTokenizer, whose pipeline may be another than that of the folder's
`tokenizer.json`. So it is loaded the same way, and written down. That takes seconds and holds the GIL:
`local_model_reader.py` does it in a process of its own. Sources: transformers 5.19 (`models/auto/tokenization_auto.py`,
`tokenization_utils_tokenizers.py`), vLLM 0.32 (`tokenizers/registry.py`, `config/model.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from gateway.encoding.nasty_texts import nasty_texts

KINDS = ("vllm", "sglang", "reference")
TRANSFORMERS = "transformers 5 isn't installed (pip install 'warmroute[transformers]')"
TRANSFORMERS_MAJOR = "5"
PROOF_TEXTS = 100
FILE_BYTES_MAX = 256 * 2**20
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_AS_ITS_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that take the pipeline from `tokenizer.json`, and change it only where the configuration says so."""
_TYPES_OF_ANY_CLASS = ("", "llama")
"""Model types for which the class that the configuration names is taken, whichever it is."""
_CHANGES = ("add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "extra_special_tokens",
            "additional_special_tokens", "split_special_tokens", "fix_mistral_regex", "auto_map")  # fmt: skip
_MISTRAL_VOCABULARY = 100_000
"""Larger ones are looked at for a wrong expression of Mistral's, and mended."""
_OWN_RENDERERS = ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration",
                  "DeepseekV41ForCausalLM")  # fmt: skip
_OWN_TOKENIZERS = ("MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration", "InklingForCausalLM",
                   "InklingForConditionalGeneration")  # fmt: skip
_PLAIN_BACKENDS = ("internlm2", "step3_vl", "step3p7", "unlimited-ocr", "unlimited_ocr")
"""Model types whose tokenizers vLLM takes for plain ones, whatever their configuration says."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A renderer's kind and the contents of its files. Without them only token ids are known; `reason` says why."""

    renderer: str
    contents: Mapping[str, bytes]
    reason: str = ""


def read_local_model(folder: Path, kind: str) -> LocalModel:
    """How an engine of this `kind` encodes for the model in `folder`. Raises `ValueError` or `OSError`."""
    if kind == "reference":
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        return LocalModel("reference", {name: _read(folder / name) for name in names})
    config = _object(folder / "config.json") if (folder / "config.json").is_file() else {}
    architecture = str((config.get("architectures") or [""])[0])
    if kind == "vllm" and (architecture in _OWN_TOKENIZERS or _is_of_mistrals_form(folder)):
        return LocalModel("vllm-unknown", {}, "vLLM encodes for this model by code of its own")
    is_own = kind == "vllm" and (architecture in _OWN_RENDERERS or config.get("model_type") == "gpt_oss")
    is_plain = kind == "vllm" and (architecture in _OWN_RENDERERS or config.get("model_type") in _PLAIN_BACKENDS)
    transformers = _transformers()
    if transformers is None:
        files = _as_its_file_says(folder, str(config.get("model_type", "")))
    else:
        loader = transformers.TokenizersBackend if is_plain else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        pipeline, reason = _pipeline_of(tokenizer)
        if reason:
            return LocalModel("vllm-unknown", {}, reason)
        files = {"tokenizer.json": pipeline, "tokenizer_config.json": _configuration_of(tokenizer)}
    for name in ("chat_template.json",):  # a processor's, which the tokenizer doesn't know of
        if (folder / name).is_file():
            files[name] = _read(folder / name)
    return LocalModel("vllm-own" if is_own else kind, files)


def _transformers() -> Any | None:
    """The library, if it is of the major version that engines have: another gives a tokenizer other ids."""
    try:
        import transformers
    except ImportError:
        return None
    return transformers if transformers.__version__.partition(".")[0] == TRANSFORMERS_MAJOR else None


def _is_of_mistrals_form(folder: Path) -> bool:
    return any(folder.glob("consolidated*.safetensors")) and any(
        True for pattern in ("tekken.json", "tokenizer.model.v*") for _ in folder.glob(pattern)
    )


def _pipeline_of(tokenizer: Any) -> tuple[bytes, str]:
    """The pipeline of a loaded tokenizer, or the reason why it isn't all that it does."""
    name, backend = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return b"", f"the tokenizer's class {name} is code of its own"
    pipeline = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    content = _stable_json(pipeline)
    alone = tokenizers.Tokenizer.from_str(content.decode())
    for text in nasty_texts([token["content"] for token in pipeline["added_tokens"]], PROOF_TEXTS):
        for adds_special in (False, True):
            ids = alone.encode(text, add_special_tokens=adds_special).ids
            if tokenizer(text, add_special_tokens=adds_special)["input_ids"] != ids:
                return b"", f"the tokenizer's class {name} encodes otherwise than its pipeline"
    return content, ""


def _configuration_of(tokenizer: Any) -> bytes:
    config: dict[str, Any] = {name: tokenizer.special_tokens_map.get(name) for name in SPECIAL_TOKENS}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        config["chat_template"] = [{"name": name, "template": template[name]} for name in sorted(template)]
    elif template is not None:
        config["chat_template"] = template
    return _stable_json(config)


def _as_its_file_says(folder: Path, model_type: str) -> dict[str, bytes]:
    """The files themselves, where transformers would change nothing. Raises `ValueError` where it might."""
    config, pipeline = _object(folder / "tokenizer_config.json"), _object(folder / "tokenizer.json")
    if model_type not in _TYPES_OF_ANY_CLASS:
        raise ValueError(f"the model type {model_type!r} needs transformers: {TRANSFORMERS}")
    if config.get("tokenizer_class") not in _AS_ITS_FILE:
        raise ValueError(f"tokenizer_class {config.get('tokenizer_class')!r} needs transformers: {TRANSFORMERS}")
    if changes := [name for name in _CHANGES if config.get(name)]:
        raise ValueError(f"{changes[0]} in tokenizer_config.json needs transformers: {TRANSFORMERS}")
    flags = ("normalized", "lstrip", "rstrip", "single_word")
    special = [token["content"] for token in pipeline["added_tokens"] if token["special"]]
    odd = [token["content"] for token in pipeline["added_tokens"] if any(token[flag] for flag in flags)]
    for name in SPECIAL_TOKENS:
        if config.get(name) is not None and (config[name] not in special or config[name] in odd):
            raise ValueError(f"{name} isn't a plain special token of tokenizer.json: {TRANSFORMERS}")
    if len(pipeline["model"]["vocab"]) > _MISTRAL_VOCABULARY:
        raise ValueError(f"a vocabulary of more than {_MISTRAL_VOCABULARY:,} needs transformers: {TRANSFORMERS}")
    if "add_bos_token" in config or "add_eos_token" in config or pipeline["post_processor"] is None:
        pipeline["post_processor"] = None  # transformers puts one there that adds nothing
    files = {
        "tokenizer.json": _stable_json(pipeline | {"truncation": None, "padding": None}),
        "tokenizer_config.json": _read(folder / "tokenizer_config.json"),
    }
    if (folder / "chat_template.jinja").is_file():
        files["chat_template.jinja"] = _read(folder / "chat_template.jinja")
    return files


def _object(path: Path) -> dict[str, Any]:
    found = json.loads(_read(path))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} isn't a JSON object")
    return found


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"{path.name} is larger than {FILE_BYTES_MAX} bytes")
    return content


def _stable_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
