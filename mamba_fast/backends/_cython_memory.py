"""The CPU backend's memory ops: making, viewing, copying and casting tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_fast import checks
from mamba_fast.backend import Backend, Tensor
from mamba_fast.backends._cython_tensors import (
    NAMES,
    NUMPY,
    apart,
    bf16_to_f32,
    convert,
    f32_to_bf16,
    reshape,
)

__all__ = ["ArrayMemory"]


class ArrayMemory(Backend):
    """The memory ops of `Backend` for tensors that are numpy arrays."""

    def from_host(self, array: Any, dtype: str = "f32", *, copy: bool = True) -> Tensor:
        self._storage("from_host", dtype)
        self.transfers += 1
        if dtype in ("f32", "i32"):
            return convert(array, dtype, copy)
        return self.cast(convert(array, "f32", False), dtype)

    def to_host(self, tensor: Tensor, *, copy: bool = True) -> np.ndarray:
        self.transfers += 1
        name = self.dtype_of(tensor)
        if name == "bf16":
            host = bf16_to_f32(np.ascontiguousarray(tensor))
        else:
            dtype = NUMPY["i32" if name == "i32" else "f32"]
            host = (np.array if copy else np.asarray)(tensor, dtype=dtype, order="C")
        if not copy:
            host = host.view()  # the tensor itself stays writable
            host.setflags(write=False)
        return host

    def empty(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        return self._new(tuple(shape), self._storage("empty", dtype))

    def zeros(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        result = self._new(tuple(shape), self._storage("zeros", dtype))
        result.fill(0)
        return result

    @staticmethod
    def _storage(op: str, dtype: str) -> np.dtype[Any]:
        if dtype not in NUMPY:
            raise ValueError(f"{op}: dtype must be one of {', '.join(NUMPY)}, got {dtype!r}")
        return NUMPY[dtype]

    def dtype_of(self, tensor: Tensor) -> str:
        if not isinstance(tensor, np.ndarray) or tensor.dtype not in NAMES:
            kind = f"{tensor.dtype} array" if isinstance(tensor, np.ndarray) else type(tensor).__name__
            raise TypeError(f"dtype_of: a {kind} is not a tensor of the cython backend: use from_host")
        return NAMES[tensor.dtype]

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return reshape(tensor, shape)

    def view(self, tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
        checks.view(tensor, axis, start, stop)
        return tensor[start:stop] if axis == 0 else tensor[..., start:stop]

    def copy_(self, dst: Tensor, src: Tensor) -> None:
        checks.same_shape("copy_", dst, src)
        if self.dtype_of(dst) != self.dtype_of(src):
            raise TypeError(f"copy_: dst is {self.dtype_of(dst)} and src {self.dtype_of(src)}: use cast")
        if not dst.flags.writeable or np.may_share_memory(dst, src):  # bounds alone: rare, so look closer
            apart("copy_", {"dst": dst}, {"src": src})
        np.copyto(dst, src)

    def fill_(self, dst: Tensor, value: float) -> None:
        name = self.dtype_of(dst)
        with np.errstate(over="ignore"):
            if name == "i32":
                dst.fill(int(value))
            elif name == "bf16":
                dst.fill(f32_to_bf16(np.array([value], np.float32))[0])
            else:
                dst.fill(value)

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        source = self.dtype_of(tensor)
        for name in (source, dtype):
            if name not in ("f32", "f16", "bf16"):
                raise ValueError(f"cast: from {source} to {dtype}; expected floating types: f32, f16, bf16")
        if source == dtype:
            return np.array(tensor, order="C")
        with np.errstate(over="ignore", invalid="ignore"):
            wide = bf16_to_f32(tensor) if source == "bf16" else np.asarray(tensor, np.float32)
            return f32_to_bf16(wide) if dtype == "bf16" else np.ascontiguousarray(wide, NUMPY[dtype])

    def synchronize(self) -> None:
        pass  # nothing is ever queued
