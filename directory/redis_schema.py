"""Every key, tag, function name and term of life in Redis: the only place in Python where they are spelled.

`directory/README.md` tells the same to other languages; `functions.lua` is the half that runs in the server.
"""

import re
from dataclasses import dataclass
from importlib import resources

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.members import INCARNATION_BYTES, REMEMBERED_S
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
MEMBERS = "wr_v1_members"

REMEMBERED_MS = round(REMEMBERED_S * 1000)

_PREFIXES = tuple(f"wr:{VERSION}:{{{tag}}}:".encode() for tag in PARTITION_TAGS)

REGISTRATIONS_KEY = _PREFIXES[0] + b"reg"
VERSIONS_KEY = f"wr:{{{PARTITION_TAGS[0]}}}:versions".encode()
"""When each version of the schema last registered a member (server's milliseconds): the one key without a version."""

_KEY = re.compile(rb"wr:(v[0-9]{1,4}):\{([0-9]{1,8})\}:(.*)\Z", re.DOTALL)

assert len(PARTITION_TAGS) == PARTITIONS


def record_key(key: bytes) -> bytes:
    """Where the packed holders of a directory key (16 bytes) are."""
    return _PREFIXES[partition_of(key)] + key


def attempts_key(partition: int, incarnation: bytes) -> bytes:
    """Where a partition keeps the number of an incarnation's last attempt."""
    return _PREFIXES[partition] + b"#" + incarnation


@dataclass(frozen=True, slots=True)
class KeyKind:
    """What a key is: a `record`, a partition's `attempts`, the `table`, the `versions`, or something `else`."""

    what: str
    version: str
    partition: int | None = None


def kind_of(key: bytes) -> KeyKind | None:
    """What a key of any version of the schema is; `None` for one that isn't the directory's."""
    if key == VERSIONS_KEY:
        return KeyKind("versions", "any")
    parts = _KEY.match(key)
    if parts is None:
        return None
    version, tag, rest = parts[1].decode(), parts[2].decode(), parts[3]
    if version != VERSION or tag not in PARTITION_TAGS:
        return KeyKind("else", version)
    partition = PARTITION_TAGS.index(tag)
    if len(rest) == DIRECTORY_KEY_BYTES:
        return KeyKind("record", version, partition)
    if key == REGISTRATIONS_KEY:
        return KeyKind("table", version)
    is_attempts = rest.startswith(b"#") and len(rest) == 1 + INCARNATION_BYTES
    return KeyKind("attempts", version, partition) if is_attempts else KeyKind("else", version)


def functions_source() -> str:
    """The text of `functions.lua`, for FUNCTION LOAD."""
    return resources.files("directory").joinpath("functions.lua").read_text("utf-8")
