"""The addresses of a server's name, asked for again after a few seconds: an engine that moved is found.

A name that can't be resolved for the moment keeps the addresses it had: the name server's troubles aren't the engine's.
"""

import asyncio
import ipaddress
import socket
from dataclasses import dataclass

KEPT_S = 5.0
NAMES_MAX = 4096
PER_NAME_MAX = 4
"""Addresses of one name that are tried."""


@dataclass(frozen=True, slots=True)
class _Answer:
    addresses: tuple[str, ...]
    asked_at: float


class Addresses:
    """Use from one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[str, _Answer] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def of(self, host: str) -> tuple[str, ...]:
        """The addresses of a name, that which worked last first; an address is its own. Raises `OSError`."""
        if _is_address(host):
            return (host,)
        known = self._known.get(host)
        if known is not None and self._loop.time() - known.asked_at < KEPT_S:
            return known.addresses
        lock = self._asking.setdefault(host, asyncio.Lock())
        try:
            async with lock:
                now_known = self._known.get(host)
                if now_known is not known and now_known is not None:  # another asked meanwhile
                    return now_known.addresses
                return await self._ask(host, known)
        finally:
            if not lock.locked():
                self._asking.pop(host, None)

    def prefer(self, host: str, address: str) -> None:
        """This one accepted a connection."""
        known = self._known.get(host)
        if known is not None and known.addresses[0] != address:
            rest = tuple(each for each in known.addresses if each != address)
            self._known[host] = _Answer((address, *rest), known.asked_at)

    async def _ask(self, host: str, known: _Answer | None) -> tuple[str, ...]:
        try:
            rows = await self._loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        except UnicodeError as error:
            raise OSError("no name of a server") from error
        except OSError:
            if known is None:
                raise
            addresses = known.addresses
        else:
            found = list(dict.fromkeys(str(row[4][0]) for row in rows))[:PER_NAME_MAX]
            if not found:
                raise OSError("a name without an address")
            if known is not None and known.addresses[0] in found:  # it worked before
                found.remove(known.addresses[0])
                found.insert(0, known.addresses[0])
            addresses = tuple(found)
        if len(self._known) >= NAMES_MAX:
            self._known.pop(next(iter(self._known)))
        self._known[host] = _Answer(addresses, self._loop.time())
        return addresses


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
