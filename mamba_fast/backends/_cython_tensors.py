"""The CPU backend's tensors: plain numpy arrays, and what every op checks about them.

====== ===================================================
f32    float32
i32    int32
f16    float16, storage only
bf16   uint16 with the upper half of the float32's bits
====== ===================================================

A tensor is native, aligned, and either C-contiguous or a column view: its last axis is contiguous and all
axes before it have the strides of one axis, so that `rows` can merge them without a copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.exceptions import TooHardError

__all__ = [
    "NAMES",
    "NUMPY",
    "apart",
    "bf16_to_f32",
    "convert",
    "elements",
    "f32",
    "f32_to_bf16",
    "i32",
    "reshape",
    "rows",
]

NUMPY = {
    "f32": np.dtype(np.float32),
    "i32": np.dtype(np.int32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
NAMES = {dtype: name for name, dtype in NUMPY.items()}

_F32 = NUMPY["f32"]
_I32 = NUMPY["i32"]

# How hard `numpy.shares_memory` may try. Column views of one buffer need a handful of tries.
_MAX_WORK = 1_000_000


def convert(array: Any, dtype: str, copy: bool) -> np.ndarray:
    """A host array as a tensor; see `Backend.from_host`. Shares memory only where copy is False and the
    array is a tensor as it stands. `dtype` is "f32" or "i32"."""
    source = np.asarray(array)
    if source.dtype.kind not in "biuf":
        raise ValueError(f"from_host: expected numbers, got an array of {source.dtype}")
    target = NUMPY[dtype]
    if not copy and source.dtype == target and source.flags.c_contiguous and source.flags.aligned:
        return source
    with np.errstate(all="ignore"):
        result = np.array(source, dtype=target, order="C", copy=True, subok=False)
    if dtype == "i32" and source.dtype != target:
        wrong = source[result != source]
        if wrong.size:
            raise ValueError(f"from_host: {wrong.flat[0]} is not a 32-bit integer")
    return result


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32 bits, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(x), quiet, rounded)


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def _is_uniform(tensor: np.ndarray) -> bool:
    """Whether the array is a column view: one distance between all its rows."""
    shape, strides = tensor.shape, tensor.strides
    if tensor.ndim == 0 or 0 in shape:
        return True
    expected, distance = tensor.itemsize, None
    if shape[-1] > 1 and strides[-1] != expected:
        return False
    for extent, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if extent == 1:
            continue
        if distance is None:
            if stride < shape[-1] * expected:
                return False
        elif stride != distance:
            return False
        distance = stride * extent
    return True


def _check(op: str, name: str, tensor: Any, dtype: np.dtype[Any]) -> None:
    if not isinstance(tensor, np.ndarray):
        raise TypeError(
            f"{op}: {name} is a {type(tensor).__name__}, not a tensor of this backend: use from_host"
        )
    if tensor.dtype != dtype:
        found = NAMES.get(tensor.dtype, f"a {tensor.dtype} array")
        remedy = "use cast" if found in ("f16", "bf16") else "use from_host"
        raise TypeError(f"{op}: {name} is {found}, expected {NAMES[dtype]}: {remedy}")
    flags = tensor.flags
    if not flags.aligned or not (flags.c_contiguous or _is_uniform(tensor)):
        raise ValueError(
            f"{op}: {name} has strides {tensor.strides} for shape {tensor.shape}; expected a contiguous "
            "array or a column view of one: use from_host"
        )


def f32(op: str, **tensors: Any) -> None:
    """The arguments are float32 tensors, or None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _check(op, name, tensor, _F32)


def i32(op: str, **tensors: Any) -> None:
    """The arguments are int32 tensors, or None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _check(op, name, tensor, _I32)


def apart(op: str, writes: dict[str, Any], reads: dict[str, Any]) -> None:
    """Nothing written overlaps anything read or anything else that is written; None counts as absent.

    Exact for column views of one buffer, which interleave without overlapping.
    """
    spans = []
    for name, tensor in (writes | reads).items():
        if tensor is None:
            continue
        if name in writes and not tensor.flags.writeable:
            raise ValueError(f"{op}: {name} is read-only: give it a tensor made by empty, zeros or from_host")
        if tensor.size:
            spans.append((*_bounds(tensor), name, tensor))
    spans.sort(key=lambda span: span[:2])
    # In the order of addresses, what overlaps is near: two hundred tensors are not twenty thousand pairs.
    for i, (_, stop, name, tensor) in enumerate(spans):
        for start, _, other, operand in itertools.islice(spans, i + 1, None):
            if start >= stop:
                break
            if (name in writes or other in writes) and _shares(tensor, operand):
                first, second = (name, other) if name in writes else (other, name)
                raise ValueError(f"{op}: {first} overlaps {second} in memory: give it memory of its own")


def _bounds(tensor: np.ndarray) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one after its last."""
    start = tensor.__array_interface__["data"][0]
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
    return start, start + reach + tensor.itemsize


def _shares(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=_MAX_WORK))
    except TooHardError:
        return True


def rows(tensor: np.ndarray) -> np.ndarray:
    """A tensor as (rows, width), the same memory."""
    return tensor.reshape(-1, tensor.shape[-1])


def elements(*tensors: np.ndarray) -> list[np.ndarray]:
    """Tensors of one shape as (rows, width) for an elementwise kernel: a single row where all are
    contiguous."""
    if all(t.flags.c_contiguous for t in tensors):
        return [t.reshape(1, -1) for t in tensors]
    return [rows(t) for t in tensors]


def reshape(tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """See `Backend.reshape`."""
    shape = tuple(shape)
    if any(n < 0 for n in shape) or math.prod(shape) != tensor.size:
        raise ValueError(f"reshape: shape {tensor.shape} cannot become {shape}")
    result = tensor.reshape(shape)
    if result.size and not (np.may_share_memory(result, tensor) and _is_uniform(result)):
        raise ValueError(
            f"reshape: a column view of shape {tensor.shape} cannot become {shape} without a copy"
        )
    return result


def check_lengths(op: str, lengths: Any, length: int) -> None:
    """The kernels read and write by these int32 values, so they are checked here."""
    if lengths is not None and (lengths.min() < 1 or lengths.max() > length):
        i = int(np.argmax((lengths < 1) | (lengths > length)))
        raise ValueError(f"{op}: lengths[{i}] is {lengths[i]}, expected 1 to {length}")


def check_ids(op: str, name: str, ids: np.ndarray, stop: int) -> None:
    if ids.min() < 0 or ids.max() >= stop:
        wrong = ids[(ids < 0) | (ids >= stop)].flat[0]
        raise ValueError(f"{op}: {name} {wrong} is outside 0 to {stop - 1}")
