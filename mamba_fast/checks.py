"""Argument checks of the ops: what every backend calls before it queues work.

They read `.shape` only, so they hold for any kind of tensor. Each raises ValueError naming the op,
the argument, its shape and the expected one. They are part of the contract, not of a backend: this
is why a wrong call fails alike on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from mamba_fast.backend import Tensor

DISCRETIZATIONS = ("zoh", "euler")
ACTIVATIONS = ("silu", None)


def _fail(op: str, name: str, shape: object, expected: str) -> NoReturn:
    raise ValueError(f"{op}: {name} has shape {shape}, expected {expected}")


def _expect(op: str, name: str, tensor: Tensor | None, shape: tuple[int, ...], letters: str) -> None:
    """An optional tensor has this exact shape."""
    if tensor is not None and tuple(tensor.shape) != shape:
        _fail(op, name, tuple(tensor.shape), f"{shape} = {letters}")


def _positive(op: str, name: str, tensor: Tensor) -> None:
    if 0 in tensor.shape or len(tensor.shape) == 0:
        _fail(op, name, tuple(tensor.shape), "at least one axis and no empty one")


def _rank(op: str, name: str, tensor: Tensor, rank: int, letters: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if len(shape) != rank or 0 in shape:
        _fail(op, name, shape, f"{letters} with no empty axis")
    return shape


def view(tensor: Tensor, axis: int, start: int, stop: int) -> None:
    if axis not in (0, -1, len(tensor.shape) - 1):
        raise ValueError(f"view: axis {axis} of shape {tuple(tensor.shape)}; only the first (0) or last (-1)")
    if not 0 <= start < stop <= tensor.shape[axis]:
        raise ValueError(f"view: [{start}, {stop}) is not inside an axis of {tensor.shape[axis]}")


def same_shape(op: str, a: Tensor, b: Tensor, out: Tensor | None = None) -> None:
    _expect(op, "second operand", b, tuple(a.shape), "the first operand's shape")
    _expect(op, "out", out, tuple(a.shape), "the operands' shape")


def embedding(ids: Tensor, table: Tensor, out: Tensor | None) -> None:
    _positive("embedding", "ids", ids)
    _, d = _rank("embedding", "table", table, 2, "(V, D)")
    _expect("embedding", "out", out, (*ids.shape, d), "(ids..., D)")


def embedding_backward(dy: Tensor, ids_shape: Sequence[int], d_table: Tensor) -> None:
    _, d = _rank("embedding_backward", "d_table", d_table, 2, "(V, D)")
    _expect("embedding_backward", "dy", dy, (*ids_shape, d), "(ids..., D)")


def linear(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None, accumulate: bool) -> None:
    _positive("linear", "x", x)
    o, i = _rank("linear", "w", w, 2, "(O, I)")
    _expect("linear", "x", x, (*x.shape[:-1], i), "(..., I)")
    _expect("linear", "bias", bias, (o,), "(O,)")
    _expect("linear", "out", out, (*x.shape[:-1], o), "(..., O)")
    if accumulate and out is None:
        raise ValueError("linear: accumulate=True needs out")


def linear_backward(
    dy: Tensor, x_shape: Sequence[int], w: Tensor, dw: Tensor | None, dbias: Tensor | None,
    out: Tensor | None, accumulate: bool,
) -> None:  # fmt: skip
    o, i = _rank("linear_backward", "w", w, 2, "(O, I)")
    _expect("linear_backward", "dy", dy, (*x_shape[:-1], o), "(..., O)")
    _expect("linear_backward", "dw", dw, (o, i), "(O, I)")
    _expect("linear_backward", "dbias", dbias, (o,), "(O,)")
    _expect("linear_backward", "out", out, tuple(x_shape), "(..., I)")
    if accumulate and out is None:
        raise ValueError("linear_backward: accumulate=True needs out")


def rms_norm(x: Tensor, w: Tensor | None, out: Tensor | None) -> None:
    _positive("rms_norm", "x", x)
    _expect("rms_norm", "w", w, (x.shape[-1],), "(D,)")
    _expect("rms_norm", "out", out, tuple(x.shape), "(..., D)")


def rms_norm_backward(
    dy: Tensor,
    x_shape: Sequence[int],
    w: Tensor | None,
    dw: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
) -> None:
    op = "rms_norm_backward"
    _expect(op, "dy", dy, tuple(x_shape), "(..., D)")
    _expect(op, "w", w, (x_shape[-1],), "(D,)")
    _expect(op, "dw", dw, (x_shape[-1],), "(D,)")
    _expect(op, "out", out, tuple(x_shape), "(..., D)")
    if accumulate and out is None:
        raise ValueError(f"{op}: accumulate=True needs out")


def decay(a_log: Tensor) -> None:
    _rank("decay", "a_log", a_log, 2, "(E, N)")


def conv1d(
    x: Tensor, w: Tensor, bias: Tensor | None, initial_state: Tensor | None, seq_start: Tensor | None,
    lengths: Tensor | None, activation: str | None, out: Tensor | None,
) -> None:  # fmt: skip
    op = "conv1d"
    batch, length, e = _rank(op, "x", x, 3, "(B, L, E)")
    _, k = _rank(op, "w", w, 2, "(E, K)")
    _expect(op, "w", w, (e, k), "(E, K)")
    _expect(op, "bias", bias, (e,), "(E,)")
    _expect(op, "initial_state", initial_state, (batch, k - 1, e), "(B, K-1, E)")
    _expect(op, "seq_start", seq_start, (batch, length), "(B, L)")
    _expect(op, "lengths", lengths, (batch,), "(B,)")
    _expect(op, "out", out, (batch, length, e), "(B, L, E)")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")


def conv1d_backward(
    dy: Tensor, x_shape: Sequence[int], w: Tensor, dw: Tensor | None, dbias: Tensor | None,
    d_final_state: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    op = "conv1d_backward"
    batch, _, e = x_shape
    k = w.shape[1]
    _expect(op, "dy", dy, tuple(x_shape), "(B, L, E)")
    _expect(op, "w", w, (e, k), "(E, K)")
    _expect(op, "dw", dw, (e, k), "(E, K)")
    _expect(op, "dbias", dbias, (e,), "(E,)")
    _expect(op, "d_final_state", d_final_state, (batch, k - 1, e), "(B, K-1, E)")
    _expect(op, "out", out, tuple(x_shape), "(B, L, E)")


def selective_scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, discretization: str, initial_state: Tensor | None, seq_start: Tensor | None,
    lengths: Tensor | None, out: Tensor | None,
) -> None:  # fmt: skip
    op = "selective_scan"
    batch, length, e = _rank(op, "u", u, 3, "(B, L, E)")
    _, n = _rank(op, "a", a, 2, "(E, N)")
    _expect(op, "delta", delta, (batch, length, e), "(B, L, E)")
    _expect(op, "a", a, (e, n), "(E, N)")
    _expect(op, "b", b, (batch, length, n), "(B, L, N)")
    _expect(op, "c", c, (batch, length, n), "(B, L, N)")
    _expect(op, "d", d, (e,), "(E,)")
    _expect(op, "z", z, (batch, length, e), "(B, L, E)")
    _expect(op, "delta_bias", delta_bias, (e,), "(E,)")
    _expect(op, "initial_state", initial_state, (batch, e, n), "(B, E, N)")
    _expect(op, "seq_start", seq_start, (batch, length), "(B, L)")
    _expect(op, "lengths", lengths, (batch,), "(B,)")
    _expect(op, "out", out, (batch, length, e), "(B, L, E)")
    if discretization not in DISCRETIZATIONS:
        raise ValueError(f"{op}: discretization must be 'zoh' or 'euler', got {discretization!r}")


def selective_scan_backward(
    dy: Tensor, u_shape: Sequence[int], states: int, d_final_state: Tensor | None, d_a: Tensor | None,
    d_d: Tensor | None, d_delta_bias: Tensor | None, du_out: Tensor | None, ddelta_out: Tensor | None,
    db_out: Tensor | None, dc_out: Tensor | None, dz_out: Tensor | None,
) -> None:  # fmt: skip
    op = "selective_scan_backward"
    batch, length, e = u_shape
    for name, tensor in (("dy", dy), ("du_out", du_out), ("ddelta_out", ddelta_out), ("dz_out", dz_out)):
        _expect(op, name, tensor, (batch, length, e), "(B, L, E)")
    for name, tensor in (("db_out", db_out), ("dc_out", dc_out)):
        _expect(op, name, tensor, (batch, length, states), "(B, L, N)")
    _expect(op, "d_final_state", d_final_state, (batch, e, states), "(B, E, N)")
    _expect(op, "d_a", d_a, (e, states), "(E, N)")
    _expect(op, "d_d", d_d, (e,), "(E,)")
    _expect(op, "d_delta_bias", d_delta_bias, (e,), "(E,)")


def conv1d_step(
    x: Tensor, state: Tensor, w: Tensor, bias: Tensor | None, activation: str | None, out: Tensor | None
) -> None:
    op = "conv1d_step"
    batch, e = _rank(op, "x", x, 2, "(B, E)")
    _, k = _rank(op, "w", w, 2, "(E, K)")
    _expect(op, "w", w, (e, k), "(E, K)")
    _expect(op, "bias", bias, (e,), "(E,)")
    _expect(op, "state", state, (batch, k - 1, e), "(B, K-1, E)")
    _expect(op, "out", out, (batch, e), "(B, E)")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")


def selective_scan_step(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, state: Tensor, discretization: str, out: Tensor | None,
) -> None:  # fmt: skip
    op = "selective_scan_step"
    batch, e = _rank(op, "u", u, 2, "(B, E)")
    _, n = _rank(op, "a", a, 2, "(E, N)")
    _expect(op, "delta", delta, (batch, e), "(B, E)")
    _expect(op, "a", a, (e, n), "(E, N)")
    _expect(op, "b", b, (batch, n), "(B, N)")
    _expect(op, "c", c, (batch, n), "(B, N)")
    _expect(op, "d", d, (e,), "(E,)")
    _expect(op, "z", z, (batch, e), "(B, E)")
    _expect(op, "delta_bias", delta_bias, (e,), "(E,)")
    _expect(op, "state", state, (batch, e, n), "(B, E, N)")
    _expect(op, "out", out, (batch, e), "(B, E)")
    if discretization not in DISCRETIZATIONS:
        raise ValueError(f"{op}: discretization must be 'zoh' or 'euler', got {discretization!r}")


def cross_entropy_(logits: Tensor, targets: Tensor) -> None:
    rows, _ = _rank("cross_entropy_", "logits", logits, 2, "(T, V)")
    _expect("cross_entropy_", "targets", targets, (rows,), "(T,)")


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor],
    weight_decay: Sequence[float], grad_norm: Tensor, stats: Tensor,
) -> None:  # fmt: skip
    if not len(params) == len(grads) == len(m) == len(v) == len(weight_decay):
        raise ValueError(
            f"adamw_: params, grads, m, v and weight_decay have lengths {len(params)}, {len(grads)}, "
            f"{len(m)}, {len(v)} and {len(weight_decay)}, expected equal ones"
        )
    for i, (p, g, mi, vi) in enumerate(zip(params, grads, m, v, strict=True)):
        for name, tensor in (("grads", g), ("m", mi), ("v", vi)):
            _expect("adamw_", f"{name}[{i}]", tensor, tuple(p.shape), "params' shape")
    _expect("adamw_", "grad_norm", grad_norm, (1,), "(1,)")
    _expect("adamw_", "stats", stats, (4,), "(4,)")
