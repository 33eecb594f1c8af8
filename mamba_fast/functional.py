"""The ops of Mamba on numpy arrays, for people's own architectures: each alone, and with its vjp.

    y = selective_scan(u, delta, A_log, B, C, D, z=z, delta_bias=bias)
    y, backprop = selective_scan_vjp(u, delta, A_log, B, C, D, z=z, delta_bias=bias)
    grads = backprop(dy)          # {"u": ..., "delta": ..., "A_log": ..., ...}

Letters in shapes: `B` batch, `L` time, `D` channels, `N` states, `K` taps (the arguments B, C and D
of the scan are written as in the Mamba paper). Inputs are anything `numpy.asarray` takes as numbers:
any float or integer type, layout and byte order, read-only or not. They are converted to float32,
and so is what comes back; backend "oracle" computes and returns float64.

`backend` is a name or an object from `get_backend`: `get_backend("cython", threads=2)`. A backend
made for a name is kept for the next call: what it read from the environment when it was made
(OMP_NUM_THREADS, MAMBA_FAST_CPU) holds until the process ends. For other settings pass an object.

A `_vjp` function returns `(outputs, backprop)`. `backprop(dy)` returns the gradients of
sum(dy * y), by argument name, for those arguments that were given. It may be called again; the
second and later calls repeat the forward pass. The input arrays must not be changed before it has
been called: large ones are shared, not copied.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from mamba_fast.backend import Backend, Tensor
from mamba_fast.inputs import check_lengths, check_seq_start
from mamba_fast.registry import get_backend

__all__ = [
    "Backprop",
    "SequenceBackprop",
    "causal_conv1d",
    "causal_conv1d_vjp",
    "rms_norm",
    "rms_norm_vjp",
    "selective_scan",
    "selective_scan_vjp",
]

Outputs = np.ndarray | tuple[np.ndarray, np.ndarray]
"""y, or (y, final_state) with `return_final_state=True`."""


class Backprop(Protocol):
    """Gradients by argument name from the gradient of y."""

    def __call__(self, dy: ArrayLike) -> dict[str, np.ndarray]: ...


class SequenceBackprop(Protocol):
    """Gradients by argument name from those of y and, where it is used on, of the final state."""

    def __call__(self, dy: ArrayLike, d_final_state: ArrayLike | None = None) -> dict[str, np.ndarray]: ...


def selective_scan(
    u: ArrayLike,
    delta: ArrayLike,
    A_log: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    *,
    z: ArrayLike | None = None,
    delta_bias: ArrayLike | None = None,
    delta_softplus: bool = True,
    discretization: str = "zoh",
    initial_state: ArrayLike | None = None,
    seq_start: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    return_final_state: bool = False,
    backend: str | Backend = "cython",
) -> Outputs:
    """The selective scan (Gu and Dao 2023, algorithm 2; SPEC 2.6 to 2.10).

    With A = -exp(clamp(A_log, -10, 5)) and Delta = softplus(delta + delta_bias), per channel and state

        h_t = exp(Delta_t A) h_{t-1} + g_t B_t u_t,   g = (exp(Delta A) - 1) / A ("zoh") or Delta ("euler")
        y_t = (sum_n C_t[n] h_t[n] + D u_t) * silu(z_t)

    Parameters
    ----------
    u, delta : (B, L, D)
    A_log : (D, N)
    B, C : (B, L, N)
    D, delta_bias : (D,) or None (zero)
    z : (B, L, D) or None (no gate)
    delta_softplus
        False: Delta = delta + delta_bias as it is
    discretization
        "zoh" or "euler"
    initial_state : (B, D, N) or None (zeros)
    seq_start : (B, L) bool or int, or None
        where it is true the state is zero before that step
    lengths : (B,) int or None
        real positions of right-padded rows, in [1, L]; outputs beyond are 0 and the final state is
        that after the last real position
    return_final_state
        True: return (y, final_state)
    backend
        a name, whose backend is made by the first call that asks for it and then kept, or an object

    Returns
    -------
    y : (B, L, D), or (y, final_state (B, D, N))

    Raises
    ------
    ValueError
        an argument has a wrong shape or type; the message names it
    """
    call = _scan_call(
        u, delta, A_log, B, C, D, z, delta_bias, delta_softplus, discretization, initial_state, seq_start,
        lengths, backend,
    )  # fmt: skip
    y, final_state, _ = call.forward(grad=False)
    return call.outputs(y, final_state, return_final_state)


def selective_scan_vjp(
    u: ArrayLike,
    delta: ArrayLike,
    A_log: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    *,
    z: ArrayLike | None = None,
    delta_bias: ArrayLike | None = None,
    delta_softplus: bool = True,
    discretization: str = "zoh",
    initial_state: ArrayLike | None = None,
    seq_start: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    return_final_state: bool = False,
    backend: str | Backend = "cython",
) -> tuple[Outputs, SequenceBackprop]:
    """`selective_scan` and its backprop; arguments as there.

    `backprop(dy, d_final_state=None)` takes the gradients of y (B, L, D) and of the final state
    (B, D, N), and returns those of "u", "delta", "A_log", "B", "C", "D", "z", "delta_bias" and
    "initial_state": the ones that were given.
    """
    call = _scan_call(
        u, delta, A_log, B, C, D, z, delta_bias, delta_softplus, discretization, initial_state, seq_start,
        lengths, backend,
    )  # fmt: skip
    return call.with_backprop(return_final_state)


def causal_conv1d(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = "silu",
    initial_state: ArrayLike | None = None,
    seq_start: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    return_final_state: bool = False,
    backend: str | Backend = "cython",
) -> Outputs:
    """Causal depthwise convolution: y[b,t,i] = f(bias[i] + sum_k w[i,k] * x[b,t-k,i]) (SPEC 2.3).

    Parameters
    ----------
    x : (B, L, D)
    w : (D, K)
        tap k looks k steps back (PyTorch's Conv1d stores the taps the other way round)
    bias : (D,) or None
    activation
        f: "silu", or None for none
    initial_state : (B, K-1, D) or None (zeros)
        the inputs before t = 0, oldest first
    seq_start : (B, L) bool or int, or None
        where it is true no tap reaches before that step
    lengths : (B,) int or None
        real positions of right-padded rows, in [1, L]; outputs beyond are 0
    return_final_state
        True: return (y, final_state)
    backend
        a name, whose backend is made by the first call that asks for it and then kept, or an object

    Returns
    -------
    y : (B, L, D), or (y, final_state (B, K-1, D)): the last K-1 inputs of each row, zero where they
    would be from before the last restart

    Raises
    ------
    ValueError
        an argument has a wrong shape or type; the message names it
    """
    call = _conv_call(x, w, bias, activation, initial_state, seq_start, lengths, backend)
    y, final_state, _ = call.forward(grad=False)
    return call.outputs(y, final_state, return_final_state)


def causal_conv1d_vjp(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: str | None = "silu",
    initial_state: ArrayLike | None = None,
    seq_start: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    return_final_state: bool = False,
    backend: str | Backend = "cython",
) -> tuple[Outputs, SequenceBackprop]:
    """`causal_conv1d` and its backprop; arguments as there.

    `backprop(dy, d_final_state=None)` takes the gradients of y (B, L, D) and of the final state
    (B, K-1, D), and returns those of "x", "w", "bias" and "initial_state": the ones that were given.
    """
    call = _conv_call(x, w, bias, activation, initial_state, seq_start, lengths, backend)
    return call.with_backprop(return_final_state)


def rms_norm(
    x: ArrayLike, w: ArrayLike | None, eps: float = 1e-6, *, backend: str | Backend = "cython"
) -> np.ndarray:
    """Root-mean-square normalisation of the last axis: x * w / sqrt(mean(x^2) + eps) (SPEC 2.1).

    Parameters
    ----------
    x : (..., D)
    w : (D,) or None (ones)
    eps
        above 0
    backend
        a name, whose backend is made by the first call that asks for it and then kept, or an object

    Returns
    -------
    y : (..., D)

    Raises
    ------
    ValueError
        an argument has a wrong shape or type; the message names it
    """
    ops, x_tensor, w_tensor = _norm_inputs(x, w, eps, backend)
    y, _ = ops.rms_norm(x_tensor, w_tensor, eps, grad=False)
    return ops.to_host(y)


def rms_norm_vjp(
    x: ArrayLike, w: ArrayLike | None, eps: float = 1e-6, *, backend: str | Backend = "cython"
) -> tuple[np.ndarray, Backprop]:
    """`rms_norm` and its backprop; arguments as there.

    `backprop(dy)` takes the gradient of y (..., D) and returns those of "x" and, where given, "w".
    """
    ops, x_tensor, w_tensor = _norm_inputs(x, w, eps, backend)
    y, first_saved = ops.rms_norm(x_tensor, w_tensor, eps)
    unused = [first_saved]

    def backprop(dy: ArrayLike) -> dict[str, np.ndarray]:
        dy_tensor = ops.from_host(_numbers("dy", dy, x_tensor.shape), copy=False)
        saved = unused.pop() if unused else ops.rms_norm(x_tensor, w_tensor, eps)[1]
        dw = None if w_tensor is None else ops.zeros(w_tensor.shape)
        dx = ops.rms_norm_backward(dy_tensor, saved, w_tensor, dw=dw)
        return {name: ops.to_host(t) for name, t in (("x", dx), ("w", dw)) if t is not None}

    return ops.to_host(y), backprop


# ---- parts ------------------------------------------------------------------------------------


class _SequenceCall(ABC):
    """A checked call of an op over sequences: its inputs as tensors, its forward and its backward.

    Parameters
    ----------
    arrays
        the op's checked arrays by argument name, None for one that was not given
    masks
        `seq_start` and `lengths`, likewise
    options
        what else the op takes
    y_shape, state_shape
        of the op's outputs, which their gradients must have
    """

    def __init__(
        self,
        ops: Backend,
        arrays: Mapping[str, np.ndarray | None],
        masks: Mapping[str, np.ndarray | None],
        options: Mapping[str, Any],
        y_shape: tuple[int, ...],
        state_shape: tuple[int, ...],
    ) -> None:
        self._ops = ops
        self._y_shape = y_shape
        self._state_shape = state_shape
        self._t = {name: _tensor(ops, array) for name, array in arrays.items()}
        self._options = {**options, **{name: _tensor(ops, mask, "i32") for name, mask in masks.items()}}

    @abstractmethod
    def forward(self, *, grad: bool) -> tuple[Tensor, Tensor, Any]:
        """y, the final state, and what the op saved."""

    @abstractmethod
    def backward(self, dy: Tensor, saved: Any, d_final_state: Tensor | None) -> dict[str, Tensor | None]:
        """The gradients by argument name, None where an argument was not given."""

    def outputs(self, y: Tensor, final_state: Tensor, return_final_state: bool) -> Outputs:
        host = self._ops.to_host(y)
        return (host, self._ops.to_host(final_state)) if return_final_state else host

    def with_backprop(self, return_final_state: bool) -> tuple[Outputs, SequenceBackprop]:
        y, final_state, first_saved = self.forward(grad=True)
        unused = [first_saved]
        ops = self._ops

        def backprop(dy: ArrayLike, d_final_state: ArrayLike | None = None) -> dict[str, np.ndarray]:
            dy_tensor = ops.from_host(_numbers("dy", dy, self._y_shape), copy=False)
            d_state = None
            if d_final_state is not None:
                d_state = ops.from_host(
                    _numbers("d_final_state", d_final_state, self._state_shape), copy=False
                )
            saved = unused.pop() if unused else self.forward(grad=True)[2]  # an op's saved value serves once
            gradients = self.backward(dy_tensor, saved, d_state)
            return {name: ops.to_host(t) for name, t in gradients.items() if t is not None}

        return self.outputs(y, final_state, return_final_state), backprop

    def _zeros_like(self, name: str) -> Tensor | None:
        """Where the gradient of an argument is added up; None where it was not given."""
        tensor = self._t[name]
        return None if tensor is None else self._ops.zeros(tensor.shape)


class _ScanCall(_SequenceCall):
    """A call of the selective scan, from A_log on."""

    def forward(self, *, grad: bool) -> tuple[Tensor, Tensor, Any]:
        t = self._t
        a, saved_decay = self._ops.decay(t["A_log"], grad=grad)
        y, final_state, saved = self._ops.selective_scan(
            t["u"],
            t["delta"],
            a,
            t["B"],
            t["C"],
            t["D"],
            t["z"],
            t["delta_bias"],
            initial_state=t["initial_state"],
            **self._options,
            grad=grad,
        )
        return y, final_state, (saved, saved_decay)

    def backward(self, dy: Tensor, saved: Any, d_final_state: Tensor | None) -> dict[str, Tensor | None]:
        saved_scan, saved_decay = saved
        d_a, d_a_log = self._zeros_like("A_log"), self._zeros_like("A_log")
        d_d, d_bias = self._zeros_like("D"), self._zeros_like("delta_bias")
        scan = self._ops.selective_scan_backward(
            dy,
            saved_scan,
            d_final_state=d_final_state,
            d_a=d_a,
            d_d=d_d,
            d_delta_bias=d_bias,
            need_d_initial_state=self._t["initial_state"] is not None,
        )
        self._ops.decay_backward(d_a, saved_decay, d_a_log=d_a_log)
        return {
            "u": scan.du,
            "delta": scan.ddelta,
            "A_log": d_a_log,
            "B": scan.db,
            "C": scan.dc,
            "D": d_d,
            "z": scan.dz,
            "delta_bias": d_bias,
            "initial_state": scan.d_initial_state,
        }


class _ConvCall(_SequenceCall):
    """A call of the convolution."""

    def forward(self, *, grad: bool) -> tuple[Tensor, Tensor, Any]:
        t = self._t
        return self._ops.conv1d(
            t["x"], t["w"], t["bias"], initial_state=t["initial_state"], **self._options, grad=grad
        )

    def backward(self, dy: Tensor, saved: Any, d_final_state: Tensor | None) -> dict[str, Tensor | None]:
        dw, dbias = self._zeros_like("w"), self._zeros_like("bias")
        dx, d_state = self._ops.conv1d_backward(
            dy,
            saved,
            self._t["w"],
            dw=dw,
            dbias=dbias,
            d_final_state=d_final_state,
            need_d_initial_state=self._t["initial_state"] is not None,
        )
        return {"x": dx, "w": dw, "bias": dbias, "initial_state": d_state}


def _scan_call(
    u: Any, delta: Any, A_log: Any, B: Any, C: Any, D: Any, z: Any, delta_bias: Any, delta_softplus: bool,
    discretization: str, initial_state: Any, seq_start: Any, lengths: Any, backend: str | Backend,
) -> _ScanCall:  # fmt: skip
    """The arguments of `selective_scan`, checked (ValueError) and moved to the backend."""
    if discretization not in ("zoh", "euler"):
        raise ValueError(f"discretization must be 'zoh' or 'euler', got {discretization!r}")
    u = _numbers("u", u, "(B, L, D)")
    batch, length, width = u.shape
    A_log = _numbers("A_log", A_log, "(D, N)")
    states = A_log.shape[1]
    _shape("A_log", A_log, (width, states), "(D, N)")
    arrays = {
        "u": u,
        "delta": _numbers("delta", delta, (batch, length, width), "(B, L, D)"),
        "A_log": A_log,
        "B": _numbers("B", B, (batch, length, states), "(B, L, N)"),
        "C": _numbers("C", C, (batch, length, states), "(B, L, N)"),
        "D": _optional("D", D, (width,), "(D,)"),
        "z": _optional("z", z, (batch, length, width), "(B, L, D)"),
        "delta_bias": _optional("delta_bias", delta_bias, (width,), "(D,)"),
        "initial_state": _optional("initial_state", initial_state, (batch, width, states), "(B, D, N)"),
    }
    masks = _masks(seq_start, lengths, batch, length)
    options = {"delta_softplus": delta_softplus, "discretization": discretization}
    return _ScanCall(_resolve(backend), arrays, masks, options, u.shape, (batch, width, states))


def _conv_call(
    x: Any, w: Any, bias: Any, activation: str | None, initial_state: Any, seq_start: Any, lengths: Any,
    backend: str | Backend,
) -> _ConvCall:  # fmt: skip
    """The arguments of `causal_conv1d`, checked (ValueError) and moved to the backend."""
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    x = _numbers("x", x, "(B, L, D)")
    batch, length, width = x.shape
    w = _numbers("w", w, "(D, K)")
    taps = w.shape[1]
    _shape("w", w, (width, taps), "(D, K)")
    state_shape = (batch, taps - 1, width)
    arrays = {
        "x": x,
        "w": w,
        "bias": _optional("bias", bias, (width,), "(D,)"),
        "initial_state": _optional("initial_state", initial_state, state_shape, "(B, K-1, D)"),
    }
    masks = _masks(seq_start, lengths, batch, length)
    return _ConvCall(_resolve(backend), arrays, masks, {"activation": activation}, x.shape, state_shape)


def _masks(seq_start: Any, lengths: Any, batch: int, length: int) -> dict[str, np.ndarray | None]:
    return {
        "seq_start": check_seq_start(seq_start, (batch, length)),
        "lengths": check_lengths(lengths, batch, length),
    }


def _norm_inputs(x: Any, w: Any, eps: float, backend: str | Backend) -> tuple[Backend, Tensor, Tensor | None]:
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not (0 < eps < math.inf):
        raise ValueError(f"eps must be a finite number above 0, got {eps!r}")
    x = _numbers("x", x)
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"x has shape {x.shape}, expected (..., D) with no empty axis")
    w = _optional("w", w, (x.shape[-1],), "(D,)")
    ops = _resolve(backend)
    return ops, ops.from_host(x, copy=False), _tensor(ops, w)


def _resolve(backend: str | Backend) -> Backend:
    return _named(backend) if isinstance(backend, str) else get_backend(backend)


@lru_cache(maxsize=8)
def _named(name: str) -> Backend:
    """The backend of a name, made once: making one reads the installed packages' metadata.

    The environment is read then and not again, as the module's docstring says.
    """
    return get_backend(name)


def _tensor(ops: Backend, array: np.ndarray | None, dtype: str = "f32") -> Tensor | None:
    return None if array is None else ops.from_host(array, dtype, copy=False)


def _optional(name: str, value: Any, shape: tuple[int, ...], letters: str) -> np.ndarray | None:
    return None if value is None else _numbers(name, value, shape, letters)


def _numbers(
    name: str, value: Any, shape: tuple[int, ...] | str | None = None, letters: str = ""
) -> np.ndarray:
    """An array of numbers of this shape; letters alone ask for as many axes, none of them empty."""
    try:
        array = np.asarray(value)
    except ValueError:  # numpy's message speaks of its own internals
        raise ValueError(f"{name} must be a rectangular array: its rows differ in length") from None
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be an array of real numbers, got dtype {array.dtype}")
    if isinstance(shape, str):
        if array.ndim != shape.count(",") + 1 or array.size == 0:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape} with no empty axis")
    elif shape is not None:
        _shape(name, array, shape, letters)
    return array


def _shape(name: str, array: np.ndarray, shape: tuple[int, ...], letters: str) -> None:
    if array.shape != shape:
        raise ValueError(
            f"{name} has shape {array.shape}, expected {shape}{' = ' + letters if letters else ''}"
        )
