"""The CPU backend: typed Cython kernels, and the BLAS that numpy brings for matrix products.

Tensors are numpy arrays (`_cython_tensors`; `_cython_memory` has the memory ops), so moving to and from
the host is at most a copy. Every op checks its arguments, allocates its results and calls one kernel.
Kernels run on the pool of `mamba_fast._threads`; what is smaller than `SERIAL_BELOW` elementary operations
runs on the calling thread. Matrix products run on the same pool, as blocks of OpenBLAS's (`_gemm.pyx`), or
where there is no OpenBLAS to use as whole products of numpy's (`_blas`). The results have the same bits for
any number of threads; numpy's products are as its library makes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_fast import checks
from mamba_fast.backend import ScanGradients, Tensor
from mamba_fast.backends._blas import blas_name, find_openblas, multiply_with_numpy
from mamba_fast.backends._cython_memory import ArrayMemory
from mamba_fast.backends._cython_pool import Pool
from mamba_fast.backends._cython_saved import (
    ConvSaved,
    DecaySaved,
    EmbeddingSaved,
    LinearSaved,
    NormSaved,
    ScanSaved,
    read_saved,
)
from mamba_fast.backends._cython_tensors import apart, check_ids, check_lengths, elements, f32, i32, rows
from mamba_fast.backends._dispatch import Kernels, load_kernels

__all__ = ["SERIAL_BELOW", "CythonBackend", "create_backend"]

SERIAL_BELOW = 1 << 15
"""Fewest elementary operations (elements, times taps or states where an op has them) for which waking
another thread costs less than it saves: about ten microseconds of work."""

MOST_THREADS = 256
"""The size of the pool of `_threads`."""


def create_backend(*, threads: int | None = None) -> CythonBackend:
    """The CPU backend.

    Parameters
    ----------
    threads
        How many threads the kernels use, at most 256. None: the environment variable OMP_NUM_THREADS
        where it is a positive integer, else the number of CPUs that this process may use. Matrix products
        use as many where they are OpenBLAS's; where they are numpy's (`describe` says it) they follow the
        settings of numpy's library.

    Raises
    ------
    ValueError
        threads is not an integer from 1 to 256
    BackendUnavailableError
        a compiled module is missing or does not fit this Python, or MAMBA_FAST_CPU names a variant of
        the kernels that cannot run here
    """
    if threads is not None and (
        isinstance(threads, bool)
        or not isinstance(threads, int | np.integer)
        or not 1 <= threads <= MOST_THREADS
    ):
        raise ValueError(f"threads must be an integer from 1 to {MOST_THREADS} or None, got {threads!r}")
    kernels = load_kernels()
    if threads is None:
        threads = _threads_from_environment() or kernels.threads.available_cpus()
        threads = min(threads, MOST_THREADS)
    return CythonBackend(kernels, int(threads))


def _create_with(threads: int) -> CythonBackend:
    return create_backend(threads=threads)


def _threads_from_environment() -> int | None:
    value = os.environ.get("OMP_NUM_THREADS", "").strip()
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None


def _numbered(**lists: Sequence[Any]) -> dict[str, Any]:
    """The tensors of argument lists by name, "params[0]" and so on."""
    return {f"{name}[{i}]": tensor for name, tensors in lists.items() for i, tensor in enumerate(tensors)}


class CythonBackend(ArrayMemory):
    """See the module's docstring; the ops are described in `mamba_fast.backend`."""

    name = "cython"

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.threads = threads
        """Threads that the kernels use for work that is large enough."""
        self.variant = kernels.variant
        """The instruction set that the kernels were compiled for: "baseline", "v3" or "v4"."""
        self._scan = kernels.scan
        self._conv1d = kernels.conv1d
        self._pointwise = kernels.pointwise
        self._optim = kernels.optim
        self._gemm = kernels.gemm
        self._operands = kernels.operands
        self._openblas = find_openblas()
        self.pool = Pool()
        """The memory of the tensors that ops make."""
        self._new = self.pool.new

    def __reduce__(self) -> tuple[Any, ...]:
        # The kernels are modules; a copy or an unpickled backend finds them again, in its own process.
        return _create_with, (self.threads,)

    def describe(self) -> str:
        plural = "s" if self.threads > 1 else ""
        numpy = ".".join(np.__version__.split(".")[:2])
        products = "OpenBLAS" if self._openblas else f"numpy.matmul over {blas_name()}"
        return f"cython: {self.threads} thread{plural}, {self.variant}, numpy {numpy} ({products})"

    def _workers(self, work: int) -> int:
        return self.threads if work >= SERIAL_BELOW else 1

    def _check(
        self, op: str, writes: dict[str, Any], reads: dict[str, Any], ids: dict[str, Any] | None = None
    ) -> None:
        """The operands, by argument, are float32 tensors (`ids`: int32) or None, and nothing that is
        written overlaps another one."""
        ids = ids or {}
        if not self._operands.clear(writes.values(), reads.values(), ids.values()):
            # Something is wrong, or too intricate for the quick look.
            f32(op, **reads, **writes)
            i32(op, **ids)
            apart(op, writes, {**reads, **ids})

    def _multiply(
        self,
        a: np.ndarray,
        trans_a: bool,
        b: np.ndarray,
        trans_b: bool,
        out: np.ndarray,
        alpha: float,
        accumulate: bool,
    ) -> None:
        """out = alpha op(a) op(b), or added to out; op transposes if asked to. All matrices.

        Always with all threads: a product that is too small for more than one is one task.
        """
        beta = 1.0 if accumulate else 0.0
        if self._openblas is None:
            multiply_with_numpy(a, trans_a, b, trans_b, out, alpha, beta)
        else:
            self._gemm.product(*self._openblas, a, trans_a, b, trans_b, out, alpha, beta, self.threads)

    # ---- elementwise and sums -----------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        checks.same_shape("add", a, b, out)
        self._check("add", {"out": out}, {"a": a, "b": b})
        if out is None:
            out = self._new(a.shape)
        self._pointwise.add(*elements(out, a, b), self._workers(a.size))
        return out

    def add_(self, dst: Tensor, src: Tensor) -> None:
        checks.same_shape("add_", dst, src)
        self._check("add_", {"dst": dst}, {"src": src})
        self._pointwise.accumulate(*elements(dst, src), self._workers(dst.size))

    def scale_(self, dst: Tensor, factor: float) -> None:
        self._check("scale_", {"dst": dst}, {})
        self._pointwise.scale(*elements(dst), factor, self._workers(dst.size))

    def sum(self, x: Tensor) -> Tensor:
        self._check("sum", {}, {"x": x})
        total = self._new((1,))
        self._pointwise.store(self._pointwise.sum_all(*elements(x), False, self._workers(x.size)), total)
        return total

    def decay(self, a_log: Tensor, *, grad: bool = True) -> tuple[Tensor, Any]:
        checks.decay(a_log)
        self._check("decay", {}, {"a_log": a_log})
        a = self._new(a_log.shape)
        self._pointwise.decay(*elements(a_log, a))
        return a, DecaySaved(a_log, a) if grad else None

    def decay_backward(self, d_a: Tensor, saved: Any, *, d_a_log: Tensor) -> None:
        op = "decay_backward"
        a_log, a = read_saved(op, saved, DecaySaved)
        checks.same_shape(op, a_log, d_a, d_a_log)
        self._check(op, {"d_a_log": d_a_log}, {"d_a": d_a, "a_log": a_log, "a": a})
        self._pointwise.decay_backward(*elements(d_a, a, a_log, d_a_log))

    # ---- embedding, matrix products, normalisation --------------------------------------------

    def embedding(
        self, ids: Tensor, table: Tensor, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        checks.embedding(ids, table, out)
        self._check("embedding", {"out": out}, {"table": table}, {"ids": ids})
        check_ids("embedding", "id", ids, table.shape[0])
        y = self._new((*ids.shape, table.shape[1])) if out is None else out
        self._pointwise.gather(ids.reshape(-1), table, rows(y), self._workers(y.size))
        return y, EmbeddingSaved(ids) if grad else None

    def embedding_backward(self, dy: Tensor, saved: Any, *, d_table: Tensor) -> None:
        op = "embedding_backward"
        ids = read_saved(op, saved, EmbeddingSaved).ids
        checks.embedding_backward(dy, ids.shape, d_table)
        self._check(op, {"d_table": d_table}, {"dy": dy}, {"ids": ids})
        flat = np.array(ids.reshape(-1))  # a copy: nobody can change it between the check and the use
        check_ids(op, "id", flat, d_table.shape[0])
        order = np.argsort(flat, kind="stable")
        self._pointwise.scatter_add(flat, order, rows(dy), d_table, self._workers(dy.size))

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
        self._check("linear", {"out": out}, {"x": x, "w": w, "bias": bias})
        if out is None:
            out = self._new((*x.shape[:-1], w.shape[0]))
        y = rows(out)
        self._multiply(rows(x), False, w, True, y, alpha, accumulate)
        if bias is not None:
            self._pointwise.add_bias(y, bias, self._workers(out.size))
        return out, LinearSaved(x) if grad else None

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
        self._check(op, {"dw": dw, "dbias": dbias, "out": out}, {"dy": dy, "w": w, "x": x})
        dy2 = rows(dy)
        if dw is not None:
            self._multiply(dy2, True, rows(x), False, dw, alpha, True)
        if dbias is not None:
            self._pointwise.column_sums(dy2, dbias, self._workers(dy.size))
        if not need_dx:
            return None
        dx = self._new(x.shape) if out is None else out
        self._multiply(dy2, False, w, False, rows(dx), alpha, accumulate)
        return dx

    def rms_norm(
        self, x: Tensor, w: Tensor | None, eps: float, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        checks.rms_norm(x, w, out)
        self._check("rms_norm", {"out": out}, {"x": x, "w": w})
        y = self._new(x.shape) if out is None else out
        inv = np.empty(x.size // x.shape[-1], np.float64)
        self._pointwise.rms_norm(rows(x), w, eps, rows(y), inv, self._workers(x.size))
        return y, NormSaved(x, inv) if grad else None

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
        x, inv = read_saved(op, saved, NormSaved)
        checks.rms_norm_backward(dy, x.shape, w, dw, out, accumulate)
        self._check(op, {"dw": dw, "out": out}, {"dy": dy, "w": w, "x": x})
        dx = self._new(x.shape) if out is None else out
        threads = self._workers(x.size)
        self._pointwise.rms_norm_backward(rows(dy), rows(x), w, inv, rows(dx), accumulate, dw, threads)
        return dx

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
        self._check(
            op,
            {"out": out},
            {"x": x, "w": w, "bias": bias, "initial_state": initial_state},
            {"seq_start": seq_start, "lengths": lengths},
        )
        check_lengths(op, lengths, x.shape[1])
        saved = ConvSaved(x, bias, initial_state, seq_start, lengths, activation == "silu")
        y = self._new(x.shape) if out is None else out
        final_state = self._new((x.shape[0], w.shape[1] - 1, x.shape[2]))
        threads = self._workers(x.size * w.shape[1])
        self._conv1d.forward(
            x, np.ascontiguousarray(w.T), bias, initial_state, seq_start, lengths, y, final_state, saved.silu,
            threads,
        )  # fmt: skip
        return y, final_state, saved if grad else None

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
        x, bias, initial_state, seq_start, lengths, silu = read_saved(op, saved, ConvSaved)
        checks.conv1d_backward(dy, x.shape, w, dw, dbias, d_final_state, out)
        self._check(
            op,
            {"dw": dw, "dbias": dbias, "out": out},
            {
                "dy": dy,
                "w": w,
                "d_final_state": d_final_state,
                "x": x,
                "bias": bias,
                "initial_state": initial_state,
            },
            {"seq_start": seq_start, "lengths": lengths},
        )
        dx = self._new(x.shape) if out is None else out
        d_initial_state = None
        if need_d_initial_state:
            d_initial_state = self._new((x.shape[0], w.shape[1] - 1, x.shape[2]))
        self._conv1d.backward(
            dy, d_final_state, x, np.ascontiguousarray(w.T), bias, initial_state, seq_start, lengths, dx, dw,
            dbias, d_initial_state, silu, self._workers(x.size * w.shape[1]),
        )  # fmt: skip
        return dx, d_initial_state

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
        reads = {
            "u": u, "delta": delta, "a": a, "b": b, "c": c, "d": d, "z": z, "delta_bias": delta_bias,
            "initial_state": initial_state,
        }  # fmt: skip
        self._check(op, {"out": out}, reads, {"seq_start": seq_start, "lengths": lengths})
        check_lengths(op, lengths, u.shape[1])
        batch, length, width = u.shape
        states = a.shape[1]
        zoh, softplus = discretization == "zoh", bool(delta_softplus)
        y = self._new(u.shape) if out is None else out
        final_state = self._new((batch, width, states))
        checkpoints = None
        if grad:
            checkpoints = self._new(self._scan.checkpoint_shape(batch, length, width, states))
        self._scan.forward(
            u, delta, a, b, c, d, z, delta_bias, initial_state, seq_start, lengths, y, final_state,
            checkpoints, softplus, zoh, self._workers(u.size * states),
        )  # fmt: skip
        if checkpoints is None:
            return y, final_state, None
        saved = ScanSaved(u, delta, a, b, c, d, z, delta_bias, seq_start, lengths, checkpoints, softplus, zoh)
        return y, final_state, saved

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
        s: ScanSaved = read_saved(op, saved, ScanSaved)
        batch, _, width = s.u.shape
        states = s.a.shape[1]
        checks.selective_scan_backward(
            dy, s.u.shape, states, d_final_state, d_a, d_d, d_delta_bias, du_out, ddelta_out, db_out, dc_out,
            dz_out,
        )  # fmt: skip
        if s.z is None and dz_out is not None:
            raise ValueError(f"{op}: dz_out was given, but the forward op had no z")
        writes = {
            "d_a": d_a, "d_d": d_d, "d_delta_bias": d_delta_bias, "du_out": du_out, "ddelta_out": ddelta_out,
            "db_out": db_out, "dc_out": dc_out, "dz_out": dz_out,
        }  # fmt: skip
        reads = {
            "dy": dy, "d_final_state": d_final_state, "u": s.u, "delta": s.delta, "a": s.a, "b": s.b,
            "c": s.c, "d": s.d, "z": s.z, "delta_bias": s.delta_bias,
        }  # fmt: skip
        self._check(op, writes, reads, {"seq_start": s.seq_start, "lengths": s.lengths})
        du = self._new(s.u.shape) if du_out is None else du_out
        ddelta = self._new(s.u.shape) if ddelta_out is None else ddelta_out
        db = self._new(s.b.shape) if db_out is None else db_out
        dc = self._new(s.b.shape) if dc_out is None else dc_out
        dz = None if s.z is None else self._new(s.u.shape) if dz_out is None else dz_out
        d_initial = self._new((batch, width, states)) if need_d_initial_state else None
        self._scan.backward(
            dy, d_final_state, s.u, s.delta, s.a, s.b, s.c, s.d, s.z, s.delta_bias, s.seq_start, s.lengths,
            s.checkpoints, du, ddelta, db, dc, dz, d_a, d_d, d_delta_bias, d_initial, s.softplus, s.zoh,
            self._workers(s.u.size * states),
        )  # fmt: skip
        return ScanGradients(du, ddelta, db, dc, dz, d_initial)

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
        self._check(op, {"logits": logits}, {}, {"targets": targets})
        width = logits.shape[1]
        outside = ((targets < 0) | (targets >= width)) & (targets != ignore_index)
        if outside.any():
            raise ValueError(
                f"{op}: target {targets[outside][0]} is outside 0 to {width - 1} and not {ignore_index}"
            )
        losses = self._new(targets.shape)
        self._pointwise.cross_entropy(
            logits, targets, losses, scale, ignore_index, grad, self._workers(logits.size)
        )
        return losses

    def global_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        if not self._operands.clear((), tensors, ()):
            f32("global_norm", **_numbered(tensors=tensors))
        total = 0.0
        for tensor in tensors:
            total += self._pointwise.sum_all(*elements(tensor), True, self._workers(tensor.size))
        norm = self._new((1,))
        self._pointwise.store(math.sqrt(total), norm)
        return norm

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
        if not self._operands.clear((*params, *m, *v, stats), (*grads, grad_norm), ()):
            writes = _numbered(params=params, m=m, v=v)
            self._check(op, {**writes, "stats": stats}, {**_numbered(grads=grads), "grad_norm": grad_norm})
        skipped, norm = float(stats[0]), float(grad_norm[0])
        if not math.isfinite(norm):
            stats[:] = skipped + 1.0, norm, 0.0, 0.0
            return
        t = step - skipped
        if t < 1:
            raise ValueError(
                f"{op}: step is {step} after {skipped:g} skipped steps; it counts all attempts from 1"
            )
        clip = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm > 0.0 else 1.0
        clamped = 0
        for p, g, mi, vi, decay in zip(params, grads, m, v, weight_decay, strict=True):
            clamped += self._optim.adamw(
                *elements(p, g, mi, vi),
                lr,
                beta1,
                beta2,
                eps,
                decay,
                t,
                clip,
                max_delta,
                self._workers(p.size),
            )
        stats[1:] = norm, clip, clamped

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
        op = "conv1d_step"
        checks.conv1d_step(x, state, w, bias, activation, out)
        self._check(op, {"state": state, "out": out}, {"x": x, "w": w, "bias": bias})
        y = self._new(x.shape) if out is None else out
        threads = self._workers(x.size * w.shape[1])
        self._conv1d.step(x, state, np.ascontiguousarray(w.T), bias, y, activation == "silu", threads)
        return y

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
        op = "selective_scan_step"
        checks.selective_scan_step(u, delta, a, b, c, d, z, delta_bias, state, discretization, out)
        reads = {"u": u, "delta": delta, "a": a, "b": b, "c": c, "d": d, "z": z, "delta_bias": delta_bias}
        self._check(op, {"state": state, "out": out}, reads)
        y = self._new(u.shape) if out is None else out
        self._scan.step(
            u, delta, a, b, c, d, z, delta_bias, state, y, bool(delta_softplus), discretization == "zoh",
            self._workers(state.size),
        )  # fmt: skip
        return y
