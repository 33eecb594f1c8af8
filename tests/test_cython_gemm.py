"""Matrix products of the CPU backend: blocks of the library's sgemm, and numpy where there is no OpenBLAS."""

import threading

import numpy as np
import pytest
import threadpoolctl

from mamba_fast import _gemm
from mamba_fast.backends import cython as module
from mamba_fast.backends._blas import find_openblas, multiply_with_numpy
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2

needs_openblas = pytest.mark.skipif(find_openblas() is None, reason="numpy here does not use OpenBLAS")

# m, n, k: single rows and columns, odd sizes, sizes that are split by rows and by columns
SHAPES = [(1, 1, 1), (1, 300, 700), (300, 1, 17), (3, 5, 7), (130, 70, 300), (1111, 37, 129), (65, 2001, 33)]


def by_blocks(a, trans_a, b, trans_b, c, alpha, beta, threads=2):
    _gemm.product(*find_openblas(), a, trans_a, b, trans_b, c, alpha, beta, threads)


WAYS = [pytest.param(by_blocks, marks=needs_openblas), multiply_with_numpy]


def operands(shape, trans_a, trans_b):
    m, n, k = shape
    rng = np.random.default_rng(m + n + k)
    a = rng.standard_normal((k, m) if trans_a else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if trans_b else (k, n)).astype(np.float32)
    c = rng.standard_normal((m, n)).astype(np.float32)
    return a, b, c


@pytest.mark.parametrize("multiply", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (False, True), (True, False), (True, True)])
def test_products_are_right_in_every_orientation(multiply, shape, trans_a, trans_b):
    a, b, c = operands(shape, trans_a, trans_b)
    left, right = (a.T if trans_a else a).astype(np.float64), (b.T if trans_b else b).astype(np.float64)
    for alpha, beta in ((1.0, 0.0), (1.0, 1.0), (-0.5, 0.0), (2.0, 1.0)):
        out = c.copy()
        multiply(a, trans_a, b, trans_b, out, alpha, beta)
        assert relative_l2(out, alpha * (left @ right) + beta * c) < 1e-6


@pytest.mark.parametrize("multiply", WAYS)
def test_column_views_are_read_and_written_in_place(multiply):
    rng = np.random.default_rng(0)
    wide_a, wide_c = rng.standard_normal((2, 90, 200)).astype(np.float32)
    b = rng.standard_normal((40, 70)).astype(np.float32)
    a, c = wide_a[:, 3:73], wide_c[:, 100:140]
    before = wide_c.copy()
    multiply(a, False, b, True, c, 1.0, 0.0)
    assert relative_l2(c, a.astype(np.float64) @ b.T) < 1e-6
    assert (wide_c[:, :100] == before[:, :100]).all()
    assert (wide_c[:, 140:] == before[:, 140:]).all()


@pytest.mark.parametrize("multiply", WAYS)
def test_what_was_in_the_result_does_not_matter_unless_it_is_added_to(multiply):
    a, b, c = operands((70, 80, 90), False, False)
    c[:] = np.nan
    multiply(a, False, b, False, c, 1.0, 0.0)
    assert np.isfinite(c).all()


@needs_openblas
@pytest.mark.parametrize("shape", [(1024, 256, 128), (100, 3000, 64)])
def test_the_bits_do_not_depend_on_the_number_of_threads(shape):
    a, b, c = operands(shape, False, False)
    results = []
    for threads in (1, 2, 3, 16):
        by_blocks(a, False, b, False, c, 1.0, 0.0, threads)
        results.append(c.tobytes())
    assert len(set(results)) == 1


@needs_openblas
def test_the_library_has_its_own_number_of_threads_again_afterwards():
    a, b, c = operands((500, 500, 100), False, False)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        workers = [
            threading.Thread(target=by_blocks, args=(a, False, b, False, c.copy(), 1.0, 0.0))
            for _ in range(8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        counts = [one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
    assert set(counts) == {2}


def test_a_backend_without_openblas_multiplies_with_numpy(monkeypatch):
    monkeypatch.setattr(module, "find_openblas", lambda: None)
    backend = get_backend("cython")
    rng = np.random.default_rng(1)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((3, 50, 20), (30, 20), (3, 50, 30)))
    bias = rng.standard_normal(30).astype(np.float32)
    y, saved = backend.linear(x, w, bias, alpha=0.5)
    assert relative_l2(y, 0.5 * (x.astype(np.float64) @ w.T) + bias) < 1e-6
    dw = np.ones_like(w)
    dx = backend.linear_backward(dy, saved, w, dw=dw, alpha=0.5)
    assert relative_l2(dx, 0.5 * (dy.astype(np.float64) @ w)) < 1e-6
    flat = dy.reshape(-1, 30).astype(np.float64)
    assert relative_l2(dw, 1 + 0.5 * (flat.T @ x.reshape(-1, 20))) < 1e-6
