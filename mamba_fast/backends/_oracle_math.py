"""Scalar functions of the oracle, on Python floats, in the forms that lose no digits (SPEC 2).

They return what IEEE arithmetic would (infinity, NaN) where the `math` module raises instead.
"""

from __future__ import annotations

import math
import struct

__all__ = [
    "adam",
    "bf16_bits",
    "bf16_value",
    "exp",
    "phi",
    "phi_prime",
    "round_bf16",
    "round_f16",
    "sigmoid",
    "silu",
    "silu_prime",
    "softplus",
]


def exp(x: float) -> float:
    """e^x, infinity where that overflows."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x), through the exponential that cannot overflow."""
    if x >= 0.0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


def silu(x: float) -> float:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def silu_prime(x: float) -> float:
    """d silu / dx = s + x s (1 - s), with 1 - s taken as sigmoid(-x) so that it keeps its digits."""
    s = sigmoid(x)
    return s + x * s * sigmoid(-x)


def softplus(x: float) -> float:
    """log(1 + e^x) as max(x, 0) + log1p(e^-|x|) (SPEC 2.6)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def phi(z: float) -> float:
    """expm1(z) / z, 1 at 0: the quotient of two numbers that are each exact to the last place."""
    if z == 0.0:
        return 1.0
    try:
        return math.expm1(z) / z
    except OverflowError:
        return math.inf


def phi_prime(z: float) -> float:
    """d phi / dz = (1 + (z - 1) e^z) / z^2; below |z| = 1, where that cancels, its power series
    sum over k of z^k / (k! (k + 2))."""
    if not abs(z) < 1.0:
        return (1.0 + (z - 1.0) * exp(z)) / z / z  # z * z could overflow
    total, power, k = 0.5, 1.0, 0  # power is z^k / k!
    while True:
        k += 1
        power *= z / k
        term = power / (k + 2)
        total += term
        if abs(term) < 1e-18:
            return total


def adam(
    g: float, m: float, v: float, *, t: float, lr: float, beta1: float, beta2: float, eps: float
) -> tuple[float, float, float]:
    """The new moments of one element and its step, 0 where that is not finite (SPEC 5).

    The moments stay as they are where the new second one is not finite.
    """
    square = beta2 * v + (1.0 - beta2) * g * g
    if not math.isfinite(square):
        return m, v, 0.0
    m, v = beta1 * m + (1.0 - beta1) * g, square
    second = v / (1.0 - beta2**t)
    divisor = (math.sqrt(second) if second >= 0.0 else math.nan) + eps
    step = lr * (m / (1.0 - beta1**t)) / divisor if divisor != 0.0 else math.nan
    return m, v, step if math.isfinite(step) else 0.0


def _round(x: float, digits: int, lowest: int, limit: float) -> float:
    """x to `digits` significant bits, none worth less than 2^lowest, ties to even; infinity from
    `limit` on. One rounding from float64: going through float32 would round twice."""
    if x == 0.0 or not math.isfinite(x):
        return x
    exponent = math.frexp(x)[1]
    quantum = math.ldexp(1.0, max(exponent - digits, lowest))
    y = round(abs(x) / quantum) * quantum  # round() is to nearest, ties to even
    return math.copysign(math.inf if y >= limit else y, x)


def round_f16(x: float) -> float:
    """The nearest IEEE half (SPEC 6)."""
    return _round(x, 11, -24, 65536.0)


def round_bf16(x: float) -> float:
    """The nearest bfloat16."""
    return _round(x, 8, -133, 2.0**128)


def bf16_bits(x: float) -> int:
    """The 16 bits of the nearest bfloat16: the upper half of a float32."""
    y = round_bf16(x)
    return 0x7FC0 if y != y else struct.unpack("<I", struct.pack("<f", y))[0] >> 16


def bf16_value(bits: int) -> float:
    """The value of a bfloat16 given by its bits."""
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
