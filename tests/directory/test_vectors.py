"""Every entry of the golden vectors is an assertion: what leaves the process must be equal in every language."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from directory import redis_schema as schema
from directory.chunks import chunk_keys, directory_key, foreign_storage_key, pack_tokens
from directory.costs import ModelShape, Rates, best_cut, break_even_tokens, kv_bytes_per_token, prefill_s, tier_load_s
from directory.errors import IdentityRefused
from directory.identity import Identity, Scope, derive_salt
from directory.placements import PARTITIONS, pack_holders, partition_of, unpack_holders
from directory.schemes import key_scheme, sglang_seed
from directory.tiers import Tier, tier_names

VECTORS_DIR = Path(__file__).parents[1] / "vectors"
KEYS: dict[str, Any] = json.loads((VECTORS_DIR / "chunk_keys.json").read_text())
COSTS: dict[str, Any] = json.loads((VECTORS_DIR / "break_even.json").read_text())

CASE_IDENTITY_FIELDS = ("model_id", "weights_sha", "tokenizer_sha", "kv_dtype", "layout")
SCOPED_IDENTITY = Identity(**KEYS["identity_for_scopes"])


def tokens_of(spec: dict[str, list[int]]) -> bytes:
    """`{"range": [start, end]}` or `{"repeat": [token, times]}`."""
    ((kind, (first, second)),) = spec.items()
    return pack_tokens(range(first, second) if kind == "range" else [first] * second)


def named(rows: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(row, id=row["name"]) for row in rows]


def hexes(values: list[bytes]) -> list[str]:
    return [value.hex() for value in values]


def scope_of(row: dict[str, Any]) -> Scope:
    lora = row["adapter_digest_hex"]
    return Scope(bytes.fromhex(lora) if lora else None, row["salt"])


class TestChunkKeys:
    @pytest.mark.parametrize("case", named(KEYS["cases"]))
    def test_cases(self, case: dict[str, Any]) -> None:
        identity = Identity(
            **{field: case["identity"][field] for field in CASE_IDENTITY_FIELDS}, tp_size=case["tp_size"]
        )
        digest = identity.shard_digest(case["tp_rank"])
        assert digest.hex() == case["digest"]
        assert hexes(chunk_keys(digest, tokens_of(case["tokens"]), case["chunk_tokens"])) == case["keys"]

    @pytest.mark.parametrize("row", named(KEYS["scopes"]))
    def test_scopes(self, row: dict[str, Any]) -> None:
        rank = row["tp_rank"]
        digest = SCOPED_IDENTITY.fleet_digest() if rank == "*" else SCOPED_IDENTITY.shard_digest(rank)
        root = scope_of(row).root(digest)
        keys = chunk_keys(root, tokens_of(KEYS["scope_tokens"]))
        assert root.hex() == row["root"]
        assert hexes(keys) == row["keys"]
        if row["directory_keys"] is not None:
            assert hexes([directory_key(key) for key in keys]) == row["directory_keys"]
            scheme = key_scheme("warmroute")
            digests = scheme.digests(digest, scope_of(row), tokens_of(KEYS["scope_tokens"]), 256, None)
            assert hexes(scheme.directory_keys(digest, scope_of(row), digests)) == row["directory_keys"]

    @pytest.mark.parametrize("case", KEYS["salt_derivation"]["cases"])
    def test_salt_derivation(self, case: dict[str, str]) -> None:
        secret = bytes.fromhex(KEYS["salt_derivation"]["secret_hex"])
        assert derive_salt(secret, case["client_salt"]) == case["salt"]

    @pytest.mark.parametrize("case", KEYS["foreign_storage_key"]["cases"])
    def test_foreign_storage_keys(self, case: dict[str, str]) -> None:
        key = foreign_storage_key(bytes.fromhex(case["digest"]), bytes.fromhex(case["engine_key_hex"]))
        assert key.hex() == case["storage_key"]

    @pytest.mark.parametrize("fields", KEYS["refused_identities"])
    def test_refused_identities(self, fields: dict[str, Any]) -> None:
        with pytest.raises(IdentityRefused):
            Identity(**fields)


class TestSchemes:
    SGLANG = KEYS["sglang"]
    LMCACHE = KEYS["lmcache_mp"]
    FLEET = SCOPED_IDENTITY.fleet_digest()
    SALTED = Scope(salt=KEYS["salt_derivation"]["cases"][0]["salt"])

    def test_sglang_pages(self) -> None:
        tokens = tokens_of(self.SGLANG["tokens"])
        pages = key_scheme("sglang").digests(self.FLEET, Scope(), tokens, self.SGLANG["page"], self.SGLANG["page"])
        assert hexes(pages[:3]) == self.SGLANG["first_three_pages"]

    def test_sglang_chunks_and_directory_keys(self) -> None:
        scheme, tokens = key_scheme("sglang"), tokens_of(self.SGLANG["tokens"])
        digests = scheme.digests(self.FLEET, Scope(), tokens, self.SGLANG["chunk_tokens"], self.SGLANG["page"])
        assert hexes(digests) == self.SGLANG["chunk_digests"]
        assert self.FLEET.hex() == self.SGLANG["fleet_root"]
        assert hexes(scheme.directory_keys(self.FLEET, Scope(), digests)) == self.SGLANG["directory_keys"]

    def test_sglang_seed_and_first_salted_page(self) -> None:
        page, scope = self.SGLANG["page"], Scope(salt="tenantA")
        assert sglang_seed(None, "tenantA").hex() == self.SGLANG["seed_salt_tenantA"]
        digests = key_scheme("sglang").digests(self.FLEET, scope, tokens_of(self.SGLANG["tokens"]), page, page)
        assert digests[0].hex() == self.SGLANG["first_page_salt_tenantA"]

    def test_lmcache_chunks_and_directory_keys(self) -> None:
        scheme, tokens = key_scheme("lmcache-mp"), tokens_of(self.LMCACHE["tokens"])
        digests = scheme.digests(self.FLEET, self.SALTED, tokens, self.LMCACHE["chunk_tokens"], None)
        assert hexes(digests) == self.LMCACHE["digests"]
        assert self.SALTED.root(self.FLEET).hex() == self.LMCACHE["scoped_root_salt"]
        directory_keys = scheme.directory_keys(self.FLEET, self.SALTED, digests)
        assert hexes(directory_keys) == self.LMCACHE["directory_keys_with_salt"]


class TestLayout:
    def test_partitions_are_the_high_half_of_the_first_byte(self) -> None:
        assert [partition_of(bytes([byte]) + bytes(15)) for byte in range(256)] == [byte >> 4 for byte in range(256)]

    def test_tags(self) -> None:
        assert list(schema.PARTITION_TAGS) == [str(tag) for tag in KEYS["partitions"]["tags"]]
        assert len(KEYS["partitions"]["tags"]) == PARTITIONS

    @pytest.mark.parametrize("partition", range(PARTITIONS))
    def test_cluster_slots(self, partition: int) -> None:
        record = schema.record_key(bytes([partition << 4]) + bytes(15))
        attempts = schema.attempts_key(partition)
        slot = KEYS["partitions"]["cluster_slots"][partition]
        assert (cluster_slot(record), cluster_slot(attempts)) == (slot, slot)

    @pytest.mark.parametrize("key", [schema.REGISTRATIONS_KEY, schema.VERSIONS_KEY])
    def test_the_table_lies_in_the_first_partitions_slot(self, key: bytes) -> None:
        assert cluster_slot(key) == KEYS["partitions"]["cluster_slots"][0]

    def test_holder_bytes(self) -> None:
        holder = KEYS["holder"]
        mask = sum(Tier[name.upper()] for name in holder["tiers"])
        record = pack_holders([(bytes.fromhex(holder["incarnation_hex"]), mask)])
        assert record.hex() == holder["bytes_hex"]
        ((incarnation, read_mask),) = unpack_holders(record)
        assert incarnation.hex() == holder["incarnation_hex"]
        assert list(tier_names(read_mask)) == holder["tiers"]


def cluster_slot(key: bytes) -> int:
    """Redis' own rule (cluster specification): CRC16/XMODEM of what the first braces hold, mod 16,384."""
    tag = key[key.index(b"{") + 1 : key.index(b"}")]
    crc = 0
    for byte in tag:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc % 16384


class TestBreakEven:
    """8B, 400 TFLOP/s useful, a drive of 7 GB/s with 2 ms fixed: the source line of the file."""

    SHAPES: ClassVar = {"8B": (32, 8, 128), "70B": (80, 8, 128)}
    DTYPE_BYTES: ClassVar = {"bf16": 2, "fp8": 1}
    SHAPE = ModelShape(COSTS["model_parameters"]["8B"], 32, 4096, kv_bytes_per_token(32, 8, 128, 2))
    RATES = Rates(4e14, {Tier.NVME: 7e9}, {Tier.NVME: 0.002})

    def bytes_per_token(self, model: str, dtype: str = "bf16") -> int:
        return kv_bytes_per_token(*self.SHAPES[model], self.DTYPE_BYTES[dtype])

    @pytest.mark.parametrize(("name", "expected"), COSTS["kv_bytes_per_token"].items())
    def test_kv_bytes_per_token(self, name: str, expected: int) -> None:
        model, dtype = name.split(" ")[:2]
        assert self.bytes_per_token(model, dtype) == expected

    @pytest.mark.parametrize(("name", "expected"), COSTS["chunk_bytes_256"].items())
    def test_chunk_bytes(self, name: str, expected: int) -> None:
        assert 256 * self.bytes_per_token(*name.split(" ")) == expected

    @pytest.mark.parametrize(("name", "expected"), COSTS["context_bytes"].items())
    def test_context_bytes(self, name: str, expected: int) -> None:
        model, tokens, _ = name.split(" ")
        assert int(tokens) * self.bytes_per_token(model) == expected

    @pytest.mark.parametrize("row", COSTS["break_even"], ids=lambda row: str(row["tokens"]))
    def test_break_even(self, row: dict[str, Any]) -> None:
        tokens = row["tokens"]
        assert prefill_s(self.SHAPE, self.RATES, tokens) == pytest.approx(row["recompute_s"], rel=1e-12)
        assert tier_load_s(self.SHAPE, self.RATES, Tier.NVME, tokens) == pytest.approx(row["disk_s"], rel=1e-12)
        cut = best_cut(self.SHAPE, self.RATES, tokens, tokens, [Tier.NVME])
        assert ("disk" if cut.chunks else "recompute") == row["winner"]
        assert cut.total_s == pytest.approx(min(row["recompute_s"], row["disk_s"]), rel=1e-12)

    def test_break_even_tokens_lie_between_the_rows_that_recompute_and_those_that_load(self) -> None:
        even = break_even_tokens(self.SHAPE, self.RATES, Tier.NVME)
        assert even is not None
        for row in COSTS["break_even"]:
            assert (row["tokens"] >= even) == (row["winner"] == "disk")

    @pytest.mark.parametrize(("name", "expected"), COSTS["capacity_tokens"].items())
    def test_capacity_tokens(self, name: str, expected: int) -> None:
        capacity_bytes = {"8B in 50 GB": 50e9, "8B in 500 GB": 500e9, "8B in 2x7.68 TB": 2 * 7.68e12}[name]
        assert capacity_bytes // self.bytes_per_token("8B") == expected

    def test_endurance(self) -> None:
        assert COSTS["endurance"]["2 GB/s for a day, TB"] == pytest.approx(2e9 * 86400 / 1e12)


def test_no_group_of_the_vectors_is_left_out() -> None:
    assert set(KEYS) == {
        "source",
        "cases",
        "identity_for_scopes",
        "scope_tokens",
        "scopes",
        "salt_derivation",
        "sglang",
        "lmcache_mp",
        "foreign_storage_key",
        "refused_identities",
        "partitions",
        "holder",
    }
    assert set(COSTS) == {
        "source",
        "kv_bytes_per_token",
        "chunk_bytes_256",
        "context_bytes",
        "break_even",
        "capacity_tokens",
        "endurance",
        "model_parameters",
    }
