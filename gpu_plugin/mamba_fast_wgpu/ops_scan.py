"""The selective scan: which kernels run, on which pieces, with what scratch memory.

The kernels are `shaders/scan_*.wgsl`; the formulas are SPEC 2.6 to 2.10 and 3. What this module adds:

* small operands are packed first (`scan_pack`), since a device may allow eight buffers a kernel;
* a scan whose scratch would exceed the largest binding is cut into pieces, by batch rows and, where one
  row is too long, by time: a piece's final state is the next one's initial state;
* where there are too few channels and batch rows to fill a device, time is cut into segments that run side
  by side (`scan_segments_quad`);
* sums over channels, batch rows and segments are made of shares added up in a fixed order (`scan_reduce`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mamba_fast import checks
from mamba_fast.backend import ScanGradients, Tensor
from mamba_fast_wgpu.core import Core, read_saved
from mamba_fast_wgpu.memory import Block
from mamba_fast_wgpu.tensor import WgpuTensor

__all__ = ["STEPS", "ScanOps", "ScanPiece", "ScanSaved"]

STEPS = 8
"""Steps between kept states."""

_LANES = 64
"""Invocations of a workgroup in the kernels that walk channels or elements."""

_QUAD_CHANNELS = 32
"""Channels of a workgroup in the kernels with four lanes a channel."""

_FULL_DEVICE = 256
"""Workgroups with which no GPU gains from cutting time into segments, which costs a third more work."""

_SEGMENTED = 768
"""Workgroups to cut into where there are fewer."""

_SHORTEST_SEGMENT = 16
"""Chunks of a segment at least."""

_FUSED_BINDINGS = 10
"""Storage buffers of the backward kernel that does the gate as well, and of the step kernel."""


class ScanPiece(NamedTuple):
    """Some steps of some batch rows, and what its forward pass left."""

    first_row: int
    rows: int
    first_step: int
    steps: int
    packed: Block
    kept: Block
    chunks: int
    """Kept states a batch row."""
    segments: int
    segment_chunks: int
    sums: Block | None
    """Of Delta, by segment; None with a single one."""


class ScanSaved(NamedTuple):
    u: WgpuTensor
    delta: WgpuTensor
    a: WgpuTensor
    b: WgpuTensor
    c: WgpuTensor
    d: WgpuTensor | None
    z: WgpuTensor | None
    delta_bias: WgpuTensor | None
    seq_start: WgpuTensor | None
    lengths: WgpuTensor | None
    softplus: bool
    zoh: bool
    pieces: tuple[ScanPiece, ...]


class _Cut(NamedTuple):
    first_row: int
    rows: int
    first_step: int
    steps: int


def plan(
    batch: int, length: int, width: int, states: int, *, channels: int, largest: int, most_rows: int
) -> list[_Cut]:
    """Pieces whose scratch fits into buffers of `largest` bytes, in order of batch row, then of time.

    `channels` is how many a workgroup of the backward pass takes.
    """
    groups = -(-states // 4)
    blocks = -(-width // channels)
    fixed = 16 * (2 * width * (groups + 1) + 64)
    # What a chunk takes: its kept state, or its packed rows, or its share of dB and dC with what a segment
    # needs for gradients, spread over its chunks.
    per_segment = 2 * width * (groups + 1)
    chunk = 16 * max(width * groups, STEPS * (2 * groups * blocks + 1) + -(-per_segment // 2))
    chunks = -(-length // STEPS)
    per_row = max(1, (largest - fixed) // chunk)
    if per_row < chunks:
        steps = per_row * STEPS
        return [
            _Cut(row, 1, start, min(steps, length - start))
            for row in range(batch)
            for start in range(0, length, steps)
        ]
    row_bytes = chunk * chunks + fixed
    rows = max(1, min(batch, most_rows, largest // row_bytes))
    return [_Cut(row, min(rows, batch - row), 0, length) for row in range(0, batch, rows)]


def _place(tensor: WgpuTensor | None, rows: int = 0) -> tuple[int, int]:
    """Offset, moved on by some rows, and row stride."""
    if tensor is None:
        return 0, 0
    return tensor.offset + rows * tensor.row_stride, tensor.row_stride


class ScanOps(Core):
    """`selective_scan`, its backward op and its step."""

    emulated_span: int = 0
    """For tests: run the kernels for subgroups as if those had so many lanes, by way of workgroup memory."""

    forced_segments: int = 0
    """For tests: as many segments as this, if there are chunks enough, whatever the device."""

    def _scratch(self, vectors: int) -> Block:
        return self.engine.pool.take(16 * vectors)

    def _groups(self, invocations: int) -> int:
        return -(-invocations // _LANES)

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
        self.check(op, {"out": out}, reads, {"seq_start": seq_start, "lengths": lengths})
        batch, length, width = u.shape
        states = a.shape[1]
        y: Any = self.new(u.shape) if out is None else out
        final_state = self.new((batch, width, states))
        inputs = ScanSaved(
            u, delta, a, b, c, d, z, delta_bias, seq_start, lengths, bool(delta_softplus),
            discretization == "zoh", (),
        )  # fmt: skip
        pieces = []
        for cut in self._plan(batch, length, width, states):
            state = initial_state if cut.first_step == 0 else final_state
            pieces.append(self._forward_piece(inputs, cut, state, y, final_state, grad))
        if not grad:
            return y, final_state, None
        return y, final_state, inputs._replace(pieces=tuple(pieces))

    def _plan(self, batch: int, length: int, width: int, states: int) -> list[_Cut]:
        limits = self.device.limits
        return plan(
            batch, length, width, states, channels=_QUAD_CHANNELS if self._span(states) else _LANES,
            largest=limits.binding_bytes, most_rows=limits.workgroups,
        )  # fmt: skip

    def _span(self, states: int) -> int:
        """How many lanes shuffles may reach in the kernels with four lanes a channel; 0: those without
        subgroup operations have to do."""
        size = self.emulated_span or self.device.subgroup_size
        if size < 8 or not 12 < states <= 16 or self.device.limits.invocations < 128:
            return 0
        # Intel's compiler chooses a width for each kernel; none is below 8.
        return 8 if "intel" in self.device.adapter.name.lower() else min(size, 32)

    def _segments(self, rows: int, width: int, chunks: int, span: int) -> tuple[int, int]:
        """How many segments, and the chunks of each."""
        groups = rows * -(-width // _QUAD_CHANNELS)
        count = self.forced_segments
        if not count and groups < _FULL_DEVICE and not self.device.adapter.software:
            count = min(_SEGMENTED // groups, chunks // _SHORTEST_SEGMENT)
        if not span or count <= 1:
            return 1, chunks
        # Tiles are two chunks, and no tile is in two segments.
        each = 2 * -(-chunks // (2 * count))
        return -(-chunks // each), each

    def _quad(self, span: int) -> dict[str, bool]:
        """Constants of the kernels with four lanes a channel."""
        return {"EMULATED": True} if span and self.emulated_span else {}

    def _forward_piece(
        self, s: ScanSaved, cut: _Cut, initial: Any, y: WgpuTensor, final_state: WgpuTensor, grad: bool
    ) -> ScanPiece:
        width, states = s.a.shape
        length = s.u.shape[1]
        groups = -(-states // 4)
        quads = -(-cut.steps // 4)
        row = cut.first_row * length + cut.first_step
        masked = s.seq_start is not None or s.lengths is not None
        rows_at = width * (groups + 1)
        flags_at = rows_at + cut.rows * cut.steps * 2 * groups
        packed = self._scratch(flags_at + (cut.rows * quads if masked else 0))
        chunks = -(-cut.steps // STEPS)
        span = self._span(states)
        segments, segment_chunks = self._segments(cut.rows, width, chunks, span)
        slots = chunks if grad else segments
        kept = self._scratch(cut.rows * slots * width * groups)

        self.dispatch(
            "scan_pack_channels:pack_channels",
            [s.a, s.d, s.delta_bias, packed],
            [
                cut.rows, width, states, slots, 0, 0,
                *_place(s.a), *_place(s.d), *_place(s.delta_bias), 0, 0,
            ],
            self._groups(width * (groups + 1)),
            {"NJ": groups, "HAS_D": s.d is not None, "HAS_DELTA_BIAS": s.delta_bias is not None},
        )  # fmt: skip
        self._pack_state(initial, cut, kept, width, states, slots, 0)
        pack_rows = [
            cut.rows, cut.steps, length, cut.first_step, width, states, rows_at, flags_at,
            *_place(s.b, row), *_place(s.c, row), *_place(s.seq_start, cut.first_row),
            *_place(s.lengths, 0),
        ]  # fmt: skip
        if s.lengths is not None:
            pack_rows[-2] += cut.first_row
        constants = {
            "NJ": groups,
            "HAS_LENGTHS": s.lengths is not None,
            "HAS_SEQ_START": s.seq_start is not None,
        }
        self.dispatch(
            "scan_pack:pack_rows", [s.b, s.c, s.lengths, packed], pack_rows,
            self._groups(cut.rows * cut.steps * groups), constants,
        )  # fmt: skip
        if masked:
            self.dispatch(
                "scan_pack:pack_flags", [s.seq_start, s.lengths, packed], pack_rows,
                self._groups(cut.rows * quads), constants,
            )  # fmt: skip
        sums = None
        if segments > 1:
            sums = self.engine.pool.take(8 * cut.rows * segments * width)
            params = [
                cut.rows, cut.steps, length, width, slots, segment_chunks if grad else 1, segments,
                segment_chunks, rows_at, flags_at, *_place(s.u, row), *_place(s.delta, row), 0, 0, 0, 0,
            ]  # fmt: skip
            self.dispatch(
                "scan_segments_quad:states", [s.u, s.delta, packed, kept, sums], params,
                (-(-width // _QUAD_CHANNELS), cut.rows, segments - 1),
                {"ZOH": s.zoh, "SOFTPLUS": s.softplus, "MASKED": masked, **self._quad(span)},
            )  # fmt: skip
            self.dispatch(
                "scan_segments_quad:join_states", [packed, kept, sums], params,
                self._groups(cut.rows * width * groups), self._quad(span),
            )  # fmt: skip
        self.dispatch(
            "scan_forward_quad" if span else "scan_forward",
            [s.u, s.delta, s.z, packed, kept, y, final_state],
            [
                cut.rows, cut.steps, length, width, states, slots, segments, segment_chunks, rows_at,
                flags_at, *_place(s.u, row), *_place(s.delta, row), *_place(s.z, row), *_place(y, row),
                *_place(final_state, cut.first_row * width),
            ],
            (-(-width // (_QUAD_CHANNELS if span else _LANES)), cut.rows, segments),
            {
                **(self._quad(span) if span else {"NJ": groups, "T": STEPS}),
                "ZOH": s.zoh, "SOFTPLUS": s.softplus, "GATED": s.z is not None,
                "MASKED": masked, "KEEP": grad,
            },
        )  # fmt: skip
        return ScanPiece(*cut, packed, kept, chunks, segments, segment_chunks, sums)

    def _pack_state(
        self, state: Any, cut: _Cut | ScanPiece, to: Block, width: int, states: int, slots: int, slot: int
    ) -> None:
        """The rows' states (zeros without) into a slot of theirs in a buffer of vec4."""
        groups = -(-states // 4)
        self.dispatch(
            "scan_pack_channels:pack_initial",
            [state, to],
            [cut.rows, width, states, slots, slot, 0, *([0] * 6), *_place(state, cut.first_row * width)],
            self._groups(cut.rows * width * groups),
            {"NJ": groups, "HAS_INITIAL": state is not None},
        )

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
        self.check(op, writes, reads, {"seq_start": s.seq_start, "lengths": s.lengths})
        grads = ScanGradients(
            self.new(s.u.shape) if du_out is None else du_out,
            self.new(s.u.shape) if ddelta_out is None else ddelta_out,
            self.new(s.b.shape) if db_out is None else db_out,
            self.new(s.b.shape) if dc_out is None else dc_out,
            None if s.z is None else self.new(s.u.shape) if dz_out is None else dz_out,
            self.new((batch, width, states)) if need_d_initial_state else None,
        )
        sums = (d_a, d_d, d_delta_bias)
        # The gradient that a piece hands to the one before it in time.
        handed: WgpuTensor | None = None
        last_step = s.u.shape[1]
        for piece in reversed(s.pieces):
            last = piece.first_step + piece.steps == last_step
            if piece.first_step and handed is None:
                handed = self.new((batch, width, states))
            before = handed if piece.first_step else grads.d_initial_state
            self._backward_piece(s, piece, dy, d_final_state if last else handed, grads, sums, before)
        return grads

    def _backward_piece(
        self,
        s: ScanSaved,
        piece: ScanPiece,
        dy: Any,
        d_final: Any,
        grads: ScanGradients,
        sums: tuple[Any, Any, Any],
        d_initial: Any,
    ) -> None:
        width, states = s.a.shape
        length = s.u.shape[1]
        groups = -(-states // 4)
        row = piece.first_row * length + piece.first_step
        masked = s.seq_start is not None or s.lengths is not None
        rows_at = width * (groups + 1)
        flags_at = rows_at + piece.rows * piece.steps * 2 * groups
        span = self._span(states)
        blocks = -(-width // (_QUAD_CHANNELS if span else _LANES))
        segments = piece.segments
        places = piece.rows * segments * width
        d_a_at = places * groups
        d_vectors_at = 2 * d_a_at
        shares_at = d_vectors_at + places
        scratch = self._scratch(shares_at + blocks * piece.rows * piece.steps * 2 * groups)
        self._pack_state(d_final, piece, scratch, width, states, segments, segments - 1)

        gated = s.z is not None
        fused = self.device.limits.storage_buffers >= _FUSED_BINDINGS
        gate_params = [
            piece.rows, piece.steps, length, width, flags_at, 0,
            *_place(s.z, row), *_place(dy, row), *_place(grads.du, row), *_place(grads.dz, row),
        ]  # fmt: skip
        elements = self._groups(piece.rows * piece.steps * width)
        flags = {"MASKED": masked}
        if gated and not fused:
            self.dispatch("scan_gate:gate_gradient", [s.z, dy, grads.du], gate_params, elements, flags)
        constants = {
            **({"SPAN": span, **self._quad(span)} if span else {"NJ": groups, "T": STEPS}),
            "ZOH": s.zoh, "SOFTPLUS": s.softplus, "MASKED": masked,
            "READ_DY": fused or not gated, "READ_Z": fused and gated, "WRITE_DZ": gated,
        }  # fmt: skip
        if segments > 1:
            self._segment_gradients(s, piece, dy, scratch, rows_at, flags_at, span)
        bindings = [s.u, s.delta]
        bindings += [s.z] if constants["READ_Z"] else []
        bindings += [dy] if constants["READ_DY"] else []
        bindings += [piece.packed, piece.kept, grads.du, grads.ddelta]
        bindings += [grads.dz] if gated else []
        self.dispatch(
            "scan_backward_quad" if span else "scan_backward",
            [*bindings, scratch],
            [
                piece.rows, piece.steps, length, width, piece.chunks, segments, piece.segment_chunks, rows_at,
                flags_at, d_a_at, d_vectors_at, shares_at,
                *_place(s.u, row), *_place(s.delta, row), *_place(s.z, row), *_place(dy, row),
                *_place(grads.du, row), *_place(grads.ddelta, row), *_place(grads.dz, row),
            ],
            (blocks, piece.rows, segments),
            constants,
        )  # fmt: skip
        if gated and not fused:
            self.dispatch(
                "scan_gate:gate_finish", [s.z, dy, piece.packed, grads.dz], gate_params, elements, flags
            )

        def reduce(
            entry: str, bindings: list[Any], at: int, places: list[tuple[int, int]], count: int, **flags: bool
        ) -> None:
            flat = [number for place in (*places, (0, 0), (0, 0))[:3] for number in place]
            params = [piece.rows, piece.steps, length, width, states, segments, blocks, at, d_vectors_at, 0]
            self.dispatch(
                f"scan_reduce:{entry}", [scratch, *bindings], [*params, *flat], self._groups(count),
                {"NJ": groups, **flags},
            )  # fmt: skip

        reduce(
            "reduce_rows", [grads.db, grads.dc], shares_at, [_place(grads.db, row), _place(grads.dc, row)],
            piece.rows * piece.steps * 2 * groups,
        )  # fmt: skip
        d_a, d_d, d_bias = sums
        if not d_a is d_d is d_bias is None:
            reduce(
                "reduce_channels", [d_a, d_d, d_bias], d_a_at, [_place(d_a), _place(d_d), _place(d_bias)],
                width * (groups + 1), HAS_D_A=d_a is not None, HAS_D_D=d_d is not None,
                HAS_D_BIAS=d_bias is not None,
            )  # fmt: skip
        if d_initial is not None:
            reduce(
                "unpack_state", [d_initial], 0, [_place(d_initial, piece.first_row * width)],
                piece.rows * width * groups,
            )  # fmt: skip

    def _segment_gradients(
        self, s: ScanSaved, piece: ScanPiece, dy: Any, carry: Block, rows_at: int, flags_at: int, span: int
    ) -> None:
        """The gradient of the state at the end of each segment, into `carry`, from that of the last."""
        width = s.a.shape[0]
        length = s.u.shape[1]
        row = piece.first_row * length + piece.first_step
        gated = s.z is not None
        params = [
            piece.rows, piece.steps, length, width, piece.chunks, 1, piece.segments, piece.segment_chunks,
            rows_at, flags_at, 0, 0, *_place(s.delta, row), *_place(s.z, row), *_place(dy, row),
        ]  # fmt: skip
        self.dispatch(
            "scan_segments_quad:gradients",
            [s.delta, *([s.z] if gated else []), dy, piece.packed, carry],
            params,
            (-(-width // _QUAD_CHANNELS), piece.rows, piece.segments - 1),
            {
                "SOFTPLUS": s.softplus, "MASKED": s.seq_start is not None or s.lengths is not None,
                "READ_Z": gated, **self._quad(span),
            },
        )  # fmt: skip
        self.dispatch(
            "scan_segments_quad:join_gradients", [piece.packed, carry, piece.sums], params,
            self._groups(piece.rows * width * 4), self._quad(span),
        )  # fmt: skip

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
        self.check(op, {"state": state, "out": out}, reads)
        if self.device.limits.storage_buffers < _FUSED_BINDINGS:
            # The sequence op packs its operands.
            return super().selective_scan_step(
                u, delta, a, b, c, d, z, delta_bias, state, delta_softplus=delta_softplus,
                discretization=discretization, out=out,
            )  # fmt: skip
        batch, width = u.shape
        y: Any = self.new(u.shape) if out is None else out
        operands = [u, delta, a, b, c, d, z, delta_bias, state, y]
        self.dispatch(
            "scan_step",
            operands,
            [batch, width, a.shape[1], 0, *(number for t in operands for number in _place(t))],  # type: ignore[arg-type]
            self._groups(batch * width),
            {
                "ZOH": discretization == "zoh", "SOFTPLUS": bool(delta_softplus), "HAS_D": d is not None,
                "HAS_Z": z is not None, "HAS_DELTA_BIAS": delta_bias is not None,
            },
        )  # fmt: skip
        return y
