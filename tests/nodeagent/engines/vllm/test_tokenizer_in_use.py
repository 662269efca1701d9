"""What a vLLM engine registers as its tokenizer is what its calls do; where that can't be, it says so.

The tokenizers here have transformers' interface around real pipelines; `tests/vllm/test_tokenizers.py` asks vLLM's own.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastokens._compat import _TokenizerShim
from tokenizers import Tokenizer, processors

from gateway.encoding.template_files import read_templates
from nodeagent.engines.vllm.tokenizer_in_use import SPECIAL_TOKENS, tokenizer_in_use
from tests.gateway.pipelines import PIPELINES

BEGIN = processors.TemplateProcessing(single="<unk> $A", pair="<unk> $A $B", special_tokens=[("<unk>", 0)])


class LiveTokenizer:
    """As transformers' `TokenizersBackend` behaves: it calls its backend, with or without special tokens."""

    split_special_tokens = False

    def __init__(self, backend: Any, chat_template: Any = "{{ bos_token }}") -> None:
        self.backend_tokenizer, self.chat_template = backend, chat_template
        self.special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids}


class PutsBegin(LiveTokenizer):
    """Puts a token before a text in Python, as some models' own classes do."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = super().__call__(text, add_special_tokens)["input_ids"]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


class Lowers(LiveTokenizer):
    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return super().__call__(text.lower(), add_special_tokens)


class SplitsSpecial(LiveTokenizer):
    split_special_tokens = True


class Breaks(LiveTokenizer):
    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        raise RuntimeError("Already borrowed")


def plain(name: str = "gemma") -> Tokenizer:
    """Small ones, but for what is asked for."""
    return Tokenizer.from_str(json.dumps(PIPELINES[name]()))


def with_begin(backend: Any) -> Any:
    backend.post_processor = BEGIN
    return backend


def in_a_class_that_splits_special_tokens() -> Any:
    backend = plain()
    backend.encode_special_tokens = True
    return backend


@pytest.mark.parametrize("name", ["gpt2 and digits", "gemma", "legacy llama", "mistral"])
def test_the_registered_pipeline_encodes_as_the_live_one(name: str) -> None:
    live = plain(name)
    found = tokenizer_in_use(LiveTokenizer(live))
    assert found.pipeline is not None, found.reason
    registered = Tokenizer.from_str(found.pipeline.decode())
    for text in ("a  b 12", "Über 3.50 <|im_end|></s>", "\n\n\tx"):
        for adds_special in (False, True):
            assert registered.encode(text, add_special_tokens=adds_special).ids == (
                live.encode(text, add_special_tokens=adds_special).ids
            )


def test_a_token_put_around_texts_by_the_pipeline_is_registered() -> None:
    found = tokenizer_in_use(LiveTokenizer(with_begin(plain())))
    assert found.pipeline is not None
    assert Tokenizer.from_str(found.pipeline.decode()).encode("x").ids[0] == 0


@pytest.mark.parametrize(
    ("live", "said"),
    [
        (lambda: None, "without a tokenizer"),
        (lambda: object(), "has no pipeline"),
        (lambda: PutsBegin(plain()), "otherwise than its pipeline"),
        (lambda: Lowers(plain()), "otherwise than its pipeline"),
        (lambda: SplitsSpecial(plain()), "special tokens"),
        (lambda: LiveTokenizer(in_a_class_that_splits_special_tokens()), "special tokens"),
        (lambda: LiveTokenizer(with_begin(_TokenizerShim(plain().to_str()))), "otherwise than its pipeline"),
        (lambda: Breaks(plain()), "Already borrowed"),
    ],
    ids=["none", "own", "begin", "lowers", "splits", "backend splits", "fastokens, set later", "breaks"],
)
def test_what_no_file_could_say_is_not_registered(live: Callable[[], Any], said: str, tmp_path: Path) -> None:
    found = tokenizer_in_use(live())
    assert found.pipeline is None
    assert said in found.reason
    assert found.files(tmp_path) == {}


def test_how_texts_were_cut_off_or_filled_up_last_is_not_part_of_it() -> None:
    before = tokenizer_in_use(LiveTokenizer(plain()))
    live = plain()
    live.enable_truncation(100_000)
    after = tokenizer_in_use(LiveTokenizer(live))
    assert after == before
    assert after.pipeline is not None
    assert (json.loads(after.pipeline)["truncation"], json.loads(after.pipeline)["padding"]) == (None, None)


def test_fastokens_changes_no_byte_of_it() -> None:
    shim = _TokenizerShim(plain().to_str())
    assert tokenizer_in_use(LiveTokenizer(shim)) == tokenizer_in_use(LiveTokenizer(plain()))


@pytest.mark.parametrize("template", ["{{ bos_token }}a", {"default": "{{ bos_token }}a", "tool_use": "b"}, None])
def test_templates_and_special_tokens_are_the_live_ones(template: Any, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("what lies in the folder")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<another>"}')
    files = tokenizer_in_use(LiveTokenizer(plain(), template)).files(tmp_path)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads(files["tokenizer_config.json"])
    assert {name: config[name] for name in SPECIAL_TOKENS if config[name]} == LiveTokenizer(None).special_tokens_map
    found = read_templates(files)
    if template is None:
        assert found.without_tools.missing == "no_template"
    else:
        assert found.without_tools.known() is not None
        assert found.without_tools.special_tokens == {"bos_token": "<s>"}
        assert found.are_several == isinstance(template, dict)


def test_a_processors_template_is_told_as_well(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "x"}')
    assert tokenizer_in_use(LiveTokenizer(plain())).files(tmp_path)["chat_template.json"] == (b'{"chat_template": "x"}')


def test_the_digest_is_of_the_content_that_decides_the_ids(tmp_path: Path) -> None:
    found = tokenizer_in_use(LiveTokenizer(plain()))
    assert found.pipeline is not None
    assert found.digest(tmp_path) == hashlib.sha256(found.files(tmp_path)["tokenizer.json"]).hexdigest()
    assert tokenizer_in_use(LiveTokenizer(plain("mistral"))).digest(tmp_path) != found.digest(tmp_path)

    unknown = tokenizer_in_use(None)
    (tmp_path / "tekken.json").write_text("a")
    (tmp_path / "model.safetensors").write_text("weights")
    before = unknown.digest(tmp_path)
    (tmp_path / "model.safetensors").write_text("other weights")
    assert unknown.digest(tmp_path) == before
    (tmp_path / "tekken.json").write_text("b")
    assert unknown.digest(tmp_path) != before
