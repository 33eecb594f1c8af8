"""Global norm and AdamW of the oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mamba_fast.registry import get_backend

oracle = get_backend("oracle")

# Printed to twelve decimals in the specification.
TWELVE_DECIMALS = 5.1e-13

DEFAULTS: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_grad_norm": 1.0}


class Training:
    """Tensors that are stepped with the gradients given."""

    def __init__(self, *values: Any, weight_decay: list[float] | None = None, **options: Any) -> None:
        self.params = [np.array(value, dtype=np.float64) for value in values]
        self.m, self.v = ([np.zeros_like(p) for p in self.params] for _ in range(2))
        self.weight_decay = [0.01] * len(values) if weight_decay is None else weight_decay
        self.options = {**DEFAULTS, **options}
        self.stats = np.zeros(4)
        self.attempts = 0

    def step(self, *grads: Any) -> None:
        self.attempts += 1
        tensors = [np.array(grad, dtype=np.float64) for grad in grads]
        kept = [tensor.tobytes() for tensor in tensors]
        oracle.adamw_(
            self.params, tensors, self.m, self.v, weight_decay=self.weight_decay, step=self.attempts,
            grad_norm=oracle.global_norm(tensors), stats=self.stats, **self.options,
        )  # fmt: skip
        assert [tensor.tobytes() for tensor in tensors] == kept, "gradients are only read"

    def bits(self) -> list[bytes]:
        return [tensor.tobytes() for tensor in (*self.params, *self.m, *self.v)]


def test_global_norm_is_over_all_tensors():
    frame = np.full((2, 3), 9.0)
    frame[:, 1] = [2.0, 4.0]
    assert oracle.global_norm([np.array([[1.0], [2.0]]), oracle.view(frame, -1, 1, 2)]).tolist() == [5.0]


@pytest.mark.parametrize("magnitude", [1e25, 1e200, 1e-200])
def test_global_norm_neither_overflows_nor_vanishes(magnitude: float):
    assert oracle.global_norm([np.full(10000, magnitude)]).tolist() == [pytest.approx(100.0 * magnitude)]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_global_norm_is_not_finite_when_any_element_is_not(wrong: float):
    assert not np.isfinite(oracle.global_norm([np.ones(3), np.array([1.0, wrong])])).any()


def test_one_step_at_the_defaults_by_hand():
    training = Training([[1.0]])
    training.step([[0.5]])
    assert training.params[0][0, 0] == pytest.approx(0.999899000002, abs=TWELVE_DECIMALS)


def test_the_trust_region_by_hand():
    training = Training([[1.0]], lr=1.0, max_delta=0.05)
    training.step([[0.5]])
    assert training.params[0][0, 0] == pytest.approx(0.94, abs=TWELVE_DECIMALS)


def test_three_steps_by_hand():
    training = Training([[1.0]], lr=0.1)
    for _ in range(3):
        training.step([[0.5]])
    assert training.params[0][0, 0] == pytest.approx(0.697302904994, abs=TWELVE_DECIMALS)


def test_moments_and_bias_correction_by_the_formulas():
    training = Training([1.0, -2.0], weight_decay=[0.0], max_grad_norm=0.0)
    p, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for t, g in enumerate(np.array([[0.5, -3.0], [2.0, 0.1], [-1.0, 0.0]]), start=1):
        training.step(g)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        p = p - 1e-4 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    assert training.params[0].tolist() == pytest.approx(p.tolist(), rel=1e-14)
    assert training.m[0].tolist() == pytest.approx(m.tolist(), rel=1e-14)
    assert training.v[0].tolist() == pytest.approx(v.tolist(), rel=1e-14)


def test_gradients_above_the_norm_are_clipped_together():
    training = Training([[0.0]], [0.0], max_grad_norm=1.0)
    training.step([[3.0]], [4.0])
    clip = 1.0 / (5.0 + 1e-6)
    assert training.m[0][0, 0] == pytest.approx(0.1 * 3.0 * clip, rel=1e-14)
    assert training.m[1][0] == pytest.approx(0.1 * 4.0 * clip, rel=1e-14)
    assert training.stats.tolist() == [0.0, 5.0, clip, 0.0]


@pytest.mark.parametrize(("max_grad_norm", "grad"), [(0.0, 30.0), (1.0, 0.3)])
def test_gradients_below_the_norm_or_without_one_are_not_clipped(max_grad_norm: float, grad: float):
    training = Training([0.0], max_grad_norm=max_grad_norm)
    training.step([grad])
    assert training.m[0][0] == pytest.approx(0.1 * grad, rel=1e-14)
    assert training.stats.tolist() == [0.0, grad, 1.0, 0.0]


def test_gradients_of_1e25_are_clipped_not_skipped():
    training = Training(np.ones((3, 4)))
    training.step(np.full((3, 4), 1e25))
    assert training.stats[0] == 0.0
    assert (training.params[0] < 1.0).all()
    assert np.isfinite(training.params[0]).all()


def test_weight_decay_is_each_tensors_own():
    training = Training([[1.0]], [1.0], weight_decay=[0.01, 0.0], lr=0.1)
    training.step([[0.0]], [0.0])
    assert training.params[0][0, 0] == pytest.approx(0.999, rel=1e-14)
    assert training.params[1][0] == 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(wrong: float):
    training = Training([[1.0, 2.0]], [3.0])
    training.step([[0.5, -0.5]], [1.0])
    bits = training.bits()
    training.step([[0.5, wrong]], [1.0])
    assert training.bits() == bits
    assert training.stats[0] == 1.0
    assert not math.isfinite(training.stats[1])
    assert training.stats[2:].tolist() == [0.0, 0.0]


def test_an_element_whose_square_overflows_keeps_its_moments_and_goes_on():
    training = Training([1.0, 1.0], max_grad_norm=0.0, weight_decay=[0.0])
    training.step([1.0, 1.0])
    param, m, v = (tensors[0].copy() for tensors in (training.params, training.m, training.v))
    training.step([1e160, 1.0])
    assert (training.params[0][0], training.m[0][0], training.v[0][0]) == (param[0], m[0], v[0])
    assert training.params[0][1] < param[1]
    training.step([1.0, 1.0])
    assert training.params[0][0] < param[0]


def test_a_norm_of_another_shape_is_an_error():
    p = [np.ones(1)]
    with pytest.raises(ValueError, match=r"adamw_: grad_norm has shape \(3,\), expected \(1,\)"):
        oracle.adamw_(
            p, p, p, p, weight_decay=[0.0], step=1, grad_norm=np.ones(3), stats=np.zeros(4), **DEFAULTS
        )


def test_a_skipped_step_leaves_no_trace():
    straight, skipping = Training([1.0]), Training([1.0])
    for grad in (1.0, math.nan, 1.0, 1.0, 1.0):
        skipping.step([grad])
        if grad == grad:
            straight.step([grad])
    assert skipping.bits() == straight.bits()
    assert skipping.params[0][0] < (1.0 - 1e-6) ** 4, "more than decay alone"


def test_a_step_that_is_not_finite_is_zero():
    training = Training([[1.0, 1.0]], eps=0.0, lr=0.1)
    training.step([[0.0, 0.5]])
    assert training.params[0].tolist() == [[pytest.approx(0.999), pytest.approx(0.899)]]


def test_clamped_elements_are_counted():
    training = Training([[0.0, 0.0, 0.0]], lr=1.0, max_delta=0.05, max_grad_norm=0.0)
    training.step([[1.0, -1.0, 0.0]])
    assert training.params[0].tolist() == [[-0.05, 0.05, 0.0]]
    assert training.stats[3] == 2.0


def test_no_trust_region_without_max_delta():
    training = Training([[0.0]], lr=1.0)
    training.step([[1.0]])
    assert training.params[0][0, 0] == pytest.approx(-1.0, rel=1e-6)


def test_a_column_view_is_stepped_and_nothing_around_it():
    frame = np.ones((2, 4))
    view = oracle.view(frame, -1, 1, 3)
    zeros = [np.zeros((2, 2)) for _ in range(2)]
    grad = np.ones((2, 2))
    oracle.adamw_(
        [view], [grad], zeros[:1], zeros[1:], weight_decay=[0.0], step=1, grad_norm=np.array([2.0]),
        stats=np.zeros(4), **DEFAULTS,
    )  # fmt: skip
    assert (frame[:, [0, 3]] == 1.0).all()
    assert (view < 1.0).all()


def test_a_step_count_below_the_skipped_ones_is_an_error():
    p = [np.ones(1)]
    with pytest.raises(ValueError, match="adamw_: step is 3 after 3 skipped steps"):
        oracle.adamw_(
            p, p, [np.zeros(1)], [np.zeros(1)], weight_decay=[0.0], step=3, grad_norm=np.ones(1),
            stats=np.array([3.0, 0.0, 0.0, 0.0]), **DEFAULTS,
        )  # fmt: skip


def test_unequal_lists_are_an_error():
    p = [np.ones(1)]
    with pytest.raises(ValueError, match="lengths 1, 1, 1, 1 and 0"):
        oracle.adamw_(
            p, p, p, p, weight_decay=[], step=1, grad_norm=np.ones(1), stats=np.zeros(4), **DEFAULTS
        )
