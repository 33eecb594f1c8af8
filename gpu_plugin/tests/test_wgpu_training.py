"""Whole training runs: the same curve as the CPU kernels, and checkpoints that either can go on from."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_fast.config import MambaConfig, TrainConfig
from mamba_fast.model import MambaLM, load_model
from mamba_fast.registry import get_backend
from mamba_fast.train import train

CONFIG = MambaConfig(64, 16, 2, d_state=8)
OPTIONS = {"seq_len": 24, "batch_size": 4, "lr": 1e-2, "warmup_steps": 2, "seed": 1, "schedule": "constant"}


@pytest.fixture(scope="module")
def wgpu(usable_adapter):
    return get_backend("wgpu")


@pytest.fixture(scope="module")
def text():
    """A stream that can be learnt: counting, with some noise."""
    rng = np.random.default_rng(0)
    steps = 1 + (rng.random(4000) < 0.1) * rng.integers(0, 63, 4000)
    return (np.cumsum(steps) % 64).astype(np.uint16)


def run(backend, text, *, steps, out=None, resume=None):
    model = MambaLM(CONFIG, backend, seed=5)
    config = TrainConfig(steps=steps, validation_fraction=0.0, **OPTIONS)
    return model, train(model, text, config, out=out, resume=resume, progress=False)


def test_the_loss_curve_of_twenty_steps_is_that_of_the_cpu_kernels(wgpu, text):
    curves = [np.array(run(backend, text, steps=20)[1].losses) for backend in ("cython", wgpu)]
    assert curves[0].shape == curves[1].shape == (20,)
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert np.allclose(curves[1], curves[0], rtol=1e-3)


@pytest.mark.parametrize(("first", "second"), [("wgpu", "cython"), ("cython", "wgpu")])
def test_a_run_begun_on_one_backend_goes_on_on_the_other(wgpu, text, tmp_path, first, second):
    straight = np.array(run("cython", text, steps=8)[1].losses)
    out = tmp_path / "run"
    begun = run(first, text, steps=4, out=out)[1].losses
    resumed = run(second, text, steps=8, out=out, resume=True)[1].losses
    assert len(begun) == len(resumed) == 4
    assert np.allclose([*begun, *resumed], straight, rtol=1e-3)


def test_a_model_saved_from_the_device_gives_the_same_text_on_both_backends(wgpu, text, tmp_path):
    model, _ = run(wgpu, text, steps=3)
    model.save(tmp_path)
    other = load_model(tmp_path, backend="cython")
    for name, value in model.parameters().items():
        assert np.array_equal(other.parameters()[name], value), name
    prompt = np.array([[5, 6, 7, 8]])
    options = {"max_new_tokens": 6, "temperature": 0.0}
    assert np.array_equal(model.generate(prompt, **options), other.generate(prompt, **options))


def test_the_state_stays_on_the_device_while_decoding(wgpu):
    model = MambaLM(CONFIG, wgpu)
    _, state = model.prefill(np.array([[1, 2, 3]]), model.init_state(1))
    before = wgpu.transfers
    for token in (4, 5, 6):
        _, state = model.step(np.array([token]), state)
    assert wgpu.transfers - before == 6  # the id goes there, the logits come back
