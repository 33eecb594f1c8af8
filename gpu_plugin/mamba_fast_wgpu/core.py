"""What all ops share: the device's work queue, new tensors, and the checks of operands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mamba_fast.backend import Backend, Tensor
from mamba_fast_wgpu.device import Device, open_device
from mamba_fast_wgpu.encoder import Encoder
from mamba_fast_wgpu.memory import Pool
from mamba_fast_wgpu.pipelines import Pipelines
from mamba_fast_wgpu.tensor import ITEM_BYTES, WgpuTensor, reshape, shares, view, window

__all__ = ["Core", "Engine", "engine", "numbered", "read_saved", "unwrap"]


_WIDE_BYTES = 32 << 10
"""Workgroup memory of `linear_wide.wgsl`."""


class Engine:
    """A device with its memory, kernels and queue."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pool = Pool(device)
        self.pipelines = Pipelines(device)
        self.encoder = Encoder(device, self.pool, self.pipelines)


# One engine for each set of options, for as long as the process lives: drivers leak memory, and some fail,
# when devices are opened over and over. This is what makes `create_backend` cheap to call twice.
_engines: dict[Any, Engine] = {}


def engine(*, adapter: str | None, force_limits: Mapping[str, int] | None, subgroups: bool | None) -> Engine:
    """The engine for these options (see `device.open_device`), opened on the first call."""
    from mamba_fast_wgpu.device import choose

    chosen = choose(adapter).summary
    key = (chosen, tuple(sorted((force_limits or {}).items())), subgroups)
    if key not in _engines:
        _engines[key] = Engine(open_device(adapter=adapter, force_limits=force_limits, subgroups=subgroups))
    found = _engines[key]
    found.device.check_process()
    return found


def numbered(**lists: Sequence[Any]) -> dict[str, Any]:
    """The tensors of argument lists by name, "params[0]" and so on."""
    return {f"{name}[{i}]": tensor for name, tensors in lists.items() for i, tensor in enumerate(tensors)}


def read_saved(op: str, saved: Any, kind: type[Any]) -> Any:
    """What a forward op saved, or an error that says what is wrong with it."""
    if saved is None:
        raise ValueError(f"{op}: saved is None: run the forward op with grad=True")
    if not isinstance(saved, kind):
        raise TypeError(f"{op}: saved is a {type(saved).__name__}, expected what the forward op returned")
    return saved


def unwrap(op: str, name: str, tensor: Any, dtype: str) -> WgpuTensor:
    """The tensor, if it is one of this backend and of this type."""
    if not isinstance(tensor, WgpuTensor):
        raise TypeError(
            f"{op}: {name} is a {type(tensor).__name__}, not a tensor of this backend: use from_host"
        )
    if tensor.dtype != dtype:
        remedy = "use cast" if tensor.dtype in ("f16", "bf16") else "use from_host"
        raise TypeError(f"{op}: {name} is {tensor.dtype}, expected {dtype}: {remedy}")
    return tensor


class Core(Backend):
    """The base of the families of ops."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.device
        self.encoder = engine.encoder
        self.dispatch = engine.encoder.dispatch
        limits = engine.device.limits
        self.max_tensor_bytes = limits.buffer_bytes & ~3
        self.max_slab_bytes = limits.binding_bytes & ~3
        self.wide_products = limits.workgroup_bytes >= _WIDE_BYTES and not engine.device.adapter.software
        """Whether large products have a kernel of their own; on a CPU it takes seconds to compile and gains
        nothing."""

    def new(self, shape: Sequence[int], dtype: str = "f32", *, large: bool = False) -> WgpuTensor:
        """A contiguous tensor, its values undefined. Freed (to the pool) when nothing refers to it.

        `large`: it may be larger than what a kernel can bind; the ops on parameters take such tensors.
        """
        shape = tuple(shape)
        width = shape[-1] if shape else 1
        size = math.prod(shape) * ITEM_BYTES[dtype]
        limit = self.max_tensor_bytes if large else self.max_slab_bytes
        if size > limit:
            raise ValueError(
                f"a tensor of shape {shape} and type {dtype} takes {size} bytes; this device allows {limit} "
                "for it: use a smaller batch or seq_len"
            )
        return WgpuTensor(self.engine.pool.take(max(size, 4)), 0, shape, width, dtype)

    def is_large(self, tensor: WgpuTensor) -> bool:
        """Whether a kernel cannot bind the tensor's buffer whole."""
        return tensor.block.size > self.max_slab_bytes

    def spread(self, *tensors: WgpuTensor) -> Iterator[tuple[WgpuTensor, ...]]:
        """Tensors of one shape, in parts that kernels can bind: themselves, where they are small enough."""
        if not any(self.is_large(tensor) for tensor in tensors):
            yield tensors
            return
        if not all(tensor.contiguous for tensor in tensors):
            raise ValueError(
                f"column views of a tensor of more than {self.max_slab_bytes} bytes are not supported on "
                "this device: copy it in smaller parts"
            )
        size = tensors[0].size
        flat = [reshape(tensor, (size,)) for tensor in tensors]
        step = (self.max_slab_bytes - 256) // 4 // 64 * 64
        for start in range(0, size, step):
            stop = min(start + step, size)
            yield tuple(
                window(part) if self.is_large(part) else part
                for part in (view(tensor, 0, start, stop) for tensor in flat)
            )

    def row_parts(self, matrix: WgpuTensor) -> Iterator[tuple[int, int, WgpuTensor]]:
        """A matrix in runs of rows that kernels can bind: first row, the row after the last, the part."""
        rows = matrix.shape[0]
        if not self.is_large(matrix):
            yield 0, rows, matrix
            return
        step = max(1, (self.max_slab_bytes - 256) // 4 // matrix.row_stride)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield start, stop, window(view(matrix, 0, start, stop))

    def check(
        self,
        op: str,
        writes: Mapping[str, Tensor | None],
        reads: Mapping[str, Tensor | None],
        ids: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        """The operands, by argument, are f32 tensors (`ids`: i32) or None, and nothing that is written
        overlaps another operand (ValueError naming both)."""
        written: dict[int, list[tuple[str, WgpuTensor]]] = {}
        for name, tensor in writes.items():
            if tensor is not None:
                found = unwrap(op, name, tensor, "f32")
                others = written.setdefault(found.block.serial, [])
                for other, operand in others:
                    if shares(found, operand):
                        raise ValueError(
                            f"{op}: {other} overlaps {name} in memory: give it memory of its own"
                        )
                others.append((name, found))
        for group, dtype in ((reads, "f32"), (ids or {}, "i32")):
            for name, tensor in group.items():
                if tensor is not None:
                    found = unwrap(op, name, tensor, dtype)
                    for other, operand in written.get(found.block.serial, ()):
                        if shares(found, operand):
                            raise ValueError(
                                f"{op}: {other} overlaps {name} in memory: give it memory of its own"
                            )
