"""The kernels' own float32 functions: the errors that _vecmath.h states, and what is not finite."""

import importlib

import numpy as np
import pytest

from mamba_fast.backends._dispatch import runnable_variants

VARIANTS = runnable_variants()
LOG2 = np.log(2.0)


def module(variant):
    suffix = "" if variant == "baseline" else f"_{variant}"
    return importlib.import_module(f"mamba_fast._vecmath{suffix}")


def apply(variant, name, x):
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(x)
    getattr(module(variant), name)(x, out)
    return out


def floats(low, high, step=499):
    """float32 values in [low, high], drawn evenly over their bit patterns: every magnitude is there."""
    bits = np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        return x[(x >= low) & (x <= high) & (np.abs(x) >= np.finfo(np.float32).tiny)]


def ulps(got, want):
    """Largest distance from float64 values, in units in the last place of the nearest float32."""
    nearest = np.abs(want).astype(np.float32)
    return np.max(np.abs(got.astype(np.float64) - want) / np.spacing(nearest).astype(np.float64))


def phi_prime(z):
    """By its series, which converges to float64 rounding for |z| < 0.35 in 14 terms."""
    total, term = np.zeros_like(z), np.ones_like(z)
    for k in range(14):
        total += term / (k + 2)
        term = term * z / (k + 1)
    return total


def small(x):
    """The exponential that cannot overflow."""
    return np.exp(-np.abs(x))


# name, reference in float64, range, largest error in ulp as _vecmath.h states it
STATED = [
    ("exp", np.exp, -86.9, 88.7228, 1.1),
    ("exp2m1", lambda t: np.expm1(t * LOG2), -125.9, 0.0, 1.8),
    ("exp2m1", lambda t: np.expm1(t * LOG2), 0.0, 127.4, 2.5),
    ("log1p_unit", np.log1p, 0.0, 1.0, 1.7),
    ("softplus", lambda x: np.maximum(x, 0) + np.log1p(small(x)), -87.33, 1e30, 2.4),
    ("sigmoid", lambda x: np.where(x < 0, small(x), 1) / (1 + small(x)), -87.3, 1e30, 2.4),
    ("phi_prime_near_zero", phi_prime, -0.3475, 0.3475, 1.2),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "reference", "low", "high", "stated"), STATED)
def test_the_error_is_what_the_header_states(variant, name, reference, low, high, stated):
    x = floats(low, high)
    assert len(x) > 100_000
    assert ulps(apply(variant, name, x), reference(x.astype(np.float64))) < stated


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", sorted({row[0] for row in STATED} - {"sigmoid"} | {"silu"}))
def test_nan_passes_through(variant, name):
    assert np.isnan(apply(variant, name, np.full(37, np.nan))).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_ends_of_the_range(variant):
    x = np.array([-np.inf, -1e30, -1000, 1000, 1e30, np.inf])
    assert apply(variant, "exp", x).tolist() == [0, 0, 0, np.inf, np.inf, np.inf]
    assert apply(variant, "softplus", x).tolist() == [0, 0, 0, 1000, np.float32(1e30), np.inf]
    assert apply(variant, "sigmoid", x).tolist() == [0, 0, 0, 1, 1, 1]
    assert apply(variant, "exp2m1", x)[:3].tolist() == [-1, -1, -1]
    assert apply(variant, "silu", x)[1:4].tolist() == [0, 0, 1000]


@pytest.mark.parametrize("variant", VARIANTS)
def test_small_arguments_keep_their_digits(variant):
    tiny = np.array([1e-7, -1e-7, 1e-20, -1e-20, 3e-38, -3e-38, 0.0])
    assert ulps(apply(variant, "exp2m1", tiny), np.expm1(tiny.astype(np.float32) * LOG2)) < 2
    assert apply(variant, "log1p_unit", np.array([1e-20]))[0] == np.float32(1e-20)
