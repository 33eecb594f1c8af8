"""A Mamba-1 block and a small language model put together from backend ops, for tests of the ops.

Written against the contract alone and apart from the package's own model, so that golden data can
judge a backend without it. Everything goes in and comes out as numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mamba_fast.backend import Backend

Arrays = dict[str, np.ndarray]

BLOCK_NAMES = (
    "wInProj", "bInProj", "wConv", "bConv", "wXProj", "bXProj", "wDtProj", "bDtProj", "A_log", "D_vec",
    "wOutProj", "bOutProj", "normWeight",
)  # fmt: skip


def gradient_buffers(backend: Backend, params: Mapping[str, Any]) -> dict[str, Any]:
    """A tensor of zeros for each parameter."""
    return {name: backend.zeros(value.shape) for name, value in params.items()}


def block(
    backend: Backend, params: Mapping[str, Any], x: Any, *, eps: float = 1e-6, discretization: str = "zoh"
) -> tuple[Any, Callable[..., Any], dict[str, Any]]:
    """SPEC 2 for x (B, L, d): the output, `backprop(d_out, grads) -> dx`, and intermediate tensors."""
    batch, length, _ = x.shape
    inner, states = params["A_log"].shape
    rank = params["wDtProj"].shape[1]
    view = backend.view

    norm, norm_saved = backend.rms_norm(x, params["normWeight"], eps)
    xz, in_saved = backend.linear(norm, params["wInProj"], params["bInProj"])
    u, _, conv_saved = backend.conv1d(view(xz, -1, 0, inner), params["wConv"], params["bConv"])
    xproj, x_saved = backend.linear(u, params["wXProj"], params["bXProj"])
    delta, dt_saved = backend.linear(view(xproj, -1, 0, rank), params["wDtProj"], params["bDtProj"])
    a, decay_saved = backend.decay(params["A_log"])
    scan_inputs = (
        u, delta, a, view(xproj, -1, rank, rank + states), view(xproj, -1, rank + states, rank + 2 * states),
        params["D_vec"],
    )  # fmt: skip
    gated, _, scan_saved = backend.selective_scan(
        *scan_inputs, view(xz, -1, inner, 2 * inner), discretization=discretization
    )
    out = backend.empty(x.shape)
    backend.copy_(out, x)
    _, out_saved = backend.linear(gated, params["wOutProj"], params["bOutProj"], out=out, accumulate=True)

    def backprop(d_out: Any, grads: Mapping[str, Any]) -> Any:
        d_gated = backend.linear_backward(
            d_out, out_saved, params["wOutProj"], dw=grads["wOutProj"], dbias=grads["bOutProj"]
        )
        dxz = backend.empty((batch, length, 2 * inner))
        dxproj = backend.empty(xproj.shape)
        d_a = backend.zeros(a.shape)
        scan_grads = backend.selective_scan_backward(
            d_gated,
            scan_saved,
            d_a=d_a,
            d_d=grads["D_vec"],
            db_out=view(dxproj, -1, rank, rank + states),
            dc_out=view(dxproj, -1, rank + states, rank + 2 * states),
            dz_out=view(dxz, -1, inner, 2 * inner),
        )
        backend.decay_backward(d_a, decay_saved, d_a_log=grads["A_log"])
        backend.linear_backward(
            scan_grads.ddelta, dt_saved, params["wDtProj"], dw=grads["wDtProj"], dbias=grads["bDtProj"],
            out=view(dxproj, -1, 0, rank),
        )  # fmt: skip
        du = backend.linear_backward(
            dxproj, x_saved, params["wXProj"], dw=grads["wXProj"], dbias=grads["bXProj"], out=scan_grads.du,
            accumulate=True,
        )  # fmt: skip
        backend.conv1d_backward(
            du, conv_saved, params["wConv"], dw=grads["wConv"], dbias=grads["bConv"],
            out=view(dxz, -1, 0, inner),
        )  # fmt: skip
        d_norm = backend.linear_backward(
            dxz, in_saved, params["wInProj"], dw=grads["wInProj"], dbias=grads["bInProj"]
        )
        dx = backend.empty(x.shape)
        backend.copy_(dx, d_out)
        return backend.rms_norm_backward(
            d_norm, norm_saved, params["normWeight"], dw=grads["normWeight"], out=dx, accumulate=True
        )

    inside = {
        "normOut": norm,
        "u": u,
        "deltaFull": delta,
        "gated": gated,
        "scan_inputs": scan_inputs,
        "xz": xz,
    }
    return out, backprop, inside


def run_block(backend: Backend, params: Mapping[str, np.ndarray], x: np.ndarray, d_out: np.ndarray) -> Arrays:
    """Output ("output"), "dx" and parameter gradients ("g." + name) of one block."""
    tensors = {name: backend.from_host(value) for name, value in params.items()}
    grads = gradient_buffers(backend, tensors)
    out, backprop, _ = block(backend, tensors, backend.from_host(x))
    dx = backprop(backend.from_host(d_out), grads)
    found = {"output": out, "dx": dx, **{f"g.{name}": grad for name, grad in grads.items()}}
    return {name: backend.to_host(value) for name, value in found.items()}


def run_model(
    backend: Backend, params: Mapping[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray
) -> Arrays:
    """Tied language model of SPEC 4 (zoh, eps 1e-6): "logits", "loss" and all gradients ("g." + name)."""
    tensors = {name: backend.from_host(value) for name, value in params.items()}
    grads = gradient_buffers(backend, tensors)
    layers = 1 + max(int(name[5 : name.index(".")]) for name in params if name.startswith("layer"))

    def of_layer(everything: Mapping[str, Any], i: int) -> dict[str, Any]:
        return {name: everything[f"layer{i}.{name}"] for name in BLOCK_NAMES}

    h, embedding_saved = backend.embedding(backend.from_host(tokens, "i32"), tensors["embedding"])
    backprops = []
    for i in range(layers):
        h, backprop, _ = block(backend, of_layer(tensors, i), h)
        backprops.append(backprop)
    h, norm_saved = backend.rms_norm(h, tensors["final_norm"], 1e-6)
    logits, head_saved = backend.linear(h, tensors["embedding"], tensors["lm_head_bias"])
    found = {"logits": backend.to_host(logits)}

    flat = backend.reshape(logits, (tokens.size, logits.shape[-1]))
    counted = int((targets != -100).sum())
    losses = backend.cross_entropy_(flat, backend.from_host(targets.ravel(), "i32"), scale=1.0 / counted)
    found["loss"] = backend.to_host(backend.sum(losses)) / counted
    dh = backend.linear_backward(
        logits, head_saved, tensors["embedding"], dw=grads["embedding"], dbias=grads["lm_head_bias"]
    )
    dh = backend.rms_norm_backward(dh, norm_saved, tensors["final_norm"], dw=grads["final_norm"])
    for i in reversed(range(layers)):
        dh = backprops[i](dh, of_layer(grads, i))
    backend.embedding_backward(dh, embedding_saved, d_table=grads["embedding"])
    return {**found, **{f"g.{name}": backend.to_host(grad) for name, grad in grads.items()}}
