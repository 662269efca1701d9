"""Binds memory to a NUMA node, and asks on which node it lies: two system calls that Python has no names for."""

import ctypes
import errno
import os
import platform
from dataclasses import dataclass

MPOL_BIND = 2
MPOL_F_NODE_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR
LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class _Numbers:
    mbind: int
    get_mempolicy: int


_CALLS = {"x86_64": _Numbers(237, 239), "aarch64": _Numbers(235, 236)}


def bind(address: int, length: int, node: int) -> None:
    """Let the pages of a mapping (whose first is at `address`) come from `node` alone.

    For shared memory this holds whoever touches them. Raises `OSError`: ENOSYS where the kernel or this architecture
    knows no nodes, EPERM where a container may not, EINVAL for a node that isn't this process's to use.
    """
    words = (ctypes.c_ulong * (node // LONG_BITS + 1))()
    words[node // LONG_BITS] = 1 << node % LONG_BITS
    # The kernel looks at one bit less than it is told.
    bits = ctypes.c_ulong(len(words) * LONG_BITS + 1)
    rest = (ctypes.c_ulong(MPOL_BIND), words, bits, ctypes.c_ulong(0))
    _call(_numbers().mbind, ctypes.c_void_p(address), ctypes.c_ulong(length), *rest)


def node_of(address: int) -> int:
    """The node on which the page at `address` lies. Raises `OSError` as `bind` does."""
    node = ctypes.c_int(-1)
    _call(
        _numbers().get_mempolicy,
        ctypes.byref(node),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(MPOL_F_NODE_OF_ADDRESS),
    )
    return node.value


def _numbers() -> _Numbers:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, f"NUMA calls aren't known for {platform.machine()}")
    return numbers


def _call(number: int, *arguments: object) -> None:
    if _libc.syscall(ctypes.c_long(number), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
