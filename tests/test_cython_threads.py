"""The same bits at any thread count, from several Python threads at once, and after a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cython_support import THREADS, bits, cython, normal

from mamba_fast.backends._dispatch import load_kernels
from mamba_fast.backends.cython import SERIAL_BELOW, CythonBackend


def conv(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(0)
    x, w, bias = normal(rng, 19, 37, 130), normal(rng, 130, 4), normal(rng, 130)
    dw, dbias = np.zeros_like(w), np.zeros_like(bias)
    starts = (rng.random((19, 37)) < 0.1).astype(np.int32)
    y, final_state, saved = b.conv1d(x, w, bias, seq_start=starts)
    dx, d_initial = b.conv1d_backward(
        normal(rng, 19, 37, 130), saved, w, dw=dw, dbias=dbias, need_d_initial_state=True
    )
    return bits(y, final_state, dx, d_initial, dw, dbias)


def scan(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(1)
    u, delta, z, dy = (normal(rng, 3, 70, 150) for _ in range(4))
    a, bm, c = -np.exp(normal(rng, 150, 5)), normal(rng, 3, 70, 5), normal(rng, 3, 70, 5)
    d, bias = normal(rng, 150), normal(rng, 150)
    sums = [np.zeros_like(a), np.zeros_like(d), np.zeros_like(bias)]
    y, final_state, saved = b.selective_scan(u, delta, a, bm, c, d, z, bias)
    grads = b.selective_scan_backward(
        dy, saved, d_a=sums[0], d_d=sums[1], d_delta_bias=sums[2], need_d_initial_state=True
    )
    return bits(y, final_state, *grads, *sums)


def norm(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(2)
    x, w = normal(rng, 1501, 37), normal(rng, 37)
    dw = np.zeros_like(w)
    y, saved = b.rms_norm(x, w, 1e-5)
    return bits(y, b.rms_norm_backward(normal(rng, 1501, 37), saved, w, dw=dw), dw)


def loss(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(3)
    logits, targets = normal(rng, 50, 1003), rng.integers(0, 1003, 50).astype(np.int32)
    return bits(b.cross_entropy_(logits, targets, scale=0.1), logits)


def embed(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(4)
    ids, table = rng.integers(0, 11, (4, 120)).astype(np.int32), normal(rng, 11, 193)
    d_table = np.zeros_like(table)
    y, saved = b.embedding(ids, table)
    b.embedding_backward(normal(rng, 4, 120, 193), saved, d_table=d_table)
    return bits(y, d_table)


def sums(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(5)
    x, dbias, w = normal(rng, 3001, 19), np.zeros(19, np.float32), normal(rng, 19, 1)
    _, saved = b.linear(normal(rng, 3001, 1), w)
    b.linear_backward(x, saved, w, dbias=dbias, need_dx=False)
    return bits(b.sum(x), b.global_norm([x, x[:2000]]), b.add(x, x.copy()), dbias)


def optimizer(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(6)
    p, g, m, v = (normal(rng, 70_001) for _ in range(4))
    v, stats = np.abs(v), np.zeros(4, np.float32)
    b.adamw_(
        [p], [g], [m], [v], lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=[0.01], step=2,
        grad_norm=b.global_norm([g]), max_grad_norm=1.0, max_delta=0.05, stats=stats,
    )  # fmt: skip
    return bits(p, m, v, stats)


def steps(b: CythonBackend) -> tuple[bytes, ...]:
    rng = np.random.default_rng(7)
    batch, width, states = 29, 300, 9
    x, w, state = normal(rng, batch, width), normal(rng, width, 4), normal(rng, batch, 3, width)
    y = b.conv1d_step(x, state, w)
    h, a = normal(rng, batch, width, states), -np.exp(normal(rng, width, states))
    out = b.selective_scan_step(
        y, x, a, normal(rng, batch, states), normal(rng, batch, states), None, None, None, h
    )
    return bits(y, state, out, h)


WORK: list[Callable[[CythonBackend], tuple[bytes, ...]]] = [
    conv, scan, norm, loss, embed, sums, optimizer, steps,
]  # fmt: skip


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
@pytest.mark.parametrize("threads", THREADS[1:])
def test_the_bits_do_not_depend_on_the_number_of_threads(work, threads):
    assert work(cython(threads)) == work(cython(1))


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_two_runs_give_the_same_bits(work):
    assert work(cython(2)) == work(cython(2))


class Recorded:
    """A module of kernels that notes the number of threads, the last argument, of each call.

    Kernels without one (they are serial, or not kernels) are in `SERIAL`.
    """

    SERIAL = ("checkpoint_shape", "decay", "decay_backward", "store")

    def __init__(self, module: ModuleType, calls: list[tuple[str, int]]) -> None:
        self.module, self.calls = module, calls

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.module, name)
        if name in self.SERIAL:
            return kernel

        def call(*args: Any) -> Any:
            assert type(args[-1]) is int
            self.calls.append((f"{self.module.__name__}.{name}", args[-1]))
            return kernel(*args)

        return call


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_the_work_of_these_tests_is_large_enough_to_be_shared(work):
    calls: list[tuple[str, int]] = []
    kernels = load_kernels()
    names = ("scan", "conv1d", "pointwise", "optim")
    recorded = {name: Recorded(getattr(kernels, name), calls) for name in names}
    work(CythonBackend(kernels._replace(**recorded), 3))
    assert calls
    assert [call for call in calls if call[1] != 3] == []


def test_work_below_the_limit_is_not_shared():
    backend = cython(3)
    assert backend._workers(SERIAL_BELOW) == 3
    assert backend._workers(SERIAL_BELOW - 1) == 1


def test_kernels_run_from_several_python_threads_at_once():
    expected = [work(cython(1)) for work in WORK]
    failures: list[str] = []
    barrier = threading.Barrier(4)

    def body(offset: int) -> None:
        barrier.wait()
        for i in range(len(WORK)):
            work = (i + offset) % len(WORK)
            if WORK[work](cython(3)) != expected[work]:
                failures.append(WORK[work].__name__)

    pool = [threading.Thread(target=body, args=(offset,)) for offset in range(4)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert failures == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_kernels_run_in_a_forked_child():
    """libgomp would hang here: its threads do not exist in the child."""
    expected = [work(cython(3)) for work in WORK]
    child = os.fork()
    if child == 0:
        try:
            same = [work(cython(3)) for work in (conv, norm, loss, optimizer)]
            os._exit(0 if same == [expected[i] for i in (0, 2, 3, 6)] else 3)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
