"""The ops of a backend as layers: each returns its output and a function that goes back.

`y, backprop = layer(backend, x, param, ...)`. `backprop(dy)` adds the parameters' gradients into
`Param.grad` where there is one, and returns the gradient of `x`. It may be called once, and is None
with `grad=False`: then nothing is kept for it. Where a gradient has a place already (a column of a
wider tensor, or a gradient that it is added to), `backprop` takes it as `out=`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mamba_fast.backend import Backend, ScanGradients, Tensor
from mamba_fast.params import Param

__all__ = ["Backprop", "causal_conv1d", "decay", "embedding", "linear", "rms_norm", "selective_scan"]

Backprop = Callable[..., Any]


def _value(param: Param | None) -> Tensor | None:
    return None if param is None else param.value


def _grad(param: Param | None) -> Tensor | None:
    return None if param is None else param.grad


def embedding(
    backend: Backend, ids: Tensor, table: Param, *, grad: bool = True
) -> tuple[Tensor, Backprop | None]:
    """ids (...) -> rows of the table (..., D). `backprop(dy)` returns nothing: ids have no gradient."""
    y, saved = backend.embedding(ids, table.value, grad=grad)

    def backprop(dy: Tensor) -> None:
        if table.grad is not None:
            backend.embedding_backward(dy, saved, d_table=table.grad)

    return y, backprop if grad else None


def linear(
    backend: Backend, x: Tensor, w: Param, bias: Param | None = None, *, grad: bool = True
) -> tuple[Tensor, Backprop | None]:
    """x (..., I), w (O, I) -> x @ w.T + bias (..., O). `backprop(dy, need_dx=False)` returns None."""
    y, saved = backend.linear(x, w.value, _value(bias), grad=grad)

    def backprop(
        dy: Tensor, *, need_dx: bool = True, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor | None:
        if not need_dx:
            out, accumulate = None, False
        return backend.linear_backward(
            dy,
            saved,
            w.value,
            dw=w.grad,
            dbias=_grad(bias),
            need_dx=need_dx,
            out=out,
            accumulate=accumulate,
        )

    return y, backprop if grad else None


def rms_norm(
    backend: Backend, x: Tensor, w: Param, eps: float, *, grad: bool = True
) -> tuple[Tensor, Backprop | None]:
    """x (..., D) -> x * w / sqrt(mean(x^2) + eps)."""
    y, saved = backend.rms_norm(x, w.value, eps, grad=grad)

    def backprop(dy: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
        return backend.rms_norm_backward(dy, saved, w.value, dw=w.grad, out=out, accumulate=accumulate)

    return y, backprop if grad else None


def causal_conv1d(
    backend: Backend,
    x: Tensor,
    w: Param,
    bias: Param | None,
    *,
    initial_state: Tensor | None = None,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
    grad: bool = True,
) -> tuple[Tensor, Tensor, Backprop | None]:
    """SiLU of the depthwise convolution: x (B, L, E) -> y (B, L, E), final state (B, K-1, E)."""
    y, final_state, saved = backend.conv1d(
        x,
        w.value,
        _value(bias),
        initial_state=initial_state,
        seq_start=seq_start,
        lengths=lengths,
        activation="silu",
        grad=grad,
    )

    def backprop(dy: Tensor, *, out: Tensor | None = None) -> Tensor:
        dx, _ = backend.conv1d_backward(dy, saved, w.value, dw=w.grad, dbias=_grad(bias), out=out)
        return dx

    return y, final_state, backprop if grad else None


def decay(backend: Backend, a_log: Param, *, grad: bool = True) -> tuple[Tensor, Backprop | None]:
    """A_log (E, N) -> A = -exp(clamp(A_log, -10, 5))."""
    a, saved = backend.decay(a_log.value, grad=grad)

    def backprop(d_a: Tensor) -> None:
        if a_log.grad is not None:
            backend.decay_backward(d_a, saved, d_a_log=a_log.grad)

    return a, backprop if grad else None


def selective_scan(
    backend: Backend,
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Param,
    z: Tensor,
    delta_bias: Param,
    *,
    discretization: str,
    initial_state: Tensor | None = None,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
    grad: bool = True,
) -> tuple[Tensor, Tensor, Backprop | None]:
    """The scan with its D skip and its gate: u (B, L, E) -> y (B, L, E), final state (B, E, N).

    `backprop(dy, d_a=..., db_out=..., dc_out=..., dz_out=...)` gives the backend's `ScanGradients`;
    the gradient of A is added to `d_a`, for the backprop of `decay`.
    """
    y, final_state, saved = backend.selective_scan(
        u,
        delta,
        a,
        b,
        c,
        d.value,
        z,
        delta_bias.value,
        delta_softplus=True,
        discretization=discretization,
        initial_state=initial_state,
        seq_start=seq_start,
        lengths=lengths,
        grad=grad,
    )

    def backprop(
        dy: Tensor, *, d_a: Tensor | None, db_out: Tensor, dc_out: Tensor, dz_out: Tensor
    ) -> ScanGradients:
        return backend.selective_scan_backward(
            dy,
            saved,
            d_a=d_a,
            d_d=d.grad,
            d_delta_bias=delta_bias.grad,
            db_out=db_out,
            dc_out=dc_out,
            dz_out=dz_out,
        )

    return y, final_state, backprop if grad else None
