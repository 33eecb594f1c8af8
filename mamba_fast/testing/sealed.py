"""The tensor of the loopback backend: a shape, and nothing else that host code could use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["HostAccessError", "SealedTensor"]


class HostAccessError(TypeError):
    """Host code touched a tensor's values, or asked for more than its shape."""


class SealedTensor:
    """A tensor's shape, and a key that only its backend can use. Every other use is an error."""

    __slots__ = ("__weakref__", "_key", "_owner", "_shape")

    def __init__(self, owner: object, key: int, shape: tuple[int, ...]) -> None:
        self._owner = owner
        self._key = key
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __repr__(self) -> str:
        return f"SealedTensor(shape={self._shape})"

    def __getattr__(self, name: str) -> NoReturn:
        # AttributeError, so that hasattr keeps its meaning; numpy and copy probe for attributes too.
        raise AttributeError(f"a tensor has no {name!r}: its shape is all that the contract gives")


def _refusal(method: str) -> Callable[..., NoReturn]:
    def refuse(self: SealedTensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise HostAccessError(
            f"{method} of a tensor of shape {self.shape}: its values are the backend's, use to_host"
        )

    refuse.__name__ = refuse.__qualname__ = method
    return refuse


_ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("lshift", "rshift", "and", "or", "xor"),
)  # fmt: skip
_REFUSED = (
    *(prefix + name for name in _ARITHMETIC for prefix in ("", "r", "i")),
    *("divmod", "rdivmod", "neg", "pos", "abs", "invert", "round", "floor", "ceil", "trunc"),
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "float", "complex", "index", "bytes"),
    *("len", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem"),
    *("array", "array_ufunc", "array_function", "array_namespace", "dlpack", "dlpack_device", "buffer"),
    *("copy", "deepcopy", "reduce_ex"),
)  # fmt: skip
for _name in _REFUSED:
    setattr(SealedTensor, f"__{_name}__", _refusal(f"__{_name}__"))
