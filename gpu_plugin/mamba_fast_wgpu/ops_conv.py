"""The causal depthwise convolution. Kernels: `shaders/conv1d_*.wgsl`; formulas: SPEC 2.3, 2.4 and 3."""

from __future__ import annotations

from typing import Any, NamedTuple

from mamba_fast import checks
from mamba_fast.backend import Tensor
from mamba_fast_wgpu.core import Core, read_saved
from mamba_fast_wgpu.tensor import WgpuTensor

__all__ = ["TILE", "ConvOps", "ConvSaved"]

_LANES = 64
TILE = 64
"""Steps that one invocation walks."""


class ConvSaved(NamedTuple):
    x: WgpuTensor
    bias: WgpuTensor | None
    initial_state: WgpuTensor | None
    seq_start: WgpuTensor | None
    lengths: WgpuTensor | None
    silu: bool


def _places(*tensors: Any) -> list[int]:
    """Offset and row stride of each."""
    return [number for t in tensors for number in ((0, 0) if t is None else (t.offset, t.row_stride))]


def _up(count: int, size: int) -> int:
    return -(-count // size)


class ConvOps(Core):
    """`conv1d`, its backward op and its step."""

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
        reads = {"x": x, "w": w, "bias": bias, "initial_state": initial_state}
        self.check(op, {"out": out}, reads, {"seq_start": seq_start, "lengths": lengths})
        batch, length, width = x.shape
        taps = w.shape[1]
        state = initial_state if taps > 1 else None
        y: Any = self.new(x.shape) if out is None else out
        final_state = self.new((batch, taps - 1, width))
        constants = {
            "K": taps, "SHORT": taps <= 4, "TILE": TILE, "SILU": activation == "silu",
            "HAS_BIAS": bias is not None, "HAS_STATE": state is not None, "HAS_STARTS": seq_start is not None,
            "HAS_LENGTHS": lengths is not None,
        }  # fmt: skip
        operands = [x, w, bias, state, seq_start, lengths, y, final_state]
        for first, rows in self._rows(batch):
            self.dispatch(
                "conv1d_forward",
                operands,
                [length, width, *_places(*operands), first],
                (_up(width, _LANES), _up(length, TILE), rows),
                constants,
            )
        if not grad:
            return y, final_state, None
        saved: Any = ConvSaved(x, bias, state, seq_start, lengths, activation == "silu")  # type: ignore[arg-type]
        return y, final_state, saved

    def _rows(self, batch: int) -> list[tuple[int, int]]:
        """Batch rows in runs that one dispatch can take: the first, and how many."""
        most = self.device.limits.workgroups
        return [(first, min(most, batch - first)) for first in range(0, batch, most)]

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
        s: ConvSaved = read_saved(op, saved, ConvSaved)
        checks.conv1d_backward(dy, s.x.shape, w, dw, dbias, d_final_state, out)
        reads = {"dy": dy, "x": s.x, "w": w, "bias": s.bias, "d_final_state": d_final_state}
        self.check(
            op,
            {"out": out, "dw": dw, "dbias": dbias},
            {**reads, "initial_state": s.initial_state},
            {"seq_start": s.seq_start, "lengths": s.lengths},
        )
        batch, length, width = s.x.shape
        taps = w.shape[1]
        past = taps - 1
        d_final = d_final_state if past else None
        dx: Any = self.new(s.x.shape) if out is None else out
        d_state = self.new((batch, past, width)) if need_d_initial_state else None
        masked = s.seq_start is not None or s.lengths is not None
        tiles = _up(length, TILE)
        bias_at = taps * width
        state_at = bias_at + width
        d_final_at = state_at + batch * past * width
        flags_at = d_final_at + batch * past * width
        shares_at = batch * past * width
        packed = self.new((flags_at + batch * length,))
        scratch = self.new((shares_at + batch * tiles * (taps + 1) * width,))

        def params(first: int) -> list[int]:
            return [
                length, width, batch, tiles, bias_at, state_at, d_final_at, flags_at, shares_at, first,
                *_places(s.x, dy, dx, w, s.bias, s.initial_state, d_final, s.seq_start, s.lengths),
                *_places(dw, dbias, d_state),
            ]  # fmt: skip

        constants = {
            "K": taps, "SHORT": taps <= 4, "TILE": TILE, "SILU": s.silu, "MASKED": masked,
            "HAS_BIAS": s.bias is not None, "HAS_STATE": s.initial_state is not None,
            "HAS_D_FINAL": d_final is not None,
            "HAS_STARTS": s.seq_start is not None, "HAS_LENGTHS": s.lengths is not None,
            "HAS_DW": dw is not None, "HAS_DBIAS": dbias is not None,
        }  # fmt: skip
        self.dispatch(
            "conv1d_backward:pack",
            [w, s.bias, s.initial_state, d_final, s.seq_start, s.lengths, packed],
            params(0),
            _up(flags_at + (batch * length if masked else 0), _LANES),
            constants,
        )
        for first, rows in self._rows(batch):
            self.dispatch(
                "conv1d_backward",
                [s.x, dy, packed, dx, scratch],
                params(first),
                (_up(width, _LANES), tiles, rows),
                constants,
            )
        if dw is not None or dbias is not None:
            self.dispatch(
                "conv1d_backward:reduce",
                [scratch, dw, dbias],
                params(0),
                (_up(width, 16), taps + 1, 1),
                constants,
            )
        if d_state is not None and past:
            self.dispatch(
                "conv1d_backward:unpack", [scratch, d_state], params(0), _up(shares_at, _LANES), constants
            )
        return dx, d_state

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
        self.check(op, {"state": state, "out": out}, {"x": x, "w": w, "bias": bias})
        batch, width = x.shape
        y: Any = self.new(x.shape) if out is None else out
        self.dispatch(
            "conv1d_step",
            [x, w, bias, state, y],
            [batch, width, *_places(x, w, bias, state, y)],
            _up(batch * width, _LANES),
            {"K": w.shape[1], "SILU": activation == "silu", "HAS_BIAS": bias is not None},
        )
        return y
