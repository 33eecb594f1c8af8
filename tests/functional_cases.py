"""Inputs for the tests of the functional API."""

from __future__ import annotations

import numpy as np


def scan_inputs(seed=0, batch=2, length=6, width=3, states=2):
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    return {
        "u": normal((batch, length, width)),
        "delta": normal((batch, length, width)),
        "A_log": 0.5 * normal((width, states)),
        "B": normal((batch, length, states)),
        "C": normal((batch, length, states)),
        "D": normal(width),
        "z": normal((batch, length, width)),
        "delta_bias": normal(width),
        "initial_state": normal((batch, width, states)),
    }


def conv_inputs(seed=0, batch=2, length=6, width=3, taps=4):
    normal = np.random.default_rng(seed).standard_normal
    return {
        "x": normal((batch, length, width)),
        "w": normal((width, taps)),
        "bias": normal(width),
        "initial_state": normal((batch, taps - 1, width)),
    }
