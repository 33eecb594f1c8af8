"""Memory of the CPU backend's tensors: kept and given out again, instead of asked of the system each time.

A training step makes the same arrays as the one before. Memory that the system hands out anew costs a page
fault for every 4 KiB, 14 % of the time of a step of a small model; here a tensor's memory goes back to the
pool when its last view is gone, and the next tensor of about that size takes it. Every tensor starts at a
cache line: numpy's own large arrays start 16 bytes past one, so that each of the kernels' vectors would lie
across two lines, which cost the scan 7 % on a processor with AVX-512.

What the pool holds, in use or not, is never more than what was once in use at the same time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from threading import RLock
from typing import Any

import numpy as np

__all__ = ["Pool"]

_LINE = 64
_POOL_FROM = 1 << 14
"""Bytes from which on the pool is worth its bookkeeping; smaller arrays are numpy's."""


class _Block:
    """The memory of one tensor, which holds it as `base`; returns to the pool with the tensor's last view."""

    __slots__ = ("__array_interface__", "_memory", "_pool")

    def __init__(self, pool: Pool, memory: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._pool = pool
        self._memory = memory
        address = memory.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address + -address % _LINE, False),
        }

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class Pool:
    """Free memory by size. Safe to use from several threads."""

    def __init__(self) -> None:
        # Reentrant: a collection of garbage in the middle of `_take` may end in `give_back`.
        self._lock = RLock()
        self._free: OrderedDict[int, list[np.ndarray]] = OrderedDict()  # the class given to last is last
        self._held = self._used = self._most = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool has from the system, in use or free."""
        return self._held

    def new(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """A writable C-contiguous array with undefined values."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _POOL_FROM:
            return np.empty(shape, dtype)
        return np.asarray(_Block(self, self._take(_size_class(nbytes)), shape, dtype))

    def _take(self, size: int) -> np.ndarray:
        with self._lock:
            self._used += size
            self._most = max(self._most, self._used)
            if self._free.get(size):
                return self._free[size].pop()
            self._held += size
            while self._held > self._most and self._drop_one():
                pass
        return np.empty(size + _LINE, np.uint8)

    def _drop_one(self) -> bool:
        """Let the system have a free block of the class that was given to least recently."""
        for size, blocks in self._free.items():
            if blocks:
                blocks.pop()
                self._held -= size
                return True
        return False

    def give_back(self, memory: np.ndarray) -> None:
        """Memory that no tensor uses any more."""
        size = memory.nbytes - _LINE
        with self._lock:
            self._used -= size
            self._free.setdefault(size, []).append(memory)
            self._free.move_to_end(size)


def _size_class(nbytes: int) -> int:
    """At least nbytes, at most a sixteenth more: sizes a little apart share their memory."""
    step = 1 << max(nbytes.bit_length() - 5, 12)
    return -(-nbytes // step) * step
