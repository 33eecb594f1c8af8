"""What people run today for the same computation: other projects' scans and models, and two plain loops.

Every scan here takes the same arrays (`scan_arrays`) and computes what `mamba_fast.functional.selective_scan`
does with `discretization="euler"`, the only one that the others have; `test_peers.py` and `check_scan` hold
them to it. A peer whose package is not installed raises `MissingPeerError` with the reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from mamba_fast import MambaConfig, functional
from mamba_fast.testing.tolerances import relative_l2

__all__ = [
    "SCANS",
    "MissingPeerError",
    "check_scan",
    "numpy_loop",
    "scan",
    "scan_arrays",
    "torch_model",
    "transformers_model",
]

Arrays = dict[str, np.ndarray]
ForwardBackward = Callable[[], tuple[Any, dict[str, Any]]]
"""One timed call: (y, gradients by name), in the peer's own arrays."""

GRADIENTS = ("u", "delta", "A_log", "B", "C", "D", "z", "delta_bias")
CLOSE = 1e-4
"""Largest relative L2 error of a peer in float32: far above rounding, far below a different formula."""


class MissingPeerError(RuntimeError):
    """The package that a peer needs is not installed, or lacks what is timed."""


def _need(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPeerError(
            f"{module} cannot be imported ({error}): pip install 'mamba-fast[{extra}]'"
        ) from None


def _transformers_module(name: str) -> ModuleType:
    # Nothing is fetched at run time, and what it says about missing CUDA kernels is expected here.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _need("transformers", "bench-transformers").logging.set_verbosity_error()
    return _need(name, "bench-transformers")


def _torch(threads: int) -> ModuleType:
    torch = _need("torch", "bench-torch")
    torch.set_num_threads(threads)
    return torch


def scan_arrays(batch: int, length: int, width: int, states: int = 16, seed: int = 20240607) -> Arrays:
    """Inputs of a scan as a freshly initialised layer sees them, with the gradient "dy" of its output."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    steps = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size=width))
    return {
        "u": normal(batch, length, width),
        "delta": 0.5 * normal(batch, length, width),
        "A_log": np.tile(np.log(np.arange(1, states + 1, dtype=np.float32)), (width, 1)),
        "B": normal(batch, length, states),
        "C": normal(batch, length, states),
        "D": normal(width),
        "z": normal(batch, length, width),
        "delta_bias": np.log(np.expm1(steps)).astype(np.float32),
        "dy": normal(batch, length, width),
    }


# ---- scans ------------------------------------------------------------------------------------


def _torch_loop(torch: ModuleType) -> Callable[..., Any]:
    """Step by step on the slices that unbind gives, whose gradients are stacked once. (Indexing a step
    instead makes autograd fill a whole zero tensor for each: quadratic in L.)"""
    functions = torch.nn.functional

    def forward(u, delta, A_log, B, C, D, z, delta_bias):
        dt = functions.softplus(delta + delta_bias)
        decay = torch.exp(dt.unsqueeze(-1) * -torch.exp(A_log))
        entering = (dt * u).unsqueeze(-1) * B.unsqueeze(2)
        h = torch.zeros_like(decay[:, 0])
        outputs = []
        for decay_t, entering_t, c_t in zip(decay.unbind(1), entering.unbind(1), C.unbind(1), strict=True):
            h = decay_t * h + entering_t
            outputs.append((h @ c_t.unsqueeze(-1)).squeeze(-1))
        return (torch.stack(outputs, 1) + D * u) * functions.silu(z)

    return forward


def _torch_compiled(torch: ModuleType) -> Callable[..., Any]:
    return torch.compile(_torch_loop(torch))


def _mambapy(torch: ModuleType) -> Callable[..., Any]:
    selective_scan = _need("mambapy.mamba", "bench-mambapy").MambaBlock.selective_scan
    functions = torch.nn.functional

    def forward(u, delta, A_log, B, C, D, z, delta_bias):
        dt = functions.softplus(delta + delta_bias)
        # The method reads nothing of its block.
        return selective_scan(None, u, dt, -torch.exp(A_log), B, C, D) * functions.silu(z)

    return forward


def _transformers(torch: ModuleType, *, use_mambapy: bool) -> Callable[..., Any]:
    if use_mambapy:
        _need("mambapy.pscan", "bench-mambapy")
    module = _transformers_module("transformers.models.mamba.modeling_mamba")
    selective_scan = getattr(module, "mamba_selective_scan", None)
    if selective_scan is None:
        raise MissingPeerError("this transformers has no function mamba_selective_scan: 5.24 has it")

    def forward(u, delta, A_log, B, C, D, z, delta_bias):
        # The module keeps (batch, channels, time); its model makes the same transposed views.
        y = selective_scan(
            u.transpose(1, 2), delta.transpose(1, 2), -torch.exp(A_log), B.transpose(1, 2), C.transpose(1, 2),
            D=D, z=z.transpose(1, 2), delta_bias=delta_bias, delta_softplus=True, use_mambapy=use_mambapy,
        )  # fmt: skip
        return y.transpose(1, 2)

    return forward


def torch_scan(name: str, threads: int) -> Callable[..., Any]:
    """The forward function of a peer on torch tensors, differentiable."""
    torch = _torch(threads)
    return {
        "torch loop": lambda: _torch_loop(torch),
        "torch.compile": lambda: _torch_compiled(torch),
        "mambapy": lambda: _mambapy(torch),
        "transformers, mambapy": lambda: _transformers(torch, use_mambapy=True),
        "transformers, default": lambda: _transformers(torch, use_mambapy=False),
    }[name]()


def numpy_loop(arrays: Arrays) -> tuple[np.ndarray, Arrays]:
    """The scan and its gradients, step by step, in numpy: what one writes without a framework."""
    u, delta, A_log, B, C, D, z, delta_bias, dy = (arrays[name] for name in (*GRADIENTS, "dy"))
    A = -np.exp(A_log)
    raw = delta + delta_bias
    dt = np.logaddexp(np.float32(0), raw)
    entering = dt * u
    batch, length, width = u.shape
    states = np.zeros((length + 1, batch, width, A.shape[1]), np.float32)
    y = np.empty_like(u)
    for t in range(length):
        np.multiply(np.exp(dt[:, t, :, None] * A), states[t], out=states[t + 1])
        states[t + 1] += entering[:, t, :, None] * B[:, t, None, :]
        y[:, t] = (states[t + 1] @ C[:, t, :, None])[..., 0]
    y += D * u
    gate = 1 / (1 + np.exp(-z))

    g = dy * z * gate
    dz = dy * y * gate * (1 + z * (1 - gate))
    d_entering, d_dt = np.empty_like(u), np.empty_like(u)
    dB, dC, dA = np.empty_like(B), np.empty_like(C), np.zeros_like(A)
    dh = np.zeros_like(states[0])
    for t in reversed(range(length)):
        dh += g[:, t, :, None] * C[:, t, None, :]
        dC[:, t] = (g[:, t, None, :] @ states[t + 1])[:, 0]
        dB[:, t] = (entering[:, t, None, :] @ dh)[:, 0]
        d_entering[:, t] = (dh @ B[:, t, :, None])[..., 0]
        dh *= np.exp(dt[:, t, :, None] * A)
        d_exponent = dh * states[t]
        d_dt[:, t] = (d_exponent * A).sum(-1)
        dA += (d_exponent * dt[:, t, :, None]).sum(0)
    d_dt += d_entering * u
    ddelta = d_dt / (1 + np.exp(-raw))
    gradients = {
        "u": d_entering * dt + g * D, "delta": ddelta, "A_log": dA * A, "B": dB, "C": dC,
        "D": (g * u).sum((0, 1)), "z": dz, "delta_bias": ddelta.sum((0, 1)),
    }  # fmt: skip
    return y * z * gate, gradients


SCANS = ("mambapy", "transformers, mambapy", "torch loop", "numpy loop", "transformers, default")


def scan(name: str, arrays: Arrays, threads: int) -> ForwardBackward:
    """One forward and backward pass of a peer's scan. MissingPeerError where the peer is absent."""
    if name == "numpy loop":
        return lambda: numpy_loop(arrays)
    forward = torch_scan(name, threads)
    torch = _torch(threads)
    leaves = {key: torch.from_numpy(arrays[key]).requires_grad_() for key in GRADIENTS}
    dy = torch.from_numpy(arrays["dy"])

    def call() -> tuple[Any, dict[str, Any]]:
        y = forward(**leaves)
        gradients = torch.autograd.grad(y, list(leaves.values()), dy)
        return y.detach(), dict(zip(leaves, gradients, strict=True))

    return call


def check_scan(
    name: str, threads: int, arrays: Arrays | None = None, call: ForwardBackward | None = None
) -> float:
    """The largest relative error of a peer against this project's scan in Euler, over output and gradients.

    At a small odd size, or on the given arrays with the given call, for a peer that is costly to make.
    ValueError where it is above `CLOSE`: then it would be another computation that is timed.
    """
    arrays = scan_arrays(2, 37, 24) if arrays is None else arrays
    inputs = {key: arrays[key] for key in GRADIENTS}
    expected, backprop = functional.selective_scan_vjp(**inputs, discretization="euler")
    expected_gradients = backprop(arrays["dy"])
    y, gradients = (call or scan(name, arrays, threads))()
    errors = {"y": relative_l2(np.asarray(y), expected)}
    errors |= {
        f"d{key}": relative_l2(np.asarray(gradients[key]), expected_gradients[key]) for key in GRADIENTS
    }
    worst = max(errors, key=lambda key: errors[key])
    if not errors[worst] < CLOSE:
        raise ValueError(f"{name} computes something else: {worst} differs by {errors[worst]:.1e}")
    return errors[worst]


# ---- models -----------------------------------------------------------------------------------


def transformers_model(config: MambaConfig, parameters: Mapping[str, np.ndarray] | None, threads: int) -> Any:
    """MambaForCausalLM in the form of `MambaConfig.hf`, with mambapy's scan; None leaves its own weights."""
    torch = _torch(threads)
    _need("mambapy.pscan", "bench-mambapy")
    transformers = _transformers_module("transformers")
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=config.vocab_size, hidden_size=config.d_model, num_hidden_layers=config.n_layers,
            state_size=config.d_state, conv_kernel=config.d_conv, expand=config.expand,
            time_step_rank=config.dt_rank, layer_norm_epsilon=config.norm_eps, use_bias=False,
            use_cache=False, use_mambapy=True, tie_word_embeddings=True,
        )
    ).train()  # fmt: skip
    if parameters is not None:
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                value = parameters[_own_name(name)]
                if name.endswith("conv1d.weight"):  # taps are stored the other way round
                    value = value[:, None, ::-1]
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(value)))
    return model


def _own_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] != "layers":
        return {"embeddings": "embedding", "norm_f": "final_norm"}[parts[1]]
    own = {
        "in_proj.weight": "wInProj", "conv1d.weight": "wConv", "conv1d.bias": "bConv",
        "x_proj.weight": "wXProj", "dt_proj.weight": "wDtProj", "dt_proj.bias": "bDtProj",
        "A_log": "A_log", "D": "D_vec", "out_proj.weight": "wOutProj", "weight": "normWeight",
    }  # fmt: skip
    return f"layer{parts[2]}.{own['.'.join(parts[4:])]}"


def transformers_step(model: Any, ids: np.ndarray) -> Callable[[], float]:
    """Forward and backward of the mean loss of predicting ids[:, 1:]; returns the loss."""
    torch = _need("torch", "bench-torch")
    tokens = torch.from_numpy(ids.astype(np.int64))

    def call() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return float(loss.detach())

    return call


def torch_model(
    config: MambaConfig, parameters: Mapping[str, np.ndarray], scan_name: str, threads: int, lr: float = 0.0
) -> Callable[[np.ndarray, np.ndarray], float]:
    """A training step in torch of the model that `MambaConfig.hf` describes, with a peer's scan.

    step(ids, targets) runs forward, backward and torch's fused AdamW; it returns the loss before the step.
    """
    torch = _torch(threads)
    functions = torch.nn.functional
    run_scan = torch_scan(scan_name, threads)
    p = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in parameters.items()}
    optimizer = torch.optim.AdamW(list(p.values()), lr=lr, fused=True)
    inner, rank, states = config.d_inner, config.dt_rank, config.d_state

    def norm(x: Any, weight: Any) -> Any:
        return functions.rms_norm(x, (config.d_model,), weight, config.norm_eps)

    def block(x: Any, w: Mapping[str, Any]) -> Any:
        xin, z = functions.linear(norm(x, w["normWeight"]), w["wInProj"]).chunk(2, -1)
        padded = functions.pad(xin.transpose(1, 2), (config.d_conv - 1, 0))
        taps = w["wConv"].flip(-1).unsqueeze(1)
        u = functions.silu(functions.conv1d(padded, taps, w["bConv"], groups=inner)).transpose(1, 2)
        low, b, c = functions.linear(u, w["wXProj"]).split((rank, states, states), -1)
        delta = functions.linear(low, w["wDtProj"])
        y = run_scan(u, delta, w["A_log"], b, c, w["D_vec"], z, w["bDtProj"])
        return x + functions.linear(y, w["wOutProj"])

    layers = [
        {name.partition(".")[2]: t for name, t in p.items() if name.startswith(f"layer{i}.")}
        for i in range(config.n_layers)
    ]

    def step(ids: np.ndarray, targets: np.ndarray) -> float:
        optimizer.zero_grad(set_to_none=True)
        x = functions.embedding(torch.from_numpy(ids), p["embedding"])
        for weights in layers:
            x = block(x, weights)
        logits = functions.linear(norm(x, p["final_norm"]), p["embedding"])
        loss = functions.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
