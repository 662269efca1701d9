"""A made-up Llama of a few thousand weights in a real GGUF file, and the same model written as plain loops."""

from pathlib import Path

import gguf
import numpy as np

from nodeagent.engines.reference.tokenizer import byte_alphabet

CHUNK_TOKENS = 16
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 4, 2, 8, 48
WIDTH = HEADS * HEAD_DIM
CONTEXT_TOKENS = 512
ROPE_BASE = 10000.0
EPSILON = 1e-5
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ t", "Ġt he"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary() -> list[str]:
    return [*SPECIAL, *byte_alphabet().values(), *(merge.replace(" ", "") for merge in MERGES)]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns) * 2).astype(np.float32)

    tensors = {
        "token_embd.weight": matrix(len(vocabulary()), WIDTH),
        "output_norm.weight": np.linspace(0.5, 1.5, WIDTH, dtype=np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        tensors |= {
            f"{prefix}attn_norm.weight": np.linspace(0.8, 1.2, WIDTH, dtype=np.float32),
            f"{prefix}attn_q.weight": matrix(WIDTH, WIDTH),
            f"{prefix}attn_k.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}attn_v.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}attn_output.weight": matrix(WIDTH, WIDTH),
            f"{prefix}ffn_norm.weight": np.linspace(1.2, 0.8, WIDTH, dtype=np.float32),
            f"{prefix}ffn_gate.weight": matrix(HIDDEN, WIDTH),
            f"{prefix}ffn_up.weight": matrix(HIDDEN, WIDTH),
            f"{prefix}ffn_down.weight": matrix(WIDTH, HIDDEN),
        }
    return tensors


def write_gguf(
    path: Path,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    tokenizer: str = "gpt2",
    quantised: gguf.GGMLQuantizationType | None = None,
    strings: dict[str, str] | None = None,
) -> Path:
    """Write a model file; the keywords plant what a reader must notice."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre_tokenizer)
    tokens = vocabulary()
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in (strings or {}).items():
        writer.add_string(name, value)
    for name, tensor in (weights() if tensors is None else tensors).items():
        if quantised is not None and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loop_logits(tensors: dict[str, np.ndarray], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same model written as plain loops in float64, after GGUF's own conventions: (last logits, keys rotated).

    Keys are [layers, tokens, kv_heads, head_dim] in GGUF's order of rotary pairs.
    """
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    hidden = [w["token_embd.weight"][token] for token in tokens]
    all_keys = []
    for layer in range(LAYERS):
        p = f"blk.{layer}."
        queries, keys, values = [], [], []
        for position, x in enumerate(hidden):
            h = _norm(x, w[p + "attn_norm.weight"])
            queries.append(_rotate(w[p + "attn_q.weight"] @ h, HEADS, position))
            keys.append(_rotate(w[p + "attn_k.weight"] @ h, KV_HEADS, position))
            values.append((w[p + "attn_v.weight"] @ h).reshape(KV_HEADS, HEAD_DIM))
        for position in range(len(hidden)):
            heads = []
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = [queries[position][head] @ keys[t][shared] / HEAD_DIM**0.5 for t in range(position + 1)]
                odds = np.exp(np.array(scores) - max(scores))
                odds /= odds.sum()
                heads.append(sum(odds[t] * values[t][shared] for t in range(position + 1)))
            x = hidden[position] + w[p + "attn_output.weight"] @ np.concatenate(heads)
            h = _norm(x, w[p + "ffn_norm.weight"])
            gate = w[p + "ffn_gate.weight"] @ h
            hidden[position] = x + w[p + "ffn_down.weight"] @ (
                gate / (1 + np.exp(-gate)) * (w[p + "ffn_up.weight"] @ h)
            )
        all_keys.append(keys)
    output = w.get("output.weight", w["token_embd.weight"])
    return output @ _norm(hidden[-1], w["output_norm.weight"]), np.array(all_keys)


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + EPSILON) * weight


def _rotate(x: np.ndarray, heads: int, position: int) -> np.ndarray:
    out = x.reshape(heads, HEAD_DIM).copy()
    for head in out:
        for pair in range(HEAD_DIM // 2):
            angle = position / ROPE_BASE ** (2 * pair / HEAD_DIM)
            a, b = head[2 * pair], head[2 * pair + 1]
            head[2 * pair] = a * np.cos(angle) - b * np.sin(angle)
            head[2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
    return out


def words(count: int, seed: int = 0) -> list[int]:
    """Token ids that aren't special, the same for the same seed."""
    return [int(each) for each in np.random.default_rng(seed).integers(len(SPECIAL), len(vocabulary()), count)]
