"""AdamW on the CPU: the numbers of SPEC 5, the guard, clipping, the trust region."""

import numpy as np
import pytest
from cython_support import assert_close, bits, cython, normal

from mamba_fast.backends.oracle import create_backend as create_oracle

DEFAULTS = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def step(backend, p, g, m, v, stats, *, n, norm=None, weight_decay=0.01, **options):
    norm = backend.global_norm([g]) if norm is None else backend.from_host(np.array([norm]))
    backend.adamw_(
        [p], [g], [m], [v], weight_decay=[weight_decay], step=n, grad_norm=norm, stats=stats,
        **{**DEFAULTS, **options},
    )  # fmt: skip


def scalar(value):
    return np.full((1, 1), value, np.float32)


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (1, {}, 0.999899000002),
        (1, {"lr": 1.0, "max_delta": 0.05}, 0.94),
        (3, {"lr": 0.1}, 0.697302904994),
    ],
)
def test_the_values_worked_out_by_hand(steps, options, expected):
    p, m, v, stats = scalar(1.0), scalar(0.0), scalar(0.0), np.zeros(4, np.float32)
    for n in range(1, steps + 1):
        step(cython(), p, scalar(0.5), m, v, stats, n=n, **options)
    assert p[0, 0] == pytest.approx(expected, rel=2e-7)


@pytest.mark.parametrize("count", [1, 3, 16, 16385, 40_007])
def test_ten_steps_match_float64(count):
    rng = np.random.default_rng(count)
    p, m, v, stats = normal(rng, count), *np.zeros((2, count), np.float32), np.zeros(4, np.float32)
    p64, m64, v64 = p.astype(np.float64), np.zeros(count), np.zeros(count)
    for n in range(1, 11):
        g = normal(rng, count)
        step(cython(), p, g, m, v, stats, n=n, lr=1e-2, max_grad_norm=1.0, max_delta=0.012)
        g64 = g * min(1.0, 1.0 / (np.linalg.norm(g.astype(np.float64)) + 1e-6))
        m64 = 0.9 * m64 + 0.1 * g64
        v64 = 0.999 * v64 + 0.001 * g64 * g64
        change = 1e-2 * (m64 / (1 - 0.9**n)) / (np.sqrt(v64 / (1 - 0.999**n)) + 1e-8)
        p64 = p64 * (1 - 1e-2 * 0.01) - np.clip(change, -0.012, 0.012)
    for actual, expected in ((p, p64), (m, m64), (v, v64)):
        assert_close(actual, expected, "output")


def test_weight_decay_is_not_lost_in_rounding():
    # lr * wd = 1e-7 is near the spacing of float32 below 1: a factor 1 - lr * wd would be off by a fifth.
    p = np.full(4, 0.01, np.float32)
    g, m, v, stats = *np.zeros((3, 4), np.float32), np.zeros(4, np.float32)
    for n in range(1, 2001):
        step(cython(), p, g, m, v, stats, n=n, lr=1e-5, weight_decay=0.01)
    assert (0.01 - p[0]) / 0.01 == pytest.approx(2000e-7, rel=0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 20_000, 49_999])
def test_one_bad_gradient_element_changes_no_bit_and_is_counted(bad, where):
    rng = np.random.default_rng(where)
    backend = cython()
    p, m, v = normal(rng, 50_000), normal(rng, 50_000), np.abs(normal(rng, 50_000))
    g = normal(rng, 50_000)
    g[where] = bad
    stats = np.array([2.0, 0.5, 0.25, 7.0], np.float32)
    before = bits(p, m, v)
    step(backend, p, g, m, v, stats, n=9)
    assert bits(p, m, v) == before
    assert stats[0] == 3.0
    assert not np.isfinite(stats[1])
    assert stats[2:].tolist() == [0.0, 0.0]


def test_a_skipped_step_leaves_no_trace_in_later_ones():
    rng = np.random.default_rng(5)
    g1, g2, start = normal(rng, 30), normal(rng, 30), normal(rng, 30)
    results = []
    for with_nan in (False, True):
        p, m, v, stats = start.copy(), *np.zeros((2, 30), np.float32), np.zeros(4, np.float32)
        gradients = [g1, np.full(30, np.nan, np.float32), g2] if with_nan else [g1, g2]
        for n, g in enumerate(gradients, start=1):
            step(cython(), p, g, m, v, stats, n=n)
        results.append(bits(p, m, v))
    assert results[0] == results[1]


def test_gradients_as_large_as_1e25_are_clipped_not_skipped():
    g = np.full(1000, 1e25, np.float32)
    p, m, v, stats = np.ones(1000, np.float32), *np.zeros((2, 1000), np.float32), np.zeros(4, np.float32)
    step(cython(), p, g, m, v, stats, n=1, max_grad_norm=1.0, weight_decay=0.0)
    assert stats[0] == 0.0
    assert_close(p, np.full(1000, 1.0 - 1e-4), "output")
    assert_close(stats[1:3], np.array([1e25 * 1000**0.5, 1.0 / (1e25 * 1000**0.5)]), "output")


def test_stats_hold_the_norm_the_clip_factor_and_the_number_of_clamped_elements():
    p, m, v, stats = np.ones(5, np.float32), *np.zeros((2, 5), np.float32), np.zeros(4, np.float32)
    g = np.array([3.0, -4.0, 0.0, 0.0, 0.0], np.float32)
    step(cython(), p, g, m, v, stats, n=1, lr=1.0, max_grad_norm=2.5, max_delta=0.05, weight_decay=0.0)
    assert_close(stats, np.array([0.0, 5.0, 0.5, 2.0]), "output")
    assert_close(p, np.array([0.95, 1.05, 1.0, 1.0, 1.0]), "output")


def test_a_step_that_is_not_finite_is_zero():
    # v overflows to infinity where nothing clips 1e25, and a moment that is already infinite gives inf / inf.
    p, stats = np.ones(2, np.float32), np.zeros(4, np.float32)
    m, v = np.array([0.0, np.inf], np.float32), np.array([0.0, np.inf], np.float32)
    step(cython(), p, np.array([1e25, 1.0], np.float32), m, v, stats, n=1, weight_decay=0.0, max_delta=0.1)
    assert np.array_equal(p, np.ones(2, np.float32))
    assert stats[3] == 0.0


@pytest.mark.parametrize("count", [3, 16, 40_007])
def test_an_element_whose_square_overflows_keeps_its_moments_and_goes_on(count):
    rng = np.random.default_rng(count)
    p, m, v = normal(rng, count), np.abs(normal(rng, count)), np.abs(normal(rng, count))
    g, stats = normal(rng, count), np.zeros(4, np.float32)
    large = np.arange(count) % 3 == 1
    g[large] = np.where(rng.random(large.sum()) < 0.5, 1e20, -1e25).astype(np.float32)
    before, expected = (p.copy(), m.copy(), v.copy()), (p.copy(), m.copy(), v.copy())
    options = {"lr": 1e-2, "weight_decay": 0.0}
    step(cython(), p, g, m, v, stats, n=5, **options)
    without = np.where(large, np.float32(0.0), g)
    step(cython(), expected[0], without, *expected[1:], np.zeros(4, np.float32), n=5, **options)
    for now, old, other in zip((p, m, v), before, expected, strict=True):
        assert bits(now[large]) == bits(old[large])
        assert bits(now[~large]) == bits(other[~large])
    step(cython(), p, np.ones(count, np.float32), m, v, stats, n=6, **options)
    assert np.isfinite(p).all()
    assert (p[large] != before[0][large]).all()


def test_a_step_number_that_no_attempt_can_have_is_an_error():
    p, g, m, v = np.ones((4, 1), np.float32)
    with pytest.raises(ValueError, match="step is 2 after 2 skipped"):
        step(cython(), p, g, m, v, np.array([2, 0, 0, 0], np.float32), n=2)


def test_column_views_are_updated_in_place_and_nothing_beside_them():
    rng = np.random.default_rng(6)
    backend, hosts = cython(), [normal(rng, 9, 11) for _ in range(4)]
    hosts[3] = np.abs(hosts[3])
    views = [backend.view(backend.from_host(h), -1, 3, 8) for h in hosts]
    whole = [v.base for v in views]
    expected = [backend.from_host(h[:, 3:8]) for h in hosts]
    step(backend, *views, np.zeros(4, np.float32), n=3)
    step(backend, *expected, np.zeros(4, np.float32), n=3)
    assert bits(*views) == bits(*expected)
    for base, host in zip(whole, hosts, strict=True):
        assert bits(base[:, :3], base[:, 8:]) == bits(host[:, :3], host[:, 8:])


def test_one_step_matches_the_oracle_with_and_without_decay():
    rng = np.random.default_rng(7)
    hosts = [normal(rng, 4, 7), normal(rng, 4, 7), normal(rng, 4, 7), np.abs(normal(rng, 4, 7))]
    for decay in (0.0, 0.1):
        results = []
        for backend in (create_oracle(), cython()):
            tensors = [backend.from_host(h) for h in hosts]
            stats = backend.zeros((4,))
            step(backend, *tensors, stats, n=4, lr=0.01, weight_decay=decay, max_grad_norm=0.7)
            results.append([*tensors, stats])
        for expected, actual in zip(*results, strict=True):
            assert_close(actual, expected, "output")
