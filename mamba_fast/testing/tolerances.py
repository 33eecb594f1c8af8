"""Every tolerance of the project, and how tensors are compared.

There is one measure, relative L2 tensor by tensor, and one table, that of SPEC 2. A test that wants
another number must say here where it comes from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["TOLERANCES", "relative_l2", "tolerance"]

# SPEC 2's acceptance table. "output": y and final states of an op. "gradient": every gradient of an
# op. "logits" and "model_gradient": a whole model, where the roundings of all ops add up.
#
# oracle: float64 against float64; the orders of summation differ, nothing else.
# cython: float32 arithmetic (unit roundoff 6e-8). A handful of roundings per term and sums over N or
#         over M = B*L rows give a few 1e-7; a form that cancels, such as (exp(z) - 1)/A, gives 6e-5.
# wgpu:   float32 with the looser exp and division that shading languages allow (2.5 ulp and more).
_SINGLE = {"logits": 1e-5, "model_gradient": 1e-4}
TOLERANCES: dict[str, dict[str, float]] = {
    "oracle": {"output": 1e-9, "gradient": 1e-9, "logits": 1e-9, "model_gradient": 1e-9},
    "cython": {"output": 2e-6, "gradient": 1e-5, **_SINGLE},
    "wgpu": {"output": 5e-6, "gradient": 2e-5, **_SINGLE},
}

# The loopback backend runs the oracle behind sealed tensors: it is held to the oracle's numbers.
_HELD_TO = {"loopback": "oracle"}

# Backends that the table does not know are held to the looser float32 row.
_DEFAULT = "wgpu"


def tolerance(backend_name: str, kind: str) -> float:
    """The largest relative L2 error that a backend may have.

    Parameters
    ----------
    backend_name
        "oracle", "cython", "wgpu" or "loopback"; any other name gets the numbers of "wgpu", the
        looser of the two float32 rows.
    kind
        "output" (an op's output or state), "gradient" (an op's gradient), "logits" or
        "model_gradient" (a whole model).
    """
    row = TOLERANCES.get(_HELD_TO.get(backend_name, backend_name), TOLERANCES[_DEFAULT])
    if kind not in row:
        raise ValueError(f"no tolerance of kind {kind!r}; kinds are {', '.join(row)}")
    return row[kind]


def relative_l2(actual: Any, expected: Any) -> float:
    """||actual - expected|| / ||expected||, in float64, over all elements of one tensor.

    Where `expected` is all zeros (an all-zero gradient is exactly zero, not small) the result is 0
    if `actual` is all zeros too and infinity if it is not. Any non-finite element in `actual` or
    `expected` gives infinity: a comparison with NaN must never pass. Shapes must be equal
    (ValueError), so that broadcasting cannot hide an error. Empty tensors are equal (0).
    """
    a = np.asarray(actual, dtype=np.float64)
    e = np.asarray(expected, dtype=np.float64)
    if a.shape != e.shape:
        raise ValueError(f"relative_l2: actual has shape {a.shape}, expected {e.shape}")
    if not (np.isfinite(a).all() and np.isfinite(e).all()):
        return math.inf
    # Scaled by the largest magnitude first: squares of values near 1e200 or 1e-200 would leave the range.
    scale = float(np.abs(e).max(initial=0.0))
    if scale == 0.0:
        return 0.0 if not a.any() else math.inf
    return float(np.linalg.norm(((a - e) / scale).ravel()) / np.linalg.norm((e / scale).ravel()))
