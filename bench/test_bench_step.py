"""A whole block, training steps, prefill and decoding, and two yardsticks of the machine itself.

Absolute times do not travel between machines; ratios to the yardsticks, timed in the same run, do.
"""

from __future__ import annotations

import numpy as np
import pytest

from mamba_fast import MambaConfig, MambaLM
from mamba_fast.mamba1 import block
from mamba_fast.optim import AdamW
from mamba_fast.params import Slabs, bind

CONFIG = MambaConfig(vocab_size=258, d_model=128, n_layers=4)
# The width and half the vocabulary of a 130-million-parameter model, of whose 24 layers one token meets 4.
WIDE = MambaConfig.hf(25140, 768, 4)


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
@pytest.mark.parametrize(
    "shape", [(16, 256, 128), (1, 512, 768)], ids=lambda shape: "x".join(map(str, shape))
)
def test_block(timed, backend, rng, shape, discretization):
    batch, length, width = shape
    config = MambaConfig(vocab_size=2, d_model=width, n_layers=1, discretization=discretization)
    store = MambaLM(config, backend).store
    params = bind(store.values, Slabs(backend, store.layout)).layers[0]
    x = backend.from_host(rng.standard_normal(shape))

    def forward_backward():
        y, _, backprop = block(backend, config, params, x)
        return backprop(y)

    timed(
        f"block forward and backward {batch}x{length}x{width} {discretization}",
        forward_backward,
        state_updates=batch * length * config.d_inner * config.d_state,
    )


def test_training_step(timed, backend, rng):
    batch, length = 16, 256
    model = MambaLM(CONFIG, backend)
    optimizer = AdamW(backend, model.store)
    ids = rng.integers(0, CONFIG.vocab_size, size=(batch, length))

    def step():
        model.store.grads.zero()
        model.accumulate_gradients(ids, ids, scale=1.0 / ids.size)
        optimizer.step(1e-4)

    timed(f"training step d{CONFIG.d_model} x {CONFIG.n_layers}, {batch}x{length}", step, tokens=ids.size)


def test_forward_and_backward(timed, backend, rng):
    batch, length = 16, 256
    model = MambaLM(CONFIG, backend=backend)
    ids = rng.integers(0, CONFIG.vocab_size, size=(batch, length))
    timed(
        f"forward and backward d{CONFIG.d_model} x {CONFIG.n_layers}, {batch}x{length}",
        lambda: model.accumulate_gradients(ids, ids, scale=1.0 / ids.size),
        tokens=ids.size,
    )


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=lambda config: f"d{config.d_model}")
def test_prefill(timed, backend, rng, config):
    model = MambaLM(config, backend)
    ids = rng.integers(0, config.vocab_size, size=(1, 512))
    timed(
        f"prefill d{config.d_model} x {config.n_layers}, 1x512",
        lambda: model.prefill(ids, model.init_state(1)),
        tokens=ids.size,
    )


@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=lambda config: f"d{config.d_model}")
def test_decoding_step(timed, backend, rng, config):
    model = MambaLM(config, backend)
    _, state = model.prefill(rng.integers(0, config.vocab_size, size=(1, 32)), model.init_state(1))
    timed(
        f"one token d{config.d_model} x {config.n_layers}",
        lambda: model.step(np.array([7]), state),
        tokens=1,
        bytes=4 * model.num_parameters(),  # every weight is read once
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
