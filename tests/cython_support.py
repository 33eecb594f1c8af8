"""What the tests of the CPU backend share: backends by thread count, random inputs, comparison."""

from __future__ import annotations

from functools import cache

import numpy as np

from mamba_fast.backends.cython import CythonBackend, create_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance

THREADS = (1, 2, 3, 8)


@cache
def cython(threads: int = 2) -> CythonBackend:
    return create_backend(threads=threads)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def columns(backend: CythonBackend, array: np.ndarray) -> np.ndarray:
    """The same values as a column view, with NaN on both sides: reading past the edge shows."""
    host = np.full((*array.shape[:-1], array.shape[-1] + 5), np.nan, np.float32)
    host[..., 2:-3] = array
    return backend.view(backend.from_host(host), -1, 2, host.shape[-1] - 3)


def assert_close(actual: np.ndarray, expected: np.ndarray, kind: str) -> None:
    assert relative_l2(actual, expected) <= tolerance("cython", kind)


def bits(*arrays: np.ndarray | None) -> tuple[bytes, ...]:
    return tuple(np.ascontiguousarray(a).tobytes() for a in arrays if a is not None)
