"""What shapes floating-point results besides the model: libraries and instruction set - and a sample.

OpenBLAS chooses its kernels by processor and its blocking by cache size, so names alone don't settle whether two
engines compute the same bits. The fingerprint does: it is a digest of KV that this very process computed.
"""

import ctypes
import hashlib
import importlib
import platform
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_OPENBLAS_AFFIXES = (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", ""))


@dataclass(frozen=True, slots=True)
class Numerics:
    """The libraries and the machine: part of an identity's layout."""

    numpy: str
    blas: str
    kernel: str
    instructions: str

    def describe(self) -> str:
        """One word-like field: letters, digits and `.-+_=;` only."""
        fields = (
            f"numpy={self.numpy}",
            f"blas={self.blas}",
            f"kernel={self.kernel}",
            f"cpu={self.instructions}",
        )
        return ";".join(_plain(field) for field in fields)


def use_one_blas_thread() -> None:
    """Keep the OpenBLAS of this process to one thread; other libraries heed the environment they were loaded in."""
    call = _openblas("set_num_threads")
    if call is not None:
        call.restype = None
        call(1)


def read_numerics() -> Numerics:
    """What this process computes with."""
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {})
    simd = config.get("SIMD Extensions", {})
    features = [*simd.get("baseline", []), *simd.get("found", [])]
    return Numerics(
        numpy=np.__version__,
        blas=f"{blas.get('name', 'unknown')}-{blas.get('version', 'unknown')}",
        kernel=_blas_kernel(),
        instructions="+".join([platform.machine(), *features]),
    )


def fingerprint(arrays: list[NDArray[np.float32]]) -> str:
    """16 hexadecimal digits of a digest of the arrays' bits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _blas_kernel() -> str:
    call = _openblas("get_corename")
    if call is None:
        return "unknown"
    call.restype = ctypes.c_char_p
    return bytes(call()).decode()


def _openblas(function: str) -> Any:
    """A function of the OpenBLAS that NumPy is linked to, whatever affixes its build gave it; None without one."""
    library = ctypes.CDLL(importlib.import_module("numpy._core._multiarray_umath").__file__)
    for prefix, suffix in _OPENBLAS_AFFIXES:
        call = getattr(library, f"{prefix}openblas_{function}{suffix}", None)
        if call is not None:
            return call
    return None


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.\-+_=]", "_", text)
