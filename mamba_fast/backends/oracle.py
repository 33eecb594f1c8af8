"""The oracle: every op of the contract in float64 and plain Python loops.

It is what all other backends are compared with, so it is written to be read: the formulas of
SPEC.md one after another, on nested lists of Python floats, and nothing shared with the code that
it judges. NumPy only holds the tensors. `_oracle_math` has the scalar functions, `_oracle_scan` the
convolution and the scan, `_oracle_lists` the way from tensors to lists and back.

Tensors are numpy arrays, views are slices:

====== ==================================================================
f32    float64: the oracle computes and keeps all digits
i32    int32
f16    float16
bf16   uint16 with the upper half of the float32's bits
====== ==================================================================

`to_host` gives float64 for every floating type. Arithmetic follows IEEE where `math` would raise:
overflow gives infinity, and NaN spreads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np

from mamba_fast import checks
from mamba_fast.backend import Backend, ScanGradients, Tensor
from mamba_fast.backends._oracle_lists import (
    NAMES,
    NUMPY,
    add_into,
    maybe,
    read,
    read_flat,
    read_lengths,
    read_rows,
    read_starts,
    store,
    to_tensor,
)
from mamba_fast.backends._oracle_math import adam, bf16_bits, bf16_value, exp, round_f16
from mamba_fast.backends._oracle_saved import (
    ConvSaved,
    DecaySaved,
    EmbeddingSaved,
    LinearSaved,
    NormSaved,
    ScanSaved,
    read_saved,
)
from mamba_fast.backends._oracle_scan import (
    ConvInputs,
    ScanInputs,
    conv_backward,
    conv_forward,
    scan_backward,
    scan_forward,
)

__all__ = ["OracleBackend", "create_backend"]


def create_backend(**options: Any) -> OracleBackend:
    """The oracle backend. It has no options: any is a TypeError."""
    if options:
        raise TypeError(
            f"the oracle backend takes no options, got {', '.join(sorted(options))}: leave them out"
        )
    return OracleBackend()


class OracleBackend(Backend):
    """See the module's docstring; the ops are described in `mamba_fast.backend`."""

    name = "oracle"

    def describe(self) -> str:
        return "oracle: float64 in plain Python loops, one thread, for tests"

    # ---- memory -------------------------------------------------------------------------------

    def from_host(self, array: Any, dtype: str = "f32", *, copy: bool = True) -> Tensor:
        if dtype not in NUMPY:
            raise ValueError(f"from_host: dtype must be one of {', '.join(NUMPY)}, got {dtype!r}")
        self.transfers += 1
        source = np.asarray(array)
        if source.dtype.kind not in "biuf":
            raise ValueError(f"from_host: expected numbers, got an array of {source.dtype}")
        if dtype == "i32" and source.dtype != np.int32:
            with np.errstate(invalid="ignore"):
                result = source.astype(np.int32)
            wrong = source[result != source]
            if wrong.size:
                raise ValueError(f"from_host: {wrong.flat[0]} is not a 32-bit integer")
            return np.ascontiguousarray(result).reshape(source.shape)
        if dtype in ("f16", "bf16"):
            return self.cast(np.asarray(source, dtype=np.float64), dtype)
        if copy:
            return np.array(source, dtype=NUMPY[dtype], order="C")
        return np.asarray(source, dtype=NUMPY[dtype], order="C")

    def to_host(self, tensor: Tensor, *, copy: bool = True) -> np.ndarray:
        self.transfers += 1
        name = self.dtype_of(tensor)
        if name == "bf16":
            bits = read_flat("to_host", "tensor", tensor, "bf16")
            host = to_tensor([bf16_value(one) for one in bits], tensor.shape)
        else:
            host = np.array(tensor, dtype=np.int32 if name == "i32" else np.float64, order="C")
        host.setflags(write=copy)
        return host

    def empty(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        return self.zeros(shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        if dtype not in NUMPY:
            raise ValueError(f"zeros: dtype must be one of {', '.join(NUMPY)}, got {dtype!r}")
        return np.zeros(tuple(shape), NUMPY[dtype])

    def dtype_of(self, tensor: Tensor) -> str:
        if not isinstance(tensor, np.ndarray) or tensor.dtype not in NAMES:
            raise TypeError(
                f"dtype_of: a {type(tensor).__name__} is not a tensor of the oracle: use from_host"
            )
        return NAMES[tensor.dtype]

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        shape = tuple(shape)
        if any(n < 0 for n in shape) or math.prod(shape) != math.prod(tensor.shape):
            raise ValueError(f"reshape: shape {tuple(tensor.shape)} cannot become {shape}")
        result = tensor.reshape(shape)
        if result.size and not np.may_share_memory(result, tensor):
            raise ValueError(
                f"reshape: a view of shape {tuple(tensor.shape)} cannot become {shape} without a copy"
            )
        return result

    def view(self, tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
        checks.view(tensor, axis, start, stop)
        return tensor[start:stop] if axis == 0 else tensor[..., start:stop]

    def copy_(self, dst: Tensor, src: Tensor) -> None:
        checks.same_shape("copy_", dst, src)
        if self.dtype_of(dst) != self.dtype_of(src):
            raise TypeError(f"copy_: dst is {self.dtype_of(dst)} and src {self.dtype_of(src)}: use cast")
        dst[...] = src

    def fill_(self, dst: Tensor, value: float) -> None:
        name = self.dtype_of(dst)
        if name == "i32":
            dst[...] = int(value)
        else:
            dst[...] = bf16_bits(value) if name == "bf16" else round_f16(value) if name == "f16" else value

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        source = self.dtype_of(tensor)
        for name in (source, dtype):
            if name not in ("f32", "f16", "bf16"):
                raise ValueError(f"cast: from {source} to {dtype}; expected floating types: f32, f16, bf16")
        values = read_flat("cast", "tensor", tensor, source)
        if source == "bf16":
            values = [bf16_value(bits) for bits in values]
        if dtype != "f32":
            convert: Callable[[float], float] = round_f16 if dtype == "f16" else bf16_bits
            values = [convert(value) for value in values]
        return np.array(values, dtype=NUMPY[dtype]).reshape(tensor.shape)

    def synchronize(self) -> None:
        pass  # nothing is ever queued

    # ---- elementwise and sums -----------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        checks.same_shape("add", a, b, out)
        values = [p + q for p, q in zip(read_flat("add", "a", a), read_flat("add", "b", b), strict=True)]
        return store("add", values, a.shape, out)

    def add_(self, dst: Tensor, src: Tensor) -> None:
        checks.same_shape("add_", dst, src)
        add_into("add_", "dst", dst, read("add_", "src", src))

    def scale_(self, dst: Tensor, factor: float) -> None:
        dst[...] = to_tensor([value * factor for value in read_flat("scale_", "dst", dst)], dst.shape)

    def sum(self, x: Tensor) -> Tensor:
        total = 0.0
        for value in read_flat("sum", "x", x):
            total += value
        return to_tensor([total], (1,))

    def decay(self, a_log: Tensor, *, grad: bool = True) -> tuple[Tensor, Any]:
        checks.decay(a_log)
        values = [-exp(min(max(x, -10.0), 5.0)) for x in read_flat("decay", "a_log", a_log)]
        a = to_tensor(values, a_log.shape)
        return a, DecaySaved(a_log, a) if grad else None

    def decay_backward(self, d_a: Tensor, saved: Any, *, d_a_log: Tensor) -> None:
        op = "decay_backward"
        a_log, a = read_saved(op, saved, DecaySaved)
        checks.same_shape(op, a_log, d_a, d_a_log)
        entries = zip(read_flat(op, "d_a", d_a), a_log.ravel().tolist(), a.ravel().tolist(), strict=True)
        add_into(op, "d_a_log", d_a_log, [g * y if -10.0 < x < 5.0 else 0.0 for g, x, y in entries])

    # ---- embedding, matrix products, normalisation --------------------------------------------

    def embedding(
        self, ids: Tensor, table: Tensor, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        checks.embedding(ids, table, out)
        rows = read_rows("embedding", "table", table)
        y = []
        for i in read_flat("embedding", "ids", ids, "i32"):
            if not 0 <= i < len(rows):
                raise ValueError(f"embedding: id {i} is outside 0 to {len(rows) - 1}")
            y.append(rows[i])
        shape = (*ids.shape, table.shape[1])
        return store("embedding", y, shape, out), EmbeddingSaved(ids) if grad else None

    def embedding_backward(self, dy: Tensor, saved: Any, *, d_table: Tensor) -> None:
        op = "embedding_backward"
        ids = read_saved(op, saved, EmbeddingSaved).ids
        checks.embedding_backward(dy, ids.shape, d_table)
        total = [[0.0] * d_table.shape[1] for _ in range(d_table.shape[0])]
        for i, row in zip(ids.ravel().tolist(), read_rows(op, "dy", dy), strict=True):
            total[i] = [p + q for p, q in zip(total[i], row, strict=True)]
        add_into(op, "d_table", d_table, total)

    def linear(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        alpha: float = 1.0,
        out: Tensor | None = None,
        accumulate: bool = False,
        grad: bool = True,
    ) -> tuple[Tensor, Any]:
        checks.linear(x, w, bias, out, accumulate)
        weights = read_rows("linear", "w", w)
        offsets = [0.0] * len(weights) if bias is None else read("linear", "bias", bias)
        y = [
            [
                alpha * sum(map(mul, row, weight)) + offset
                for weight, offset in zip(weights, offsets, strict=True)
            ]
            for row in read_rows("linear", "x", x)
        ]
        shape = (*x.shape[:-1], w.shape[0])
        return store("linear", y, shape, out, accumulate=accumulate), LinearSaved(x) if grad else None

    def linear_backward(
        self,
        dy: Tensor,
        saved: Any,
        w: Tensor,
        *,
        dw: Tensor | None = None,
        dbias: Tensor | None = None,
        alpha: float = 1.0,
        need_dx: bool = True,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor | None:
        op = "linear_backward"
        x = read_saved(op, saved, LinearSaved).x
        checks.linear_backward(dy, x.shape, w, dw, dbias, out, accumulate)
        g = read_rows(op, "dy", dy)
        by_output = list(zip(*g, strict=True))
        if dw is not None:
            by_input = list(zip(*read_rows(op, "x", x), strict=True))
            add_into(
                op, "dw", dw, [[alpha * sum(map(mul, row, col)) for col in by_input] for row in by_output]
            )
        if dbias is not None:
            add_into(op, "dbias", dbias, [sum(row) for row in by_output])
        if not need_dx:
            return None
        columns = list(zip(*read_rows(op, "w", w), strict=True))
        dx = [[alpha * sum(map(mul, row, col)) for col in columns] for row in g]
        return store(op, dx, x.shape, out, accumulate=accumulate)

    def rms_norm(
        self, x: Tensor, w: Tensor | None, eps: float, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        checks.rms_norm(x, w, out)
        width = x.shape[-1]
        weight = [1.0] * width if w is None else read("rms_norm", "w", w)
        y, inverse_rms = [], []
        for row in read_rows("rms_norm", "x", x):
            mean_square = sum(map(mul, row, row)) / width + eps
            inverse = 1.0 / math.sqrt(mean_square) if mean_square != 0.0 else math.inf
            inverse_rms.append(inverse)
            y.append([v * inverse * k for v, k in zip(row, weight, strict=True)])
        return store("rms_norm", y, x.shape, out), NormSaved(x, inverse_rms) if grad else None

    def rms_norm_backward(
        self,
        dy: Tensor,
        saved: Any,
        w: Tensor | None,
        *,
        dw: Tensor | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        op = "rms_norm_backward"
        x, inverse_rms = read_saved(op, saved, NormSaved)
        checks.rms_norm_backward(dy, x.shape, w, dw, out, accumulate)
        width = x.shape[-1]
        weight = [1.0] * width if w is None else read(op, "w", w)
        dx, d_weight = [], [0.0] * width
        for row, g, inverse in zip(read_rows(op, "x", x), read_rows(op, "dy", dy), inverse_rms, strict=True):
            unit = [v * inverse for v in row]
            d_unit = list(map(mul, g, weight))
            mean = sum(map(mul, d_unit, unit)) / width
            dx.append([inverse * (p - q * mean) for p, q in zip(d_unit, unit, strict=True)])
            d_weight = [p + q * r for p, q, r in zip(d_weight, g, unit, strict=True)]
        add_into(op, "dw", dw, d_weight)
        return store(op, dx, x.shape, out, accumulate=accumulate)

    # ---- convolution and scan -----------------------------------------------------------------

    def conv1d(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        initial_state: Tensor | None = None,
        seq_start: Tensor | None = None,
        lengths: Tensor | None = None,
        activation: str | None = "silu",
        out: Tensor | None = None,
        grad: bool = True,
    ) -> tuple[Tensor, Tensor, Any]:
        op = "conv1d"
        checks.conv1d(x, w, bias, initial_state, seq_start, lengths, activation, out)
        inputs = ConvInputs(
            x=read(op, "x", x),
            w=read(op, "w", w),
            bias=maybe(op, "bias", bias),
            initial_state=maybe(op, "initial_state", initial_state),
            starts=read_starts(op, seq_start),
            lengths=read_lengths(op, lengths, x.shape[0], x.shape[1]),
            silu=activation == "silu",
        )
        y, final, before = conv_forward(inputs)
        final_state = to_tensor(final, (x.shape[0], w.shape[1] - 1, x.shape[2]))
        saved = ConvSaved(x.shape, inputs, before) if grad else None
        return store(op, y, x.shape, out), final_state, saved

    def conv1d_backward(
        self,
        dy: Tensor,
        saved: Any,
        w: Tensor,
        *,
        dw: Tensor | None = None,
        dbias: Tensor | None = None,
        d_final_state: Tensor | None = None,
        need_d_initial_state: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        op = "conv1d_backward"
        shape, inputs, before = read_saved(op, saved, ConvSaved)
        checks.conv1d_backward(dy, shape, w, dw, dbias, d_final_state, out)
        inputs = inputs._replace(w=read(op, "w", w))
        d_final = maybe(op, "d_final_state", d_final_state)
        dx, d_initial, d_w, d_bias = conv_backward(inputs, before, read(op, "dy", dy), d_final)
        add_into(op, "dw", dw, d_w)
        add_into(op, "dbias", dbias, d_bias)
        state_shape = (shape[0], w.shape[1] - 1, shape[2])
        return store(op, dx, shape, out), to_tensor(d_initial, state_shape) if need_d_initial_state else None

    def selective_scan(
        self,
        u: Tensor,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        *,
        delta_softplus: bool = True,
        discretization: str = "zoh",
        initial_state: Tensor | None = None,
        seq_start: Tensor | None = None,
        lengths: Tensor | None = None,
        out: Tensor | None = None,
        grad: bool = True,
    ) -> tuple[Tensor, Tensor, Any]:
        op = "selective_scan"
        checks.selective_scan(
            u, delta, a, b, c, d, z, delta_bias, discretization, initial_state, seq_start, lengths, out
        )
        inputs = ScanInputs(
            u=read(op, "u", u),
            delta=read(op, "delta", delta),
            a=read(op, "a", a),
            b=read(op, "b", b),
            c=read(op, "c", c),
            d=maybe(op, "d", d),
            z=maybe(op, "z", z),
            delta_bias=maybe(op, "delta_bias", delta_bias),
            softplus=delta_softplus,
            zoh=discretization == "zoh",
            initial_state=maybe(op, "initial_state", initial_state),
            starts=read_starts(op, seq_start),
            lengths=read_lengths(op, lengths, u.shape[0], u.shape[1]),
        )
        y, final = scan_forward(inputs)
        final_state = to_tensor(final, (u.shape[0], *a.shape))
        return store(op, y, u.shape, out), final_state, ScanSaved(u.shape, inputs) if grad else None

    def selective_scan_backward(
        self,
        dy: Tensor,
        saved: Any,
        *,
        d_final_state: Tensor | None = None,
        d_a: Tensor | None = None,
        d_d: Tensor | None = None,
        d_delta_bias: Tensor | None = None,
        need_d_initial_state: bool = False,
        du_out: Tensor | None = None,
        ddelta_out: Tensor | None = None,
        db_out: Tensor | None = None,
        dc_out: Tensor | None = None,
        dz_out: Tensor | None = None,
    ) -> ScanGradients:
        op = "selective_scan_backward"
        shape, inputs = read_saved(op, saved, ScanSaved)
        states = len(inputs.a[0])
        checks.selective_scan_backward(
            dy,
            shape,
            states,
            d_final_state,
            d_a,
            d_d,
            d_delta_bias,
            du_out,
            ddelta_out,
            db_out,
            dc_out,
            dz_out,
        )
        grads = scan_backward(inputs, read(op, "dy", dy), maybe(op, "d_final_state", d_final_state))
        add_into(op, "d_a", d_a, grads.a)
        add_into(op, "d_d", d_d, grads.d)
        add_into(op, "d_delta_bias", d_delta_bias, grads.delta_bias)
        state_shape = (shape[0], shape[2], states)
        bc_shape = (*shape[:2], states)
        return ScanGradients(
            du=store(op, grads.u, shape, du_out),
            ddelta=store(op, grads.delta, shape, ddelta_out),
            db=store(op, grads.b, bc_shape, db_out),
            dc=store(op, grads.c, bc_shape, dc_out),
            dz=None if inputs.z is None else store(op, grads.z, shape, dz_out),
            d_initial_state=to_tensor(grads.initial_state, state_shape) if need_d_initial_state else None,
        )

    # ---- loss and optimizer -------------------------------------------------------------------

    def cross_entropy_(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        scale: float = 1.0,
        ignore_index: int = -100,
        grad: bool = True,
    ) -> Tensor:
        op = "cross_entropy_"
        checks.cross_entropy_(logits, targets)
        width = logits.shape[1]
        losses, d_logits = [], []
        for row, target in zip(
            read_rows(op, "logits", logits), read_flat(op, "targets", targets, "i32"), strict=True
        ):
            if target == ignore_index:
                losses.append(0.0)
                d_logits.append([0.0] * width)
                continue
            if not 0 <= target < width:
                raise ValueError(f"{op}: target {target} is outside 0 to {width - 1} and not {ignore_index}")
            top = max(row)
            weights = [exp(x - top) for x in row]
            total = sum(weights)
            # 1 - p as the share of the other entries: it keeps its digits where p is near 1.
            others = sum(weights[:target]) + sum(weights[target + 1 :])
            at_top = weights[target] == 1.0
            losses.append(math.log1p(others) if at_top else math.log(total) - (row[target] - top))
            gradient = [scale * (e / total) for e in weights]
            gradient[target] = -scale * (others / total)
            d_logits.append(gradient)
        if grad:
            logits[...] = to_tensor(d_logits, logits.shape)
        return to_tensor(losses, targets.shape)

    def global_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        values = [
            x for i, tensor in enumerate(tensors) for x in read_flat("global_norm", f"tensors[{i}]", tensor)
        ]
        return to_tensor([math.hypot(*values)], (1,))  # hypot scales, so no square overflows

    def adamw_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        m: Sequence[Tensor],
        v: Sequence[Tensor],
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: Sequence[float],
        step: int,
        grad_norm: Tensor,
        max_grad_norm: float = 0.0,
        max_delta: float = 0.0,
        stats: Tensor,
    ) -> None:
        op = "adamw_"
        checks.adamw_(params, grads, m, v, weight_decay, grad_norm, stats)
        skipped = read(op, "stats", stats)[0]
        norm = read_flat(op, "grad_norm", grad_norm)[0]
        if not math.isfinite(norm):
            stats[...] = to_tensor([skipped + 1.0, norm, 0.0, 0.0], (4,))
            return
        clip = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm > 0.0 else 1.0
        t = step - skipped
        if t < 1:
            raise ValueError(
                f"{op}: step is {step} after {skipped:g} skipped steps; it counts all attempts from 1"
            )
        clamped = 0
        for i, (pi, gi, mi, vi, decay) in enumerate(zip(params, grads, m, v, weight_decay, strict=True)):
            new_p, new_m, new_v = [], [], []
            columns = [
                read_flat(op, f"{name}[{i}]", x)
                for name, x in (("params", pi), ("grads", gi), ("m", mi), ("v", vi))
            ]
            for p, g, m1, v1 in zip(*columns, strict=True):
                m1, v1, delta = adam(g * clip, m1, v1, t=t, lr=lr, beta1=beta1, beta2=beta2, eps=eps)
                if 0.0 < max_delta < abs(delta):
                    delta = math.copysign(max_delta, delta)
                    clamped += 1
                new_p.append(p * (1.0 - lr * decay) - delta)
                new_m.append(m1)
                new_v.append(v1)
            for tensor, values in ((pi, new_p), (mi, new_m), (vi, new_v)):
                tensor[...] = to_tensor(values, tensor.shape)
        stats[1], stats[2], stats[3] = norm, clip, float(clamped)

    # ---- single steps -------------------------------------------------------------------------

    def conv1d_step(
        self,
        x: Tensor,
        state: Tensor,
        w: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = "silu",
        out: Tensor | None = None,
    ) -> Tensor:
        checks.conv1d_step(x, state, w, bias, activation, out)
        return super().conv1d_step(x, state, w, bias, activation=activation, out=out)

    def selective_scan_step(
        self,
        u: Tensor,
        delta: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        z: Tensor | None,
        delta_bias: Tensor | None,
        state: Tensor,
        *,
        delta_softplus: bool = True,
        discretization: str = "zoh",
        out: Tensor | None = None,
    ) -> Tensor:
        checks.selective_scan_step(u, delta, a, b, c, d, z, delta_bias, state, discretization, out)
        return super().selective_scan_step(
            u,
            delta,
            a,
            b,
            c,
            d,
            z,
            delta_bias,
            state,
            delta_softplus=delta_softplus,
            discretization=discretization,
            out=out,
        )
