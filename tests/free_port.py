"""A port for a part that is told its own before it starts, and keeps it over its restarts."""

import contextlib
import socket

from warmroute.free_ports import free_ports

_PORTS = free_ports(range(12_000, 20_000))
"""None that a fleet takes by itself, nor the kernel for outgoing connections: one of those may take a port between two
starts, be it a client that keeps trying this very port."""


def free_port() -> int:
    """A port that nobody else in this process gets, whose successor is free as well and given to nobody."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.socket() as successor:
            successor.bind(("127.0.0.1", port + 1))
            if port % 2 == 0:
                return port
    raise AssertionError("unreachable: `free_ports` raises")
