"""Convolution and selective scan of the oracle, forward and backward, on nested lists of floats.

One batch row and one channel at a time; the only thing kept per time step is that channel's state.
Shapes have been checked. `starts` is None or rows of booleans, `lengths` has one entry for each
batch row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mamba_fast.backends._oracle_math import exp, phi, phi_prime, sigmoid, silu, silu_prime, softplus

__all__ = ["ConvInputs", "ScanInputs", "conv_backward", "conv_forward", "scan_backward", "scan_forward"]

# Nested lists of floats: their depth is the tensor's rank.
List1 = list[float]
List2 = list[List1]
List3 = list[List2]


def zeros(*shape: int) -> Any:
    """Nested lists of zeros."""
    if len(shape) == 1:
        return [0.0] * shape[0]
    return [zeros(*shape[1:]) for _ in range(shape[0])]


# ---- convolution ------------------------------------------------------------------------------


class ConvInputs(NamedTuple):
    """Everything that one call of `conv1d` reads."""

    x: List3
    w: List2
    bias: List1 | None
    initial_state: List3 | None
    starts: list[list[bool]] | None
    lengths: list[int]
    silu: bool


def _reach(inputs: ConvInputs, row: int) -> list[int]:
    """For each time step of a row, the earliest time that its taps may look at.

    Times below 0 are those of the initial state, -(K-1) being its oldest entry.
    """
    earliest = -(len(inputs.w[0]) - 1)
    reach = []
    for t in range(inputs.lengths[row]):
        if inputs.starts is not None and inputs.starts[row][t]:
            earliest = t
        reach.append(earliest)
    return reach


def conv_forward(inputs: ConvInputs) -> tuple[List3, List3, List3]:
    """y (B, L, E), final_state (B, K-1, E) and the values before the activation (B, L, E)."""
    x, w, initial = inputs.x, inputs.w, inputs.initial_state
    batch, length, width, taps = len(x), len(x[0]), len(w), len(w[0])
    y, before = zeros(batch, length, width), zeros(batch, length, width)
    final = zeros(batch, taps - 1, width)
    for i in range(batch):
        reach = _reach(inputs, i)

        def source(s: int, e: int, i: int = i) -> float:
            """The input at time s."""
            if s >= 0:
                return x[i][s][e]
            return 0.0 if initial is None else initial[i][taps - 1 + s][e]

        for t, earliest in enumerate(reach):
            for e in range(width):
                total = 0.0 if inputs.bias is None else inputs.bias[e]
                for k in range(taps):
                    if t - k >= earliest:
                        total += w[e][k] * source(t - k, e)
                before[i][t][e] = total
                y[i][t][e] = silu(total) if inputs.silu else total
        end = inputs.lengths[i]
        for j in range(taps - 1):
            s = end - (taps - 1) + j
            if s >= reach[-1]:
                final[i][j] = [source(s, e) for e in range(width)]
    return y, final, before


def conv_backward(
    inputs: ConvInputs, before: List3, dy: List3, d_final: List3 | None
) -> tuple[List3, List3, List2, List1]:
    """dx (B, L, E), d_initial_state (B, K-1, E), dw (E, K), dbias (E)."""
    x, w, initial = inputs.x, inputs.w, inputs.initial_state
    batch, length, width, taps = len(x), len(x[0]), len(w), len(w[0])
    dx, d_initial = zeros(batch, length, width), zeros(batch, taps - 1, width)
    dw, dbias = zeros(width, taps), zeros(width)
    for i in range(batch):
        reach = _reach(inputs, i)
        if d_final is not None:
            for j in range(taps - 1):
                s = inputs.lengths[i] - (taps - 1) + j
                if s >= reach[-1]:
                    row = dx[i][s] if s >= 0 else d_initial[i][taps - 1 + s]
                    for e in range(width):
                        row[e] += d_final[i][j][e]
        for t, earliest in enumerate(reach):
            for e in range(width):
                g = dy[i][t][e]
                if inputs.silu:
                    g *= silu_prime(before[i][t][e])
                dbias[e] += g
                for k in range(taps):
                    s = t - k
                    if s < earliest:
                        break
                    if s >= 0:
                        dx[i][s][e] += g * w[e][k]
                        dw[e][k] += g * x[i][s][e]
                    else:
                        d_initial[i][taps - 1 + s][e] += g * w[e][k]
                        if initial is not None:
                            dw[e][k] += g * initial[i][taps - 1 + s][e]
    return dx, d_initial, dw, dbias


# ---- selective scan ---------------------------------------------------------------------------


class ScanInputs(NamedTuple):
    """Everything that one call of `selective_scan` reads."""

    u: List3
    delta: List3
    a: List2
    b: List3
    c: List3
    d: List1 | None
    z: List3 | None
    delta_bias: List1 | None
    softplus: bool
    zoh: bool
    initial_state: List3 | None
    starts: list[list[bool]] | None
    lengths: list[int]


class _Channel(NamedTuple):
    """What one channel of one batch row went through, by time step."""

    raw: List1
    """delta + delta_bias."""
    step: List1
    """Delta, after softplus."""
    previous: List2
    """The state that entered each step: zeros at a restart."""
    decay: List2
    """exp(Delta A)."""
    state: List2
    """The state that left each step."""
    y: List1
    """Sum of c h + d u, before the gate."""


def _walk(inputs: ScanInputs, i: int, e: int) -> _Channel:
    """The recurrence of SPEC 2.8 and 2.9 for batch row i and channel e."""
    a = inputs.a[e]
    states = range(len(a))
    bias = 0.0 if inputs.delta_bias is None else inputs.delta_bias[e]
    skip = 0.0 if inputs.d is None else inputs.d[e]
    h = zeros(len(a)) if inputs.initial_state is None else inputs.initial_state[i][e]
    walked = _Channel([], [], [], [], [], [])
    for t in range(inputs.lengths[i]):
        if inputs.starts is not None and inputs.starts[i][t]:
            h = zeros(len(a))
        raw = inputs.delta[i][t][e] + bias
        step = softplus(raw) if inputs.softplus else raw
        u, b, c = inputs.u[i][t][e], inputs.b[i][t], inputs.c[i][t]
        decay = [exp(step * a[n]) for n in states]
        gain = [step * phi(step * a[n]) if inputs.zoh else step for n in states]
        previous, h = h, [decay[n] * h[n] + gain[n] * b[n] * u for n in states]
        y = skip * u
        for n in states:
            y += c[n] * h[n]
        for kept, value in zip(walked, (raw, step, previous, decay, h, y), strict=True):
            kept.append(value)
    return walked


def scan_forward(inputs: ScanInputs) -> tuple[List3, List3]:
    """y (B, L, E) and final_state (B, E, N)."""
    batch, length, width = len(inputs.u), len(inputs.u[0]), len(inputs.a)
    y, final = zeros(batch, length, width), []
    for i in range(batch):
        final.append([])
        for e in range(width):
            walked = _walk(inputs, i, e)
            for t, value in enumerate(walked.y):
                y[i][t][e] = value if inputs.z is None else value * silu(inputs.z[i][t][e])
            final[i].append(walked.state[-1])
    return y, final


class ScanGrads(NamedTuple):
    """Gradients of all that the scan reads, in the shapes of what they are gradients of."""

    u: List3
    delta: List3
    a: List2
    b: List3
    c: List3
    d: List1
    z: List3
    delta_bias: List1
    initial_state: List3


def scan_backward(inputs: ScanInputs, dy: List3, d_final: List3 | None) -> ScanGrads:
    """The walk back of SPEC 3, after the states have been computed again."""
    batch, length, width, n_states = len(inputs.u), len(inputs.u[0]), len(inputs.a), len(inputs.a[0])
    grads = ScanGrads(
        u=zeros(batch, length, width),
        delta=zeros(batch, length, width),
        a=zeros(width, n_states),
        b=zeros(batch, length, n_states),
        c=zeros(batch, length, n_states),
        d=zeros(width),
        z=zeros(batch, length, width),
        delta_bias=zeros(width),
        initial_state=zeros(batch, width, n_states),
    )
    for i in range(batch):
        for e in range(width):
            carry = zeros(n_states) if d_final is None else list(d_final[i][e])
            grads.initial_state[i][e] = _walk_back(inputs, i, e, dy, carry, grads)
    return grads


def _walk_back(inputs: ScanInputs, i: int, e: int, dy: List3, carry: List1, grads: ScanGrads) -> List1:
    """Add one channel's share to `grads`; returns the gradient of its initial state."""
    a, d_a = inputs.a[e], grads.a[e]
    states = range(len(a))
    skip = 0.0 if inputs.d is None else inputs.d[e]
    walked = _walk(inputs, i, e)
    for t in reversed(range(inputs.lengths[i])):
        u, b, c, step = inputs.u[i][t][e], inputs.b[i][t], inputs.c[i][t], walked.step[t]
        previous, decay, h = walked.previous[t], walked.decay[t], walked.state[t]
        db, dc = grads.b[i][t], grads.c[i][t]
        g = dy[i][t][e]
        if inputs.z is not None:
            gate = inputs.z[i][t][e]
            grads.z[i][t][e] = g * walked.y[t] * silu_prime(gate)
            g *= silu(gate)
        grads.d[e] += g * u
        du, d_step = g * skip, 0.0
        for n in states:
            z = step * a[n]
            if inputs.zoh:
                gain, gain_by_step, gain_by_a = step * phi(z), decay[n], step * step * phi_prime(z)
            else:
                gain, gain_by_step, gain_by_a = step, 1.0, 0.0
            dh = g * c[n] + carry[n]
            dc[n] += g * h[n]
            db[n] += dh * gain * u
            du += dh * gain * b[n]
            d_step += dh * (previous[n] * a[n] * decay[n] + gain_by_step * b[n] * u)
            d_a[n] += dh * (previous[n] * step * decay[n] + gain_by_a * b[n] * u)
            carry[n] = dh * decay[n]
        if inputs.starts is not None and inputs.starts[i][t]:
            carry = zeros(len(a))
        grads.u[i][t][e] = du
        d_raw = d_step * sigmoid(walked.raw[t]) if inputs.softplus else d_step
        grads.delta[i][t][e] = d_raw
        grads.delta_bias[e] += d_raw
    return carry
