"""Device memory: buffers return, nothing grows, and the queue keeps its order."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from mamba_fast.config import MambaConfig
from mamba_fast.model import MambaLM
from mamba_fast.registry import get_backend
from mamba_fast_wgpu.encoder import FLUSH_AFTER
from mamba_fast_wgpu.memory import size_class


@pytest.fixture(scope="module")
def wgpu(usable_adapter):
    return get_backend("wgpu")


def live(backend):
    gc.collect()
    pool = backend.engine.pool
    return pool.live_blocks, pool.live_bytes


def test_two_hundred_backends_share_one_device_and_hold_no_memory(wgpu):
    before = live(wgpu)
    for _ in range(200):
        backend = get_backend("wgpu")
        backend.to_host(backend.add(backend.zeros((7,)), backend.zeros((7,))))
    assert backend.engine is wgpu.engine
    del backend
    assert live(wgpu) == before


def test_a_dead_tensors_buffer_serves_the_next_one_of_its_size(wgpu):
    made = [wgpu.empty((1000,)).block.serial for _ in range(3)]
    assert len(set(made)) == 1


def test_views_keep_their_buffer_alive(wgpu):
    part = wgpu.view(wgpu.from_host(np.arange(100.0)), 0, 40, 60)
    wgpu.fill_(wgpu.empty((100,)), 0.0)
    assert wgpu.to_host(part).tolist() == list(range(40, 60))


def test_training_steps_use_the_same_memory_and_bind_groups_over_and_over(wgpu):
    model = MambaLM(MambaConfig(24, 8, 2, d_state=4), wgpu)
    ids = np.arange(26).reshape(2, 13) % 24
    pool = wgpu.engine.pool

    def step():
        model.accumulate_gradients(ids, ids, scale=1.0)
        wgpu.synchronize()

    step()
    step()
    before, total, groups = live(wgpu), pool.live_bytes + pool.pooled_bytes, wgpu.encoder.bind_groups
    for _ in range(5):
        step()
    assert wgpu.encoder.bind_groups == groups
    assert live(wgpu) == before
    assert pool.live_bytes + pool.pooled_bytes == total


def test_a_write_from_the_host_does_not_overtake_recorded_work(wgpu):
    first = wgpu.from_host(np.full(1000, 1.0))
    total = wgpu.add(first, first)
    serial = first.block.serial
    del first
    second = wgpu.from_host(np.full(1000, 5.0))  # into the buffer that recorded work still reads
    assert second.block.serial == serial
    assert (wgpu.to_host(total) == 2.0).all()
    assert (wgpu.to_host(second) == 5.0).all()


def test_more_dispatches_than_a_submission_holds_keep_their_order_and_parameters(wgpu):
    x, one = wgpu.zeros((3,)), wgpu.from_host([1.0, 2.0, 3.0])
    for _ in range(2 * FLUSH_AFTER + 10):
        wgpu.add_(x, one)
    count = 2 * FLUSH_AFTER + 10
    assert wgpu.to_host(x).tolist() == [count, 2 * count, 3 * count]


def test_pooled_memory_goes_back_to_the_device_when_asked_and_work_goes_on(wgpu):
    x = wgpu.add(wgpu.from_host(np.ones(500)), wgpu.from_host(np.ones(500)))
    wgpu.engine.pool.trim()
    assert wgpu.engine.pool.pooled_bytes == 0
    assert (wgpu.to_host(wgpu.add(x, x)) == 4.0).all()


def test_size_classes_waste_at_most_a_quarter_and_never_exceed_the_largest():
    for size in (1, 4, 255, 256, 257, 1000, 4097, 123_457, 10**6, 10**8):
        made = size_class(size, 2**31 - 4)
        assert size <= made <= max(256, 1.25 * size + 256)
        assert made % 4 == 0
    assert size_class(134_217_700, 134_217_728) <= 134_217_728


def test_a_training_step_moves_nothing_to_the_host(wgpu, monkeypatch):
    from mamba_fast.optim import AdamW

    model = MambaLM(MambaConfig(24, 8, 2, d_state=4), wgpu)
    optimizer = AdamW(wgpu, model.store)
    ids = np.arange(26).reshape(2, 13) % 24

    def refuse(*_):
        raise AssertionError("the host read from the device")

    monkeypatch.setattr(wgpu.encoder, "read", refuse)
    for _ in range(3):
        model.store.grads.zero()
        model.accumulate_gradients(ids, ids, scale=1.0 / ids.size)
        optimizer.step(1e-3)


def test_a_process_that_used_the_backend_ends_by_itself(usable_adapter):
    code = (
        "from mamba_fast.registry import get_backend\n"
        "b = get_backend('wgpu')\n"
        "x = b.add(b.zeros((3,)), b.zeros((3,)))\n"  # left unsubmitted
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_gets_a_clear_error(usable_adapter):
    code = (
        "import os\n"
        "from mamba_fast.registry import get_backend\n"
        "b = get_backend('wgpu')\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        b.to_host(b.zeros((3,)))\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "WgpuError" in done.stdout
    assert "forked" in done.stdout
