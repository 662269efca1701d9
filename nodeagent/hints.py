"""What a gateway says will be wanted, and where it can be had: the body of `POST /prefetch`, and of `DELETE /prefetch`.

    {"keys": ["<directory key in hex>", ...],
     "peers": [{"address": "10.0.0.7:8301", "keys": ["<directory key in hex>", ...]}, ...]}

`keys` lie on this host's disk, those of a peer in another host's tiers; both in the order in which they will be
wanted. `peers` may be left out. Hints cost only themselves: one that is late, wrong or refused means a slower request,
and nothing else.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from directory.chunks import DIRECTORY_KEY_BYTES
from directory.members import PEER_ADDRESS_CHARS_MAX
from nodeagent.errors import HintRefused

KEYS_MAX = 4_096
"""Directory keys of one hint, those of all its peers included."""
PEERS_MAX = 16
PORT_MAX = 65_535
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")

DirectoryKeyHex = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-fA-F]{{{2 * DIRECTORY_KEY_BYTES}}}$")]
Keys = Annotated[list[DirectoryKeyHex], msgspec.Meta(max_length=KEYS_MAX)]


class PeerRow(msgspec.Struct, forbid_unknown_fields=True):
    """One peer in the body."""

    address: Annotated[str, msgspec.Meta(min_length=3, max_length=PEER_ADDRESS_CHARS_MAX)]
    keys: Keys


class HintBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body as it is written."""

    keys: Keys
    peers: Annotated[list[PeerRow], msgspec.Meta(max_length=PEERS_MAX)] = []


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another host's agent listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PeerHint:
    """Directory keys that the peer at `address` is believed to hold."""

    address: PeerAddress
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Hint:
    """Directory keys that will be wanted: those on this host's disk, and those of peers."""

    keys: tuple[bytes, ...] = ()
    peers: tuple[PeerHint, ...] = ()


class Hinted(Protocol):
    """Follows hints; neither method waits or raises."""

    def prefetch(self, hint: Hint) -> int:
        """How many of the keys will be tried."""
        ...

    def cancel(self, hint: Hint) -> int:
        """Whoever gave this hint doesn't want it any more; how many keys won't be tried. What is begun lands."""
        ...


class KeysHinted(Protocol):
    """Follows hints of one kind."""

    def prefetch(self, directory_keys: Sequence[bytes]) -> int:
        """See `Hinted`."""
        ...

    def cancel(self, directory_keys: Sequence[bytes]) -> int:
        """See `Hinted`."""
        ...


class PeersHinted(Protocol):
    """Follows hints of the other kind."""

    def prefetch(self, hint: PeerHint) -> int:
        """See `Hinted`."""
        ...

    def cancel(self, hint: PeerHint) -> int:
        """See `Hinted`."""
        ...


class Hints:
    """Gives each part of a hint to whom it concerns."""

    def __init__(self, disk: KeysHinted, peers: PeersHinted) -> None:
        self._disk = disk
        self._peers = peers

    def prefetch(self, hint: Hint) -> int:
        """See `Hinted`."""
        return self._disk.prefetch(hint.keys) + sum(self._peers.prefetch(each) for each in hint.peers)

    def cancel(self, hint: Hint) -> int:
        """See `Hinted`."""
        return self._disk.cancel(hint.keys) + sum(self._peers.cancel(each) for each in hint.peers)


def decode_hint(body: bytes) -> Hint:
    """The hint in `body`. Raises `HintRefused`, which names the field."""
    try:
        row = msgspec.json.decode(body, type=HintBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HintRefused(str(error)) from error
    if len(row.keys) + sum(len(peer.keys) for peer in row.peers) > KEYS_MAX:
        raise HintRefused(f"more than {KEYS_MAX} keys in all - at `$.peers`")
    peers = tuple(
        PeerHint(_address(peer.address, f"$.peers[{number}].address"), _decoded(peer.keys))
        for number, peer in enumerate(row.peers)
    )
    return Hint(_decoded(row.keys), peers)


def read_address(text: str) -> PeerAddress:
    """`host:port`, the host a name, an IPv4 address, or an IPv6 address in brackets. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= len(str(PORT_MAX)) and 0 < int(port) <= PORT_MAX):
        raise ValueError(f"an address is host:port, with a port of 1 to {PORT_MAX}, not {text!r}")
    if host.startswith("[") and host.endswith("]") and "%" not in host:
        try:
            return PeerAddress(str(ipaddress.IPv6Address(host[1:-1])), int(port))
        except ValueError:
            host = ""
    if not _NAME.fullmatch(host):
        raise ValueError(f"an address is host:port, its host a name or an address, not {text!r}")
    return PeerAddress(host, int(port))


def _address(text: str, place: str) -> PeerAddress:
    try:
        return read_address(text)
    except ValueError as error:
        raise HintRefused(f"{error} - at `{place}`") from error


def _decoded(keys: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(key) for key in keys)
