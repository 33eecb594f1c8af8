"""The row kernels against the oracle at sizes with tails, and what they promise beyond it."""

import numpy as np
import pytest
from cython_support import assert_close, bits, columns, cython, normal

from mamba_fast.backends.oracle import create_backend as create_oracle

SHAPES = [(1, 1), (1, 7), (3, 8), (5, 17), (40, 33), (67, 5), (130, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "columns"])
def test_rms_norm_matches_the_oracle(shape, weighted, layout):
    rng = np.random.default_rng(shape[0])
    x, dy = normal(rng, *shape), normal(rng, *shape)
    w = normal(rng, shape[-1]) if weighted else None

    def run(backend, place):
        dw = backend.zeros(shape[-1:]) if weighted else None
        weight = None if w is None else backend.from_host(w)
        y, saved = backend.rms_norm(place(x), weight, 1e-5)
        return y, backend.rms_norm_backward(place(dy), saved, weight, dw=dw), dw

    oracle = create_oracle()
    place = cython().from_host if layout == "contiguous" else lambda value: columns(cython(), value)
    for kind, actual, expected in zip(
        ("output", "gradient", "gradient"), run(cython(), place), run(oracle, oracle.from_host), strict=True
    ):
        if expected is not None:
            assert_close(actual, expected, kind)


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_rms_norm_survives_squares_outside_the_range_of_float32(size):
    x = np.full((2, 9), size, np.float32)
    y, _ = cython().rms_norm(x, None, 1e-36)
    assert_close(y, np.ones((2, 9)), "output")


@pytest.mark.parametrize("shape", SHAPES)
def test_bias_gradients_match_a_float64_sum(shape):
    rng = np.random.default_rng(1)
    backend = cython()
    dy, w = normal(rng, *shape), normal(rng, shape[1], 2)
    _, saved = backend.linear(normal(rng, shape[0], 2), w)
    dbias = np.ones(shape[1], np.float32)
    backend.linear_backward(columns(backend, dy), saved, w, dbias=dbias, need_dx=False)
    assert_close(dbias, 1.0 + dy.sum(axis=0, dtype=np.float64), "gradient")


def test_a_bias_gradient_over_many_rows_keeps_its_digits():
    backend, n = cython(), 100_003
    dy = np.full((n, 1), 0.1, np.float32)
    w, dbias = np.ones((1, 1), np.float32), np.zeros(1, np.float32)
    _, saved = backend.linear(dy, w)
    backend.linear_backward(dy, saved, w, dbias=dbias, need_dx=False)
    assert_close(dbias, np.array([n * float(np.float32(0.1))]), "output")


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16383, 16384, 16385, 50_001])
def test_sum_and_norm_match_float64(count):
    backend = cython()
    x = normal(np.random.default_rng(count), count) + np.float32(0.5)
    wide = x.astype(np.float64)
    assert_close(backend.sum(x), np.array([wide.sum()]), "output")
    assert_close(backend.global_norm([x, x]), np.array([np.sqrt(2.0 * (wide * wide).sum())]), "output")


def test_sum_of_a_column_view_leaves_out_what_lies_between():
    backend = cython()
    x = normal(np.random.default_rng(3), 9, 4, 3)
    view = columns(backend, x)
    assert_close(backend.sum(view), np.array([x.sum(dtype=np.float64)]), "output")
    norm = np.array([np.linalg.norm(x.astype(np.float64).ravel())])
    assert_close(backend.global_norm([view]), norm, "output")


@pytest.mark.parametrize("layout", ["contiguous", "columns"])
def test_add_is_exact_for_every_layout(layout):
    backend, rng = cython(), np.random.default_rng(4)
    a, b = normal(rng, 70, 3, 241), normal(rng, 70, 3, 241)
    view = columns(backend, a) if layout == "columns" else a.copy()
    assert np.array_equal(backend.add(view, b), a + b)
    backend.add_(view, b)
    assert np.array_equal(view, a + b)


@pytest.mark.parametrize("layout", ["contiguous", "columns"])
@pytest.mark.parametrize("factor", [-0.3, 0.0])
def test_scale_is_one_rounding_for_every_layout(layout, factor):
    backend = cython()
    x = normal(np.random.default_rng(6), 70, 3, 241)
    dst = columns(backend, x) if layout == "columns" else x.copy()
    backend.scale_(dst, factor)
    assert np.array_equal(dst, x * np.float32(factor))


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (2, 2), (3, 7), (5, 16), (4, 1025), (70, 33)])
def test_cross_entropy_matches_the_oracle(rows, vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = 3.0 * normal(rng, rows, vocabulary)
    targets = rng.integers(0, vocabulary, rows).astype(np.int32)
    targets[rows // 2 :: 5] = -100
    results = []
    for backend in (create_oracle(), cython()):
        tensor = backend.from_host(logits)
        losses = backend.cross_entropy_(tensor, backend.from_host(targets, "i32"), scale=0.25)
        results.append((losses, tensor))
    assert_close(results[1][0], results[0][0], "output")
    assert_close(results[1][1], results[0][1], "gradient")


def test_a_confident_row_keeps_the_digits_of_its_loss_and_gradient():
    # p is within 1e-8 of 1: log(sum) and p - 1 would both be 0 in float32.
    logits = np.array([[18.0, 0.0, -1.0]], np.float32)
    results = []
    for backend in (create_oracle(), cython()):
        tensor = backend.from_host(logits)
        losses = backend.cross_entropy_(tensor, backend.from_host(np.array([0]), "i32"))
        results.append((losses, tensor))
    assert 0.0 < results[1][0][0] < 1e-7
    assert_close(results[1][0], results[0][0], "output")
    assert_close(results[1][1], results[0][1], "gradient")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["target", "elsewhere", "everywhere"])
def test_a_bad_logit_makes_its_row_nan_and_leaves_the_others(bad, place):
    logits = np.zeros((3, 20), np.float32)
    columns_ = {"target": [4], "elsewhere": [11], "everywhere": range(20)}[place]
    logits[1, list(columns_)] = bad
    losses = cython().cross_entropy_(logits, np.array([4, 4, 4], np.int32))
    assert np.isnan(losses[1])
    assert np.isnan(logits[1]).any()
    assert np.isfinite(losses[[0, 2]]).all()
    assert np.isfinite(logits[[0, 2]]).all()


def test_an_impossible_target_has_infinite_loss():
    logits = np.zeros((1, 5), np.float32)
    logits[0, 2] = -np.inf
    assert cython().cross_entropy_(logits, np.array([2], np.int32))[0] == np.inf


def test_ignored_rows_are_zero_whatever_their_logits():
    logits = np.full((2, 5), np.nan, np.float32)
    losses = cython().cross_entropy_(logits, np.array([-100, -100], np.int32))
    assert not losses.any()
    assert not logits.any()


def test_a_target_outside_the_vocabulary_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="cross_entropy_: target 5 is outside 0 to 4"):
        cython().cross_entropy_(np.zeros((2, 5), np.float32), np.array([1, 5], np.int32))


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_id_outside_the_table_is_an_error_that_names_it(wrong):
    with pytest.raises(ValueError, match=f"embedding: id {wrong} is outside 0 to 5"):
        cython().embedding(np.array([[0, wrong]], np.int32), np.zeros((6, 3), np.float32))


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_repeated_ids_add_up_in_float64(width):
    backend, rng = cython(), np.random.default_rng(width)
    ids = rng.integers(0, 4, (5, 300)).astype(np.int32)
    table, dy = normal(rng, 6, width), normal(rng, 5, 300, width)
    d_table = np.ones((6, width), np.float32)
    y, saved = backend.embedding(ids, table)
    backend.embedding_backward(columns(backend, dy), saved, d_table=d_table)
    expected = np.ones((6, width))
    np.add.at(expected, ids, dy.astype(np.float64))
    assert np.array_equal(y, table[ids])
    assert_close(d_table, expected, "output")
    assert np.array_equal(d_table[4:], np.ones((2, width), np.float32))


def test_decay_is_clamped_and_its_gradient_zero_outside():
    backend = cython()
    a_log = np.array([[-11.0, -10.0, -9.5, 0.0, 4.5, 5.0, 6.0]], np.float32)
    a, saved = backend.decay(a_log)
    assert_close(a, -np.exp(np.clip(a_log.astype(np.float64), -10.0, 5.0)), "output")
    d_a_log = np.ones_like(a_log)
    backend.decay_backward(np.ones_like(a), saved, d_a_log=d_a_log)
    inside = np.array([[0, 0, 1, 1, 1, 0, 0]])
    assert_close(d_a_log, 1.0 + inside * a.astype(np.float64), "gradient")
    assert np.array_equal(d_a_log[inside == 0], np.ones(4, np.float32))


def test_decay_passes_nan_on():
    a, saved = cython().decay(np.full((1, 2), np.nan, np.float32))
    d_a_log = np.zeros((1, 2), np.float32)
    cython().decay_backward(np.ones_like(a), saved, d_a_log=d_a_log)
    assert np.isnan(a).all()
    assert np.isnan(d_a_log).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
def test_linear_writes_column_views_in_place(accumulate, alpha):
    backend, rng = cython(), np.random.default_rng(8)
    x, w, bias, before = normal(rng, 2, 5, 7), normal(rng, 3, 7), normal(rng, 3), normal(rng, 2, 5, 3)
    out = columns(backend, before)
    y, saved = backend.linear(columns(backend, x), w, bias, alpha=alpha, out=out, accumulate=accumulate)
    expected = alpha * x.astype(np.float64) @ w.T.astype(np.float64) + bias + (before if accumulate else 0.0)
    assert y is out
    assert_close(out, expected, "output")
    dy, dx = normal(rng, 2, 5, 3), columns(backend, x)
    backend.linear_backward(columns(backend, dy), saved, w, alpha=alpha, out=dx, accumulate=accumulate)
    assert_close(dx, alpha * dy.astype(np.float64) @ w + (x if accumulate else 0.0), "gradient")


def test_products_with_nan_and_infinity_raise_no_warning():
    x = np.array([[np.nan, np.inf], [1.0, -np.inf]], np.float32)
    y, _ = cython().linear(x, np.ones((2, 2), np.float32))
    assert np.isnan(y[0]).all()
    assert bits(y[1]) == bits(np.full(2, -np.inf, np.float32))
