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
from mamba_fast_wgpu.memory import Block, Pool, Window
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
        self.bind_groups = 0
        """Bind groups made so far: none is, once a training step has come round."""
        # Pipeline and bind group by kernel, constants and what is bound; and the keys by buffer.
        self._ready: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._keys: dict[int, set[tuple[Any, ...]]] = {}
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
            point uses, in the order of its binding numbers. Buffers are bound whole: offsets and strides are
            the kernel's parameters
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
        blocks = [
            None if given is None else given.block if type(given) is WgpuTensor else given
            for given in bindings
        ]
        key = (
            kernel,
            tuple(constants.items()) if constants else (),
            *[-1 if block is None else block.key for block in blocks],
        )
        pipeline, group = self._ready.get(key) or self._prepare(key, kernel, constants, blocks)
        slot = self._slots * SLOT_BYTES
        self._pack(slot, params)
        if self._pass is None:
            self._begin()
        work = self._pass
        if self._pipeline is not pipeline:
            work.set_pipeline(pipeline)
            self._pipeline = pipeline
        if self._group is not group:
            work.set_bind_group(0, group)
            self._group = group
        work.set_bind_group(1, self._ring_group, [slot])
        work.dispatch_workgroups(*groups)
        submission = self.submission
        for block in blocks:
            if block is not None:
                block.used = submission
        self._slots += 1
        self.dispatches += 1

    def _prepare(
        self,
        key: tuple[Any, ...],
        kernel: str,
        constants: Mapping[str, int | float | bool],
        given: Sequence[Block | Window | None],
    ) -> tuple[Any, Any]:
        """Pipeline and bind group for what is bound, kept under the key."""
        self._forget()
        made = self.pipelines.get(kernel, constants)
        if len(given) != len(made.access):
            raise ValueError(f"kernel {kernel} has {len(made.access)} storage buffers, given {len(given)}")
        uses = [(how, block.serial) for how, block in zip(made.access, given, strict=True) if block]
        written = {serial for how, serial in uses if how == "w"}
        if any(how == "r" and serial in written for how, serial in uses):
            made = self.pipelines.get(kernel, constants, True)
        blocks = [
            self._absent[how] if block is None else block
            for how, block in zip(made.access, given, strict=True)
        ]
        for block in blocks:
            if block.size > self.device.limits.binding_bytes:
                raise ValueError(
                    f"kernel {made.label} was given a tensor of {block.size} bytes, more than the "
                    f"{self.device.limits.binding_bytes} that this device can bind: use smaller tensors"
                )
        group = self.device.bind_group(
            made.layout, [(block.buffer, block.start, block.size) for block in blocks]
        )
        self.bind_groups += 1
        self._ready[key] = made.pipeline, group
        for block in blocks:
            self._keys.setdefault(block.serial, set()).add(key)
        return made.pipeline, group

    def _forget(self) -> None:
        """Drop bind groups of destroyed buffers, and the oldest where there are too many."""
        for serial in self.pool.dropped:
            for key in self._keys.pop(serial, ()):
                self._ready.pop(key, None)
        self.pool.dropped.clear()
        if len(self._ready) >= _MAX_GROUPS:
            for key in list(self._ready)[: _MAX_GROUPS // 2]:
                del self._ready[key]

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
        except (struct.error, OverflowError):  # a negative number, or one that float32 does not hold
            words = [
                _float_bits(value) if isinstance(value, float) else int(value) & 0xFFFFFFFF
                for value in params
            ]
            struct.pack_into(f"<{len(words)}I", self._parameters, slot, *words)

    def _begin(self) -> None:
        self.device.check_process()
        with translated("recording work"):
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
