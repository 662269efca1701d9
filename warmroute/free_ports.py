"""Free ports for parts that are told theirs before they start."""

import contextlib
import random
import socket
from collections.abc import Iterator

PORTS = range(20_000, 32_000)
"""Below those that the kernel gives out by itself: a starting vLLM takes dozens of these, and must not take ours."""


class NoPortFree(OSError):
    """All of `PORTS` are taken."""


def free_ports(ports: range = PORTS) -> Iterator[int]:
    """Those of `ports` that are free on this machine, each once. Raises `NoPortFree` after the last."""
    for port in random.sample(ports, len(ports)):
        with contextlib.suppress(OSError):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
            yield port
    raise NoPortFree(f"all ports from {ports.start} to {ports.stop - 1} are taken")
