"""Parameters larger than what a kernel may bind: worked on in runs of rows, with the same results."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_fast.config import MambaConfig
from mamba_fast.model import MambaLM
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance

SMALL = {"binding_bytes": 1 << 16}
"""The smallest binding that the API allows to ask for: a table of 400 x 64 is then a large tensor."""

ROWS, WIDTH = 701, 64


@pytest.fixture(scope="module")
def wgpu(usable_adapter):
    return get_backend("wgpu", force_limits=SMALL)


@pytest.fixture(scope="module")
def cython():
    return get_backend("cython")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(actual, expected, kind="gradient"):
    assert relative_l2(actual, expected) <= tolerance("wgpu", kind)


def test_the_table_of_these_tests_is_larger_than_a_binding(wgpu):
    assert wgpu.max_slab_bytes == 1 << 16
    assert 2 * wgpu.max_slab_bytes < ROWS * WIDTH * 4
    assert wgpu.is_large(wgpu.zeros((ROWS, WIDTH)))


def test_a_large_tensor_comes_back_as_it_went_in_and_is_copied_and_filled(wgpu):
    host = normal(ROWS, WIDTH)
    table, other = wgpu.from_host(host), wgpu.zeros((ROWS, WIDTH))
    wgpu.copy_(other, table)
    wgpu.fill_(wgpu.view(other, 0, 500, 600), 2.0)
    back = wgpu.to_host(other)
    host[500:600] = 2.0
    assert np.array_equal(back, host)


def test_large_tensors_are_added_and_scaled(wgpu):
    a, b = normal(ROWS, WIDTH), normal(ROWS, WIDTH, seed=1)
    x = wgpu.from_host(a)
    wgpu.add_(x, wgpu.from_host(b))
    wgpu.scale_(x, 0.5)
    assert_close(wgpu.to_host(x), 0.5 * (a + b), "output")


def test_rows_of_a_large_table_are_found_and_their_gradients_added_up(wgpu, cython):
    table = normal(ROWS, WIDTH)
    ids = np.random.default_rng(2).integers(0, ROWS, (3, 40)).astype(np.int32)
    ids[1] = ids[0]
    ids[0, 0], ids[2, 39] = 0, ROWS - 1
    dy = normal(3, 40, WIDTH, seed=3)
    results = []
    for backend in (wgpu, cython):
        gradient = backend.zeros((ROWS, WIDTH))
        y, saved = backend.embedding(backend.from_host(ids, "i32"), backend.from_host(table))
        backend.embedding_backward(backend.from_host(dy), saved, d_table=gradient)
        results.append((backend.to_host(y), backend.to_host(gradient)))
    assert np.array_equal(results[0][0], table[ids])
    assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("rows", [2, 20], ids=["few_rows", "many_rows"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["new", "added"])
def test_products_with_a_large_matrix_match_the_cpu_kernels(wgpu, cython, rows, accumulate):
    x, w, bias, dy = (
        normal(rows, WIDTH), normal(ROWS, WIDTH, seed=1), normal(ROWS, seed=2), normal(rows, ROWS, seed=3),
    )  # fmt: skip
    results = []
    for backend in (wgpu, cython):
        t = [backend.from_host(array) for array in (x, w, bias, dy)]
        dw, dbias = backend.from_host(normal(ROWS, WIDTH, seed=4)), backend.zeros((ROWS,))
        out, dx_out = backend.from_host(dy), backend.from_host(x)
        y, saved = backend.linear(*t[:3], alpha=0.5, out=out, accumulate=accumulate)
        dx = backend.linear_backward(
            t[3], saved, t[1], dw=dw, dbias=dbias, alpha=0.5, out=dx_out, accumulate=accumulate
        )
        results.append([backend.to_host(tensor) for tensor in (y, dx, dw, dbias)])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


def test_the_norm_and_a_step_of_a_large_tensor_match_the_cpu_kernels(wgpu, cython):
    results = []
    for backend in (wgpu, cython):
        p, g = backend.from_host(normal(ROWS, WIDTH)), backend.from_host(normal(ROWS, WIDTH, seed=1))
        m, v, stats = backend.zeros((ROWS, WIDTH)), backend.zeros((ROWS, WIDTH)), backend.zeros((4,))
        norm = backend.global_norm([g])
        backend.adamw_(
            [p], [g], [m], [v], lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=[0.01], step=1,
            grad_norm=norm, max_grad_norm=1.0, max_delta=0.09, stats=stats,
        )  # fmt: skip
        results.append([backend.to_host(tensor) for tensor in (p, m, v, stats)])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)
    assert results[0][3][3] == results[1][3][3]  # elements clamped, counted over all parts


def test_a_model_with_a_large_embedding_has_the_gradients_of_the_cpu_kernels(wgpu, cython):
    config = MambaConfig(701, 32, 1, d_state=4, train_lm_head_bias=True)
    ids = np.random.default_rng(0).integers(0, 701, (2, 9))
    results = [
        MambaLM(config, backend, seed=3).loss_and_grads(ids, np.roll(ids, -1)) for backend in (wgpu, cython)
    ]
    assert wgpu.is_large(MambaLM(config, wgpu).store.values["embedding"])
    assert relative_l2(results[0][0], results[1][0]) <= tolerance("wgpu", "logits")
    for name, expected in results[1][1].items():
        assert relative_l2(results[0][1][name], expected) <= tolerance("wgpu", "model_gradient"), name


def test_a_large_activation_is_refused_with_its_size_and_the_remedy(wgpu):
    x, w = wgpu.zeros((300, 8)), wgpu.zeros((100, 8))
    with pytest.raises(ValueError, match=r"\(300, 100\).* 120000 bytes.* 65536 .*smaller batch"):
        wgpu.linear(x, w)


def test_an_op_that_takes_no_large_tensors_says_so(wgpu):
    with pytest.raises(ValueError, match="more than the 65536 that this device can bind"):
        wgpu.sum(wgpu.zeros((ROWS, WIDTH)))
