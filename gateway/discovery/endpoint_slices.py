"""EndpointSlices as the API server tells them, and the engines in them. Pure.

Format: `discovery.k8s.io/v1` (https://kubernetes.io/docs/concepts/services-networking/endpoint-slices). A service has
several slices, an endpoint may be in two of them while it moves, and a condition that isn't known counts as ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

NAME_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """A pod that may serve. `uid` is another for a pod that was made again under the same name."""

    name: str
    uid: str
    address: str
    port: int

    @property
    def place(self) -> str:
        """Host and port as they stand in a URL."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class SliceTable:
    """The slices of one service, by name. `port` is the wanted port's name or number; none: the first TCP port."""

    def __init__(self, port: str | int | None = None) -> None:
        self._port = port
        self._slices: dict[str, tuple[Endpoint, ...]] = {}
        self.strange = 0
        """Slices and endpoints that couldn't be read."""

    def replace(self, slices: Iterable[Any]) -> None:
        """These are all that there are: what was deleted unseen goes."""
        self._slices = {}
        for each in slices:
            self.put(each)

    def put(self, slice_: Any) -> None:
        """A slice is new or changed."""
        name = _name(slice_)
        if name is None:
            self.strange += 1
        else:
            self._slices[name] = tuple(self._endpoints(slice_))

    def remove(self, slice_: Any) -> None:
        """A slice is gone."""
        self._slices.pop(_name(slice_) or "", None)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All that may have requests, each pod once; of one that is told twice, the lowest address."""
        found: dict[str, Endpoint] = {}
        for each in sorted(endpoint for slice_ in self._slices.values() for endpoint in slice_):
            found.setdefault(each.name, each)
        return tuple(found.values())

    def _endpoints(self, slice_: Mapping[str, Any]) -> Iterable[Endpoint]:
        port = _port(slice_.get("ports"), self._port)
        endpoints = slice_.get("endpoints") or []
        if port is None or not isinstance(endpoints, list) or slice_.get("addressType") == "FQDN":
            self.strange += bool(endpoints)
            return
        for row in endpoints:
            endpoint = _endpoint(row, port)
            if endpoint is None:
                self.strange += 1
            elif _may_serve(row):
                yield endpoint


def _name(slice_: Any) -> str | None:
    metadata = slice_.get("metadata") if isinstance(slice_, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) and name else None


def _port(ports: Any, wanted: str | int | None) -> int | None:
    for row in ports if isinstance(ports, list) else ():
        if not isinstance(row, Mapping) or row.get("protocol", "TCP") not in ("TCP", None):
            continue
        number = row.get("port")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 2**16:
            continue
        if wanted is None or wanted in (number, row.get("name")):
            return number
    return None


def _endpoint(row: Any, port: int) -> Endpoint | None:
    addresses = row.get("addresses") if isinstance(row, Mapping) else None
    address = addresses[0] if isinstance(addresses, list) and addresses else None
    if not isinstance(address, str) or not _is_address(address):
        return None
    target = row.get("targetRef")
    target = target if isinstance(target, Mapping) else {}
    name, uid = target.get("name"), target.get("uid")
    is_named = isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_CHARS_MAX
    own = Endpoint("", uid if isinstance(uid, str) else "", address, port)
    return Endpoint(str(name) if is_named else own.place, own.uid, address, port)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def _may_serve(row: Mapping[str, Any]) -> bool:
    """A pod that ends finishes what it has, and gets nothing more."""
    conditions = row.get("conditions")
    conditions = conditions if isinstance(conditions, Mapping) else {}
    return conditions.get("ready") is not False and conditions.get("terminating") is not True
