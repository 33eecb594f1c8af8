"""Numerical derivatives in float64, for tests of gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

STEP = 1e-3
"""Of a fourth-order difference: truncation STEP^4/30 times the fifth derivative and rounding 1e-16/STEP
both stay below 1e-12 for the functions tested, a thousandth of the tolerance of the oracle."""


def slopes(value: Callable[[], float], array: np.ndarray) -> np.ndarray:
    """d value() / d array, element by element.

    `value` must read `array` (float64) itself: its elements are changed in place and put back.
    """
    result = np.empty(array.shape)
    for index in np.ndindex(array.shape):
        kept = array[index]
        at = []
        for steps in (-2, -1, 1, 2):
            array[index] = kept + steps * STEP
            at.append(value())
        array[index] = kept
        result[index] = (at[0] - 8.0 * at[1] + 8.0 * at[2] - at[3]) / (12.0 * STEP)
    return result
