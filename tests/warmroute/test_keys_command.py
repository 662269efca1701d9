"""`warmroute keys` reproduces the golden vectors, and says what is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent.parent / "vectors" / "chunk_keys.json").read_text())


def tokens_of(spec: dict[str, list[int]]) -> list[int]:
    if "range" in spec:
        return list(range(*spec["range"]))
    value, count = spec["repeat"]
    return [value] * count


def keys_command(identity: dict[str, Any], *options: str, stdin: str) -> subprocess.CompletedProcess[str]:
    flags = [
        part
        for name in ("model_id", "weights_sha", "tokenizer_sha", "kv_dtype", "layout")
        for part in (f"--{name.replace('_', '-')}", identity[name])
    ]
    command = [sys.executable, "-m", "warmroute.cli", "keys", *flags, *options]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def keys(identity: dict[str, Any], *options: str, tokens: dict[str, list[int]]) -> list[str]:
    done = keys_command(identity, *options, stdin=json.dumps(tokens_of(tokens)))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_the_cases(case: dict[str, Any]) -> None:
    ranks = ("--tp-rank", str(case["tp_rank"]), "--tp-size", str(case["tp_size"]))
    options = (*ranks, "--chunk-tokens", str(case["chunk_tokens"]))
    assert keys(case["identity"], *options, tokens=case["tokens"]) == case["keys"]


@pytest.mark.parametrize("scope", VECTORS["scopes"], ids=lambda scope: scope["name"])
def test_the_scopes_and_their_directory_keys(scope: dict[str, Any]) -> None:
    identity, tokens = VECTORS["identity_for_scopes"], VECTORS["scope_tokens"]
    options = ["--tp-size", str(identity["tp_size"])]
    if scope["salt"]:
        options += ["--salt", scope["salt"]]
    if scope["adapter_digest_hex"]:
        options += ["--lora-digest", scope["adapter_digest_hex"]]
    assert keys(identity, *options, "--tp-rank", str(scope["tp_rank"]), tokens=tokens) == scope["keys"]
    if scope["directory_keys"]:
        assert keys(identity, *options, "--directory", tokens=tokens) == scope["directory_keys"]


def test_the_foreign_schemes() -> None:
    identity = VECTORS["identity_for_scopes"]
    sglang, lmcache = VECTORS["sglang"], VECTORS["lmcache_mp"]
    options = ("--tp-size", "2", "--scheme", "sglang", "--page-tokens", str(sglang["page"]))
    assert keys(identity, *options, tokens=sglang["tokens"]) == sglang["chunk_digests"]
    assert keys(identity, *options, "--directory", tokens=sglang["tokens"]) == sglang["directory_keys"]
    salt = VECTORS["salt_derivation"]["cases"][0]["salt"]
    options = ("--tp-size", "2", "--scheme", "lmcache-mp", "--salt", salt)
    assert keys(identity, *options, tokens=lmcache["tokens"]) == lmcache["digests"]
    assert keys(identity, *options, "--directory", tokens=lmcache["tokens"]) == lmcache["directory_keys_with_salt"]


@pytest.mark.parametrize("identity", VECTORS["refused_identities"], ids=["pipe", "empty", "control"])
def test_a_refused_identity_is_one_sentence(identity: dict[str, Any]) -> None:
    done = keys_command(identity, stdin="[1]")
    assert done.returncode == 2
    assert done.stderr.startswith("warmroute keys: ")
    assert done.stderr.count("\n") == 1


GOOD = VECTORS["identity_for_scopes"]


@pytest.mark.parametrize(
    ("options", "stdin", "says"),
    [
        ((), "not json", "JSON list"),
        ((), "{}", "JSON list"),
        ((), "[1.5]", "whole numbers"),
        ((), "[true]", "whole numbers"),
        ((), "[-1]", "between 0 and"),
        ((), "[4294967296]", "between 0 and"),
        (("--tp-rank", "x"), "[1]", "--tp-rank"),
        (("--tp-rank", "5"), "[1]", "tp_rank"),
        (("--tp-rank", "0", "--directory"), "[1]", "--directory"),
        (("--chunk-tokens", "0"), "[1]", "--chunk-tokens"),
        (("--lora-digest", "zz"), "[1]", "--lora-digest"),
        (("--lora-digest", "00"), "[1]", "32 bytes"),
        (("--salt", ""), "[1]", "salt"),
        (("--scheme", "sglang", "--page-tokens", "100"), "[1]", "page_tokens"),
    ],
)
def test_bad_input_is_one_sentence_that_names_it(options: tuple[str, ...], stdin: str, says: str) -> None:
    done = keys_command(GOOD, *options, stdin=stdin)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
