"""Tensors of this backend: a place in a buffer on the device.

A tensor is row-major; its last axis is contiguous, and all axes before it together are the rows, which
lie `row_stride` elements apart. Kernels bind the whole buffer and are told offset and row stride, so that a
view costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mamba_fast import checks
from mamba_fast_wgpu.memory import Block, Window

__all__ = ["ITEM_BYTES", "WgpuTensor", "reshape", "shares", "view", "window"]

ITEM_BYTES = {"f32": 4, "i32": 4, "f16": 2, "bf16": 2}


class WgpuTensor:
    """See the module's docstring. `offset` and `row_stride` count elements."""

    __slots__ = ("block", "dtype", "offset", "row_stride", "shape")

    def __init__(
        self, block: Block | Window, offset: int, shape: tuple[int, ...], row_stride: int, dtype: str
    ) -> None:
        self.block = block
        self.offset = offset
        self.shape = shape
        self.row_stride = row_stride
        self.dtype = dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Elements of a row: the last extent."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Number of rows: the product of all extents but the last."""
        return math.prod(self.shape[:-1])

    @property
    def contiguous(self) -> bool:
        return self.row_stride == self.width or self.rows <= 1

    @property
    def flat(self) -> tuple[int, int]:
        """(rows, width) for an elementwise kernel: a single row where the tensor is contiguous."""
        return (1, self.size) if self.contiguous else (self.rows, self.width)

    def span(self) -> tuple[int, int]:
        """First element and the one after the last, counted from the buffer's start."""
        if self.size == 0:
            return self.offset, self.offset
        return self.offset, self.offset + (self.rows - 1) * self.row_stride + self.width

    def aligned(self, elements: int) -> bool:
        """Whether every row starts at a multiple of this many elements, so that vectors can be loaded."""
        return self.offset % elements == 0 and (self.rows <= 1 or self.row_stride % elements == 0)

    def __repr__(self) -> str:
        return f"WgpuTensor(shape={self.shape}, dtype={self.dtype!r}, row_stride={self.row_stride})"


def reshape(tensor: WgpuTensor, shape: Sequence[int]) -> WgpuTensor:
    """See `Backend.reshape`."""
    shape = tuple(shape)
    if any(n < 0 for n in shape) or math.prod(shape) != tensor.size:
        raise ValueError(f"reshape: shape {tensor.shape} cannot become {shape}")
    width = shape[-1] if shape else 1
    if tensor.contiguous:
        stride = width
    elif width == tensor.width:
        stride = tensor.row_stride
    else:
        raise ValueError(
            f"reshape: a column view of shape {tensor.shape} cannot become {shape} without a copy"
        )
    return WgpuTensor(tensor.block, tensor.offset, shape, stride, tensor.dtype)


def view(tensor: WgpuTensor, axis: int, start: int, stop: int) -> WgpuTensor:
    """See `Backend.view`."""
    checks.view(tensor, axis, start, stop)
    shape, count = tensor.shape, stop - start
    if axis == 0 and len(shape) > 1:
        step = math.prod(shape[1:-1]) * tensor.row_stride
        return WgpuTensor(
            tensor.block, tensor.offset + start * step, (count, *shape[1:]), tensor.row_stride, tensor.dtype
        )
    return WgpuTensor(
        tensor.block, tensor.offset + start, (*shape[:-1], count), tensor.row_stride, tensor.dtype
    )


def shares(a: Any, b: Any) -> bool:
    """Whether two tensors have an element in common. Exact for column views of one base."""
    if a.block.serial != b.block.serial:
        return False
    (a0, a1), (b0, b1) = a.span(), b.span()
    if a0 >= b1 or b0 >= a1:
        return False
    stride = a.row_stride if a.rows > 1 else b.row_stride
    same = (b.rows <= 1 or b.row_stride == stride) and a.width <= stride and b.width <= stride
    if same and (a.rows > 1 or b.rows > 1):
        # Both are columns of one grid of this stride: compare where in a row they lie.
        first, second = a.offset % stride, b.offset % stride
        if first + a.width <= stride and second + b.width <= stride:
            return first < second + b.width and second < first + a.width
    return True


_WINDOW_ALIGNMENT = 256
"""Bytes that a window's start is a multiple of, as WebGPU guarantees to be allowed."""


def window(tensor: WgpuTensor) -> WgpuTensor:
    """The same elements, in a window of the block that begins near the first one."""
    start, stop = tensor.span()
    item = ITEM_BYTES[tensor.dtype]
    first = start * item // _WINDOW_ALIGNMENT * _WINDOW_ALIGNMENT
    size = -(-(stop * item - first) // 4) * 4
    return WgpuTensor(
        Window(tensor.block, first, size),
        start - first // item,
        tensor.shape,
        tensor.row_stride,
        tensor.dtype,
    )
