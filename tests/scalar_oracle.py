"""Scan and convolution once more, from their definitions, to check the oracle itself.

No numpy, no recurrence and no clever forms: numbers are `decimal` with 45 digits, so that the naive
formulas (log(1 + e^x), (e^z - 1)/z) keep more than float64 even after losing a dozen; the scan is
written as the sum over all earlier inputs that its recurrence unrolls to; derivatives are central
differences, whose error at that many digits is far below float64's.

Inputs and outputs are nested lists, of floats and of Decimals.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Any

DIGITS = Context(prec=45)
STEP = Decimal("1e-12")  # of the differences: truncation 1e-24, rounding 1e-33

ONE = Decimal(1)


def exact(values: Any) -> Any:
    """Nested lists of numbers as Decimals, digit for digit."""
    if isinstance(values, list):
        return [exact(value) for value in values]
    return Decimal(values)


def floats(values: Any) -> Any:
    """Nested lists of Decimals as floats."""
    if isinstance(values, list):
        return [floats(value) for value in values]
    return float(values)


# A difference changes one number at a time, so nearly all exponentials come again. All are taken
# with DIGITS in force: only then may they be kept.
@lru_cache(maxsize=100_000)
def _exp(x: Decimal) -> Decimal:
    return x.exp()


@lru_cache(maxsize=100_000)
def _softplus(x: Decimal) -> Decimal:
    return (ONE + x.exp()).ln()


def _silu(x: Decimal) -> Decimal:
    return x / (ONE + _exp(-x))


def _gain(step: Decimal, a: Decimal, discretization: str) -> Decimal:
    """What b u is multiplied with: the integral of e^(a s) over one step, or the step itself."""
    if discretization == "euler" or a == 0:
        return step
    return (_exp(step * a) - ONE) / a


def _restart(seq_start: Any, row: int, t: int) -> int | None:
    """The last time up to t at which the row restarts, None if there is none."""
    starts = [] if seq_start is None else [s for s in range(t + 1) if seq_start[row][s]]
    return starts[-1] if starts else None


def conv1d(
    x: Any, w: Any, bias: Any = None, *, initial_state: Any = None, seq_start: Any = None,
    lengths: Any = None, activation: str | None = "silu",
) -> tuple[Any, Any]:  # fmt: skip
    """y (B, L, E) and final_state (B, K-1, E) for x (B, L, E), w (E, K)."""
    back = len(w[0]) - 1
    y, final = [], []
    for i, inputs in enumerate(x):
        end = len(inputs) if lengths is None else lengths[i]
        nothing = [Decimal(0)] * len(w)
        before = [nothing] * back if initial_state is None else initial_state[i]
        line = [*before, *inputs]  # line[back + t] is the input at time t
        rows = []
        for t in range(len(inputs)):
            start = _restart(seq_start, i, t)
            row = []
            for e, taps in enumerate(w):
                total = Decimal(0) if bias is None else bias[e]
                for position in range(t, t + back + 1):
                    if start is None or position - back >= start:
                        total += taps[t + back - position] * line[position][e]
                row.append(total if activation is None else _silu(total))
            rows.append(row if t < end else nothing)
        y.append(rows)
        start = _restart(seq_start, i, end - 1)
        window = range(end, end + back)
        final.append([line[p] if start is None or p - back >= start else nothing for p in window])
    return y, final


def selective_scan(
    u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any = None, z: Any = None, delta_bias: Any = None, *,
    delta_softplus: bool = True, discretization: str = "zoh", initial_state: Any = None,
    seq_start: Any = None, lengths: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """y (B, L, E) and final_state (B, E, N): h_t is the sum over s <= t of what entered at s times
    exp(a (T_t - T_s)), T being the sum of the steps so far."""
    y, final = [], []
    for i, inputs in enumerate(u):
        end = len(inputs) if lengths is None else lengths[i]
        rows = [[Decimal(0)] * len(a) for _ in inputs]
        last = []
        for e in range(len(a)):
            steps = []
            for t in range(end):
                step = delta[i][t][e] + (0 if delta_bias is None else delta_bias[e])
                steps.append(_softplus(step) if delta_softplus else step)
            state: list[Decimal] = []
            for t in range(end):
                start = _restart(seq_start, i, t)
                state = []
                for n, rate in enumerate(a[e]):
                    total = Decimal(0)
                    if start is None and initial_state is not None:
                        total += initial_state[i][e][n] * _exp(rate * sum(steps[: t + 1]))
                    for s in range(start or 0, t + 1):
                        entered = _gain(steps[s], rate, discretization) * b[i][s][n] * inputs[s][e]
                        total += entered * _exp(rate * sum(steps[s + 1 : t + 1]))
                    state.append(total)
                out = sum(p * q for p, q in zip(c[i][t], state, strict=True))
                out += 0 if d is None else d[e] * inputs[t][e]
                rows[t][e] = out if z is None else out * _silu(z[i][t][e])
            last.append(state)
        y.append(rows)
        final.append(last)
    return y, final


def _dot(p: Any, q: Any) -> Decimal:
    if isinstance(p, list):
        return sum((_dot(x, y) for x, y in zip(p, q, strict=True)), Decimal(0))
    return p * q


def run(function: Callable[..., Any], inputs: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """The function's two outputs as floats. `inputs` are nested lists of floats by name."""
    with localcontext(DIGITS):
        y, final = function(**{name: exact(values) for name, values in inputs.items()}, **options)
    return floats(y), floats(final)


def gradients(
    function: Callable[..., Any], inputs: dict[str, Any], dy: Any, d_final: Any, **options: Any
) -> dict[str, Any]:
    """Gradients by input name of <dy, y> + <d_final, final_state>, by central differences."""
    with localcontext(DIGITS):
        point = {name: exact(values) for name, values in inputs.items()}
        dy, d_final = exact(dy), exact(d_final)

        def value() -> Decimal:
            y, final = function(**point, **options)
            return _dot(dy, y) + _dot(d_final, final)

        def slope(row: list[Any], k: int) -> Any:
            if isinstance(row[k], list):
                return [slope(row[k], j) for j in range(len(row[k]))]
            kept = row[k]
            row[k] = kept + STEP
            above = value()
            row[k] = kept - STEP
            below = value()
            row[k] = kept
            return (above - below) / (2 * STEP)

        return {name: floats([slope(rows, k) for k in range(len(rows))]) for name, rows in point.items()}
