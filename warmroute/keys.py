"""`warmroute keys`: the chunk keys of a prompt, for whoever builds against them."""

import argparse
import json
import sys
from collections.abc import Sequence

from directory.chunks import CHUNK_TOKENS_DEFAULT, pack_tokens
from directory.errors import IdentityRefused
from directory.identity import Identity, Scope
from directory.schemes import SCHEMES, key_scheme


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = "Read token ids as a JSON list on stdin; print one hex key a line, for full chunks only."
    for name in ("model-id", "weights-sha", "tokenizer-sha", "kv-dtype", "layout"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--tp-rank", metavar='N|"*"', help="a shard's rank, or * for fleet keys (default 0; * with --directory)"
    )
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS_DEFAULT)
    parser.add_argument("--salt", help="the salt as the engine sees it")
    parser.add_argument("--lora-digest", metavar="HEX", help="the adapter's content digest, 64 hex digits")
    parser.add_argument("--scheme", choices=SCHEMES, default="warmroute")
    parser.add_argument("--page-tokens", type=int, help="the engine's own block size (scheme sglang)")
    parser.add_argument("--directory", action="store_true", help="the 16-byte directory keys instead")


def run(options: argparse.Namespace) -> int:
    """Print the keys; trouble is one sentence on stderr, and 2."""
    try:
        keys = keys_for(options, sys.stdin.read())
    except (IdentityRefused, ValueError) as error:
        print(f"warmroute keys: {error}", file=sys.stderr)
        return 2
    for key in keys:
        print(key.hex())
    return 0


def keys_for(options: argparse.Namespace, tokens_json: str) -> Sequence[bytes]:
    """The keys asked for. Raises `IdentityRefused` or `ValueError` with a sentence that names what is wrong."""
    if options.chunk_tokens < 1:
        raise ValueError("--chunk-tokens must be at least 1")
    identity = Identity(
        options.model_id,
        options.weights_sha,
        options.tokenizer_sha,
        options.kv_dtype,
        options.layout,
        options.tp_size,
    )
    scope = Scope(lora=_adapter_digest(options.lora_digest), salt=options.salt)
    tokens = pack_tokens(_read_tokens(tokens_json))
    digest = _identity_digest(identity, options)
    scheme = key_scheme(options.scheme)
    digests = scheme.digests(digest, scope, tokens, options.chunk_tokens, options.page_tokens)
    return scheme.directory_keys(digest, scope, digests) if options.directory else digests


def _identity_digest(identity: Identity, options: argparse.Namespace) -> bytes:
    rank = options.tp_rank
    if options.directory:
        if rank not in (None, "*"):
            raise ValueError("--directory names chunks for the whole fleet: leave --tp-rank out, or give *")
        return identity.fleet_digest()
    if rank == "*":
        return identity.fleet_digest()
    try:
        return identity.shard_digest(int(rank or 0))
    except ValueError as error:
        if isinstance(error, IdentityRefused):
            raise
        raise ValueError(f'--tp-rank must be a number or "*", not {rank!r}') from None


def _adapter_digest(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError("--lora-digest must be 64 hex digits") from None


def _read_tokens(text: str) -> list[int]:
    try:
        tokens = json.loads(text)
    except ValueError as error:
        raise ValueError(f"stdin must hold token ids as a JSON list: {error}") from None
    if not isinstance(tokens, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in tokens):
        raise ValueError("stdin must hold token ids as a JSON list of whole numbers")
    return tokens
