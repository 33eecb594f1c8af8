"""The memory of the CPU backend's tensors is reused, and never while anything still sees it."""

import gc
import threading

import numpy as np
import pytest

from mamba_fast.backends._cython_pool import Pool, _size_class
from mamba_fast.registry import get_backend

LARGE = (64, 1024)  # 256 KiB


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_given_out_again_when_its_last_view_is_gone():
    pool = Pool()
    first = pool.new(LARGE)
    where, row = address(first), first[5]
    row[:] = 7
    del first
    assert address(pool.new(LARGE)) != where, "a view still sees it"
    assert (row == 7).all()
    del row
    assert address(pool.new(LARGE)) == where


@pytest.mark.parametrize(
    "view", [lambda a: a.reshape(-1), lambda a: a[3:, 10:20], lambda a: a.T, lambda a: a.view(np.int32)]
)
def test_every_kind_of_view_keeps_the_memory(view):
    pool = Pool()
    array = pool.new(LARGE)
    where, kept = address(array), view(array)
    del array
    gc.collect()
    others = [pool.new(LARGE) for _ in range(4)]
    assert where not in [address(other) for other in others]
    del kept


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.float16, np.uint16])
@pytest.mark.parametrize("shape", [(1 << 14,), (33, 7, 129), (3, 5), (100001,)])
def test_arrays_are_like_numpys_and_large_ones_start_at_a_cache_line(shape, dtype):
    array = Pool().new(shape, dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert type(array) is np.ndarray
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    if array.nbytes >= 1 << 14:
        assert address(array) % 64 == 0
    array[...] = 1
    assert (array == 1).all()


def test_the_pool_holds_no_more_than_was_once_in_use():
    pool, rng = Pool(), np.random.default_rng(0)
    most, alive = 0, []
    for _ in range(2000):
        if alive and rng.random() < 0.55:
            alive.pop(int(rng.integers(len(alive))))
        else:
            alive.append(pool.new((int(rng.integers(5_000, 60_000)),)))
        most = max(most, sum(_size_class(a.nbytes) for a in alive))
        assert pool.held_bytes <= most
    alive.clear()
    assert pool.held_bytes <= most


@pytest.mark.parametrize("nbytes", [1 << 14, (1 << 14) + 1, 100_000, 1 << 20, (1 << 20) + 5, 123_456_789])
def test_a_size_class_wastes_at_most_a_sixteenth_or_a_page(nbytes):
    assert nbytes <= _size_class(nbytes) <= max(nbytes * 17 / 16, nbytes + 4096)


def test_arrays_in_use_never_share_memory_with_many_threads_at_work():
    pool, wrong = Pool(), []

    def work(seed):
        rng = np.random.default_rng(seed)
        alive = []
        for _ in range(300):
            if len(alive) > 5:
                value, array = alive.pop(int(rng.integers(len(alive))))
                if not (array == value).all():
                    wrong.append(seed)
            value = float(rng.integers(1 << 20))
            array = pool.new((int(rng.integers(4_000, 20_000)),))
            array.fill(value)
            alive.append((value, array[:]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_repeated_op_asks_the_system_for_nothing_new():
    backend = get_backend("cython")
    x, w = backend.zeros((200, 300)), backend.zeros((400, 300))
    for _ in range(3):
        y, _ = backend.linear(x, w)
    held = backend.pool.held_bytes
    for _ in range(5):
        y, _ = backend.linear(x, w)
    assert backend.pool.held_bytes == held
    assert y.shape == (200, 400)
