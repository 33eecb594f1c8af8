"""Sums, matrix products, normalisation and the embedding."""

from __future__ import annotations

from typing import Any, NamedTuple

from mamba_fast import checks
from mamba_fast.backend import Tensor
from mamba_fast_wgpu.core import Core, read_saved
from mamba_fast_wgpu.tensor import WgpuTensor, view

__all__ = ["MatrixOps"]

_WG = 256
_TILE = 64
_FEW_ROWS = 8
"""Most rows of a product that is bound by reading the other operand once."""
_ENOUGH_TILES = 512
"""Workgroups that keep a large GPU busy: with fewer, k is cut into slices."""
_SHORTEST_SLICE = 256
_LONGEST_DISPATCH = 1 << 37
"""Floating-point operations of one dispatch: a desktop's watchdog kills what takes seconds."""


class LinearSaved(NamedTuple):
    x: WgpuTensor


class NormSaved(NamedTuple):
    x: WgpuTensor
    inv: WgpuTensor


class EmbeddingSaved(NamedTuple):
    ids: WgpuTensor


class MatrixOps(Core):
    """`sum`, `embedding` to `rms_norm_backward`."""

    # ---- sums ---------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        self.check("sum", {}, {"x": x})
        rows, width = x.flat
        each, groups = self._share(x.size)
        partial, total = self.new((groups,)), self.new((1,))
        self.dispatch(
            "reduce:sum", [x, partial],
            [rows, width, groups, x.offset, x.row_stride, 0, each, 0, 0, 0, 0.0], groups,
        )  # fmt: skip
        each = -(-groups // _WG)
        self.dispatch("reduce:sum", [partial, total], [1, groups, 1, 0, groups, 0, each, 0, 0, 0, 0.0], 1)
        return total

    @staticmethod
    def _share(size: int) -> tuple[int, int]:
        """Elements for each thread of a first stage, and its workgroups."""
        each = max(16, -(-size // (_WG * 4096)))
        return each, -(-size // (_WG * each))

    def _add_columns(
        self, partial: WgpuTensor, out: WgpuTensor, alpha: float = 1.0, accumulate: bool = True
    ) -> None:
        """out += alpha * the sum of the rows of partial (rows, out.size)."""
        rows, cols = partial.shape
        groups = -(-cols // _WG)
        self.dispatch(
            "reduce:columns", [partial, out],
            [rows, out.width, groups, 0, cols, out.offset, int(accumulate), 0, cols, out.row_stride, alpha],
            groups,
        )  # fmt: skip

    def _column_sums(self, kernel: str, bindings: list[Any], places: list[int], rows: int, out: Any) -> None:
        """out += sums over rows made by `norm:bias` or `norm:weight`; places are those of x and dy."""
        width = out.shape[-1]
        chunk = max(16, -(-rows // 256))
        chunks = -(-rows // chunk)
        partial = self.new((chunks, width))
        threads = 64 if width <= 64 else 256
        params = [rows, width, *places, 0, width, 0, chunk, 0.0]
        self.dispatch(
            kernel, [*bindings, partial], params, (-(-width // threads), chunks, 1), {"WG": threads}
        )
        self._add_columns(partial, out)

    # ---- embedding ----------------------------------------------------------------------------

    def embedding(
        self, ids: Tensor, table: Tensor, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        checks.embedding(ids, table, out)
        self.check("embedding", {"out": out}, {"table": table}, {"ids": ids})
        y = self.new((*ids.shape, table.shape[1])) if out is None else out
        groups = -(-y.size // _WG)
        for first, stop, part in self.row_parts(table):
            params = self._embedding_params(ids, part, y, groups, first, stop)
            self.dispatch("embedding:forward", [ids, part, y], params, groups)
        return y, EmbeddingSaved(ids) if grad else None

    def embedding_backward(self, dy: Tensor, saved: Any, *, d_table: Tensor) -> None:
        op = "embedding_backward"
        ids = read_saved(op, saved, EmbeddingSaved).ids
        checks.embedding_backward(dy, ids.shape, d_table)
        self.check(op, {"d_table": d_table}, {"dy": dy}, {"ids": ids})
        groups = ids.size * -(-dy.width // _WG)
        for first, stop, part in self.row_parts(d_table):
            params = self._embedding_params(ids, part, dy, groups, first, stop)
            self.dispatch("embedding:backward", [ids, dy, part], params, groups)

    @staticmethod
    def _embedding_params(ids: Any, table: Any, y: Any, groups: int, first: int, stop: int) -> list[int]:
        return [
            ids.size, y.width, groups, ids.width, ids.offset, ids.row_stride, table.offset, table.row_stride,
            y.offset, y.row_stride, first, stop - first,
        ]  # fmt: skip

    # ---- matrix products ----------------------------------------------------------------------

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
        self.check("linear", {"out": out}, {"x": x, "w": w, "bias": bias})
        y = self.new((*x.shape[:-1], w.shape[0])) if out is None else out
        for first, stop, part in self.row_parts(w):
            self._linear_part(
                x, part, None if bias is None else view(bias, 0, first, stop), view(y, -1, first, stop),
                float(alpha), accumulate,
            )  # fmt: skip
        return y, LinearSaved(x) if grad else None

    def _linear_part(
        self, x: Any, w: WgpuTensor, bias: WgpuTensor | None, y: WgpuTensor, alpha: float, accumulate: bool
    ) -> None:
        m, n, k = x.rows, w.shape[0], w.shape[1]
        if m <= _FEW_ROWS:
            groups = m * -(-n // 16)
            params = [
                m, n, k, groups, x.offset, x.row_stride, w.offset, w.row_stride, y.offset, y.row_stride,
                0 if bias is None else bias.offset, alpha,
            ]  # fmt: skip
            flags = {"BIAS": bias is not None, "ACCUMULATE": accumulate}
            self.dispatch("linear_rows", [x, w, bias, y], params, groups, flags)
        else:
            self._product(x, False, w, True, y, (m, n, k), alpha, accumulate, bias)

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
        self.check(op, {"dw": dw, "dbias": dbias, "out": out}, {"dy": dy, "w": w, "x": x})
        rows, n_in = dy.rows, w.shape[1]
        if dw is not None:
            for first, stop, part in self.row_parts(dw):
                columns = view(dy, -1, first, stop)
                self._product(columns, True, x, False, part, (stop - first, n_in, rows), alpha, True)
        if dbias is not None:
            self._column_sums("norm:bias", [dy], [0, 0, dy.offset, dy.row_stride], rows, dbias)
        if not need_dx:
            return None
        dx = self.new(x.shape) if out is None else out
        for first, stop, part in self.row_parts(w):
            columns = view(dy, -1, first, stop)
            added = accumulate or first > 0
            self._product(columns, False, part, False, dx, (rows, n_in, stop - first), alpha, added)
        return dx

    def _product(
        self,
        x: WgpuTensor,
        trans_x: bool,
        y: WgpuTensor,
        trans_y: bool,
        out: WgpuTensor,
        shape: tuple[int, int, int],
        alpha: float,
        accumulate: bool,
        bias: WgpuTensor | None = None,
    ) -> None:
        """out (m, n) = alpha * op(x) (m, k) op(y) (k, n) + bias, or added to out; op transposes if asked."""
        m, n, k = shape
        vectors = self._in_vectors(x, y, bias, out, (k if not trans_x else m, k if trans_y else n, n))
        large = self.wide_products and vectors and min(m, n) > _TILE
        tile = 2 * _TILE if large else _TILE
        tall, wide = -(-m // tile), -(-n // tile)
        slices = 1
        if bias is None and tall * wide < _ENOUGH_TILES:
            slices = max(1, min(_ENOUGH_TILES // (tall * wide), k // _SHORTEST_SLICE))
            slices = min(slices, max(1, self.max_slab_bytes // (4 * m * n)))
        k_slice = -(-k // (16 * slices)) * 16
        slices = -(-k // k_slice)
        flags = {
            "TRANS_X": trans_x,
            "TRANS_Y": trans_y,
            "BIAS": bias is not None,
            "ACCUMULATE": accumulate and slices == 1,
        }
        target = out if slices == 1 else self.new((slices, m * n))
        stride = out.row_stride if slices == 1 else n
        factor = float(alpha) if slices == 1 else 1.0
        places = [
            x.offset, x.row_stride, y.offset, y.row_stride, target.offset, stride, m * n,
            0 if bias is None else bias.offset,
        ]  # fmt: skip
        if large:
            places = [number // 4 for number in places]
        at_a_time = max(1, _LONGEST_DISPATCH // (2 * tile * n * k))
        for first in range(0, tall, at_a_time):
            self.dispatch(
                "linear_wide" if large else "linear",
                [x, y, bias, target],
                [m, n, k, k_slice, *places, first, factor],
                (wide, min(at_a_time, tall - first), slices),
                flags,
            )
        if slices > 1:
            self._add_columns(target, out, float(alpha), accumulate)

    @staticmethod
    def _in_vectors(
        x: WgpuTensor, y: WgpuTensor, bias: WgpuTensor | None, out: WgpuTensor, widths: tuple[int, ...]
    ) -> bool:
        """Whether rows of these widths begin and end at vectors of four."""
        return (
            all(width % 4 == 0 for width in widths)
            and all(tensor.aligned(4) for tensor in (x, y, out))
            and (bias is None or bias.offset % 4 == 0)
        )

    # ---- normalisation ------------------------------------------------------------------------

    def rms_norm(
        self, x: Tensor, w: Tensor | None, eps: float, *, out: Tensor | None = None, grad: bool = True
    ) -> tuple[Tensor, Any]:
        checks.rms_norm(x, w, out)
        self.check("rms_norm", {"out": out}, {"x": x, "w": w})
        y = self.new(x.shape) if out is None else out
        inv = self.new((x.rows,)) if grad else None
        params = [
            x.rows, x.width, x.offset, x.row_stride, y.offset, y.row_stride, 0, 0,
            0 if w is None else w.offset, 0, float(eps),
        ]  # fmt: skip
        flags = {"WG": 64 if x.width <= 128 else 256, "WEIGHT": w is not None, "SAVE": grad}
        self.dispatch("norm:forward", [x, w, y, inv], params, x.rows, flags)
        return y, None if inv is None else NormSaved(x, inv)

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
        self.check(op, {"dw": dw, "out": out}, {"dy": dy, "w": w, "x": x})
        dx = self.new(x.shape) if out is None else out
        places = [x.offset, x.row_stride, dy.offset, dy.row_stride]
        params = [
            x.rows, x.width, *places, dx.offset, dx.row_stride, 0 if w is None else w.offset, 0, 0.0
        ]  # fmt: skip
        flags = {"WG": 64 if x.width <= 128 else 256, "WEIGHT": w is not None, "ACCUMULATE": accumulate}
        self.dispatch("norm:backward", [x, w, dy, inv, dx], params, x.rows, flags)
        if dw is not None:
            self._column_sums("norm:weight", [x, dy, inv], places, x.rows, dw)
        return dx
