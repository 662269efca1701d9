"""What can be asked to be forgotten, read strictly: an identity, directory keys, a salt, or the chunks of token ids."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from directory.chunks import CHUNK_TOKENS_DEFAULT, DIRECTORY_KEY_BYTES, chunk_keys, directory_key, pack_tokens
from directory.errors import IdentityRefused
from directory.identity import Identity, Scope
from directory.members import EngineRegistration
from nodeagent.errors import ForgetRefused
from nodeagent.tiers.chunk_file import IDENTITY_BYTES, UNKNOWN_IDENTITY

KEYS_MAX = 65_536
TOKENS_MAX = 4_194_304
TP_SIZE_MAX = 1_024
CHUNK_KEYS_MAX = 262_144
"""Keys that are computed for one request: a fifth of a second of a thread."""
_WAYS = ("identity", "keys", "salt", "token_ids")
_HEX_DIGEST = re.compile(rf"[0-9a-fA-F]{{{2 * IDENTITY_BYTES}}}")

DirectoryKeyHex = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-fA-F]{{{2 * DIRECTORY_KEY_BYTES}}}$")]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
ChunkTokens = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
DigestHex = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-fA-F]{{{2 * IDENTITY_BYTES}}}$")]


class IdentityFields(msgspec.Struct, forbid_unknown_fields=True):
    """An identity by its fields."""

    model_id: str
    weights_sha: str
    tokenizer_sha: str
    kv_dtype: str
    layout: str
    tp_size: int = 1


class ForgetBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /forget`. See FORGET.md.

    An identity beside `salt` narrows it, and beside `token_ids` says of which model they are. `kept_tokens` is how many
    leading tokens are left alone; `chunk_tokens` where no engine of the identity is here to tell.
    """

    identity: str | IdentityFields | None = None
    keys: Annotated[list[DirectoryKeyHex], msgspec.Meta(min_length=1, max_length=KEYS_MAX)] | None = None
    salt: str | None = None
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=TOKENS_MAX)] | None = None
    lora: DigestHex | None = None
    kept_tokens: Tokens | None = None
    chunk_tokens: ChunkTokens | None = None
    reset_engines: bool = False


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """What is to be forgotten. `by` is the way in which it was named.

    Identities and a salt's tag narrow each other; keys stand for themselves; all that follows goes, too.
    `reset_engines` has engines empty their own prefix caches. `is_identity_unknown` where a digest was given that no
    engine here has: of which shards' chunks it speaks isn't known.
    """

    by: str
    identities: frozenset[bytes] = frozenset()
    salt_tag: bytes | None = None
    directory_keys: frozenset[bytes] = frozenset()
    storage_keys: frozenset[bytes] = frozenset()
    reset_engines: bool = False
    is_identity_unknown: bool = False


_DECODER = msgspec.json.Decoder(ForgetBody)


def read_request(body: bytes, engines: Sequence[EngineRegistration]) -> ForgetRequest:
    """The request in `body`; `engines` are those of this host. Raises `ForgetRefused`: it says what would be right."""
    try:
        asked = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForgetRefused(f"the body can't be read: {error}") from error
    try:
        return _request(asked, engines)
    except IdentityRefused as error:
        raise ForgetRefused(str(error)) from error


def _request(asked: ForgetBody, engines: Sequence[EngineRegistration]) -> ForgetRequest:
    by = _way(asked)
    if by == "keys":
        keys = frozenset(bytes.fromhex(key) for key in asked.keys or ())
        return ForgetRequest(by, directory_keys=keys, reset_engines=asked.reset_engines)
    if by == "token_ids":
        return _of_tokens(asked, engines)
    salt_tag = Scope(salt=asked.salt).salt_tag if asked.salt is not None else None
    if asked.identity is None:
        return ForgetRequest(by, salt_tag=salt_tag, reset_engines=asked.reset_engines)
    known = _known(asked.identity, engines)
    digests = frozenset[bytes]().union(*map(_all_of, known)) or frozenset([_digest(asked.identity)])
    return ForgetRequest(by, digests, salt_tag, reset_engines=asked.reset_engines, is_identity_unknown=not known)


def _way(asked: ForgetBody) -> str:
    """By what it is named. An identity alone is one; it may also say more of a salt or of token ids."""
    given = [way for way in _WAYS if getattr(asked, way) is not None]
    main = [way for way in given if way != "identity"]
    if asked.token_ids is not None:
        main = [way for way in main if way != "salt"]
    if len(main) > 1 or not given or ("keys" in main and "identity" in given):
        raise ForgetRefused(
            f"give exactly one of {', '.join(_WAYS)}; an identity may narrow a salt, and token_ids need one, to which "
            f"a salt and a lora may be added; given: {', '.join(given) or 'none'}"
        )
    way = main[0] if main else "identity"
    if way == "token_ids" and asked.identity is None:
        raise ForgetRefused("token_ids need the identity of the model that they were computed with")
    only_tokens = ("lora", "kept_tokens", "chunk_tokens")
    stray = next((name for name in only_tokens if getattr(asked, name) is not None), None)
    if way != "token_ids" and stray is not None:
        raise ForgetRefused(f"{stray} goes with token_ids only")
    return way


def _of_tokens(asked: ForgetBody, engines: Sequence[EngineRegistration]) -> ForgetRequest:
    assert asked.identity is not None, "it was asked for"
    tokens = pack_tokens(asked.token_ids or ())
    scope = Scope(lora=bytes.fromhex(asked.lora) if asked.lora is not None else None, salt=asked.salt)
    known = _known(asked.identity, engines)
    # Where no engine tells more, a digest is the fleet's.
    fleet = known[0].fleet_digest() if known else _digest(asked.identity)
    shards = [each.shard_digest(rank) for each in known for rank in range(each.tp_size)]
    sizes = _chunk_sizes(asked, fleet, engines)
    keys = sum(len(asked.token_ids or ()) // size for size in sizes) * (1 + len(shards))
    if keys > CHUNK_KEYS_MAX:
        raise ForgetRefused(
            f"these token_ids have {keys:,} chunk keys, with those of all shards, of at most {CHUNK_KEYS_MAX:,} at a "
            "time; give the leading ones only (what follows them goes, too), or forget by identity or salt"
        )
    directory_keys: set[bytes] = set()
    storage_keys: set[bytes] = set()
    for chunk_tokens in sizes:
        first = (asked.kept_tokens or 0) // chunk_tokens
        directory_keys.update(map(directory_key, chunk_keys(scope.root(fleet), tokens, chunk_tokens)[first:]))
        for shard in shards:
            storage_keys.update(chunk_keys(scope.root(shard), tokens, chunk_tokens)[first:])
    if not directory_keys:
        raise ForgetRefused(
            "the token_ids hold no full chunk that isn't among the kept_tokens: only full chunks are stored"
        )
    return ForgetRequest(
        "token_ids",
        directory_keys=frozenset(directory_keys),
        storage_keys=frozenset(storage_keys),
        reset_engines=asked.reset_engines,
    )


def _chunk_sizes(asked: ForgetBody, fleet: bytes, engines: Sequence[EngineRegistration]) -> set[int]:
    if asked.chunk_tokens is not None:
        return {asked.chunk_tokens}
    told = {each.chunk_tokens for each in engines if each.identity.fleet_digest() == fleet}
    return told or {CHUNK_TOKENS_DEFAULT}


def _known(given: str | IdentityFields, engines: Sequence[EngineRegistration]) -> list[Identity]:
    """The identity that is meant: by its fields, or by a digest that an engine here has; empty where none has it."""
    if not isinstance(given, str):
        return [_identity(given)]
    digest = _digest(given)
    return list(dict.fromkeys(each.identity for each in engines if digest in _all_of(each.identity)))


def _all_of(identity: Identity) -> frozenset[bytes]:
    shards = (identity.shard_digest(rank) for rank in range(min(identity.tp_size, TP_SIZE_MAX)))
    return frozenset([identity.fleet_digest(), *shards])


def _identity(fields: IdentityFields) -> Identity:
    if not 1 <= fields.tp_size <= TP_SIZE_MAX:
        raise ForgetRefused(f"tp_size must be between 1 and {TP_SIZE_MAX}, not {fields.tp_size}")
    return Identity(**msgspec.structs.asdict(fields))


def _digest(given: str | IdentityFields) -> bytes:
    assert isinstance(given, str), "fields are an identity"
    if not _HEX_DIGEST.fullmatch(given) or (digest := bytes.fromhex(given)) == UNKNOWN_IDENTITY:
        raise ForgetRefused(f"an identity is its digest of {2 * IDENTITY_BYTES} hex digits, or its fields by name")
    return digest
