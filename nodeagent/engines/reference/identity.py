"""The identity of the KV that this engine computes: content digests, and a layout that names all else."""

import hashlib
from pathlib import Path

from directory.identity import Identity
from nodeagent.engines.reference.gguf_file import content_sha256
from nodeagent.engines.reference.model import BLOCK_ROWS, LlamaSettings
from nodeagent.engines.reference.numerics import Numerics
from nodeagent.engines.reference.tokenizer import TokenizerFiles

KV_LAYOUT_VERSION = 1
"""Raised when the order of a payload, the forward pass or the cut of its batches changes."""


def read_identity(
    model_name: str,
    path: Path,
    files: TokenizerFiles,
    settings: LlamaSettings,
    chunk_tokens: int,
    numerics: Numerics,
    sample: str,
) -> Identity:
    """The identity; `sample` is a fingerprint of KV computed here, so engines that compute other bits never share."""
    layout = (
        "warmroute-reference",
        f"kv={KV_LAYOUT_VERSION}",
        f"cut={chunk_tokens}/{BLOCK_ROWS}",
        f"rope=halves-{settings.rope_base:g}",
        numerics.describe(),
        f"sample={sample}",
    )
    return Identity(
        model_id=model_name,
        weights_sha=content_sha256(path),
        tokenizer_sha=hashlib.sha256(files.tokenizer_json).hexdigest(),
        kv_dtype="float32",
        layout=";".join(layout),
    )
