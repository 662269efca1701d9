"""Identities, scopes, chunk keys and schemes: properties, against a plain reading of the formats."""

import hashlib
import struct
import subprocess
import sys
from array import array
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st

from directory.chunks import chunk_keys, foreign_storage_key, pack_tokens, usable_chunks
from directory.errors import IdentityRefused
from directory.identity import SECRET_BYTES_MIN, Identity, Scope, derive_salt, fold
from directory.schemes import SCHEMES, ChunkName, key_scheme, sglang_seed
from tests.directory.fleet_samples import IDENTITY

ROOT = bytes(range(32))
TEXT = st.text(st.characters(blacklist_categories=("Cc", "Cs"), blacklist_characters="|"), min_size=1, max_size=12)
IDENTITIES = st.builds(Identity, TEXT, TEXT, TEXT, TEXT, TEXT, st.integers(1, 64))
SALTS = st.none() | st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=8)
SCOPES = st.builds(Scope, st.none() | st.binary(min_size=32, max_size=32), SALTS)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
CHUNK_TOKENS = st.integers(1, 9)
TEXT_FIELDS = ("model_id", "weights_sha", "tokenizer_sha", "kv_dtype", "layout")


def plain_keys(root: bytes, tokens: list[int], chunk_tokens: int) -> list[bytes]:
    keys, previous = [], root
    for index in range(len(tokens) // chunk_tokens):
        chunk = tokens[index * chunk_tokens : (index + 1) * chunk_tokens]
        previous = hashlib.sha256(previous + b"".join(struct.pack("<I", token) for token in chunk)).digest()
        keys.append(previous)
    return keys


class TestChunkKeys:
    @given(tokens=TOKENS, chunk_tokens=CHUNK_TOKENS)
    def test_keys_are_as_the_format_says(self, tokens: list[int], chunk_tokens: int) -> None:
        assert chunk_keys(ROOT, pack_tokens(tokens), chunk_tokens) == plain_keys(ROOT, tokens, chunk_tokens)

    @given(tokens=TOKENS, more=TOKENS, chunk_tokens=CHUNK_TOKENS)
    def test_a_longer_prompt_begins_with_the_same_keys(
        self, tokens: list[int], more: list[int], chunk_tokens: int
    ) -> None:
        keys = chunk_keys(ROOT, pack_tokens(tokens), chunk_tokens)
        assert chunk_keys(ROOT, pack_tokens(tokens + more), chunk_tokens)[: len(keys)] == keys

    @given(tokens=TOKENS, other=st.integers(0, 2**32 - 1), chunk_tokens=CHUNK_TOKENS, data=st.data())
    def test_a_changed_token_changes_its_key_and_all_after_it(
        self, tokens: list[int], other: int, chunk_tokens: int, data: st.DataObject
    ) -> None:
        full = len(tokens) // chunk_tokens * chunk_tokens
        assume(full)
        at = data.draw(st.integers(0, full - 1))
        assume(tokens[at] != other)
        changed = [*tokens[:at], other, *tokens[at + 1 :]]
        before, after = (chunk_keys(ROOT, pack_tokens(each), chunk_tokens) for each in (tokens, changed))
        equal = [first == second for first, second in zip(before, after, strict=True)]
        assert equal == [index < at // chunk_tokens for index in range(len(before))]

    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: memoryview(array("I", data))])
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_any_kind_of_buffer_gives_the_same_keys(self, scheme: str, wrap: object) -> None:
        tokens = pack_tokens(range(70_000, 70_040))
        digests = key_scheme(scheme).digests(ROOT, Scope(), wrap(tokens), 8, 4)  # type: ignore[operator]
        assert digests == key_scheme(scheme).digests(ROOT, Scope(), tokens, 8, 4)
        assert len(digests) == 5

    @pytest.mark.parametrize("token", [-1, 2**32, 1.5, "7", None])
    def test_what_is_no_token_id_is_refused(self, token: object) -> None:
        with pytest.raises(ValueError, match="token ids"):
            pack_tokens([1, token])  # type: ignore[list-item]

    def test_half_a_token_is_a_bug(self) -> None:
        with pytest.raises(AssertionError):
            chunk_keys(ROOT, b"12345", 1)

    @pytest.mark.parametrize(
        ("prompt_tokens", "chunks"), [(0, 0), (1, 0), (256, 0), (257, 1), (512, 1), (513, 2), (32769, 128)]
    )
    def test_the_last_token_is_always_computed(self, prompt_tokens: int, chunks: int) -> None:
        assert usable_chunks(prompt_tokens, 256) == chunks

    @given(one=st.binary(max_size=40), two=st.binary(max_size=40))
    def test_foreign_storage_keys_tell_engine_keys_and_digests_apart(self, one: bytes, two: bytes) -> None:
        assert (foreign_storage_key(ROOT, one) == foreign_storage_key(ROOT, two)) == (one == two)
        assert foreign_storage_key(ROOT, one) != foreign_storage_key(ROOT[::-1], one)


class TestIdentities:
    @given(one=IDENTITIES, two=IDENTITIES)
    def test_different_identities_never_share_a_digest(self, one: Identity, two: Identity) -> None:
        assert (one.fleet_digest() == two.fleet_digest()) == (one == two)
        assert (one.shard_digest(0) == two.shard_digest(0)) == (one == two)

    @given(fields=st.lists(TEXT, min_size=5, max_size=5), at=st.integers(0, 3), cut=st.integers(1, 11))
    def test_text_moved_across_a_fields_border_changes_the_digest(self, fields: list[str], at: int, cut: int) -> None:
        moved = list(fields)
        moved[at], moved[at + 1] = fields[at][:cut], fields[at][cut:] + fields[at + 1]
        assume(moved != fields)
        assert Identity(*fields).fleet_digest() != Identity(*moved).fleet_digest()

    @given(identity=IDENTITIES)
    def test_every_rank_and_the_fleet_have_digests_of_their_own(self, identity: Identity) -> None:
        digests = [identity.fleet_digest(), *(identity.shard_digest(rank) for rank in range(identity.tp_size))]
        assert len(set(digests)) == identity.tp_size + 1

    @given(identity=IDENTITIES)
    def test_digests_are_as_the_format_says(self, identity: Identity) -> None:
        fields = "|".join(getattr(identity, field) for field in TEXT_FIELDS)
        assert identity.fleet_digest() == hashlib.sha256(f"{fields}|*/{identity.tp_size}".encode()).digest()
        assert identity.shard_digest(0) == hashlib.sha256(f"{fields}|0/{identity.tp_size}".encode()).digest()

    @pytest.mark.parametrize("field", TEXT_FIELDS)
    @pytest.mark.parametrize("value", ["", "a|b", "|", "a\nb", "\x00", "a\x7f", "\x85", "\ud800", None, 7, b"bytes"])
    def test_a_field_that_could_hide_a_border_is_refused_by_name(self, field: str, value: object) -> None:
        with pytest.raises(IdentityRefused, match=field):
            replace(IDENTITY, **{field: value})  # type: ignore[arg-type]

    @pytest.mark.parametrize("tp_size", [0, -1, 1.0, "2", True, None])
    def test_a_size_that_is_none_is_refused(self, tp_size: object) -> None:
        with pytest.raises(IdentityRefused, match="tp_size"):
            replace(IDENTITY, tp_size=tp_size)  # type: ignore[arg-type]

    @pytest.mark.parametrize("rank", [-1, 2, "*", "0", True, 0.0])
    def test_a_rank_outside_the_group_is_refused(self, rank: object) -> None:
        with pytest.raises(IdentityRefused, match="tp_rank"):
            IDENTITY.shard_digest(rank)  # type: ignore[arg-type]


class TestScopes:
    @given(one=SCOPES, two=SCOPES)
    def test_different_scopes_never_share_a_root(self, one: Scope, two: Scope) -> None:
        assert (one.root(ROOT) == two.root(ROOT)) == (one == two)

    @given(label=st.binary(max_size=6), value=st.binary(max_size=6), cut=st.integers(0, 12))
    def test_bytes_moved_between_label_and_value_change_the_fold(self, label: bytes, value: bytes, cut: int) -> None:
        joined = label + value
        assume(cut <= len(joined) and joined[:cut] != label)
        assert fold(ROOT, label, value) != fold(ROOT, joined[:cut], joined[cut:])

    def test_no_scope_leaves_the_digest_as_it_is(self) -> None:
        assert Scope().root(ROOT) == ROOT

    @pytest.mark.parametrize("lora", [b"", bytes(31), bytes(33)])
    def test_an_adapter_that_is_no_digest_is_refused(self, lora: bytes) -> None:
        with pytest.raises(IdentityRefused, match="lora"):
            Scope(lora=lora)

    @given(one=SALTS, two=SALTS)
    def test_a_salt_tag_tells_salts_apart_and_no_salt_from_any(self, one: str | None, two: str | None) -> None:
        assert (Scope(salt=one).salt_tag == Scope(salt=two).salt_tag) == (one == two)
        assert Scope(lora=ROOT, salt=one).salt_tag == Scope(salt=one).salt_tag

    def test_salt_tags_are_what_they_were(self) -> None:
        """They lie in files."""
        assert Scope().salt_tag.hex() == "5aebdccf2d569dd05a5800bd4156a462"
        assert Scope(salt="a tenant").salt_tag.hex() == "9649687929dad0e1a9941c4865c79d09"

    @pytest.mark.parametrize("salt", ["", "\ud800"])
    def test_a_salt_that_cannot_be_folded_is_refused(self, salt: str) -> None:
        with pytest.raises(IdentityRefused, match="salt"):
            Scope(salt=salt)

    @given(one=st.binary(min_size=32, max_size=40), two=st.binary(min_size=32, max_size=40), salt=st.text(max_size=5))
    def test_tenants_never_share_a_salt(self, one: bytes, two: bytes, salt: str) -> None:
        assume(one != two)
        assert derive_salt(one, salt) != derive_salt(two, salt)

    def test_a_short_secret_is_refused(self) -> None:
        with pytest.raises(IdentityRefused, match="secret"):
            derive_salt(bytes(SECRET_BYTES_MIN - 1))

    def test_a_client_salt_that_is_not_unicode_is_refused(self) -> None:
        with pytest.raises(IdentityRefused, match="salt"):
            derive_salt(bytes(SECRET_BYTES_MIN), "\ud800")


class Remembered(dict[ChunkName, bytes]):
    """Knows all digests it was ever told."""

    puts = 0

    def put(self, chunk: ChunkName, digest: bytes) -> bytes:
        self.puts += 1
        self[chunk] = digest
        return digest


class TestSchemes:
    @given(tokens=TOKENS, pages=st.integers(1, 4), page=st.integers(1, 4), salt=SALTS)
    def test_sglang_digests_are_as_the_format_says(
        self, tokens: list[int], pages: int, page: int, salt: str | None
    ) -> None:
        digests = key_scheme("sglang").digests(ROOT, Scope(salt=salt), pack_tokens(tokens), pages * page, page)
        seed = b"" if salt is None else sglang_seed(None, salt)
        chain = plain_keys(seed, tokens, page)
        assert digests == chain[pages - 1 :: pages][: len(tokens) // (pages * page)]

    @given(prompts=st.lists(st.tuples(TOKENS, st.sampled_from([8, 16]), st.sampled_from([1, 2, 4]), SALTS), max_size=4))
    def test_sglang_digests_that_were_known_are_those_that_are_not(
        self, prompts: list[tuple[list[int], int, int, str | None]]
    ) -> None:
        known = Remembered()
        for tokens, chunk_tokens, page, salt in prompts * 2:
            asked = Scope(salt=salt), pack_tokens(tokens * 9), chunk_tokens, page
            expected = key_scheme("sglang").digests(ROOT, *asked)
            assert key_scheme("sglang", known).digests(ROOT, *asked) == expected

    def test_a_chunk_of_many_pages_is_hashed_once_and_one_of_few_is_not_remembered(self) -> None:
        known = Remembered()
        for tokens in (range(40), range(56)):
            key_scheme("sglang", known).digests(ROOT, Scope(), pack_tokens(tokens), 16, 1)
            key_scheme("sglang", known).digests(ROOT, Scope(), pack_tokens(tokens), 16, 4)
        assert known.puts == 3
        assert all(page == 1 for page, _, _ in known)

    @given(tokens=TOKENS, chunk_tokens=CHUNK_TOKENS, scope=SCOPES)
    def test_lmcache_digests_are_as_the_format_says(self, tokens: list[int], chunk_tokens: int, scope: Scope) -> None:
        expected, previous = [], blake3(bytes(12)).digest()
        for index in range(len(tokens) // chunk_tokens):
            chunk = tokens[index * chunk_tokens : (index + 1) * chunk_tokens]
            previous = blake3(previous + struct.pack(f">{chunk_tokens}I", *chunk)).digest()
            expected.append(previous)
        assert key_scheme("lmcache-mp").digests(ROOT, scope, pack_tokens(tokens), chunk_tokens, None) == expected

    @pytest.mark.parametrize("name", SCHEMES)
    @given(one=SCOPES, two=SCOPES)
    def test_scopes_never_share_a_directory_key_in_any_scheme(self, name: str, one: Scope, two: Scope) -> None:
        scheme, tokens = key_scheme(name), pack_tokens(range(32))
        first, second = (
            scheme.directory_keys(ROOT, scope, scheme.digests(ROOT, scope, tokens, 16, 8)) for scope in (one, two)
        )
        assert {len(key) for key in first} == {16}
        assert bool(set(first) & set(second)) == (one == two)

    @given(one=st.tuples(SALTS, SALTS), two=st.tuples(SALTS, SALTS))
    def test_sglang_seeds_tell_extra_keys_and_salts_apart(
        self, one: tuple[str | None, str | None], two: tuple[str | None, str | None]
    ) -> None:
        assert (sglang_seed(*one) == sglang_seed(*two)) == (one == two)

    @pytest.mark.parametrize("page", [0, -1, 3, 512])
    def test_a_page_that_does_not_divide_the_chunk_is_refused(self, page: int) -> None:
        with pytest.raises(IdentityRefused, match="page_tokens"):
            key_scheme("sglang").digests(ROOT, Scope(), b"", 256, page)

    def test_an_unknown_scheme_is_refused(self) -> None:
        with pytest.raises(IdentityRefused, match="sha1"):
            key_scheme("sha1")

    def test_without_its_library_only_one_scheme_is_missing(self) -> None:
        program = (
            "import sys; sys.modules['blake3'] = None\n"
            "from directory.errors import IdentityRefused\n"
            "from directory.schemes import key_scheme\n"
            "key_scheme('warmroute'), key_scheme('sglang')\n"
            "try:\n    key_scheme('lmcache-mp')\n"
            "except IdentityRefused as error:\n    print(error)\n"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
        assert "blake3" in result.stdout
