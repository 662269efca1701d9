"""What must be equal for KV bytes to be interchangeable: identities, their digests, and the scopes that narrow them.

The formats are fixed (ARCHITECTURE.md, "Keys"); `tests/vectors/chunk_keys.json` holds golden values.
"""

import base64
import hashlib
import hmac
import unicodedata
from dataclasses import dataclass

from directory.errors import IdentityRefused

SECRET_BYTES_MIN = 32
SALT_TAG_BYTES = 16
_SALT_LABEL = b"warmroute salt v1"
_SALT_TAG_LABEL = b"warmroute salt tag v1"


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything but the tokens that KV bytes are a function of.

    `weights_sha` and `tokenizer_sha` are digests of content, never of a name. `layout` names all else that shapes
    the bytes: engine, KV layout version, RoPE scaling, pipeline and context parallelism, for CPU engines the
    instruction set. Raises `IdentityRefused` where a field is empty or holds `|` or a control character: joined
    with `|`, two identities could then share a digest.
    """

    model_id: str
    weights_sha: str
    tokenizer_sha: str
    kv_dtype: str
    layout: str
    tp_size: int = 1

    def __post_init__(self) -> None:
        for field in ("model_id", "weights_sha", "tokenizer_sha", "kv_dtype", "layout"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise IdentityRefused(f"{field} must be a non-empty string")
            if "|" in value or any(unicodedata.category(character) == "Cc" for character in value):
                raise IdentityRefused(f"{field} must not hold '|' or a control character: {value!r}")
            try:
                value.encode()
            except UnicodeEncodeError:
                raise IdentityRefused(f"{field} must be valid Unicode: {value!r}") from None
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise IdentityRefused(f"tp_size must be a whole number of at least 1, not {self.tp_size!r}")

    def fleet_digest(self) -> bytes:
        """32 bytes that name the model to gateway and directory, whichever rank holds a shard."""
        return self._digest("*")

    def shard_digest(self, tp_rank: int) -> bytes:
        """32 bytes that name one rank's bytes. Raises `IdentityRefused` for a rank outside 0..tp_size-1."""
        if isinstance(tp_rank, bool) or not isinstance(tp_rank, int) or not 0 <= tp_rank < self.tp_size:
            raise IdentityRefused(f"tp_rank must be between 0 and {self.tp_size - 1}, not {tp_rank!r}")
        return self._digest(str(tp_rank))

    def _digest(self, rank: str) -> bytes:
        fields = (self.model_id, self.weights_sha, self.tokenizer_sha, self.kv_dtype, self.layout)
        return hashlib.sha256("|".join((*fields, f"{rank}/{self.tp_size}")).encode()).digest()


@dataclass(frozen=True, slots=True)
class Scope:
    """What narrows an identity: the content digest of a LoRA adapter (32 bytes) and a salt (not empty)."""

    lora: bytes | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        if self.lora is not None and len(self.lora) != 32:
            raise IdentityRefused(f"lora must be a digest of 32 bytes, not {len(self.lora)}")
        if self.salt is not None:
            if not self.salt:
                raise IdentityRefused("salt must not be empty; leave it out instead")
            try:
                self.salt.encode()
            except UnicodeEncodeError:
                raise IdentityRefused("salt must be valid Unicode") from None

    def root(self, digest: bytes) -> bytes:
        """Fold the scopes that are present into `digest`: the start of a key chain, 32 bytes."""
        root = digest
        if self.lora is not None:
            root = fold(root, b"lora", self.lora)
        if self.salt is not None:
            root = fold(root, b"salt", self.salt.encode())
        return root

    @property
    def salt_tag(self) -> bytes:
        """16 bytes that tell chunks of this salt from all others, whatever the model and adapter.

        sha256("warmroute salt tag v1"), folded with "salt" where there is one, cut. The same for all identities, so
        that whoever forgets a salt needn't know them, nor keep the salt. It is never zero in practice: zeros are free
        to say that a tag isn't known.
        """
        tag = hashlib.sha256(_SALT_TAG_LABEL).digest()
        if self.salt is not None:
            tag = fold(tag, b"salt", self.salt.encode())
        return tag[:SALT_TAG_BYTES]


UNSCOPED = Scope()


def fold(root: bytes, label: bytes, value: bytes) -> bytes:
    """sha256(root || u32le(len(label)) || label || u32le(len(value)) || value): lengths keep fields apart."""
    parts = (root, len(label).to_bytes(4, "little"), label, len(value).to_bytes(4, "little"), value)
    return hashlib.sha256(b"".join(parts)).digest()


def derive_salt(secret: bytes, client_salt: str = "") -> str:
    """The salt a gateway sends to engines for a tenant; no client salt is the empty string.

    base64url without padding of HMAC-sha256(secret, "warmroute salt v1" || u32le(len) || client salt). Raises
    `IdentityRefused` for a secret under 32 bytes or a client salt that isn't valid Unicode.
    """
    if len(secret) < SECRET_BYTES_MIN:
        raise IdentityRefused(f"a tenant secret must have at least {SECRET_BYTES_MIN} random bytes")
    try:
        value = client_salt.encode()
    except UnicodeEncodeError:
        raise IdentityRefused("a client's salt must be valid Unicode") from None
    message = _SALT_LABEL + len(value).to_bytes(4, "little") + value
    return base64.urlsafe_b64encode(hmac.digest(secret, message, "sha256")).rstrip(b"=").decode()
