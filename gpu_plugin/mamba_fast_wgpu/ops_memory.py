"""Memory ops: transfers, allocation, views, copies, casts; and elementwise ops, which move like copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_fast import checks
from mamba_fast.backend import Tensor
from mamba_fast_wgpu.core import Core, read_saved
from mamba_fast_wgpu.tensor import ITEM_BYTES, WgpuTensor, reshape, shares, view

__all__ = ["MemoryOps"]

_WG = 256
_CODES = {"f32": 0, "f16": 1, "bf16": 2}


def _host_words(array: Any, dtype: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """The bytes of a tensor with these values, padded to whole words, and its shape."""
    source = np.asarray(array)
    if source.dtype.kind not in "biuf":
        raise ValueError(f"from_host: expected numbers, got an array of {source.dtype}")
    if dtype == "i32":
        result = np.ascontiguousarray(source, dtype=np.int32)
        wrong = source != result
        if source.dtype.kind != "b" and source.dtype != np.int32 and wrong.any():
            raise ValueError(f"from_host: {source[wrong].flat[0]} is not a 32-bit integer")
        return result.reshape(-1), source.shape
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.ascontiguousarray(source, dtype=np.float32).reshape(-1)
        if dtype == "f32":
            return wide, source.shape
        halves = wide.astype(np.float16).view(np.uint16) if dtype == "f16" else _bfloat(wide)
    return np.append(halves, np.uint16(0)) if halves.size % 2 else halves, source.shape


def _bfloat(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32 bits, rounded to nearest, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


class MemoryOps(Core):
    """`from_host` to `decay_backward`."""

    # ---- transfers and allocation -------------------------------------------------------------

    def from_host(self, array: Any, dtype: str = "f32", *, copy: bool = True) -> Tensor:
        self._storage("from_host", dtype)
        data, shape = _host_words(array, dtype)
        self.transfers += 1
        tensor = self.new(shape, dtype, large=True)
        self.encoder.write(tensor.block, data)
        return tensor

    def to_host(self, tensor: Tensor, *, copy: bool = True) -> np.ndarray:
        dtype = self.dtype_of(tensor)
        self.transfers += 1
        if dtype in ("f16", "bf16"):
            tensor = self.cast(tensor, "f32")
        elif not tensor.contiguous:
            tensor = self._contiguous(tensor)
        words = self.encoder.read(tensor.block, 4 * tensor.offset, 4 * tensor.size)
        host = words.view(np.int32 if dtype == "i32" else np.float32).reshape(tensor.shape)
        if not copy:
            host.setflags(write=False)
        return host

    def empty(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        self._storage("empty", dtype)
        return self.new(shape, dtype, large=True)

    def zeros(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        self._storage("zeros", dtype)
        tensor = self.new(shape, dtype, large=True)
        self.fill_(tensor, 0.0)
        return tensor

    @staticmethod
    def _storage(op: str, dtype: str) -> None:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{op}: dtype must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")

    def dtype_of(self, tensor: Tensor) -> str:
        if not isinstance(tensor, WgpuTensor):
            raise TypeError(
                f"dtype_of: a {type(tensor).__name__} is not a tensor of the wgpu backend: use from_host"
            )
        return tensor.dtype

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return reshape(tensor, shape)

    def view(self, tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
        return view(tensor, axis, start, stop)

    def synchronize(self) -> None:
        self.encoder.synchronize()

    # ---- copies and casts ---------------------------------------------------------------------

    def _contiguous(self, tensor: WgpuTensor) -> WgpuTensor:
        result = self.new(tensor.shape, tensor.dtype)
        self._elementwise("pointwise:copy", (tensor, None, result))
        return result

    def copy_(self, dst: Tensor, src: Tensor) -> None:
        checks.same_shape("copy_", dst, src)
        if self.dtype_of(dst) != self.dtype_of(src):
            raise TypeError(f"copy_: dst is {self.dtype_of(dst)} and src {self.dtype_of(src)}: use cast")
        if shares(dst, src):
            raise ValueError("copy_: dst overlaps src in memory: give it memory of its own")
        if dst.dtype in ("f16", "bf16"):
            self._to_half(dst, src)
        else:
            self._elementwise("pointwise:copy", (src, None, dst))

    def fill_(self, dst: Tensor, value: float) -> None:
        dtype = self.dtype_of(dst)
        if dtype == "i32":
            self._elementwise("pointwise:fill", (None, None, dst), bits=int(value) & 0xFFFFFFFF)
            return
        with np.errstate(over="ignore"):
            single = np.array([value], np.float32)
            if dtype == "f32":
                self._elementwise("pointwise:fill", (None, None, dst), bits=int(single.view(np.uint32)[0]))
                return
            bits = single.astype(np.float16).view(np.uint16) if dtype == "f16" else _bfloat(single)
        self._to_half(dst, None, int(bits[0]))

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        source = self.dtype_of(tensor)
        for name in (source, dtype):
            if name not in _CODES:
                raise ValueError(f"cast: from {source} to {dtype}; expected floating types: f32, f16, bf16")
        if source == dtype == "f32":
            return self._contiguous(tensor)
        result = self.new(tensor.shape, dtype)
        if dtype != "f32":
            self._to_half(result, tensor)
        elif tensor.size:
            groups = -(-tensor.size // _WG)
            self.dispatch(
                "cast:to_f32", [tensor, result],
                [
                    tensor.rows, tensor.width, groups, tensor.offset, tensor.row_stride, 0, tensor.width,
                    0, 0, 0,
                ],
                groups, {"FROM": _CODES[source], "TO": 0},
            )  # fmt: skip
        return result

    def _to_half(self, dst: WgpuTensor, src: WgpuTensor | None, bits: int = 0) -> None:
        """Write into a 16-bit tensor: another one's values, converted, or one value's bits."""
        if dst.size == 0:
            return
        start, stop = dst.span()
        words = (stop - 1) // 2 - start // 2 + 1
        read = (0, 0) if src is None else (src.offset, src.row_stride)
        groups = -(-words // _WG)
        params = [dst.rows, dst.width, groups, *read, dst.offset, dst.row_stride, start // 2, words, bits]
        if src is None:
            self.dispatch("cast:fill_half", [dst], params, groups)
        else:
            codes = {"FROM": _CODES[src.dtype], "TO": _CODES[dst.dtype]}
            self.dispatch("cast:to_half", [src, dst], params, groups, codes)

    # ---- elementwise --------------------------------------------------------------------------

    def _elementwise(
        self,
        kernel: str,
        operands: tuple[WgpuTensor | None, WgpuTensor | None, WgpuTensor],
        value: float = 0.0,
        bits: int = 0,
    ) -> None:
        """A kernel of `pointwise.wgsl` on tensors of one shape: x, y, z."""
        given = [tensor for tensor in operands if tensor is not None]
        like = operands[2]
        if like.size == 0:
            return
        if any(self.is_large(tensor) for tensor in given):
            for parts in self.spread(*given):
                left = iter(parts)
                x, y, z = (None if tensor is None else next(left) for tensor in operands)
                assert z is not None
                self._elementwise(kernel, (x, y, z), value, bits)
            return
        rows, width = like.flat if all(t.contiguous for t in given) else (like.rows, like.width)
        vector = width % 4 == 0 and all(
            t.offset % 4 == 0 and (rows == 1 or t.row_stride % 4 == 0) for t in given
        )
        step = 4 if vector else 1
        groups = -(-(rows * (width // step)) // _WG)
        places = [
            n // step
            for tensor in operands
            for n in ((0, 0) if tensor is None else (tensor.offset, tensor.row_stride))
        ]
        params = [rows, width // step, groups, *places, value, bits]
        self.dispatch(kernel, given, params, groups, {"VEC": True} if vector else {})

    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        checks.same_shape("add", a, b, out)
        self.check("add", {"out": out}, {"a": a, "b": b})
        result = self.new(a.shape) if out is None else out
        self._elementwise("pointwise:add", (a, b, result))
        return result

    def add_(self, dst: Tensor, src: Tensor) -> None:
        checks.same_shape("add_", dst, src)
        self.check("add_", {"dst": dst}, {"src": src})
        self._elementwise("pointwise:accumulate", (src, None, dst))

    def scale_(self, dst: Tensor, factor: float) -> None:
        self.check("scale_", {"dst": dst}, {})
        self._elementwise("pointwise:scale", (None, None, dst), value=float(factor))

    def decay(self, a_log: Tensor, *, grad: bool = True) -> tuple[Tensor, Any]:
        checks.decay(a_log)
        self.check("decay", {}, {"a_log": a_log})
        a = self.new(a_log.shape)
        groups = -(-a_log.size // _WG)
        params = [a_log.rows, a_log.width, groups, a_log.offset, a_log.row_stride, a.offset, a.row_stride]
        self.dispatch("decay:forward", [a_log, a], params, groups)
        return a, DecaySaved(a_log) if grad else None

    def decay_backward(self, d_a: Tensor, saved: Any, *, d_a_log: Tensor) -> None:
        op = "decay_backward"
        a_log = read_saved(op, saved, DecaySaved).a_log
        checks.same_shape(op, a_log, d_a, d_a_log)
        self.check(op, {"d_a_log": d_a_log}, {"d_a": d_a, "a_log": a_log})
        groups = -(-a_log.size // _WG)
        places = [n for t in (a_log, None, d_a, d_a_log) for n in ((t.offset, t.row_stride) if t else (0, 0))]
        params = [a_log.rows, a_log.width, groups, *places]
        self.dispatch("decay:backward", [a_log, d_a, d_a_log], params, groups)


class DecaySaved:
    """What `decay` keeps: its input."""

    __slots__ = ("a_log",)

    def __init__(self, a_log: WgpuTensor) -> None:
        self.a_log = a_log
