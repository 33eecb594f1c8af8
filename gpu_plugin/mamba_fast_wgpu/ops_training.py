"""The loss, the norm of all gradients and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mamba_fast import checks
from mamba_fast.backend import Tensor
from mamba_fast_wgpu.core import Core, numbered

__all__ = ["TrainingOps"]

_WG = 256
_EACH = 4
"""Elements that a thread of `optim:step` updates."""


class TrainingOps(Core):
    """`cross_entropy_`, `global_norm`, `adamw_`."""

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
        self.check(op, {"logits": logits}, {}, {"targets": targets})
        losses = self.new(targets.shape)
        rows, width = logits.shape
        params = [
            rows, width, logits.offset, logits.row_stride, targets.offset, ignore_index, 0, float(scale)
        ]  # fmt: skip
        flags = {"WG": 64 if width <= 256 else 256, "GRAD": grad}
        self.dispatch("loss", [targets, logits, losses], params, rows, flags)
        return losses

    def global_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        op = "global_norm"
        self.check(op, {}, numbered(tensors=tensors))
        tensors = [part for tensor in tensors for (part,) in self.spread(tensor)]
        shares = [self._share(tensor.size) for tensor in tensors]
        total = sum(groups for _, groups in shares)
        partial, norm = self.new((max(total, 1), 4)), self.new((1,))
        first = 0
        for tensor, (each, groups) in zip(tensors, shares, strict=True):
            rows, width = tensor.flat
            params = [rows, width, groups, tensor.offset, tensor.row_stride, 0, each, first, 0, 0, 0.0]
            if groups:
                self.dispatch("reduce:norm_partial", [tensor, partial], params, groups)
            first += groups
        self.dispatch("reduce:norm_final", [partial, norm], [0, 0, total, 0, 0, 0, 0, 0, 0, 0, 0.0], 1)
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
        writes = {**numbered(params=params, m=m, v=v), "stats": stats}
        self.check(op, writes, {**numbered(grads=grads), "grad_norm": grad_norm})
        if step < 1:
            raise ValueError(f"{op}: step is {step}; it counts all attempts from 1")
        counted = max_delta > 0.0
        parts = [
            (operands, float(lr * wd))
            for p, g, mi, vi, wd in zip(params, grads, m, v, weight_decay, strict=True)
            for operands in self.spread(p, g, mi, vi)
        ]
        groups = [-(-operands[0].size // (_WG * _EACH)) for operands, _ in parts]
        factors = self.new((4,))
        counts = self.new((max(sum(groups), 1),)) if counted else None
        common = [grad_norm.offset, stats.offset, float(step), float(lr), _log(beta1), _log(beta2)]
        common += [float(beta1), 1.0 - beta1, float(beta2), 1.0 - beta2, float(eps)]
        ends = [float(max_delta), float(max_grad_norm)]
        nowhere = [0] * 12
        self.dispatch("optim:prepare", [grad_norm, factors, stats], [*nowhere, *common, 0.0, *ends], 1)
        first = 0
        for (operands, decay), n in zip(parts, groups, strict=True):
            p, g, mi, vi = operands
            rows, width = p.flat if all(t.contiguous for t in operands) else (p.rows, p.width)
            places = [number for t in operands for number in (t.offset, t.row_stride)]
            if n:
                self.dispatch(
                    "optim:step", [g, factors, p, mi, vi, counts],
                    [rows, width, n, first, *places, *common, decay, *ends],
                    n, {"EACH": _EACH, "BOUND": counted},
                )  # fmt: skip
            first += n
        end = [0, 0, 0, first if counted else 0, *nowhere[4:], *common, 0.0, *ends]
        self.dispatch("optim:finish", [counts, grad_norm, factors, stats], end, 1)


def _log(beta: float) -> float:
    """log(beta); a beta of 0 has no bias to correct, which a large negative number says as well."""
    return math.log(beta) if beta > 0.0 else -1e4
