"""Every key, tag, function name and term of life in Redis: the only place in Python where they are spelled.

`directory/README.md` tells the same to other languages; `functions.lua` is the half that runs in the server.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.errors import DirectoryError
from directory.members import REMEMBERED_S
from directory.placements import PARTITIONS, partition_of

VERSION = "v1"
"""Stands in every key, in the library's name and in every function's, so that versions can live side by side."""

PARTITION_TAGS = (
    "3560",
    "22069",
    "48576",
    "11467",
    "4129",
    "130",
    "1296",
    "41342",
    "8209",
    "3706",
    "2821",
    "48710",
    "356",
    "45971",
    "16248",
    "4782",
)
"""Hash tags whose cluster slots lie 1,024 apart, so that 16 partitions spread evenly over any number of shards."""

LIBRARY = "warmroute_v1"
PLACE = "wr_v1_place"
WITHDRAW = "wr_v1_withdraw"
REGISTER = "wr_v1_register"
RENEW = "wr_v1_renew"
RETIRE = "wr_v1_retire"

REMEMBERED_MS = round(REMEMBERED_S * 1000)

KEY_PREFIX = "wr"
"""Begins every key, unless fleets that share a server are told apart by prefixes of their own."""
KEY_PREFIX_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

TABLE_HOMES_IN_A_CLUSTER = (0, 8)
"""Partitions in whose slot a cluster keeps the fleet's table: twice, so that it outlives a shard."""

_TABLE = b"reg"
_ATTEMPTS = b"attempts"

assert len(PARTITION_TAGS) == PARTITIONS


@dataclass(frozen=True, slots=True)
class KeyKind:
    """What a key is: a `record`, a partition's `attempts`, the `table`, the `versions`, or something `else`."""

    what: str
    version: str
    partition: int | None = None


class Keyspace:
    """The names of one fleet's keys. Raises `DirectoryError` for a prefix that isn't letters, digits, `-`, `_`, `.`."""

    def __init__(self, prefix: str = KEY_PREFIX) -> None:
        if not re.fullmatch(KEY_PREFIX_PATTERN, prefix):
            raise DirectoryError(f"a key prefix is 1 to 64 letters, digits, '-', '_' or '.', not {prefix!r}")
        self._prefix = prefix
        self._key = re.compile(re.escape(prefix).encode() + rb":(v[0-9]{1,4}):\{([0-9]{1,8})\}:(.*)\Z", re.DOTALL)
        self._partitions = tuple(f"{prefix}:{VERSION}:{{{tag}}}:".encode() for tag in PARTITION_TAGS)
        self._by_first_byte = tuple(self._partitions[partition_of(bytes((first,)))] for first in range(256))

    def record(self, key: bytes) -> bytes:
        """Where the packed holders of a directory key (16 bytes) are."""
        return self._partitions[partition_of(key)] + key

    def records(self, keys: Iterable[bytes]) -> list[bytes]:
        """The same of many."""
        prefixes = self._by_first_byte
        return [prefixes[key[0]] + key for key in keys]

    def attempts(self, partition: int) -> bytes:
        """Where a partition keeps the number of each incarnation's last attempt, and when it came."""
        return self._partitions[partition] + _ATTEMPTS

    def registrations(self, home: int = 0) -> bytes:
        """The fleet's table in that partition's slot."""
        return self._partitions[home] + _TABLE

    def versions(self, home: int = 0) -> bytes:
        """When each version of the schema last registered a member (server's ms): the one key without a version."""
        return f"{self._prefix}:{{{PARTITION_TAGS[home]}}}:versions".encode()

    def kind_of(self, key: bytes) -> KeyKind | None:
        """What a key of any version of the schema is; `None` for one that isn't this fleet's."""
        if key in map(self.versions, TABLE_HOMES_IN_A_CLUSTER):
            return KeyKind("versions", "any")
        parts = self._key.match(key)
        if parts is None:
            return None
        version, tag, rest = parts[1].decode(), parts[2].decode(), parts[3]
        if version != VERSION or tag not in PARTITION_TAGS:
            return KeyKind("else", version)
        partition = PARTITION_TAGS.index(tag)
        if len(rest) == DIRECTORY_KEY_BYTES:
            return KeyKind("record", version, partition)
        if rest == _TABLE:
            return KeyKind("table", version)
        return KeyKind("attempts", version, partition) if rest == _ATTEMPTS else KeyKind("else", version)


DEFAULT_KEYSPACE = Keyspace()
record_key, attempts_key = DEFAULT_KEYSPACE.record, DEFAULT_KEYSPACE.attempts
REGISTRATIONS_KEY, VERSIONS_KEY = DEFAULT_KEYSPACE.registrations(), DEFAULT_KEYSPACE.versions()


def functions_source() -> str:
    """The text of `functions.lua`, for FUNCTION LOAD."""
    return resources.files("directory").joinpath("functions.lua").read_text("utf-8")
