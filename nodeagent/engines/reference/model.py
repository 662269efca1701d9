"""The forward pass of a Llama-type model in NumPy, float32 throughout.

Results depend on how a prompt is cut into batches (matrix products round differently by shape), so callers keep one
rule: a prompt is computed in batches cut at multiples of the chunk from position 0, whatever a cache holds. Then KV
and logits are the same bits with and without a cache. Decoding is one token and one sequence at a time for the same
reason.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from directory.costs import ModelShape, kv_bytes_per_token
from nodeagent.engines.reference.errors import ModelFileError
from nodeagent.engines.reference.gguf_file import GgufFile
from nodeagent.engines.reference.kv import KvSequence
from nodeagent.engines.reference.team import Team

Floats = NDArray[np.float32]
TokenIds = NDArray[np.uint32]

BLOCK_ROWS = 128
"""Rows of a batch that one thread computes together. Part of the layout of KV: another number, other bits."""

CONTEXT_TOKENS_MAX = 1 << 17
LAYERS_MAX = 1024
_KV_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """The sizes and constants of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float

    @property
    def group(self) -> int:
        """How many query heads share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, laid out for `activations @ weights`; q, k, v stand side by side, and so do gate and up."""

    attention_norm: Floats
    qkv: Floats
    attention_output: Floats
    ffn_norm: Floats
    gate_up: Floats
    ffn_down: Floats


class LlamaModel:
    """The weights of one model, and the threads that compute with them."""

    def __init__(
        self,
        settings: LlamaSettings,
        layers: list[LayerWeights],
        embedding: Floats,
        output_norm: Floats,
        output: Floats,
        threads: int,
    ) -> None:
        self.settings = settings
        self.layers = layers
        self._embedding = embedding
        self._output_norm = output_norm
        self._output = output
        self.cosines, self.sines = _rope_table(settings)
        self._team = Team(threads)
        first = layers[0]
        per_layer = first.qkv.size + first.attention_output.size + first.gate_up.size + first.ffn_down.size
        self.shape = ModelShape(
            parameters=float(per_layer * settings.layers),
            layers=settings.layers,
            d_model=settings.width,
            kv_bytes_per_token=kv_bytes_per_token(
                settings.layers, settings.kv_heads, settings.head_dim, _KV_VALUE_BYTES
            ),
        )
        """`parameters` are those every token is multiplied with: the embedding is a lookup, the output one row."""

    def new_sequence(self, capacity_tokens: int) -> KvSequence:
        """An empty KV buffer with room for that many tokens (it grows)."""
        settings = self.settings
        return KvSequence(settings.layers, settings.kv_heads, settings.head_dim, capacity_tokens)

    def forward(self, tokens: TokenIds, sequence: KvSequence, *, want_logits: bool) -> Floats | None:
        """Compute `tokens` behind what `sequence` holds and add their KV to it.

        Returns the logits of the last token, float32 [vocabulary], if wanted. Token ids must be in the vocabulary.

        The rows of a batch are shared out in blocks of `BLOCK_ROWS`, so the number of threads changes no bit. A layer
        has one meeting point: before any block attends, all blocks must have written their keys and values. So each
        part of the work is the end of one layer and the beginning of the next.
        """
        count = len(tokens)
        sequence.reserve(sequence.length + count)
        x = self._embedding[tokens]
        blocks = [_Block(self, x, sequence, start) for start in range(0, count, BLOCK_ROWS)]
        for index in range(len(self.layers) + 1):
            self._team.run(lambda part, index=index: blocks[part].cross(index), len(blocks))  # type: ignore[misc]
        sequence.length += count
        if not want_logits:
            return None
        last = _rms_norm(x[-1:], self._output_norm, self.settings.norm_epsilon)
        return np.asarray(self._output @ last[0], dtype=np.float32)


class _Block:
    """Some rows of a batch on their way through the layers."""

    def __init__(self, model: LlamaModel, x: Floats, sequence: KvSequence, start: int) -> None:
        self._settings = model.settings
        self._layers = model.layers
        self._sequence = sequence
        self._x = x[start : start + BLOCK_ROWS]
        self._position = sequence.length + start
        self._queries = self._x
        end = self._position + len(self._x)
        self._cosines = model.cosines[self._position : end, None]
        self._sines = model.sines[self._position : end, None]
        self._mask = _future_mask(len(self._x))
        self._scores = np.empty((self._settings.group * len(self._x), end), np.float32)

    def cross(self, index: int) -> None:
        """Finish the layer before `index`, then write the keys and values of layer `index`."""
        if index > 0:
            self._finish(index - 1, self._layers[index - 1])
        if index < len(self._layers):
            self._begin(index, self._layers[index])

    def _begin(self, index: int, layer: LayerWeights) -> None:
        settings, rows = self._settings, len(self._x)
        heads, kv_heads = settings.heads, settings.kv_heads
        qkv = _rms_norm(self._x, layer.attention_norm, settings.norm_epsilon) @ layer.qkv
        qkv = qkv.reshape(rows, heads + 2 * kv_heads, settings.head_dim)
        rotated = _rotate(qkv[:, : heads + kv_heads], self._cosines, self._sines)
        self._sequence.write(index, self._position, rotated[:, heads:], qkv[:, heads + kv_heads :])
        # The query heads that share a KV head are stacked: each KV head then costs two matrix products.
        scaled = rotated[:, :heads] * np.float32(settings.head_dim**-0.5)
        grouped = scaled.reshape(rows, kv_heads, settings.group, settings.head_dim).transpose(1, 2, 0, 3)
        self._queries = grouped.reshape(kv_heads, settings.group * rows, settings.head_dim)

    def _finish(self, index: int, layer: LayerWeights) -> None:
        self._x += self._attend(index) @ layer.attention_output
        hidden = _rms_norm(self._x, layer.ffn_norm, self._settings.norm_epsilon) @ layer.gate_up
        gate, up = np.split(hidden, 2, axis=1)
        self._x += (_silu(gate) * up) @ layer.ffn_down

    def _attend(self, index: int) -> Floats:
        """Causal attention over all tokens up to each row's own: [rows, heads * head_dim].

        Only the square of the block's own tokens needs a mask.
        """
        settings, rows, scores = self._settings, len(self._x), self._scores
        total, group = scores.shape[1], settings.group
        out = np.empty((rows, settings.kv_heads, group, settings.head_dim), np.float32)
        for head in range(settings.kv_heads):
            keys, values = self._sequence.keys(index, head, total), self._sequence.values(index, head, total)
            np.matmul(self._queries[head], keys.T, out=scores)
            if self._mask is not None:
                own = scores.reshape(group, rows, total)[:, :, total - rows :]
                own += self._mask
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = (scores @ values) / scores.sum(axis=1, keepdims=True)
            out[:, head] = mixed.reshape(group, rows, settings.head_dim).transpose(1, 0, 2)
        return out.reshape(rows, settings.heads * settings.head_dim)


def load_model(file: GgufFile, threads: int) -> LlamaModel:
    """The model in `file`. Raises `ModelFileError` for anything but a plain Llama-type model."""
    settings = _read_settings(file)
    per_layer = (
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    )
    needed = {f"blk.{layer}.{name}.weight" for layer in range(settings.layers) for name in per_layer}
    needed |= {"token_embd.weight", "output_norm.weight"}
    found = file.tensor_names
    if missing := sorted(needed - found):
        raise ModelFileError(f"{file.path} lacks the tensor {missing[0]}")
    if unknown := sorted(found - needed - {"output.weight"}):
        raise ModelFileError(f"{file.path} holds the tensor {unknown[0]}, which this engine doesn't know")
    tensors = file.tensors(threads)
    try:
        layers = [_read_layer(settings, tensors, f"blk.{layer}.") for layer in range(settings.layers)]
        embedding = _shaped(tensors, "token_embd.weight", (settings.vocabulary, settings.width))
        output_norm = _shaped(tensors, "output_norm.weight", (settings.width,))
        output = embedding
        if "output.weight" in tensors:
            output = _shaped(tensors, "output.weight", (settings.vocabulary, settings.width))
    except ValueError as error:
        raise ModelFileError(f"{file.path}: {error}") from error
    return LlamaModel(settings, layers, embedding, output_norm, output, threads)


def _read_settings(file: GgufFile) -> LlamaSettings:
    architecture = file.field("general.architecture", str)
    if architecture != "llama":
        raise ModelFileError(f"{file.path} holds a model of type {architecture!r}; this engine runs Llama-type models")
    if file.fields.get("llama.rope.scaling.type", "none") != "none" or "llama.rope.scaling.factor" in file.fields:
        raise ModelFileError(f"{file.path} uses RoPE scaling, which this engine doesn't know")
    context_tokens = file.field("llama.context_length", int)
    if not 1 < context_tokens <= CONTEXT_TOKENS_MAX:
        raise ModelFileError(f"{file.path} has a context of {context_tokens} tokens, not 2 to {CONTEXT_TOKENS_MAX}")
    layers = file.field("llama.block_count", int)
    if not 1 <= layers <= LAYERS_MAX:
        raise ModelFileError(f"{file.path} has {layers} layers, not 1 to {LAYERS_MAX}")
    heads = file.field("llama.attention.head_count", int)
    kv_heads = file.fields.get("llama.attention.head_count_kv", heads)
    width = file.field("llama.embedding_length", int)
    head_dim = file.fields.get("llama.attention.key_length", width // max(1, heads))
    rotated = file.fields.get("llama.rope.dimension_count", head_dim)
    if not heads or not kv_heads or heads % kv_heads or head_dim % 2 or rotated != head_dim:
        raise ModelFileError(f"{file.path} has an arrangement of attention heads that this engine doesn't know")
    if file.fields.get("llama.attention.value_length", head_dim) != head_dim:
        raise ModelFileError(f"{file.path} has keys and values of different sizes")
    return LlamaSettings(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        width=width,
        vocabulary=len(file.field("tokenizer.ggml.tokens", list)),
        context_tokens=context_tokens,
        rope_base=_number(file, "llama.rope.freq_base", 1.0, 1e12, default=10000.0),
        norm_epsilon=_number(file, "llama.attention.layer_norm_rms_epsilon", 1e-12, 1.0),
    )


def _number(file: GgufFile, name: str, low: float, high: float, default: float | None = None) -> float:
    """A setting within its sane bounds: a damaged one would compute nonsense, or nothing."""
    value = file.fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ModelFileError(f"{file.path} has {name} = {value!r}, not a number from {low:g} to {high:g}")
    return float(value)


def _read_layer(settings: LlamaSettings, tensors: dict[str, Floats], prefix: str) -> LayerWeights:
    width, head_dim = settings.width, settings.head_dim
    q = _shaped(tensors, prefix + "attn_q.weight", (settings.heads * head_dim, width))
    k = _shaped(tensors, prefix + "attn_k.weight", (settings.kv_heads * head_dim, width))
    v = _shaped(tensors, prefix + "attn_v.weight", (settings.kv_heads * head_dim, width))
    down = tensors[prefix + "ffn_down.weight"]
    if down.ndim != 2:
        raise ValueError(f"{prefix}ffn_down.weight has the wrong shape")
    hidden = down.shape[1]
    gate = _shaped(tensors, prefix + "ffn_gate.weight", (hidden, width))
    up = _shaped(tensors, prefix + "ffn_up.weight", (hidden, width))
    qkv = np.concatenate([_halves_first(q, head_dim), _halves_first(k, head_dim), v])
    return LayerWeights(
        attention_norm=_shaped(tensors, prefix + "attn_norm.weight", (width,)),
        qkv=np.ascontiguousarray(qkv.T),
        attention_output=np.ascontiguousarray(
            _shaped(tensors, prefix + "attn_output.weight", (width, settings.heads * head_dim)).T
        ),
        ffn_norm=_shaped(tensors, prefix + "ffn_norm.weight", (width,)),
        gate_up=np.ascontiguousarray(np.concatenate([gate, up]).T),
        ffn_down=np.ascontiguousarray(_shaped(tensors, prefix + "ffn_down.weight", (width, hidden)).T),
    )


def _shaped(tensors: dict[str, Floats], name: str, shape: tuple[int, ...]) -> Floats:
    if tensors[name].shape != shape:
        raise ValueError(f"{name} has the shape {tensors[name].shape}, not {shape}")
    return tensors[name]


def _halves_first(weights: Floats, head_dim: int) -> Floats:
    """Reorder each head's rows from GGUF's rotary pairs (0,1), (2,3), ... to halves: all firsts, then all seconds.

    Queries and keys are reordered alike, so their products stay the same, and rotation works on contiguous halves.
    """
    heads = weights.reshape(-1, head_dim // 2, 2, weights.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(weights.shape)


def _rope_table(settings: LlamaSettings) -> tuple[Floats, Floats]:
    """Cosines and sines of every position's angles: two arrays [context, head_dim / 2]."""
    steps = np.arange(0, settings.head_dim, 2, dtype=np.float64) / settings.head_dim
    angles = np.arange(settings.context_tokens, dtype=np.float64)[:, None] / settings.rope_base**steps
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Rotary position embedding of [count, heads, head_dim], in halves (RoFormer, arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty(x.shape, np.float32)
    np.subtract(first * cosines, second * sines, out=out[..., :half])
    np.add(first * sines, second * cosines, out=out[..., half:])
    return out


def _rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    mean_square = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(x.shape[1])
    return np.asarray(x / np.sqrt(mean_square + np.float32(epsilon)) * weight, dtype=np.float32)


def _silu(x: Floats) -> Floats:
    """x / (1 + exp(-x)). The exponent is bounded, so that a very negative x gives 0 without overflowing."""
    denominator = np.negative(x)
    np.minimum(denominator, np.float32(88.0), out=denominator)
    np.exp(denominator, out=denominator)
    denominator += np.float32(1.0)
    return np.divide(x, denominator, out=denominator)


def _future_mask(count: int) -> Floats | None:
    """What is added to the scores of a batch's own tokens: minus infinity where a key lies in the future."""
    if count == 1:
        return None
    return np.triu(np.full((count, count), -np.inf, np.float32), k=1)
