"""One op on one case, forward and backward, on any backend: the same code for it and for the oracle.

Every run also proves, whatever it was called for, that no hidden transfer happened, that operands
which an op only reads kept their bits, and that nothing outside a written view was touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from mamba_fast.backend import Backend, Tensor
from mamba_fast.backends.oracle import create_backend as create_oracle
from mamba_fast.testing.cases import (
    AcceptanceCase,
    Arrays,
    ConvCase,
    EmbeddingCase,
    LinearCase,
    LossCase,
    NormCase,
    ScanCase,
    inputs,
)

__all__ = [
    "LAYOUTS",
    "Arena",
    "no_transfers",
    "oracle",
    "reference",
    "run_acceptance",
    "run_conv",
    "run_embedding",
    "run_linear",
    "run_loss",
    "run_norm",
    "run_scan",
]

LAYOUTS = ("contiguous", "columns", "slab")

_CANARY = 77


class Arena:
    """Places host arrays as tensors of one layout, and proves afterwards what was left alone.

    "contiguous": each array is a tensor of its own. "columns": each is a column view of a wider
    tensor. "slab": each is a piece of a flat tensor at an odd offset, reshaped, as parameters are.
    """

    def __init__(self, backend: Backend, layout: str = "contiguous") -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        self.backend = backend
        self.layout = layout
        self._placed: list[tuple[str, Tensor, np.ndarray, np.ndarray]] = []

    def read(self, array: np.ndarray, name: str = "an operand") -> Tensor:
        """A tensor that must not change."""
        return self._place(array, f"{name}, which is only read,", written=False)

    def write(self, array: np.ndarray, name: str = "an output") -> Tensor:
        """A tensor that may change, but nothing around it."""
        return self._place(array, f"what surrounds {name}", written=True)

    def read_all(self, arrays: Arrays) -> dict[str, Tensor]:
        return {name: self.read(array, name) for name, array in arrays.items()}

    def _place(self, array: np.ndarray, what: str, *, written: bool) -> Tensor:
        array = np.asarray(array)
        left, right = 3, 2
        if self.layout == "contiguous" or array.size == 0:
            host, inside = array, np.ones(array.shape, bool)
        elif self.layout == "columns":
            host = np.full((*array.shape[:-1], left + array.shape[-1] + right), _CANARY, array.dtype)
            host[..., left:-right] = array
            inside = np.zeros(host.shape, bool)
            inside[..., left:-right] = True
        else:
            host = np.full(left + array.size + right, _CANARY, array.dtype)
            host[left:-right] = array.ravel()
            inside = np.zeros(host.shape, bool)
            inside[left:-right] = True
        whole = self.backend.from_host(host, "i32" if array.dtype.kind in "iu" else "f32")
        kept = ~inside if written else np.ones(host.shape, bool)
        self._placed.append((what, whole, self.backend.to_host(whole), kept))
        if host is array:
            return whole
        if self.layout == "columns":
            return self.backend.view(whole, -1, left, left + array.shape[-1])
        flat = self.backend.view(whole, 0, left, left + array.size)
        return self.backend.reshape(flat, array.shape)

    def check(self) -> None:
        """Fail if anything that had to stay has changed, by so much as a bit."""
        for what, whole, before, kept in self._placed:
            after = self.backend.to_host(whole)
            if after[kept].tobytes() != before[kept].tobytes():
                raise AssertionError(f"{what} has changed (layout {self.layout})")


@contextmanager
def no_transfers(backend: Backend) -> Iterator[None]:
    """Fail if anything inside moves data between host and backend."""
    before = backend.transfers
    yield
    if backend.transfers != before:
        raise AssertionError(f"{backend.transfers - before} hidden transfers between host and backend")


@cache
def oracle() -> Backend:
    """The reference backend, one for all tests."""
    return create_oracle()


def reference(run: Callable[..., Arrays], case: Any, **options: Any) -> Arrays:
    """What the oracle gives for a run; computed once for all backends of a test session."""
    return _reference(run, case, tuple(sorted(options.items())))


@cache
def _reference(run: Callable[..., Arrays], case: Any, options: tuple[tuple[str, Any], ...]) -> Arrays:
    results = run(oracle(), case, **dict(options))
    for array in results.values():
        array.setflags(write=False)
    return results


def _filler(shape: Sequence[int]) -> np.ndarray:
    """What an output holds before it is written or added to."""
    return (1.0 + np.arange(np.prod(shape), dtype=np.float32) % 5).reshape(tuple(shape))


class _Bench:
    """One run's tensors: the operands of a case, and what the ops write.

    `out` is what becomes of results: "new" tensors, "given" ones, or gradients "added" to given ones.
    """

    def __init__(self, backend: Backend, case: Any, layout: str = "contiguous", out: str = "new") -> None:
        self.backend = backend
        self.host = inputs(case)
        self.arena = Arena(backend, layout)
        self.t = self.arena.read_all(self.host)
        self.out = out

    def accumulators(self, *names: str, frozen: bool = False) -> dict[str, Tensor]:
        """Zeros for the gradients dNAME or d_NAME of those arguments that the case has."""
        if frozen:
            return {}
        like = {name: name.removeprefix("d").removeprefix("_") for name in names}
        shapes = {name: self.host[of].shape for name, of in like.items() if of in self.host}
        return {name: self.arena.write(np.zeros(shape, np.float32), name) for name, shape in shapes.items()}

    def given(self, name: str, like: str) -> Tensor | None:
        """Something to write to, in the shape of an argument; None where results are to be new."""
        if self.out == "new" or like not in self.host:
            return None
        return self.arena.write(_filler(self.host[like].shape), name)

    def finish(self, results: dict[str, Tensor | None], **outs: Tensor | None) -> Arrays:
        """The results, read from where they were to be written; everything else has kept its value."""
        results |= {name: tensor for name, tensor in outs.items() if tensor is not None}
        read = {name: self.backend.to_host(tensor) for name, tensor in results.items() if tensor is not None}
        self.arena.check()
        return read


def _spoil(backend: Backend, wanted: bool, *outputs: Tensor) -> None:
    """Overwrite outputs that the caller is free to change."""
    for tensor in outputs if wanted else ():
        backend.fill_(tensor, 1e3)


def run_linear(
    backend: Backend,
    case: LinearCase,
    layout: str = "contiguous",
    *,
    out: str = "new",
    frozen: bool = False,
    times: int = 1,
    spoil: bool = False,
) -> Arrays:
    """`linear` and its backward op.

    `out`: "new" tensors, "given" ones, or "added" to. `frozen`: no parameter gradients. `times`:
    how often forward and backward run, into the same accumulators. `spoil`: overwrite what the
    forward op returned before its backward op runs. These options mean the same in the other runs.
    """
    bench = _Bench(backend, case, layout, out)
    t = bench.t
    gradients = bench.accumulators("dw", "dbias", frozen=frozen)
    y_out, dx_out = bench.given("out of linear", "dy"), bench.given("out of linear_backward", "x")
    add = out == "added"
    with no_transfers(backend):
        for _ in range(times):
            y, saved = backend.linear(
                t["x"], t["w"], t.get("bias"), alpha=case.alpha, out=y_out, accumulate=add
            )
            _spoil(backend, spoil, y)
            dx = backend.linear_backward(
                t["dy"], saved, t["w"], **gradients, alpha=case.alpha, out=dx_out, accumulate=add
            )
    return bench.finish({"y": y, "dx": dx, **gradients}, y=y_out, dx=dx_out)


def run_norm(
    backend: Backend,
    case: NormCase,
    layout: str = "contiguous",
    *,
    out: str = "new",
    frozen: bool = False,
    times: int = 1,
    spoil: bool = False,
) -> Arrays:
    """`rms_norm` and its backward op."""
    bench = _Bench(backend, case, layout, out)
    t = bench.t
    gradients = bench.accumulators("dw", frozen=frozen)
    y_out, dx_out = bench.given("out of rms_norm", "x"), bench.given("out of rms_norm_backward", "x")
    with no_transfers(backend):
        for _ in range(times):
            y, saved = backend.rms_norm(t["x"], t.get("w"), case.eps, out=y_out)
            _spoil(backend, spoil, y)
            dx = backend.rms_norm_backward(
                t["dy"], saved, t.get("w"), **gradients, out=dx_out, accumulate=out == "added"
            )
    return bench.finish({"y": y, "dx": dx, **gradients}, y=y_out, dx=dx_out)


def run_embedding(
    backend: Backend,
    case: EmbeddingCase,
    layout: str = "contiguous",
    *,
    out: str = "new",
    times: int = 1,
    spoil: bool = False,
) -> Arrays:
    """`embedding` and its backward op."""
    bench = _Bench(backend, case, layout, out)
    t = bench.t
    gradients = bench.accumulators("d_table")
    y_out = bench.given("out of embedding", "dy")
    with no_transfers(backend):
        for _ in range(times):
            y, saved = backend.embedding(t["ids"], t["table"], out=y_out)
            _spoil(backend, spoil, y)
            backend.embedding_backward(t["dy"], saved, **gradients)
    return bench.finish({"y": y, **gradients}, y=y_out)


def run_loss(backend: Backend, case: LossCase, layout: str = "contiguous", *, grad: bool = True) -> Arrays:
    """`cross_entropy_`; without grad, only the losses."""
    host = inputs(case)
    arena = Arena(backend, layout)
    targets = arena.read(host["targets"], "targets")
    logits = arena.write(host["logits"], "logits")
    with no_transfers(backend):
        losses = backend.cross_entropy_(logits, targets, scale=case.scale, grad=grad)
    results = {"losses": backend.to_host(losses)} | ({"dlogits": backend.to_host(logits)} if grad else {})
    arena.check()
    return results


def run_conv(
    backend: Backend,
    case: ConvCase,
    layout: str = "contiguous",
    *,
    out: str = "new",
    frozen: bool = False,
    times: int = 1,
    spoil: bool = False,
) -> Arrays:
    """`conv1d` and its backward op."""
    bench = _Bench(backend, case, layout, out)
    t = bench.t
    gradients = bench.accumulators("dw", "dbias", frozen=frozen)
    y_out, dx_out = bench.given("out of conv1d", "x"), bench.given("out of conv1d_backward", "x")
    with no_transfers(backend):
        for _ in range(times):
            y, final_state, saved = backend.conv1d(
                t["x"],
                t["w"],
                t.get("bias"),
                initial_state=t.get("initial_state"),
                seq_start=t.get("seq_start"),
                lengths=t.get("lengths"),
                activation=case.activation,
                out=y_out,
            )
            _spoil(backend, spoil, y, final_state)
            dx, d_initial_state = backend.conv1d_backward(
                t["dy"],
                saved,
                t["w"],
                **gradients,
                d_final_state=t.get("d_final_state"),
                need_d_initial_state=case.initial_state,
                out=dx_out,
            )
            if (d_initial_state is not None) != case.initial_state:
                raise AssertionError("conv1d_backward: d_initial_state must be returned when asked for only")
    results = {
        "y": y,
        "final_state": final_state,
        "dx": dx,
        "d_initial_state": d_initial_state,
        **gradients,
    }
    return bench.finish(results, y=y_out, dx=dx_out)


def run_scan(
    backend: Backend,
    case: ScanCase,
    layout: str = "contiguous",
    *,
    out: str = "new",
    frozen: bool = False,
    times: int = 1,
    spoil: bool = False,
) -> Arrays:
    """`selective_scan` and its backward op."""
    bench = _Bench(backend, case, layout, out)
    t = bench.t
    gradients = bench.accumulators("d_a", "d_d", "d_delta_bias", frozen=frozen)
    y_out = bench.given("out of selective_scan", "u")
    outs = {f"d{name}_out": bench.given(f"d{name}_out", name) for name in ("u", "delta", "b", "c", "z")}
    with no_transfers(backend):
        for _ in range(times):
            y, final_state, saved = backend.selective_scan(
                t["u"],
                t["delta"],
                t["a"],
                t["b"],
                t["c"],
                t.get("d"),
                t.get("z"),
                t.get("delta_bias"),
                delta_softplus=case.delta_softplus,
                discretization=case.discretization,
                initial_state=t.get("initial_state"),
                seq_start=t.get("seq_start"),
                lengths=t.get("lengths"),
                out=y_out,
            )
            _spoil(backend, spoil, y, final_state)
            grads = backend.selective_scan_backward(
                t["dy"],
                saved,
                d_final_state=t.get("d_final_state"),
                need_d_initial_state=case.initial_state,
                **gradients,
                **outs,
            )
            if (grads.d_initial_state is not None) != case.initial_state:
                raise AssertionError(
                    "selective_scan_backward: d_initial_state must be returned when asked for only"
                )
            if (grads.dz is not None) != case.z:
                raise AssertionError("selective_scan_backward: dz must be returned where z was given only")
    results = {"y": y, "final_state": final_state, **grads._asdict(), **gradients}
    return bench.finish(
        results, y=y_out, **{name.removesuffix("_out"): tensor for name, tensor in outs.items()}
    )


def run_acceptance(backend: Backend, case: AcceptanceCase) -> Arrays:
    """SPEC 2's accuracy acceptance: from A_log through the scan and back to its gradient."""
    bench = _Bench(backend, case)
    t = bench.t
    sums = bench.accumulators("d_a_log", "d_d")
    d_a = bench.arena.write(np.zeros((case.width, case.states), np.float32), "d_a")
    with no_transfers(backend):
        a, saved_a = backend.decay(t["a_log"])
        y, final_state, saved = backend.selective_scan(
            t["u"],
            t["delta"],
            a,
            t["b"],
            t["c"],
            t["d"],
            t["z"],
            delta_softplus=case.delta_softplus,
            discretization=case.discretization,
        )
        grads = backend.selective_scan_backward(
            t["dy"], saved, d_a=d_a, d_d=sums["d_d"], need_d_initial_state=True
        )
        backend.decay_backward(d_a, saved_a, d_a_log=sums["d_a_log"])
    return bench.finish({"y": y, "final_state": final_state, **grads._asdict(), **sums, "d_a": d_a})
