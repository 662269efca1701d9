"""What two agents say to each other, over TCP or TLS. Numbers are big-endian.

Both begin with a preamble, the client first:

    offset  bytes
         0      6  magic "WRPEER"
         6      2  version (1)
         8     32  nonce, drawn for this connection

Then each proves that it knows the fleet's token, which never passes; the client first, so that nobody who doesn't know
it learns anything of it from a server:

    proof = HMAC-sha256(token, "warmroute peer client" or "warmroute peer server" || client's preamble || server's)

A server that isn't convinced closes the connection. After that the client asks for one chunk at a time, and is
answered by its label and its bytes, or told that it isn't here: which is all that anybody learns of a chunk that they
may not have, too.

    client  frame(Ask)
    server  frame(Chunk), then `length` bytes of payload as they lie in the slot        or frame(Absent)
    frame   length (u32), xxh3-64 of the body (8 bytes), then the body: one msgpack array that begins with its name

Checksums find what a network does by accident. Against who can change bytes on the way there is TLS.
"""

import hmac
import secrets
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import xxhash

from nodeagent.errors import PeerBadBytes, PeerRefused
from nodeagent.labels import ChunkLabel
from nodeagent.messages import Checksum, Count, DirectoryKey, Message, Positive, SaltTag, StorageKey
from nodeagent.tiers.chunk_file import IDENTITY_BYTES

MAGIC = b"WRPEER"
VERSION = 1
NONCE_BYTES = 32
PREAMBLE_BYTES = len(MAGIC) + 2 + NONCE_BYTES
PROOF_BYTES = 32
LENGTH_BYTES = 4
HEADER_BYTES = LENGTH_BYTES + 8
FRAME_BYTES_MAX = 8_192
IDENTITIES_MAX = 64

IdentityDigest = Annotated[bytes, msgspec.Meta(min_length=IDENTITY_BYTES, max_length=IDENTITY_BYTES)]
Side = Literal[b"client", b"server"]


class Ask(Message, frozen=True):
    """Ask for a chunk with this directory key, of one of these identities."""

    directory_key: DirectoryKey
    identities: Annotated[list[IdentityDigest], msgspec.Meta(min_length=1, max_length=IDENTITIES_MAX)]


class Chunk(Message, frozen=True):
    """The chunk that was asked for; `length` bytes of payload with this xxh3-128 follow the frame."""

    directory_key: DirectoryKey
    identity: IdentityDigest
    storage_key: StorageKey
    parent: StorageKey | None
    position: Count
    length: Positive
    checksum: Checksum
    salt_tag: SaltTag | None = None

    @property
    def label(self) -> ChunkLabel:
        """Its names, and its place in its chain."""
        return ChunkLabel(self.storage_key, self.directory_key, self.parent, self.position, self.salt_tag)


class Absent(Message, frozen=True):
    """No such chunk is here."""

    directory_key: DirectoryKey


Answer = Chunk | Absent

_encoder = msgspec.msgpack.Encoder()
_ask_decoder = msgspec.msgpack.Decoder(Ask)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class Preambles:
    """What both sides began with: what their proofs are about."""

    client: bytes
    server: bytes

    def proof(self, token: bytes, side: Side) -> bytes:
        """That `side` knows the token."""
        return hmac.digest(token, b"warmroute peer " + side + self.client + self.server, "sha256")

    def is_proof(self, token: bytes, side: Side, proof: bytes) -> bool:
        """Whether these bytes prove it. The time taken tells nothing."""
        return hmac.compare_digest(self.proof(token, side), proof)


def draw_preamble() -> bytes:
    """What a side of a new connection sends first."""
    return MAGIC + VERSION.to_bytes(2, "big") + secrets.token_bytes(NONCE_BYTES)


def check_preamble(data: bytes) -> None:
    """Raises `PeerBadBytes` for what isn't one, `PeerRefused` for one of another version."""
    if len(data) != PREAMBLE_BYTES or data[: len(MAGIC)] != MAGIC:
        raise PeerBadBytes("the other side doesn't begin as an agent")
    version = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 2], "big")
    if version != VERSION:
        raise PeerRefused(f"the other agent speaks version {version} of the peers' protocol, this one {VERSION}")


def frame(message: Message) -> bytes:
    """A message with its header in front."""
    body = _encoder.encode(message)
    assert 0 < len(body) <= FRAME_BYTES_MAX, "messages between agents are small"
    return len(body).to_bytes(LENGTH_BYTES, "big") + xxhash.xxh3_64_digest(body) + body


def body_length(header: bytes) -> int:
    """The length in a frame's header. Raises `PeerBadBytes` for an empty or too large message."""
    length = int.from_bytes(header[:LENGTH_BYTES], "big")
    if not 0 < length <= FRAME_BYTES_MAX:
        raise PeerBadBytes(f"a message of {length} bytes is outside the peers' 1 to {FRAME_BYTES_MAX}")
    return length


def decode_ask(header: bytes, body: bytes) -> Ask:
    """A client's message. Raises `PeerBadBytes`."""
    _check(header, body)
    try:
        return _ask_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerBadBytes(f"a peer's message can't be read: {error}") from error


def decode_answer(header: bytes, body: bytes) -> Answer:
    """A server's message. Raises `PeerBadBytes`."""
    _check(header, body)
    try:
        return _answer_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerBadBytes(f"a peer's message can't be read: {error}") from error


def _check(header: bytes, body: bytes) -> None:
    if xxhash.xxh3_64_digest(body) != header[LENGTH_BYTES:]:
        raise PeerBadBytes("a peer's message isn't what it was when it was sent")
