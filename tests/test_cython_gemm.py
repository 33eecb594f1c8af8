"""Matrix products of the CPU backend: blocks of the library's sgemm, and numpy where there is no OpenBLAS."""

import ctypes
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl

from mamba_fast import _gemm
from mamba_fast.backends import _blas
from mamba_fast.backends import cython as module
from mamba_fast.backends._blas import OpenBlas, find_openblas, multiply_with_numpy
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2

needs_openblas = pytest.mark.skipif(find_openblas() is None, reason="numpy here does not use OpenBLAS")

# m, n, k: single rows and columns, odd sizes, few rows and few columns, sizes that are split by rows, by
# columns and along the sum
SHAPES = [
    (1, 1, 1), (1, 300, 700), (300, 1, 17), (3, 5, 7), (130, 70, 300), (1111, 37, 129), (65, 2001, 33),
    (1, 5003, 129), (5003, 1, 129), (2, 1501, 700), (16, 903, 130), (903, 7, 300), (903, 16, 130),
    (37, 51, 2003), (1, 41, 8001), (41, 1, 8001), (9, 40, 4099),
]  # fmt: skip


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
        # Sums of k terms in float32: their errors grow with the root of k, by how much is the library's.
        assert relative_l2(out, alpha * (left @ right) + beta * c) < 6e-8 * (10 + shape[2] ** 0.5)


def widened(array):
    """The same values as a column view, with NaN on both sides: reading past the edge shows."""
    wide = np.full((array.shape[0], array.shape[1] + 7), np.nan, np.float32)
    wide[:, 3:-4] = array
    return wide


@pytest.mark.parametrize("multiply", WAYS)
@pytest.mark.parametrize("shape", [(90, 40, 70), (1, 300, 70), (300, 1, 70), (3, 300, 70), (37, 51, 2003)])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (False, True), (True, False), (True, True)])
def test_column_views_are_read_and_written_in_place(multiply, shape, trans_a, trans_b):
    wide_a, wide_b, wide_c = (widened(x) for x in operands(shape, trans_a, trans_b))
    a, b, c = (x[:, 3:-4] for x in (wide_a, wide_b, wide_c))
    left, right = (a.T if trans_a else a).astype(np.float64), (b.T if trans_b else b).astype(np.float64)
    expected = c + left @ right
    multiply(a, trans_a, b, trans_b, c, 1.0, 1.0)
    assert relative_l2(c, expected) < 1e-6
    assert np.isnan(wide_c[:, :3]).all()
    assert np.isnan(wide_c[:, -4:]).all()


@pytest.mark.parametrize("multiply", WAYS)
@pytest.mark.parametrize(
    "shape", [(70, 80, 90), (1, 80, 90), (80, 1, 90), (3, 80, 90), (37, 51, 2003), (1, 41, 8001)]
)
def test_what_was_in_the_result_does_not_matter_unless_it_is_added_to(multiply, shape):
    a, b, c = operands(shape, False, False)
    c[:] = np.nan
    multiply(a, False, b, False, c, 1.0, 0.0)
    assert np.isfinite(c).all()


@needs_openblas
@pytest.mark.parametrize(
    "shape",
    [(1024, 256, 128), (100, 3000, 64), (1, 5003, 300), (3, 5003, 300), (64, 64, 8192), (41, 1, 8001)],
)
def test_the_bits_do_not_depend_on_the_number_of_threads(shape):
    a, b, c = operands(shape, False, False)
    results = []
    for threads in (1, 2, 3, 16):
        out = c.copy()
        by_blocks(a, False, b, False, out, 1.0, 1.0, threads)
        results.append(out.tobytes())
    assert len(set(results)) == 1


class FakeLibrary:
    """A library that computes nothing: it has a number of threads, and calls `multiply` for a product."""

    def __init__(self, threads, multiply):
        self.threads = threads
        integers, numbers = ctypes.c_int64, ctypes.c_float
        self.functions = (
            ctypes.CFUNCTYPE(
                None, ctypes.c_int, ctypes.c_int, ctypes.c_int, integers, integers, integers, numbers,
                ctypes.c_void_p, integers, ctypes.c_void_p, integers, numbers, ctypes.c_void_p, integers,
            )(lambda *_: multiply(self)),
            ctypes.CFUNCTYPE(ctypes.c_int)(lambda: self.threads),
            ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda threads: setattr(self, "threads", threads)),
        )  # fmt: skip
        sgemm, get, set_ = (ctypes.cast(f, ctypes.c_void_p).value for f in self.functions)
        self.openblas = OpenBlas(sgemm, 0, True, get, set_)

    def product(self):
        a, b, c = operands((20, 20, 20), False, False)
        _gemm.product(*self.openblas, a, False, b, False, c, 1.0, 0.0, 1)


def test_the_library_has_one_thread_during_a_product_and_its_own_number_afterwards():
    during = []
    library = FakeLibrary(4, lambda library: during.append(library.threads))
    library.product()
    assert during == [1]
    assert library.threads == 4


def test_only_the_last_of_concurrent_products_gives_the_library_its_threads_back():
    after_inner = []

    def multiply(library):
        if not after_inner:
            after_inner.append(None)
            library.product()
            after_inner.append(library.threads)

    library = FakeLibrary(4, multiply)
    library.product()
    assert after_inner == [None, 1]
    assert library.threads == 4


def test_a_limit_that_somebody_sets_during_a_product_stays():
    library = FakeLibrary(4, lambda library: setattr(library, "threads", 3))
    library.product()
    assert library.threads == 3


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
        assert blas_threads() == {2}


def blas_threads():
    return {one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"}


@needs_openblas
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_child_forked_during_products_multiplies_and_has_the_librarys_own_threads():
    a, b, c = operands((300, 300, 300), False, False)
    expected = c.copy()
    by_blocks(a, False, b, False, expected, 1.0, 0.0)
    stop = threading.Event()

    def multiply():
        while not stop.is_set():
            by_blocks(a, False, b, False, np.empty_like(c), 1.0, 0.0)

    codes = []
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        worker = threading.Thread(target=multiply)
        worker.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                try:
                    if blas_threads() != {2}:
                        os._exit(3)
                    by_blocks(a, False, b, False, c, 1.0, 0.0)
                    os._exit(0 if c.tobytes() == expected.tobytes() and blas_threads() == {2} else 4)
                finally:
                    os._exit(5)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        worker.join()
        assert blas_threads() == {2}
    assert codes == [0] * 10


@needs_openblas
@pytest.mark.parametrize(
    ("layer", "accepted"), [("pthreads", True), ("disabled", True), ("openmp", False), ("unknown", False)]
)
def test_an_openblas_that_cannot_be_held_to_one_thread_is_not_used(monkeypatch, layer, accepted):
    def with_layer(one):
        return SimpleNamespace(filepath=one.filepath, dynlib=one.dynlib, threading_layer=layer)

    real = threadpoolctl.ThreadpoolController().select(internal_api="openblas").lib_controllers
    fakes = SimpleNamespace(lib_controllers=[with_layer(one) for one in real])
    controller = SimpleNamespace(select=lambda internal_api: fakes)
    monkeypatch.setattr(_blas.threadpoolctl, "ThreadpoolController", lambda: controller)
    assert (find_openblas.__wrapped__() is not None) == accepted


@needs_openblas
def test_the_description_names_openblas_where_it_computes_the_products():
    assert "(OpenBLAS)" in get_backend("cython").describe()


def test_the_description_says_that_numpy_computes_the_products(monkeypatch):
    monkeypatch.setattr(module, "find_openblas", lambda: None)
    assert "(numpy.matmul over " in get_backend("cython").describe()


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
