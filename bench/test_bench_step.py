"""Whole training and decoding steps of a small model, and two yardsticks of the machine itself.

Absolute times do not travel between machines; ratios to the yardsticks, timed in the same run, do.
"""

from __future__ import annotations

import numpy as np
import pytest

from mamba_fast import MambaConfig, MambaLM

CONFIG = MambaConfig(vocab_size=258, d_model=128, n_layers=4)


def test_training_step(timed, backend, rng):
    batch, length = 16, 256
    model = MambaLM(CONFIG, backend=backend)
    ids = rng.integers(0, CONFIG.vocab_size, size=(batch, length))
    timed(
        f"forward and backward d{CONFIG.d_model} x {CONFIG.n_layers}, {batch}x{length}",
        lambda: model.accumulate_gradients(ids, ids, scale=1.0 / ids.size),
        tokens=ids.size,
    )


def test_decoding_step(timed, backend, rng):
    model = MambaLM(CONFIG, backend=backend)
    _, state = model.prefill(rng.integers(0, CONFIG.vocab_size, size=(1, 32)), model.init_state(1))
    timed(
        f"one token d{CONFIG.d_model} x {CONFIG.n_layers}",
        lambda: model.step(np.array([7]), state),
        tokens=1,
    )


@pytest.mark.benchmark(group="yardsticks")
def test_yardstick_matrix_product(benchmark, rng):
    a = rng.standard_normal((1024, 1024)).astype(np.float32)
    benchmark.extra_info["flop"] = 2 * 1024**3
    benchmark(np.matmul, a, a)


@pytest.mark.benchmark(group="yardsticks")
def test_yardstick_memory_copy(benchmark):
    source = np.ones(16_000_000, dtype=np.float32)
    target = np.empty_like(source)
    benchmark.extra_info["bytes"] = 2 * source.nbytes
    benchmark(np.copyto, target, source)
