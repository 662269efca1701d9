import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nodeagent.engines.reference.errors import InvalidRequest
from nodeagent.engines.reference.gguf_file import GgufFile
from nodeagent.engines.reference.loaded_model import LoadedModel, default_model_path
from nodeagent.engines.reference.tokenizer import TextTokenizer, read_tokenizer_files

TORTURE = [
    "",
    " ",
    "hello world",
    "  two  spaces\nnew\n\n line\t\ttabs \r\n end ",
    "12345 67 8.90 ٣٤٥ १२३",
    "don't WON'T I'll they've",
    "你好\uff0c世界。 naïve café e\u0301 ﬁ",
    "🎉👩\u200d👩\u200d👧 flags 🇫🇷",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_start|<|im_end|>|>",
    "\x00\x01\x1c\x85\u2028\ufeff",
    "def f(x):\n    return {x: [1, 2, 3]}  # why?",
    "Ġliteral ▁marks",
]
ALPHABET = st.sampled_from([*"hello wrd0123\n\t '", "<|im_end|>", "<|im_start|>", "é", "中", "🎉", "\u0301", "\u0661"])
TEXTS = st.lists(ALPHABET | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join)


def build_independently(path: Path) -> Tokenizer:
    """The pipeline through the library's own API, from the same file."""
    with GgufFile(path) as file:
        tokens, merges = file.fields["tokenizer.ggml.tokens"], file.fields["tokenizer.ggml.merges"]
        special = [
            token for token, kind in zip(tokens, file.fields["tokenizer.ggml.token_type"], strict=True) if kind == 3
        ]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(each.split(" ", 1)) for each in merges])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


@pytest.fixture(scope="module")
def reference(real: LoadedModel) -> Tokenizer:
    return build_independently(default_model_path())


@pytest.mark.parametrize("text", TORTURE)
def test_token_ids_equal_the_librarys(real: LoadedModel, reference: Tokenizer, text: str) -> None:
    assert real.tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_token_ids_equal_the_librarys_for_any_text(real: LoadedModel, reference: Tokenizer, text: str) -> None:
    assert real.tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_the_bytes_of_tokens_make_the_text_the_library_decodes(
    real: LoadedModel, reference: Tokenizer, ids: list[int]
) -> None:
    found = b"".join(real.tokenizer.text_bytes(each) for each in ids).decode("utf-8", errors="replace")
    assert found == reference.decode(ids, skip_special_tokens=True)


def test_nothing_is_put_around_a_text_and_special_tokens_are_parsed(real: LoadedModel) -> None:
    assert real.tokenizer.encode("") == []
    assert real.tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]


def test_digits_stand_alone(real: LoadedModel) -> None:
    assert len(real.tokenizer.encode("12345")) == 5


def test_a_lone_surrogate_is_refused(real: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        real.tokenizer.encode("\ud800")


def test_the_files_are_the_same_bytes_every_time_and_stand_alone(tiny: LoadedModel, tiny_path: Path) -> None:
    with GgufFile(tiny_path) as file:
        files = read_tokenizer_files(file)
    assert files == tiny.files
    mapping = files.as_mapping()
    assert mapping.keys() == {"tokenizer.json", "chat_template.jinja", "tokenizer_config.json"}
    assert json.loads(mapping["tokenizer_config.json"])["eos_token"] == "<|im_end|>"
    rebuilt = Tokenizer.from_str(mapping["tokenizer.json"].decode())
    assert rebuilt.encode("hello world").ids == TextTokenizer(files).encode("hello world")


def test_the_longest_token_is_known(tiny: LoadedModel) -> None:
    assert tiny.tokenizer.token_bytes_max == len("<|endoftext|>")
    assert tiny.tokenizer.eos_id == 2
