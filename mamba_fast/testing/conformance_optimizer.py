"""Conformance of the global norm and of AdamW: its guard, clipping and trust region (SPEC 5)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Backend
from mamba_fast.testing.cases import Arrays
from mamba_fast.testing.conformance_base import Checks
from mamba_fast.testing.runs import Arena, no_transfers, oracle

__all__ = ["OptimizerChecks"]

_SHAPES = ((3, 5), (65,), (1,), (7, 13))
_DECAY = (0.01, 0.0, 0.0, 0.1)
_DEFAULTS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def _gradients(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng([step, 17])
    return [rng.standard_normal(shape).astype(np.float32) for shape in _SHAPES]


class _Training:
    """Parameters and moments on a backend, stepped with gradients from the host."""

    def __init__(self, backend: Backend, layout: str = "contiguous", **options: Any) -> None:
        self.backend = backend
        self.arena = Arena(backend, layout)
        self.options = {**_DEFAULTS, "weight_decay": _DECAY, **options}
        rng = np.random.default_rng(5)
        self.params = [
            self.arena.write(rng.standard_normal(shape).astype(np.float32), "params") for shape in _SHAPES
        ]
        self.m = [self.arena.write(np.zeros(shape, np.float32), "m") for shape in _SHAPES]
        self.v = [self.arena.write(np.zeros(shape, np.float32), "v") for shape in _SHAPES]
        self.stats = backend.zeros((4,))
        self.attempts = 0

    def step(self, gradients: list[np.ndarray]) -> None:
        self.attempts += 1
        tensors = [self.arena.read(gradient, "a gradient") for gradient in gradients]
        with no_transfers(self.backend):
            norm = self.backend.global_norm(tensors)
            self.backend.adamw_(
                self.params,
                tensors,
                self.m,
                self.v,
                step=self.attempts,
                grad_norm=norm,
                stats=self.stats,
                **self.options,
            )

    def read(self) -> Arrays:
        """All that a step may change, and the check that nothing else did."""
        self.arena.check()
        lists = {"params": self.params, "m": self.m, "v": self.v}
        return {
            name: np.concatenate([self.backend.to_host(tensor).ravel() for tensor in tensors])
            for name, tensors in lists.items()
        }

    def read_stats(self) -> np.ndarray:
        return self.backend.to_host(self.stats)


def _spoil(gradients: list[np.ndarray], value: float) -> list[np.ndarray]:
    spoilt = [gradient.copy() for gradient in gradients]
    spoilt[3][2, 4] = value
    return spoilt


def _scalar(backend: Backend, gradient: float, steps: int, **options: Any) -> np.ndarray:
    """The parameter 1 after some steps with one and the same gradient."""
    param, m, v = backend.from_host([1.0]), backend.zeros((1,)), backend.zeros((1,))
    g, stats = backend.from_host([gradient]), backend.zeros((4,))
    for step in range(1, steps + 1):
        backend.adamw_(
            [param], [g], [m], [v], beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=[0.01], step=step,
            grad_norm=backend.global_norm([g]), max_grad_norm=1.0, stats=stats, **options,
        )  # fmt: skip
    return backend.to_host(param)


class OptimizerChecks(Checks):
    """`global_norm` and `adamw_`."""

    # ---- norm ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    def test_global_norm_is_the_norm_of_all_elements(self, backend: Backend, layout: str) -> None:
        arena = Arena(backend, layout)
        norm = backend.global_norm([arena.read(gradient) for gradient in _gradients(1)])
        assert tuple(norm.shape) == (1,)
        everything = np.concatenate([gradient.ravel() for gradient in _gradients(1)]).astype(np.float64)
        self.assert_matches({"norm": backend.to_host(norm)}, {"norm": [np.linalg.norm(everything)]})
        arena.check()

    @pytest.mark.parametrize("size", [1e25, 1e-25])
    def test_global_norm_neither_overflows_nor_underflows(self, backend: Backend, size: float) -> None:
        norm = backend.global_norm([backend.from_host(np.full((3, 100), size, dtype=np.float32))])
        self.assert_matches(
            {"norm": backend.to_host(norm)}, {"norm": [float(np.float32(size)) * np.sqrt(300.0)]}
        )

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
    @pytest.mark.parametrize("place", [0, 9999], ids=["first", "last"])
    def test_global_norm_is_not_finite_when_one_element_is_not(
        self, backend: Backend, value: float, place: int
    ) -> None:
        gradient = np.ones(10_000, dtype=np.float32)
        gradient[place] = value
        norm = backend.global_norm([backend.from_host([1.0]), backend.from_host(gradient)])
        assert not np.isfinite(backend.to_host(norm)).any()

    def test_global_norm_of_zeros_is_zero(self, backend: Backend) -> None:
        assert backend.to_host(backend.global_norm([backend.zeros((3, 5)), backend.zeros((2,))])) == [0.0]

    # ---- steps --------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"max_grad_norm": 1.0}, {"max_grad_norm": 1e6}, {"max_delta": 5e-3}, {"lr": 0.0}],
        ids=["plain", "clipped", "not_clipped", "trust_region", "no_rate"],
    )
    def test_adamw_matches_the_oracle_over_five_steps(
        self, backend: Backend, layout: str, options: dict[str, float]
    ) -> None:
        runs = [_Training(engine, layout, **options) for engine in (backend, oracle())]
        for step in range(5):
            for run in runs:
                run.step(_gradients(step))
        self.assert_matches(runs[0].read(), runs[1].read())
        self.assert_matches({"norm": runs[0].read_stats()[:3]}, {"norm": runs[1].read_stats()[:3]})
        assert runs[0].read_stats()[3] == runs[1].read_stats()[3]

    @pytest.mark.parametrize(
        ("steps", "options", "value"),
        [
            (1, {"lr": 1e-4}, 0.999899000002),
            (1, {"lr": 1.0, "max_delta": 0.05}, 0.94),
            (3, {"lr": 0.1}, 0.697302904994),
        ],
        ids=["defaults", "trust_region", "three_steps"],
    )
    def test_adamw_gives_the_values_worked_out_by_hand(
        self, backend: Backend, steps: int, options: dict[str, float], value: float
    ) -> None:
        self.assert_matches({"params": _scalar(backend, 0.5, steps, **options)}, {"params": [value]})

    def test_two_runs_of_adamw_give_the_same_bits(self, backend: Backend) -> None:
        results = []
        for _ in range(2):
            run = _Training(backend, max_grad_norm=1.0)
            for step in range(3):
                run.step(_gradients(step))
            results.append({**run.read(), "stats": run.read_stats()})
        self.assert_same_bits(*results)

    def test_adamw_reports_norm_clip_factor_and_clamped_elements(self, backend: Backend) -> None:
        param, m, v = backend.zeros((4,)), backend.zeros((4,)), backend.zeros((4,))
        g, stats = backend.from_host([3.0, 0.0, 4.0, 0.0]), backend.zeros((4,))
        backend.adamw_(
            [param], [g], [m], [v], lr=1.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=[0.0], step=1,
            grad_norm=backend.global_norm([g]), max_grad_norm=0.5, max_delta=0.25, stats=stats,
        )  # fmt: skip
        self.assert_matches({"norm": backend.to_host(stats)}, {"norm": [0.0, 5.0, 0.5 / (5.0 + 1e-6), 2.0]})
        self.assert_matches({"params": backend.to_host(param)}, {"params": [-0.25, 0.0, -0.25, 0.0]})

    # ---- the guard ----------------------------------------------------------------------------

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
    @pytest.mark.parametrize("layout", ["contiguous", "slab"])
    def test_adamw_skips_a_step_whose_gradient_is_not_finite(
        self, backend: Backend, value: float, layout: str
    ) -> None:
        run = _Training(backend, layout, max_grad_norm=1.0, max_delta=0.5)
        run.step(_gradients(0))
        before, stats = run.read(), run.read_stats()
        run.step(_spoil(_gradients(1), value))
        self.assert_same_bits(run.read(), before)
        after = run.read_stats()
        assert after[0] == stats[0] + 1.0
        assert not np.isfinite(after[1])
        assert after[2:].tolist() == [0.0, 0.0]

    def test_the_step_after_a_skipped_one_reports_its_own_norm(self, backend: Backend) -> None:
        run = _Training(backend, max_grad_norm=1.0)
        run.step(_spoil(_gradients(0), np.nan))
        run.step(_gradients(1))
        norm = np.linalg.norm(np.concatenate([g.ravel() for g in _gradients(1)]).astype(np.float64))
        self.assert_matches({"norm": run.read_stats()}, {"norm": [1.0, norm, 1.0 / (norm + 1e-6), 0.0]})

    def test_a_skipped_step_leaves_no_trace(self, backend: Backend) -> None:
        spoilt, clean = _Training(backend, max_grad_norm=1.0), _Training(backend, max_grad_norm=1.0)
        for step in range(4):
            if step in (0, 2):
                spoilt.step(_spoil(_gradients(9), np.nan))
            for run in (spoilt, clean):
                run.step(_gradients(step))
        self.assert_same_bits(spoilt.read(), clean.read())
        assert spoilt.read_stats().tolist() == [2.0, *clean.read_stats()[1:].tolist()]

    def test_adamw_clips_gradients_of_1e25_instead_of_skipping_them(self, backend: Backend) -> None:
        runs = [_Training(engine, max_grad_norm=1.0) for engine in (backend, oracle())]
        for step in range(2):
            for run in runs:
                run.step([gradient * np.float32(1e25) for gradient in _gradients(step)])
        self.assert_matches(runs[0].read(), runs[1].read())
        assert runs[0].read_stats()[0] == 0.0

    def test_a_step_that_is_not_finite_is_zero_for_that_element_alone(self, backend: Backend) -> None:
        start = np.array([1.0, 2.0, 3.0], dtype=np.float32)
        param, v = backend.from_host(start), backend.zeros((3,))
        m = backend.from_host(np.array([np.nan, np.inf, 0.0], dtype=np.float32))
        g, stats = backend.from_host(np.ones(3, dtype=np.float32)), backend.zeros((4,))
        backend.adamw_(
            [param], [g], [m], [v], lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=[0.0], step=1,
            grad_norm=backend.global_norm([g]), max_delta=0.1, stats=stats,
        )  # fmt: skip
        self.assert_matches({"params": backend.to_host(param)}, {"params": [1.0, 2.0, 2.9]})

    @pytest.mark.parametrize("layout", ["contiguous", "slab"])
    def test_a_large_gradient_that_nothing_clips_does_not_freeze_its_element(
        self, backend: Backend, layout: str
    ) -> None:
        arena = Arena(backend, layout)
        # Its square is beyond float32. A backend of wider range takes the step and goes on from there.
        large = np.array([1e20, 1.0, -1e20], dtype=np.float32)
        param, m, v = (arena.write(np.full(3, x, np.float32)) for x in (1.0, 0.5, 0.25))
        stats = backend.zeros((4,))
        values = []
        for step, gradient in enumerate([large, *[np.ones(3, np.float32)] * 3], start=3):
            g = arena.read(gradient)
            backend.adamw_(
                [param], [g], [m], [v], **_DEFAULTS, weight_decay=[0.0], step=step,
                grad_norm=backend.global_norm([g]), stats=stats,
            )  # fmt: skip
            values.append(backend.to_host(param))
            for tensor in (param, m, v):
                assert np.isfinite(backend.to_host(tensor)).all()
        for before, after in pairwise(values):
            assert (after != before).all()
        assert backend.to_host(stats)[0] == 0.0
        arena.check()

    def test_adamw_of_lists_of_different_lengths_is_an_error(self, backend: Backend) -> None:
        one, stats = [backend.zeros((2,))], backend.zeros((4,))
        with pytest.raises(ValueError, match="adamw_"):
            backend.adamw_(
                one, one, [backend.zeros((2,))], [backend.zeros((2,))], **_DEFAULTS, weight_decay=[0.0, 0.0],
                step=1, grad_norm=backend.zeros((1,)), stats=stats,
            )  # fmt: skip
