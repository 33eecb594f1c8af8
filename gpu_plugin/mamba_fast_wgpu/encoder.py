"""Recording and submitting work. With `device.py` the only module that imports wgpu.

One command encoder with one open compute pass takes the dispatches of many ops. It is submitted when the
host wants to read, or after `FLUSH_AFTER` dispatches, so that a device starts long before a training step is
recorded in full. Parameters of dispatches lie in a ring of 256-byte slots, uploaded once per submission.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import wgpu

from mamba_fast_wgpu.device import SLOT_BYTES, Device, translated
from mamba_fast_wgpu.memory import Block, Pool
from mamba_fast_wgpu.pipelines import Pipelines
from mamba_fast_wgpu.tensor import WgpuTensor

__all__ = ["FLUSH_AFTER", "Encoder"]

FLUSH_AFTER = 256
"""Dispatches after which what is recorded is submitted."""

_READ_PIECE = 32 << 20
"""Bytes that are read back at a time."""

_MAX_GROUPS = 8192
"""Cached bind groups; above that the oldest half goes."""

_NOTHING: dict[str, int] = {}


class Encoder:
    """Work for one device, in the order in which it is recorded."""

    def __init__(self, device: Device, pool: Pool, pipelines: Pipelines) -> None:
        self.device = device
        self.pool = pool
        self.pipelines = pipelines
        self.submission = 0
        """Number of the submission that is being recorded."""
        self.dispatches = 0
        """Dispatches so far."""
        self._parameters = bytearray(FLUSH_AFTER * SLOT_BYTES)
        self._ring = device.uniform_buffer(len(self._parameters))
        self._ring_group = device.bind_group(pipelines.uniform_layout, [(self._ring, 0, SLOT_BYTES)])
        self._slots = 0
        self._encoder: Any = None
        self._pass: Any = None
        self._pipeline: Any = None
        self._group: Any = None
        self._groups: dict[Any, Any] = {}
        self._reader: Any = None
        self._reader_size = 0
        # What is bound for an argument that is left out: one to read, one to write.
        self._absent = {"r": pool.take(1), "w": pool.take(1)}
        self._formats: dict[tuple[type, ...], struct.Struct] = {}

    # ---- recording ----------------------------------------------------------------------------

    def dispatch(
        self,
        kernel: str,
        bindings: Sequence[Any],
        params: Sequence[int | float],
        groups: int | tuple[int, int, int],
        constants: Mapping[str, int | float | bool] = _NOTHING,
    ) -> None:
        """Record one dispatch.

        Parameters
        ----------
        kernel
            "file" or "file:entry", see `pipelines`
        bindings
            a tensor, a block, a window or None (an argument left out) for each storage buffer that the entry
            point uses, in the order of its binding numbers. Buffers are bound whole: offsets and strides are the
            kernel's parameters
        params
            the parameters in the order of the kernel's struct: an int becomes u32 or i32, a float f32
        groups
            workgroups: three counts, or one that may exceed the limit of a dimension: it is then spread over
            two, and the kernel takes `group_index(workgroup_id, num_workgroups)`, which may exceed the count
            and then has nothing to do
        constants
            values for the file's overrides
        """
        if isinstance(groups, int):
            limit = self.device.limits.workgroups
            groups = (groups, 1, 1) if groups <= limit else (limit, -(-groups // limit), 1)
        if self._slots == FLUSH_AFTER:
            self.flush()
        made = self.pipelines.get(kernel, constants)
        blocks = self._blocks(made.access, bindings, kernel)
        if self._conflict(made.access, blocks):
            made = self.pipelines.get(kernel, constants, True)
            blocks = self._blocks(made.access, bindings, kernel)
        slot = self._slots * SLOT_BYTES
        self._pack(slot, params)
        group = self._bind(made, blocks)
        if self._pass is None:
            self._begin()
        work = self._pass
        if self._pipeline is not made.pipeline:
            work.set_pipeline(made.pipeline)
            self._pipeline = made.pipeline
        if self._group is not group:
            work.set_bind_group(0, group)
            self._group = group
        work.set_bind_group(1, self._ring_group, [slot])
        work.dispatch_workgroups(*groups)
        for block in blocks:
            block.used = self.submission
        self._slots += 1
        self.dispatches += 1

    def _blocks(self, access: str, bindings: Sequence[Any], kernel: str) -> list[Block]:
        if len(bindings) != len(access):
            raise ValueError(f"kernel {kernel} has {len(access)} storage buffers, given {len(bindings)}")
        return [
            self._absent[how] if given is None else given.block if type(given) is WgpuTensor else given
            for how, given in zip(access, bindings, strict=True)
        ]

    @staticmethod
    def _conflict(access: str, blocks: list[Block]) -> bool:
        written = {block.serial for how, block in zip(access, blocks, strict=True) if how == "w"}
        return any(how == "r" and block.serial in written for how, block in zip(access, blocks, strict=True))

    def _pack(self, slot: int, params: Sequence[int | float]) -> None:
        kinds = tuple(map(type, params))
        form = self._formats.get(kinds)
        if form is None:
            letters = "".join("f" if issubclass(kind, float | np.floating) else "I" for kind in kinds)
            form = self._formats[kinds] = struct.Struct("<" + letters)
            if form.size > SLOT_BYTES:
                raise ValueError(f"{form.size} bytes of parameters, at most {SLOT_BYTES}")
        try:
            form.pack_into(self._parameters, slot, *params)
        except struct.error:  # a negative number, or a float beyond float32
            words = [
                _float_bits(value) if isinstance(value, float) else int(value) & 0xFFFFFFFF
                for value in params
            ]
            struct.pack_into(f"<{len(words)}I", self._parameters, slot, *words)
        except OverflowError:
            words = [
                _float_bits(value) if isinstance(value, float) else int(value) & 0xFFFFFFFF
                for value in params
            ]
            struct.pack_into(f"<{len(words)}I", self._parameters, slot, *words)

    def _bind(self, made: Any, blocks: list[Block]) -> Any:
        key = (made.access, *[(block.serial, block.start) for block in blocks])
        group = self._groups.get(key)
        if group is None:
            self._forget()
            for block in blocks:
                if block.size > self.device.limits.binding_bytes:
                    raise ValueError(
                        f"kernel {made.label} was given a tensor of {block.size} bytes, more than the "
                        f"{self.device.limits.binding_bytes} that this device can bind: use smaller tensors"
                    )
            group = self.device.bind_group(
                made.layout, [(block.buffer, block.start, block.size) for block in blocks]
            )
            self._groups[key] = group
        return group

    def _forget(self) -> None:
        """Drop bind groups of destroyed buffers, and the oldest where there are too many."""
        if self.pool.dropped:
            gone = set(self.pool.dropped)
            self.pool.dropped.clear()
            self._groups = {
                key: group for key, group in self._groups.items() if gone.isdisjoint(s for s, _ in key[1:])
            }
        if len(self._groups) >= _MAX_GROUPS:
            for key in list(self._groups)[: _MAX_GROUPS // 2]:
                del self._groups[key]

    def _begin(self) -> None:
        self.device.check_process()
        if self._encoder is None:
            self._encoder = self.device.handle.create_command_encoder()
        self._pass = self._encoder.begin_compute_pass()
        self._pipeline = self._group = None

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()
            self._pass = None

    # ---- submitting ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Submit what is recorded; does not wait."""
        if self._encoder is None:
            return
        self.device.check_process()
        encoder, work, slots = self._encoder, self._pass, self._slots
        # Whatever happens, the next op starts afresh.
        self._encoder = self._pass = None
        self._slots = 0
        self.submission += 1
        with translated("submitting work"):
            if work is not None:
                work.end()
            commands = encoder.finish()
            queue = self.device.handle.queue
            if slots:
                queue.write_buffer(self._ring, 0, self._parameters, 0, slots * SLOT_BYTES)
            queue.submit([commands])

    def synchronize(self) -> None:
        """Submit what is recorded and wait until it is done."""
        # A read-back of four bytes: wgpu 0.32 has no other wait that every driver honours.
        self.read(self._absent["r"], 0, 4)

    # ---- host transfers -----------------------------------------------------------------------

    def write(self, block: Block, data: np.ndarray) -> None:
        """Write host bytes (a multiple of four) to the start of a buffer."""
        if data.nbytes == 0:
            return
        if block.used == self.submission:
            self.flush()  # recorded work still wants what is in the buffer, and a write would overtake it
        with translated("writing to the device"):
            self.device.check_process()
            self.device.handle.queue.write_buffer(block.buffer, 0, data)

    def read(self, block: Block, start: int, size: int) -> np.ndarray:
        """Bytes [start, start + size) of a buffer, both multiples of four. Waits."""
        result = np.empty(size, np.uint8)
        for at in range(0, size, _READ_PIECE):
            count = min(_READ_PIECE, size - at)
            reader = self._reader_of(count)
            with translated("reading from the device"):
                self._end_pass()
                if self._encoder is None:
                    self.device.check_process()
                    self._encoder = self.device.handle.create_command_encoder()
                self._encoder.copy_buffer_to_buffer(block.buffer, start + at, reader, 0, count)
                self.flush()
                padded = -(-count // 8) * 8
                reader.map_sync(wgpu.MapMode.READ, 0, padded)
                try:
                    result[at : at + count] = np.frombuffer(
                        reader.read_mapped(0, padded, copy=False), np.uint8
                    )[:count]
                finally:
                    reader.unmap()
        return result

    def _reader_of(self, size: int) -> Any:
        if self._reader_size < size:
            if self._reader is not None:
                self._reader.destroy()
            self._reader_size = min(max(4096, 1 << (size - 1).bit_length()), _READ_PIECE)
            self._reader = self.device.read_buffer(self._reader_size)
        return self._reader


def _float_bits(value: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32))
