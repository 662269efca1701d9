"""The messages of the chunk door, and their frames.

A client opens with eight bytes, `WRDOOR` and the protocol's version (u16, big-endian); after that both sides send
frames: a length (u32, big-endian) and one msgpack message. Bytes of chunks never travel: messages name slots of the
arena, whose two file descriptors (read-only, then writable) accompany `ArenaOffer`.
"""

import enum
from typing import Annotated

import msgspec

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.costs import ModelShape
from directory.identity import SALT_TAG_BYTES, Identity
from directory.tiers import Tier
from nodeagent.errors import DoorProtocolError

DOOR_VERSION = 2
MAGIC = b"WRDOOR"
PREAMBLE_BYTES = len(MAGIC) + 2
LENGTH_BYTES = 4
MESSAGE_BYTES_MAX = 64 << 20
STORAGE_KEY_BYTES = 32
CHECKSUM_BYTES = 16
CLIENT_BYTES = 16
OPEN_KEYS_MAX = 65_536
NUMBERS_MAX = 2**20
"""References or reservations named in one message."""

StorageKey = Annotated[bytes, msgspec.Meta(min_length=STORAGE_KEY_BYTES, max_length=STORAGE_KEY_BYTES)]
DirectoryKey = Annotated[bytes, msgspec.Meta(min_length=DIRECTORY_KEY_BYTES, max_length=DIRECTORY_KEY_BYTES)]
SaltTag = Annotated[bytes, msgspec.Meta(min_length=SALT_TAG_BYTES, max_length=SALT_TAG_BYTES)]
Checksum = Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Counts = Annotated[list[Count], msgspec.Meta(max_length=NUMBERS_MAX)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1_024)]


class PutOutcome(enum.Enum):
    """What became of a reservation or a commit.

    GRANTED: a slot is ours to fill. STORED: checked and indexed. HAVE: the same bytes are there already. BUSY: another
    put of this key is under way. CONFLICT: other bytes are there under this key. FULL: nothing can be evicted.
    CORRUPT: the slot doesn't hold what was promised. REFUSED: too large, unknown, or no tier. FORGOTTEN: the chunk, or
    one before it, was forgotten; clients are told REFUSED.
    """

    GRANTED = "granted"
    STORED = "stored"
    HAVE = "have"
    BUSY = "busy"
    CONFLICT = "conflict"
    FULL = "full"
    CORRUPT = "corrupt"
    REFUSED = "refused"
    FORGOTTEN = "forgotten"


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; on the wire an array that starts with the class's name."""


class KvEventSource(msgspec.Struct, frozen=True, array_like=True):
    """Where an engine publishes its KV events (ZMQ endpoints as this host reaches them), and its own block size.

    `staging_path`: a file of the engine's that its death may leave behind, for the agent to remove.
    """

    endpoint: Name
    replay_endpoint: Name | None
    topic: str
    block_tokens: Positive
    data_parallel_rank: Count = 0
    staging_path: Name | None = None


class Hello(Message, frozen=True):
    """First message: all of an engine's registration but its host, its tokenizer files, and the client's name.

    `client` (16 random bytes) tells the clients of one process apart, over all connections of each. An engine with
    `events` is foreign: its `gpu` tier is learned from them and not at the door, it names chunks by keys of its own,
    and one chunk holds all ranks. An engine of an earlier release doesn't say how many `kv_tokens` its KV cache holds,
    and an agent of an earlier release passes them over.
    """

    client: Annotated[bytes, msgspec.Meta(min_length=CLIENT_BYTES, max_length=CLIENT_BYTES)]
    engine: Name
    url: Name
    models: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=1_024)]
    identity: Identity
    tp_rank: Count
    shape: ModelShape
    chunk_tokens: Positive
    chunk_bytes: Positive
    context_tokens: Positive
    tokenizer_files: dict[str, bytes]
    flops: Annotated[float, msgspec.Meta(gt=0)]
    key_scheme: str
    renderer: str
    events: KvEventSource | None = None
    kv_tokens: Positive | None = None


class Holding(Message, frozen=True):
    """After a reconnect to the same run of the agent: all that this client still holds; the rest is given back."""

    references: Counts
    reservations: Counts


class Open(Message, frozen=True):
    """Ask for references to the leading run of `keys` that the host holds.

    The answer comes within `wait_s`, in which chunks may be read from slower tiers; 0 takes what is in DRAM. With
    `in_pieces`, whoever asks will close what it gets and open the rest, where the answer says that the run goes on.
    """

    id: Count
    keys: Annotated[list[StorageKey], msgspec.Meta(max_length=OPEN_KEYS_MAX)]
    wait_s: Amount = 0.0
    in_pieces: bool = False


class Close(Message, frozen=True):
    """Give references back: `references` were read, which took `read_s`; the bytes of `failed` didn't check; nobody
    looked at `unread`.
    """

    references: Counts
    failed: Counts
    read_bytes: Count
    read_s: Amount
    unread: Counts = []


class Reserve(Message, frozen=True):
    """Ask for a slot for a chunk of `length` bytes with this xxh3-128.

    An engine of an earlier release doesn't say the `salt_tag`, and an agent of an earlier release passes it over.
    """

    id: Count
    storage_key: StorageKey
    directory_key: DirectoryKey | None
    parent: StorageKey | None
    position: Count
    length: Positive
    checksum: Checksum
    salt_tag: SaltTag | None = None


class Commit(Message, frozen=True):
    """The reserved slot is filled."""

    id: Count
    reservation: Count


class Abort(Message, frozen=True):
    """The reserved slot won't be filled, and nobody writes to it any more."""

    reservation: Count


class GpuSnapshot(Message, frozen=True):
    """The whole `gpu` inventory, as directory keys, most recently used last."""

    keys: list[DirectoryKey]


class GpuChanges(Message, frozen=True):
    """Newest states of the `gpu` tier, as directory keys."""

    stored: list[DirectoryKey]
    evicted: list[DirectoryKey]


class LoadReport(Message, frozen=True):
    """How busy the engine is, and the useful FLOP/s it observes."""

    running: Count
    waiting: Count
    flops: Amount


class Goodbye(Message, frozen=True):
    """The engine ends in good order."""


class Welcome(Message, frozen=True):
    """The hello is accepted. `life` (16 random bytes) names this run of the agent: references live no longer."""

    life: bytes


class Refused(Message, frozen=True):
    """The hello is refused, and why."""

    reason: str


class ArenaOffer(Message, frozen=True):
    """The arena's layout; the two descriptors come with this frame.

    Without `verify_reads` a client needn't check a chunk's checksum after its copy; its generation it does.
    """

    header_bytes: Positive
    slot_bytes: Positive
    slots: Positive
    verify_reads: bool = True


class ArenaRefused(Message, frozen=True):
    """The engine works without the tier, and why."""

    reason: str


class OpenedSlot(msgspec.Struct, frozen=True, array_like=True):
    """One reference: where the chunk lies, how to check it, and the tier it came from."""

    reference: int
    slot: int
    generation: int
    length: int
    checksum: bytes
    tier: int = int(Tier.DRAM)


class Opened(Message, frozen=True):
    """Answer to `Open`: one slot for each chunk of the leading run.

    `goes_on` is said only to those who open in pieces: the next chunk is on disk, and may be had once these are closed.
    """

    id: int
    chunks: list[OpenedSlot]
    goes_on: bool = False


class Reserved(Message, frozen=True):
    """Answer to `Reserve`; the numbers count only where the outcome is GRANTED."""

    id: int
    outcome: PutOutcome
    reservation: int = 0
    slot: int = 0
    generation: int = 0


class Committed(Message, frozen=True):
    """Answer to `Commit`."""

    id: int
    outcome: PutOutcome


ClientMessage = Holding | Open | Close | Reserve | Commit | Abort | GpuSnapshot | GpuChanges | LoadReport | Goodbye
AgentMessage = Welcome | Refused | ArenaOffer | ArenaRefused | Opened | Reserved | Committed

_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_agent_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)


def preamble(version: int = DOOR_VERSION) -> bytes:
    """What a client sends first."""
    return MAGIC + version.to_bytes(2, "big")


def read_preamble(data: bytes) -> int:
    """The version in a preamble. Raises `DoorProtocolError` where it isn't one."""
    if len(data) != PREAMBLE_BYTES or data[: len(MAGIC)] != MAGIC:
        raise DoorProtocolError("the connection doesn't begin as a chunk door's client")
    return int.from_bytes(data[len(MAGIC) :], "big")


def frame(message: Message) -> bytes:
    """A message with its length in front. Raises `DoorProtocolError` for one that is too large to send."""
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise DoorProtocolError(f"a message of {len(body)} bytes exceeds the door's {MESSAGE_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_length(header: bytes | bytearray | memoryview) -> int:
    """The length in a frame's header. Raises `DoorProtocolError` for an empty or too large message."""
    length = int.from_bytes(header[:LENGTH_BYTES], "big")
    if not 0 < length <= MESSAGE_BYTES_MAX:
        raise DoorProtocolError(f"a message of {length} bytes is outside the door's 1 to {MESSAGE_BYTES_MAX}")
    return length


def decode_hello(body: bytes | bytearray | memoryview) -> Hello:
    """The hello in `body`. Raises `DoorProtocolError`; its message names the field."""
    try:
        return _hello_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DoorProtocolError(f"the hello can't be read: {error}") from error


def decode_client(body: bytes | bytearray | memoryview) -> ClientMessage:
    """A client's message. Raises `DoorProtocolError`."""
    try:
        return _client_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DoorProtocolError(f"a client's message can't be read: {error}") from error


def decode_agent(body: bytes | bytearray | memoryview) -> AgentMessage:
    """An agent's message. Raises `DoorProtocolError`."""
    try:
        return _agent_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DoorProtocolError(f"the agent's message can't be read: {error}") from error
