"""Buffers on the device: pooled by size class, returned when the last tensor in them dies.

A buffer that returns may still be used by commands that are recorded and not yet submitted. Giving it to the
next tensor is safe all the same, since whatever uses that tensor is recorded later; only writing from the
host, which overtakes recorded commands, has to look at `Block.used` first (see `encoder.Encoder.write`).
"""

from __future__ import annotations

import heapq
from typing import Any, ClassVar

from mamba_fast_wgpu.device import Device
from mamba_fast_wgpu.errors import DeviceOutOfMemoryError

__all__ = ["Block", "Pool", "Window", "size_class"]

_SMALLEST = 256


def size_class(size: int, largest: int) -> int:
    """The buffer size for so many bytes: quarters between powers of two, so at most a quarter is lost."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = max(_SMALLEST, 1 << max((size - 1).bit_length() - 3, 0))
    return min(-(-size // step) * step, max(largest & ~3, size))


class Block:
    """A buffer and its way back to the pool. Tensors hold it; it holds nothing else."""

    __slots__ = ("__weakref__", "buffer", "pool", "serial", "size", "used")

    @property
    def key(self) -> int:
        return self.serial

    start: ClassVar[int] = 0
    """Where in the buffer what is bound begins, in bytes."""

    def __init__(self, pool: Pool, buffer: Any, size: int, serial: int) -> None:
        self.pool = pool
        self.buffer = buffer
        self.size = size
        self.serial = serial
        """A number of the buffer's own, never used again: keys of cached bind groups."""
        self.used = -1
        """The submission that the last recorded use of the buffer goes with."""

    def __del__(self) -> None:
        self.pool.give_back(self)


class Window:
    """A part of a block: what is bound of a buffer that is too large to be bound whole."""

    __slots__ = ("block", "size", "start")

    def __init__(self, block: Block, start: int, size: int) -> None:
        self.block = block
        self.start = start
        self.size = size

    @property
    def buffer(self) -> Any:
        return self.block.buffer

    @property
    def serial(self) -> int:
        return self.block.serial

    @property
    def key(self) -> tuple[int, int, int]:
        return self.block.serial, self.start, self.size

    @property
    def used(self) -> int:
        return self.block.used

    @used.setter
    def used(self, submission: int) -> None:
        self.block.used = submission


class Pool:
    """The buffers of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Every buffer is held here too: one that is found in a cycle of garbage together with its block would
        # be destroyed by the collector while it returns.
        self._buffers: dict[int, Any] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._serial = 0
        self.dropped: list[int] = []
        """Serials of buffers that were destroyed, for the cache of bind groups."""
        self.live_blocks = 0
        """Buffers that tensors hold."""
        self.live_bytes = 0
        self.pooled_bytes = 0
        """Bytes of the buffers that wait for a tensor."""

    def take(self, size: int) -> Block:
        """A buffer of at least this many bytes, its contents undefined."""
        limits = self._device.limits
        size = size_class(size, limits.binding_bytes if size <= limits.binding_bytes else limits.buffer_bytes)
        free = self._free.get(size)
        if free:
            # The oldest of them, not the last: then a step that begins with the same buffers free takes the
            # same ones for the same tensors, and finds its bind groups made.
            serial, used = heapq.heappop(free)
            self.pooled_bytes -= size
        else:
            serial, used = self._serial, -1
            self._buffers[serial] = self._make(size)
            self._serial += 1
        block = Block(self, self._buffers[serial], size, serial)
        block.used = used
        self.live_blocks += 1
        self.live_bytes += size
        return block

    def _make(self, size: int) -> Any:
        try:
            return self._device.storage_buffer(size)
        except DeviceOutOfMemoryError:
            if not self.pooled_bytes:
                raise
            self.trim()
            return self._device.storage_buffer(size)

    def give_back(self, block: Block) -> None:
        self.live_blocks -= 1
        self.live_bytes -= block.size
        self.pooled_bytes += block.size
        heapq.heappush(self._free.setdefault(block.size, []), (block.serial, block.used))

    def trim(self) -> None:
        """Give the memory of all waiting buffers back to the device.

        wgpu keeps a buffer alive until the commands that use it are done, so nothing has to wait here.
        """
        for buffers in self._free.values():
            for serial, _ in buffers:
                del self._buffers[serial]
                self.dropped.append(serial)
        self._free.clear()
        self.pooled_bytes = 0
