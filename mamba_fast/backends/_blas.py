"""Where the matrix products come from: the OpenBLAS that numpy has loaded, else numpy itself.

With OpenBLAS its single-threaded products run in blocks on the kernels' own threads (`_gemm.pyx` says
why). With another library (Accelerate, MKL, BLIS), and with an OpenBLAS built on OpenMP, `numpy.matmul`
computes whole products, and the library decides on threads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import threadpoolctl

__all__ = ["OpenBlas", "blas_name", "find_openblas", "multiply_with_numpy"]


class OpenBlas(NamedTuple):
    """Addresses of the functions that `_gemm.product` calls, and the width of their integers."""

    sgemm: int
    sgemv: int
    wide: bool
    get_threads: int
    set_threads: int


@cache
def find_openblas() -> OpenBlas | None:
    """The OpenBLAS of this process, numpy's own before any other; None where there is none to use.

    One that is built on OpenMP is none to use: there a number of threads is set for the thread that asks
    alone, so that the library could not be held to one on ours.
    """
    libraries = threadpoolctl.ThreadpoolController().select(internal_api="openblas").lib_controllers
    for library in sorted(libraries, key=lambda one: "numpy" not in one.filepath):
        if library.threading_layer not in ("pthreads", "disabled"):
            continue
        for prefix in ("scipy_", ""):
            for suffix in ("64_", "_64", ""):
                found = _functions(library.dynlib, prefix, suffix)
                if found is not None:
                    return found
    return None


def _functions(library: ctypes.CDLL, prefix: str, suffix: str) -> OpenBlas | None:
    # numpy 1.26 named sgemm with the suffix of the 64-bit interface, but not always its own functions.
    names = (
        "cblas_sgemm", "cblas_sgemv", "openblas_get_num_threads", "openblas_set_num_threads",
        "openblas_get_config",
    )  # fmt: skip
    functions = [getattr(library, f"{prefix}{name}{suffix}", None) for name in names]
    if None in functions:
        return None
    *called, get_config = functions
    get_config.restype = ctypes.c_char_p
    config = get_config() or b""
    sgemm, sgemv, get, set_ = (int(ctypes.cast(f, ctypes.c_void_p).value or 0) for f in called)
    return OpenBlas(sgemm, sgemv, b"USE64BITINT" in config, get, set_)


def multiply_with_numpy(
    a: np.ndarray, trans_a: bool, b: np.ndarray, trans_b: bool, c: np.ndarray, alpha: float, beta: float
) -> None:
    """c = alpha op(a) op(b) + beta c (beta 0 or 1), as `_gemm.product`, by numpy.matmul."""
    left, right = a.T if trans_a else a, b.T if trans_b else b
    # NaN and infinity are values here, not warnings.
    with np.errstate(all="ignore"):
        result: Any = np.matmul(left, right, out=None if beta else c)
        if alpha != 1.0:
            result *= np.float32(alpha)
        if beta:
            c += result


def blas_name() -> str:
    """The library behind numpy's matrix products, as numpy reports it."""
    try:
        config: Any = np.show_config(mode="dicts")
        name = str(config["Build Dependencies"]["blas"]["name"])
    except (KeyError, TypeError):
        return "unknown BLAS"
    return "OpenBLAS" if "openblas" in name.lower() else name
