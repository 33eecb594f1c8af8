"""A backend over the oracle whose tensors show nothing but their shape.

Code that runs on it uses the contract and nothing else, as it must on a device whose memory the host
cannot see. Beyond refusing host access, it enforces what other backends have to trust:

* nothing written overlaps anything read, saved values included, or anything else written (rule 6);
* what a forward op has read keeps its value until the backward op has run, and a saved value is used
  once, by the backward op of its own op (rule 3);
* memory whose values are undefined holds NaN: `empty`, and logits after `cross_entropy_` without grad;
* transfers are counted by direction, live tensors and saved values at any moment.

It needs no registration: hand the object to whatever takes a backend.

    backend = create_backend()
    model = MambaLM(config, backend=backend)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mamba_fast import checks
from mamba_fast.backend import Backend, ScanGradients, Tensor
from mamba_fast.backends.oracle import create_backend as create_oracle
from mamba_fast.testing.sealed import HostAccessError, SealedTensor

__all__ = ["ContractError", "HostAccessError", "LoopbackBackend", "SealedTensor", "create_backend"]

_POISON_ID = -1_000_003


class ContractError(RuntimeError):
    """A call breaks a rule of the contract that most backends cannot check."""


def create_backend() -> LoopbackBackend:
    """A loopback backend of its own: its counters start at 0."""
    return LoopbackBackend()


class _Saved:
    """What a forward op hands to its backward op: a key, and which op made it."""

    __slots__ = ("__weakref__", "key", "op", "owner")

    def __init__(self, owner: LoopbackBackend, key: int, op: str) -> None:
        self.owner = owner
        self.key = key
        self.op = op


class _Record(NamedTuple):
    """What a saved value stands for, and the operands that have to keep their values until it is used."""

    value: Any
    operands: dict[str, np.ndarray]
    contents: dict[str, bytes]


Operands = dict[str, Tensor | None]


class LoopbackBackend(Backend):
    """See the module's docstring; the ops are described in `mamba_fast.backend`.

    Attributes
    ----------
    uploads, downloads : int
        calls of `from_host` and of `to_host`; `transfers` is their sum
    """

    name = "loopback"

    def __init__(self) -> None:
        self._oracle = create_oracle()
        self._keys = itertools.count()
        self._tensors: dict[int, np.ndarray] = {}
        self._records: dict[int, _Record] = {}
        self.transfers = 0
        self.uploads = 0
        self.downloads = 0

    def describe(self) -> str:
        return "loopback: the oracle behind sealed tensors, for tests of what runs on it"

    @property
    def live_tensors(self) -> int:
        """Tensors, views included, that somebody still holds."""
        return len(self._tensors)

    @property
    def live_saved(self) -> int:
        """Saved values that somebody still holds and that have not been used."""
        return len(self._records)

    # ---- sealing and opening ------------------------------------------------------------------

    def _seal(self, tensor: Any) -> SealedTensor:
        key = next(self._keys)
        self._tensors[key] = tensor
        sealed = SealedTensor(self, key, tuple(tensor.shape))
        weakref.finalize(sealed, self._tensors.pop, key).atexit = False
        return sealed

    def _open(self, op: str, name: str, tensor: Any) -> Any:
        if not isinstance(tensor, SealedTensor) or tensor._owner is not self:
            raise TypeError(
                f"{op}: {name} is a {type(tensor).__name__}, not a tensor of this backend: use from_host"
            )
        return self._tensors[tensor._key]

    def _run(
        self, op: str, reads: Operands, writes: Operands, kept: _Record | None = None, **options: Any
    ) -> Any:
        """The oracle's op on opened operands, once it is clear that nothing written overlaps another one."""
        opened = {n: None if t is None else self._open(op, n, t) for n, t in (reads | writes).items()}
        written = {name: opened[name] for name in writes if opened[name] is not None}
        others = {name: opened[name] for name in reads if opened[name] is not None}
        if kept is not None:
            others |= {f"the saved {name}": operand for name, operand in kept.operands.items()}
        self._check_apart(op, written, others)
        if kept is not None:
            options["saved"] = kept.value
        return getattr(self._oracle, op)(**opened, **options)

    def _check_apart(self, op: str, written: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
        pairs = [(w, r, others[r]) for w in written for r in others]
        pairs += [(w, x, written[x]) for w, x in itertools.combinations(written, 2)]
        for name, other_name, other in pairs:
            if np.shares_memory(written[name], other):
                raise ValueError(f"{op}: {name} overlaps {other_name}: write to other memory")

    def _keep(self, op: str, value: Any, reads: Operands) -> _Saved | None:
        """Wrap what the oracle saved, and remember what its operands hold."""
        if value is None:
            return None
        operands = {name: self._open(op, name, t) for name, t in reads.items() if t is not None}
        key = next(self._keys)
        self._records[key] = _Record(value, operands, {n: a.tobytes() for n, a in operands.items()})
        saved = _Saved(self, key, op)
        weakref.finalize(saved, self._records.pop, key, None).atexit = False
        return saved

    def _use(self, op: str, saved: Any) -> _Record:
        """The record behind a saved value, once."""
        if not isinstance(saved, _Saved) or saved.owner is not self or f"{saved.op}_backward" != op:
            origin = f"of {saved.op}" if isinstance(saved, _Saved) else f"a {type(saved).__name__}"
            raise ContractError(
                f"{op}: saved is {origin}, expected what {op.removesuffix('_backward')} returned"
            )
        record = self._records.pop(saved.key, None)
        if record is None:
            raise ContractError(f"{op}: saved has been used already; run {saved.op} again")
        for name, operand in record.operands.items():
            if operand.tobytes() != record.contents[name]:
                raise ContractError(f"{op}: {name} has changed since {saved.op} saved it")
        return record

    # ---- memory -------------------------------------------------------------------------------

    def from_host(self, array: Any, dtype: str = "f32", *, copy: bool = True) -> Tensor:
        sealed = self._seal(self._oracle.from_host(array, dtype, copy=True))
        self.transfers += 1
        self.uploads += 1
        return sealed

    def to_host(self, tensor: Tensor, *, copy: bool = True) -> np.ndarray:
        host = self._oracle.to_host(self._open("to_host", "tensor", tensor), copy=copy)
        self.transfers += 1
        self.downloads += 1
        return host

    def empty(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        tensor = self._oracle.zeros(shape, dtype)
        self._oracle.fill_(tensor, _POISON_ID if dtype == "i32" else float("nan"))
        return self._seal(tensor)

    def zeros(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        return self._seal(self._oracle.zeros(shape, dtype))

    def dtype_of(self, tensor: Tensor) -> str:
        return self._oracle.dtype_of(self._open("dtype_of", "tensor", tensor))

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        return self._seal(self._oracle.reshape(self._open("reshape", "tensor", tensor), shape))

    def view(self, tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
        return self._seal(self._oracle.view(self._open("view", "tensor", tensor), axis, start, stop))

    def copy_(self, dst: Tensor, src: Tensor) -> None:
        self._run("copy_", {"src": src}, {"dst": dst})

    def fill_(self, dst: Tensor, value: float) -> None:
        self._run("fill_", {}, {"dst": dst}, value=value)

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        return self._seal(self._run("cast", {"tensor": tensor}, {}, dtype=dtype))

    def synchronize(self) -> None:
        self._oracle.synchronize()

    # ---- elementwise and sums -----------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        result = self._run("add", {"a": a, "b": b}, {"out": out})
        return self._seal(result) if out is None else out

    def add_(self, dst: Tensor, src: Tensor) -> None:
        self._run("add_", {"src": src}, {"dst": dst})

    def scale_(self, dst: Tensor, factor: float) -> None:
        self._run("scale_", {}, {"dst": dst}, factor=factor)

    def sum(self, x: Tensor) -> Tensor:
        return self._seal(self._run("sum", {"x": x}, {}))

    def decay(self, a_log: Tensor, *, grad: bool = True) -> tuple[Tensor, Any]:
        reads: Operands = {"a_log": a_log}
        a, saved = self._run("decay", reads, {}, grad=grad)
        return self._seal(a), self._keep("decay", saved, reads)

    def decay_backward(self, d_a: Tensor, saved: Any, *, d_a_log: Tensor) -> None:
        record = self._use("decay_backward", saved)
        self._run("decay_backward", {"d_a": d_a}, {"d_a_log": d_a_log}, record)

    # ---- embedding, matrix products, normalisation --------------------------------------------

    def embedding(
        self, ids: Tensor, table: Tensor, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        reads: Operands = {"ids": ids, "table": table}
        y, saved = self._run("embedding", reads, {"out": out}, grad=grad)
        return self._seal(y) if out is None else out, self._keep("embedding", saved, reads)

    def embedding_backward(self, dy: Tensor, saved: Any, *, d_table: Tensor) -> None:
        record = self._use("embedding_backward", saved)
        self._run("embedding_backward", {"dy": dy}, {"d_table": d_table}, record)

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
        reads: Operands = {"x": x, "w": w, "bias": bias}
        y, saved = self._run("linear", reads, {"out": out}, alpha=alpha, accumulate=accumulate, grad=grad)
        return self._seal(y) if out is None else out, self._keep("linear", saved, reads)

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
        dx = self._run(
            "linear_backward",
            {"dy": dy, "w": w},
            {"dw": dw, "dbias": dbias, "out": out},
            self._use("linear_backward", saved),
            alpha=alpha,
            need_dx=need_dx,
            accumulate=accumulate,
        )
        return dx if dx is None else self._seal(dx) if out is None else out

    def rms_norm(
        self, x: Tensor, w: Tensor | None, eps: float, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        reads: Operands = {"x": x, "w": w}
        y, saved = self._run("rms_norm", reads, {"out": out}, eps=eps, grad=grad)
        return self._seal(y) if out is None else out, self._keep("rms_norm", saved, reads)

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
        dx = self._run(
            "rms_norm_backward",
            {"dy": dy, "w": w},
            {"dw": dw, "out": out},
            self._use("rms_norm_backward", saved),
            accumulate=accumulate,
        )
        return self._seal(dx) if out is None else out

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
        reads: Operands = {
            "x": x,
            "w": w,
            "bias": bias,
            "initial_state": initial_state,
            "seq_start": seq_start,
            "lengths": lengths,
        }
        y, final_state, saved = self._run("conv1d", reads, {"out": out}, activation=activation, grad=grad)
        y = self._seal(y) if out is None else out
        return y, self._seal(final_state), self._keep("conv1d", saved, reads)

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
        dx, d_initial_state = self._run(
            "conv1d_backward",
            {"dy": dy, "w": w, "d_final_state": d_final_state},
            {"dw": dw, "dbias": dbias, "out": out},
            self._use("conv1d_backward", saved),
            need_d_initial_state=need_d_initial_state,
        )
        return (
            self._seal(dx) if out is None else out,
            None if d_initial_state is None else self._seal(d_initial_state),
        )

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
        reads: Operands = {
            "u": u,
            "delta": delta,
            "a": a,
            "b": b,
            "c": c,
            "d": d,
            "z": z,
            "delta_bias": delta_bias,
            "initial_state": initial_state,
            "seq_start": seq_start,
            "lengths": lengths,
        }
        y, final_state, saved = self._run(
            "selective_scan",
            reads,
            {"out": out},
            delta_softplus=delta_softplus,
            discretization=discretization,
            grad=grad,
        )
        y = self._seal(y) if out is None else out
        return y, self._seal(final_state), self._keep("selective_scan", saved, reads)

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
        outs: Operands = {
            "du_out": du_out,
            "ddelta_out": ddelta_out,
            "db_out": db_out,
            "dc_out": dc_out,
            "dz_out": dz_out,
        }
        grads = self._run(
            "selective_scan_backward",
            {"dy": dy, "d_final_state": d_final_state},
            {"d_a": d_a, "d_d": d_d, "d_delta_bias": d_delta_bias, **outs},
            self._use("selective_scan_backward", saved),
            need_d_initial_state=need_d_initial_state,
        )
        sealed: dict[str, Any] = {}
        for name, gradient in grads._asdict().items():
            given = outs.get(f"{name}_out")
            sealed[name] = None if gradient is None else self._seal(gradient) if given is None else given
        return ScanGradients(**sealed)

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
        losses = self._run(
            "cross_entropy_",
            {"targets": targets},
            {"logits": logits},
            scale=scale,
            ignore_index=ignore_index,
            grad=grad,
        )
        if not grad:
            self.fill_(logits, float("nan"))
        return self._seal(losses)

    def global_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._seal(
            self._oracle.global_norm([self._open("global_norm", "tensors", t) for t in tensors])
        )

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
        lists = {
            name: [self._open(op, name, tensor) for tensor in tensors]
            for name, tensors in (("params", params), ("grads", grads), ("m", m), ("v", v))
        }
        norm, counts = self._open(op, "grad_norm", grad_norm), self._open(op, "stats", stats)
        written = {f"{name}[{i}]": t for name in ("params", "m", "v") for i, t in enumerate(lists[name])}
        read = {f"grads[{i}]": tensor for i, tensor in enumerate(lists["grads"])}
        self._check_apart(op, {**written, "stats": counts}, {**read, "grad_norm": norm})
        self._oracle.adamw_(
            **lists,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            grad_norm=norm,
            max_grad_norm=max_grad_norm,
            max_delta=max_delta,
            stats=counts,
        )

    # ---- single steps: the contract's default bodies, which are thus tested here ---------------

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
