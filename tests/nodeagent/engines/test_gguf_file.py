import contextlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeagent.engines.reference.errors import ModelFileError
from nodeagent.engines.reference.gguf_file import GgufFile, content_sha256
from nodeagent.engines.reference.loaded_model import load
from nodeagent.engines.reference.model import load_model
from nodeagent.engines.reference.tokenizer import read_tokenizer_files
from tests.nodeagent.engines import tiny_model


def test_settings_and_tensors_come_back_as_they_were_written(tiny_path: Path) -> None:
    with GgufFile(tiny_path) as file:
        tensors = file.tensors(threads=2)
        assert file.fields["llama.block_count"] == tiny_model.LAYERS
        assert file.fields["tokenizer.ggml.merges"] == tiny_model.MERGES
    expected = tiny_model.weights()
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], tensor)


def test_our_reading_equals_the_gguf_packages(tiny_path: Path) -> None:
    reader = gguf.GGUFReader(tiny_path)
    with GgufFile(tiny_path) as file:
        for name, value in file.fields.items():
            assert reader.fields[name].contents() == value


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantised_tensors_are_decoded(tmp_path: Path, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    path = tiny_model.write_gguf(tmp_path / "model.gguf", quantised=quantisation)
    with GgufFile(path) as file:
        found = file.tensors(threads=1)["token_embd.weight"]
    original = tiny_model.weights()["token_embd.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(original, quantisation), quantisation)
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - original).max() < 0.3


def test_a_file_of_something_else_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a model")
    with pytest.raises(ModelFileError, match="is not a GGUF model file"):
        GgufFile(path)


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ModelFileError):
        GgufFile(tmp_path / "empty")
    with pytest.raises(ModelFileError, match="can't be read"):
        GgufFile(tmp_path / "absent")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_file_cut_short_anywhere_is_refused(tiny_path: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = tiny_path.read_bytes()
    length = data.draw(st.integers(4, len(content) - 1))
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[:length])
    with pytest.raises(ModelFileError):
        GgufFile(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(tiny_path: Path, tmp_path: Path, position: int, value: int) -> None:
    content = bytearray(tiny_path.read_bytes())
    content[position] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    # Anything else than this error, or than success, fails the test.
    with contextlib.suppress(ModelFileError):
        load(path, "damaged", threads=1, chunk_tokens=tiny_model.CHUNK_TOKENS)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architecture": "mamba"}, "type 'mamba'"),
        ({"strings": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling"),
    ],
    ids=["architecture", "rope-scaling"],
)
def test_other_models_are_refused(tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    path = tiny_model.write_gguf(tmp_path / "model.gguf", **change)  # type: ignore[arg-type]
    with GgufFile(path) as file, pytest.raises(ModelFileError, match=sentence):
        load_model(file, threads=1)


def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(tmp_path: Path) -> None:
    good = tiny_model.weights()
    lacking = {name: tensor for name, tensor in good.items() if name != "blk.1.ffn_up.weight"}
    biased = good | {"blk.0.attn_q.bias": np.zeros(tiny_model.WIDTH, np.float32)}
    misshapen = good | {"blk.0.attn_k.weight": np.zeros((3, tiny_model.WIDTH), np.float32)}
    for tensors, name in ((lacking, "blk.1.ffn_up"), (biased, "blk.0.attn_q.bias"), (misshapen, "blk.0.attn_k")):
        path = tiny_model.write_gguf(tmp_path / "model.gguf", tensors=tensors)
        with GgufFile(path) as file, pytest.raises(ModelFileError, match=name):
            load_model(file, threads=1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"pre_tokenizer": "qwen2"}, "splits text by 'qwen2'"), ({"tokenizer": "llama"}, "type 'llama'")],
    ids=["pre-tokenizer", "tokenizer"],
)
def test_a_tokenizer_that_isnt_known_is_refused(tmp_path: Path, change: dict[str, str], sentence: str) -> None:
    path = tiny_model.write_gguf(tmp_path / "model.gguf", **change)  # type: ignore[arg-type]
    with GgufFile(path) as file, pytest.raises(ModelFileError, match=sentence):
        read_tokenizer_files(file)


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    one.write_bytes(b"a" * 3_000_000)
    same.write_bytes(b"a" * 3_000_000)
    other.write_bytes(b"a" * 2_999_999 + b"b")
    assert content_sha256(one) == content_sha256(same) != content_sha256(other)
