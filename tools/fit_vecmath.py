"""Derives the polynomials of mamba_fast/_vecmath.h and prints them.

Each is the minimax polynomial, in relative error, of a function on an interval, found by Lawson's
iteratively reweighted least squares on a Chebyshev grid. Coefficients are rounded to float32 one by
one from the lowest, and the rest is fitted again after each rounding, so that the rounding of one is
made up for by the others. Needs numpy and mpmath:

    python tools/fit_vecmath.py
"""

from __future__ import annotations

import mpmath as mp
import numpy as np

mp.mp.dps = 40


def fit(function, low, high, degree, fixed=(), points=1500, rounds=60):
    """float32 coefficients, lowest first, and the largest relative error on the interval."""
    x = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(points) + 0.5) / points)
    target = np.array([float(function(mp.mpf(v))) for v in x])
    known = [np.float64(np.float32(c)) for c in fixed]
    while True:
        rest = np.arange(len(known), degree + 1)
        head = sum((c * x**i for i, c in enumerate(known)), np.zeros_like(x))
        if len(rest) == 0:
            break
        matrix = x[:, None] ** rest / target[:, None]
        goal = (target - head) / target
        weight = np.full(points, 1.0 / points)
        for _ in range(rounds):
            root = np.sqrt(weight)[:, None]
            solution = np.linalg.lstsq(matrix * root, goal * root[:, 0], rcond=None)[0]
            error = np.abs(matrix @ solution - goal)
            weight *= error
            weight /= weight.sum()
        known.append(np.float64(np.float32(solution[0])))
    return [np.float32(c) for c in known], np.abs(head / target - 1).max()


def show(name, function, low, high, degree, fixed=()):
    coefficients, error = fit(function, low, high, degree, fixed)
    print(f"{name} on [{low}, {high}], degree {degree}, relative error {error:.2e}")
    for i, c in enumerate(coefficients):
        print(f"    c{i} = {c:.9e}f")


half_ln2 = float(mp.log(2)) / 2


def exp_tail(r):
    """(exp(r) - 1 - r) / r^2"""
    return mp.mpf(1) / 2 + r / 6 if r == 0 else (mp.expm1(r) - r) / (r * r)


def exp2m1_over(f):
    return mp.log(2) if f == 0 else mp.expm1(f * mp.log(2)) / f


def log1p_over(w):
    return mp.mpf(1) if w == 0 else mp.log1p(w) / w


def phi_prime(z):
    """phi(z) = expm1(z)/z, so phi'(z) = (z e^z - expm1(z)) / z^2"""
    return mp.mpf(1) / 2 if z == 0 else (z * mp.exp(z) - mp.expm1(z)) / (z * z)


if __name__ == "__main__":
    show("(exp(r) - 1 - r) / r^2", exp_tail, -half_ln2 * 1.001, half_ln2 * 1.001, 4)
    show("(2^f - 1) / f", exp2m1_over, -0.5005, 0.5005, 5)
    show("log1p(w) / w", log1p_over, 0.0, 1.0, 9, fixed=(1.0,))
    show("phi'(z)", phi_prime, -0.3475, 0.3475, 5)
