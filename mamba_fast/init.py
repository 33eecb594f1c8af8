"""The weights that a new model starts from (SPEC 8)."""

from __future__ import annotations

import math

import numpy as np

from mamba_fast.config import MambaConfig
from mamba_fast.params import parameter_shapes

__all__ = ["initial_parameters"]

# Range of the step sizes that a channel starts with (Gu and Dao 2023, section 3.6), and their floor.
_DELTA_MIN, _DELTA_MAX, _DELTA_FLOOR = 1e-3, 1e-1, 1e-4


def initial_parameters(config: MambaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Initial value of every parameter, float32, in the order of `parameters()`.

    The draws are made by numpy's PCG64 in that order, so that a seed gives the same weights whatever
    backend they go to.

    Parameters
    ----------
    config
        `init` chooses the scheme: "mamba" or "original"
    seed
        at least 0
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    rng = np.random.default_rng(int(seed))
    return {
        name: _initial(name.rpartition(".")[2], shape, config, rng).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }


def _initial(name: str, shape: tuple[int, ...], config: MambaConfig, rng: np.random.Generator) -> np.ndarray:
    """The value of one parameter, by its short name, in float64."""
    original = config.init == "original"
    match name:
        case "embedding" | "lm_head":
            return _normal(rng, shape, 1 / math.sqrt(config.d_model) if original else 0.02)
        case "wInProj":
            return _normal(rng, shape, 0.02)
        case "wConv":
            return (
                _normal(rng, shape, 0.01) if original else _uniform(rng, shape, 1 / math.sqrt(config.d_conv))
            )
        case "wXProj":
            return _normal(rng, shape, 0.01)
        case "wDtProj":
            return _normal(rng, shape, 0.02) if original else _uniform(rng, shape, config.dt_rank**-0.5)
        case "bDtProj":
            return np.zeros(shape) if original else _delta_bias(rng, shape)
        case "A_log":
            return np.broadcast_to(np.log(np.arange(1, shape[1] + 1)), shape)
        case "D_vec" | "normWeight" | "final_norm":
            return np.ones(shape)
        case "wOutProj":
            # Every block adds to the residual stream: scaled so that the sum does not grow with depth.
            return _normal(rng, shape, 0.02 / math.sqrt(config.n_layers))
        case "bInProj" | "bConv" | "bXProj" | "bOutProj" | "lm_head_bias":
            return np.zeros(shape)
    raise AssertionError(f"no initial value for {name}")


def _normal(rng: np.random.Generator, shape: tuple[int, ...], std: float) -> np.ndarray:
    return std * rng.standard_normal(shape)


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float) -> np.ndarray:
    return rng.uniform(-bound, bound, shape)


def _delta_bias(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """b with softplus(b) log-uniform in [1e-3, 1e-1]: the inverse softplus, in its form for small values."""
    delta = np.exp(rng.uniform(math.log(_DELTA_MIN), math.log(_DELTA_MAX), shape))
    delta = np.maximum(delta, _DELTA_FLOOR)
    return delta + np.log(-np.expm1(-delta))
