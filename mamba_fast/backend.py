"""The contract between the model and whatever computes: tensors, ops and errors.

A backend owns tensors and runs ops on them. The model (`lm`, `mamba1`, `layers`, `params`) is
written against this class alone, never against numpy, so that a backend may keep every tensor on a
device for a whole training step. `docs/backends.md` shows how to write and register one;
`mamba_fast.testing.BackendConformance` is the test that it must pass.

Letters in shapes: `B` batch, `L` time, `D` model width, `E` inner width (d_inner), `N` states,
`R` rank of delta, `K` convolution taps, `V` vocabulary, `T` rows, `...` any leading axes.

Rules that every op obeys

1. Row-major, channels last. The last axis is contiguous; a tensor may be a *column view*, whose
   rows are further apart than they are wide (`view` on the last axis makes one).
2. Arithmetic is float32 (the oracle's is float64), ids and masks are int32. 16-bit types are
   storage only, reached through `cast`.
3. A forward op returns its output and `saved`, an opaque value for its backward op, to be used
   once; it is None with `grad=False`. Saved values may refer to the op's inputs: they must not be
   changed before the backward op has run.
4. Results are new tensors, or written to `out=`/`*_out=` (column views allowed), which is then what is
   returned. **Gradients of parameters
   are ADDED to the tensors passed in; None means frozen and costs nothing.**
5. An op may be asynchronous. Only `to_host` and `synchronize` wait.
6. Nothing written may overlap anything read; where that could spoil a result it is a ValueError that
   says what overlaps. An op whose name ends in `_` updates operands in place; its docstring says
   which. `accumulate=True` adds into `out`.
7. Shapes are checked before work is queued; a wrong one raises ValueError naming the op, the
   argument, its shape and the expected shape.
8. The same inputs on the same device give the same bits, for a CPU backend at any thread count
   (where it multiplies matrices by a library that shares them out itself, products are the library's).
9. No hidden host transfers: `backend.transfers` counts `from_host` and `to_host` calls.
10. Every extent is at least 1, with one exception: with a single tap (K = 1) the convolution state
    is (B, 0, E), which every op that takes or returns that state accepts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

__all__ = [
    "API_VERSION",
    "Backend",
    "BackendError",
    "BackendLoadError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "ScanGradients",
    "Tensor",
]

API_VERSION = (1, 0)
"""(major, minor) of this contract. A minor step adds ops and attributes with defaults, a major one may break;
while major was 0 the contract was provisional, and a backend had to be for exactly that version."""


class BackendError(RuntimeError):
    """Base of every error about a backend as a whole."""


class BackendNotFoundError(BackendError):
    """No backend of that name is installed."""


class BackendLoadError(BackendError):
    """A backend is installed but could not be imported or does not fit this version."""


class BackendUnavailableError(BackendError):
    """A backend is installed and imports, but cannot run here (no adapter, no compiled extension)."""


class Tensor(Protocol):
    """What the model may know of a tensor: its shape. Everything else goes through the backend."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class ScanGradients(NamedTuple):
    """What `Backend.selective_scan_backward` returns; an entry is None where the input was."""

    du: Tensor
    ddelta: Tensor
    db: Tensor
    dc: Tensor
    dz: Tensor | None
    d_initial_state: Tensor | None


class Backend(ABC):
    """One way to run the ops. See the module's docstring for the rules."""

    name: ClassVar[str]
    """The name users give: `backend="..."`."""

    api_version: ClassVar[tuple[int, int]] = API_VERSION
    """The contract version that the backend was written for."""

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Optional families of ops that the backend has beside those of this class, such as "mamba2". A model
    that needs one looks here when it is built."""

    max_tensor_bytes: int | None = None
    """Largest tensor in bytes, or None for no limit of the backend's own."""

    max_slab_bytes: int | None = None
    """Largest tensor that small ones are packed into, where that is less than `max_tensor_bytes`; None where
    it is the same. Every op takes tensors up to this size; larger ones, contiguous, are taken by the memory
    ops, `add`, `add_`, `scale_`, `embedding` and `linear` (as table and weights), `global_norm`, `adamw_`
    and their backward ops."""

    preferred_to_cpu: bool = False
    """Whether `backend="auto"` should take this backend before the CPU kernels: True on a real GPU,
    False on a software adapter."""

    transfers: int = 0
    """Calls of `from_host` and `to_host` so far."""

    def describe(self) -> str:
        """One line for people: what runs, on what, with how many threads."""
        return self.name

    def details(self) -> list[str]:
        """More lines for `mamba-fast info`: what there is to choose from, with limits and features."""
        return []

    # ---- memory -------------------------------------------------------------------------------

    @abstractmethod
    def from_host(self, array: Any, dtype: str = "f32", *, copy: bool = True) -> Tensor:
        """A tensor with the values of a host array.

        Parameters
        ----------
        array
            anything `numpy.asarray` takes, of any layout, byte order and writability.
        dtype
            "f32", "i32" (the oracle keeps "f32" as float64), or a storage type, "f16" or "bf16": then
            values are rounded as `cast` rounds them. Values are converted; bool becomes 0 and 1.
        copy
            False allows the tensor to share the array's memory; the caller then promises that
            neither side writes to it.
        """

    @abstractmethod
    def to_host(self, tensor: Tensor, *, copy: bool = True) -> np.ndarray:
        """A C-contiguous numpy array with the tensor's values. Waits.

        "f16" and "bf16" are widened: the array is float32 (the oracle's float64) or int32.

        Parameters
        ----------
        copy
            True gives a fresh, writable array. False gives a read-only one that may share the tensor's
            memory: what it holds once the tensor has been written again is undefined.
        """

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        """A new contiguous tensor, its values undefined."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: str = "f32") -> Tensor:
        """A new contiguous tensor of zeros."""

    @abstractmethod
    def dtype_of(self, tensor: Tensor) -> str:
        """ "f32", "i32", "f16" or "bf16"."""

    @abstractmethod
    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The same memory in another shape, never a copy.

        ValueError where a column view would need a copy; splitting or merging all axes but the last
        always works.
        """

    @abstractmethod
    def view(self, tensor: Tensor, axis: int, start: int, stop: int) -> Tensor:
        """The part [start, stop) along the first (0) or last (-1) axis; the same memory."""

    @abstractmethod
    def copy_(self, dst: Tensor, src: Tensor) -> None:
        """Write src into dst (same shape and dtype; either may be a column view)."""

    @abstractmethod
    def fill_(self, dst: Tensor, value: float) -> None:
        """Write one value everywhere into dst."""

    @abstractmethod
    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """A new contiguous tensor of another floating storage type: "f32", "f16", "bf16".

        Rounding is to nearest, ties to even; overflow gives infinity, NaN stays NaN.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    # ---- elementwise and sums -----------------------------------------------------------------

    @abstractmethod
    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a + b, equal shapes."""

    @abstractmethod
    def add_(self, dst: Tensor, src: Tensor) -> None:
        """dst += src, equal shapes. Updates dst."""

    @abstractmethod
    def scale_(self, dst: Tensor, factor: float) -> None:
        """dst *= factor, a number of the host. Updates dst."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """The sum of all elements as a tensor of shape (1,), in a fixed order."""

    @abstractmethod
    def decay(self, a_log: Tensor, *, grad: bool = True) -> tuple[Tensor, Any]:
        """A = -exp(clamp(a_log, -10, 5)), (E, N) (SPEC 2.7). Returns (a, saved)."""

    @abstractmethod
    def decay_backward(self, d_a: Tensor, saved: Any, *, d_a_log: Tensor) -> None:
        """d_a_log += d_a * A where -10 < a_log < 5; exactly nothing at or outside the clamp."""

    # ---- embedding, matrix products, normalisation --------------------------------------------

    @abstractmethod
    def embedding(
        self, ids: Tensor, table: Tensor, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        """Rows of a table: ids (...) int32, table (V, D) -> y (..., D) (written to `out`), saved.

        The ids have been checked by the caller: 0 <= id < V.
        """

    @abstractmethod
    def embedding_backward(self, dy: Tensor, saved: Any, *, d_table: Tensor) -> None:
        """d_table[ids] += dy, repeated ids summed in a fixed order."""

    @abstractmethod
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
        """y = alpha * x @ w.T + bias: x (..., I), w (O, I), bias (O) -> y (..., O), saved.

        With accumulate, `out` += y.
        """

    @abstractmethod
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
        """dx = alpha * dy @ w (into `out`, added with accumulate); dw += alpha * dy.T @ x; dbias += dy
        summed over its rows. Returns dx, or None with need_dx=False."""

    @abstractmethod
    def rms_norm(
        self, x: Tensor, w: Tensor | None, eps: float, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        """y = x * w / sqrt(mean(x^2, last axis) + eps): x (..., D), w (D) or None (ones) -> y (written to
        `out`), saved."""

    @abstractmethod
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
        """dx (into `out`, added with accumulate); dw += sum over rows of dy * x * inv."""

    # ---- convolution and scan -----------------------------------------------------------------

    @abstractmethod
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
        """Causal depthwise convolution: y[b,t,e] = f(bias[e] + sum_k w[e,k] * x[b,t-k,e]).

        Parameters
        ----------
        x : (B, L, E)
        w : (E, K); tap k looks k steps back
        bias : (E) or None
        initial_state : (B, K-1, E) or None (zeros): the inputs before t = 0, oldest first
        seq_start : (B, L) int32 or None; where it is not 0 no tap reaches before t
        lengths : (B) int32 or None; rows are 1 <= length <= L long, outputs beyond are 0
        activation : "silu" or None
        out : (B, L, E) or None, where y is written

        Returns y (B, L, E), final_state (B, K-1, E), saved. The final state holds the last K-1
        inputs up to each row's length; entries from before the last restart are 0.
        """

    @abstractmethod
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
        """dx (B, L, E) (into `out`), and d_initial_state (B, K-1, E) where asked for, else None."""

    @abstractmethod
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
        """The selective scan (Gu and Dao 2023, algorithm 2; SPEC 2.6 to 2.10).

        With Delta = softplus(delta + delta_bias) (or delta + delta_bias), per channel and state

            h_t = exp(Delta_t A) h_{t-1} + g_t b_t u_t,   g = Delta ("euler") or expm1(Delta A)/A ("zoh")
            y_t = (sum_n c_t[n] h_t[n] + d u_t) * silu(z_t)

        Parameters
        ----------
        u, delta : (B, L, E)
        a : (E, N), any real value (0 included); `decay` makes it from A_log. For a > 0 with Delta a above
            88, where exp overflows float32, results are undefined but numbers: finite or infinite, never
            an error
        b, c : (B, L, N)
        d, delta_bias : (E) or None
        z : (B, L, E) or None (no gate)
        initial_state : (B, E, N) or None (zeros)
        seq_start : (B, L) int32 or None; where it is not 0 the state before t is taken as 0
        lengths : (B) int32 or None; positions at or beyond a row's length change nothing and give 0
        out : (B, L, E) or None, where y is written

        Returns y (B, L, E), final_state (B, E, N), saved. No (B, L, E, N) array is ever held.
        """

    @abstractmethod
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
        """Gradients of the scan (SPEC 3). d_a (E, N), d_d (E) and d_delta_bias (E) are added to; the
        others are returned, written to `*_out` (column views allowed) where given. `dz` is None
        without z, `d_initial_state` is None unless asked for. Recomputes the states."""

    # ---- loss and optimizer -------------------------------------------------------------------

    @abstractmethod
    def cross_entropy_(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        scale: float = 1.0,
        ignore_index: int = -100,
        grad: bool = True,
    ) -> Tensor:
        """Softmax cross-entropy by rows: logits (T, V), targets (T) int32 -> losses (T).

        losses[t] = logsumexp(logits[t]) - logits[t, target], unscaled, 0 where ignored. With grad,
        logits become scale * d(sum of losses)/d(logits) in place (0 where ignored); without, they
        are left undefined. Targets have been checked by the caller.
        """

    @abstractmethod
    def global_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """sqrt of the sum of the squares of all elements, (1,), stays on the device.

        Fixed order. Finite for finite elements up to 1e25 in magnitude (the sum of squares may not
        overflow); not finite when any element is not.
        """

    @abstractmethod
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
        """One AdamW step (SPEC 5; Loshchilov and Hutter 2019). Updates params, m, v and stats (4).

        * guard: if grad_norm (1) is not finite, nothing changes but stats, which become
          [stats[0] + 1, grad_norm, 0, 0];
        * clip (max_grad_norm > 0): gradients times min(1, max_grad_norm / (grad_norm + 1e-6));
        * m, v, bias correction with t = step - stats[0], where step counts attempts from 1, so that a
          skipped step leaves no trace in them and needs no host read;
        * where an element's new v is not finite (the square of a large gradient that nothing clips), its
          m and v stay as they were and its step is 0, so that it goes on with the next gradient;
        * an element's step that is not finite is 0; max_delta > 0 clamps it to +-max_delta;
        * param = param * (1 - lr * weight_decay[i]) - step.

        stats = [steps skipped, last grad_norm, last clip factor, elements clamped in the last step].
        The gradients are only read. No two tensors of the call may overlap, whichever lists they are in,
        unless both are only read.
        """

    # ---- with default bodies ------------------------------------------------------------------

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
        """One step of `conv1d`: x (B, E), state (B, K-1, E) -> y (B, E) (written to `out`). Updates state."""
        batch, width = x.shape
        long = (batch, 1, width)
        y, final_state, _ = self.conv1d(
            self.reshape(x, long),
            w,
            bias,
            initial_state=state,
            activation=activation,
            out=None if out is None else self.reshape(out, long),
            grad=False,
        )
        self.copy_(state, final_state)
        return self.reshape(y, (batch, width)) if out is None else out

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
        """One step of `selective_scan`: u, delta, z (B, E), b, c (B, N), state (B, E, N) -> y (B, E)
        (written to `out`). Updates state."""
        batch, width = u.shape
        states = b.shape[1]
        y, final_state, _ = self.selective_scan(
            self.reshape(u, (batch, 1, width)),
            self.reshape(delta, (batch, 1, width)),
            a,
            self.reshape(b, (batch, 1, states)),
            self.reshape(c, (batch, 1, states)),
            d,
            None if z is None else self.reshape(z, (batch, 1, width)),
            delta_bias,
            delta_softplus=delta_softplus,
            discretization=discretization,
            initial_state=state,
            out=None if out is None else self.reshape(out, (batch, 1, width)),
            grad=False,
        )
        self.copy_(state, final_state)
        return self.reshape(y, (batch, width)) if out is None else out
