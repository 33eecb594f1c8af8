"""How the oracle's tensors become lists of Python floats and lists become tensors again.

Every function takes the op's and the argument's name, so that a tensor of the wrong type is an
error that says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "NAMES",
    "NUMPY",
    "add_into",
    "maybe",
    "read",
    "read_flat",
    "read_lengths",
    "read_rows",
    "read_starts",
    "store",
    "to_tensor",
]

NUMPY = {
    "f32": np.dtype(np.float64),
    "i32": np.dtype(np.int32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
}
NAMES = {dtype: name for name, dtype in NUMPY.items()}


def check_dtype(op: str, name: str, tensor: Any, dtype: str) -> None:
    """TypeError unless the argument is a tensor of the oracle of that type."""
    if not isinstance(tensor, np.ndarray):
        raise TypeError(
            f"{op}: {name} is a {type(tensor).__name__}, not a tensor of the oracle: use from_host"
        )
    if tensor.dtype != NUMPY[dtype]:
        found = NAMES.get(tensor.dtype, f"a {tensor.dtype} array")
        remedy = "use cast" if found in ("f16", "bf16") else "use from_host"
        raise TypeError(f"{op}: {name} is {found}, expected {dtype}: {remedy}")


def read(op: str, name: str, tensor: Any, dtype: str = "f32") -> Any:
    """The tensor's values as nested lists."""
    check_dtype(op, name, tensor, dtype)
    return tensor.tolist()


def maybe(op: str, name: str, tensor: Any, dtype: str = "f32") -> Any:
    """`read` of an optional tensor."""
    return None if tensor is None else read(op, name, tensor, dtype)


def read_flat(op: str, name: str, tensor: Any, dtype: str = "f32") -> list[Any]:
    """The tensor's values in one list, row-major."""
    check_dtype(op, name, tensor, dtype)
    return tensor.ravel().tolist()


def read_rows(op: str, name: str, tensor: Any) -> list[list[float]]:
    """The tensor's values by rows: all axes but the last merged."""
    check_dtype(op, name, tensor, "f32")
    return tensor.reshape(-1, tensor.shape[-1]).tolist()


def to_tensor(values: Any, shape: Sequence[int]) -> np.ndarray:
    """A new tensor from lists with that many values."""
    return np.array(values, dtype=np.float64).reshape(shape)


def store(op: str, values: Any, shape: Sequence[int], out: Any, *, accumulate: bool = False) -> np.ndarray:
    """The values as a tensor: written to `out`, or added to it, where there is one."""
    result = to_tensor(values, shape)
    if out is None:
        return result
    check_dtype(op, "out", out, "f32")
    if accumulate:
        add_into(op, "out", out, values)
    else:
        out[...] = result
    return out


def add_into(op: str, name: str, tensor: Any, values: Any) -> None:
    """tensor += values, given as lists; nothing where the tensor is None."""
    if tensor is None:
        return
    old = read_flat(op, name, tensor)
    new = to_tensor(values, tensor.shape).ravel().tolist()
    tensor[...] = to_tensor([p + q for p, q in zip(old, new, strict=True)], tensor.shape)


def read_starts(op: str, seq_start: Any) -> list[list[bool]] | None:
    """Where the state restarts, or None."""
    if seq_start is None:
        return None
    return [[value != 0 for value in row] for row in read(op, "seq_start", seq_start, "i32")]


def read_lengths(op: str, lengths: Any, batch: int, length: int) -> list[int]:
    """How many positions of each row are real."""
    if lengths is None:
        return [length] * batch
    values = read(op, "lengths", lengths, "i32")
    for i, value in enumerate(values):
        if not 1 <= value <= length:
            raise ValueError(f"{op}: lengths[{i}] is {value}, expected 1 to {length}")
    return values
