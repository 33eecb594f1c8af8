"""Blocks and whole models against the golden data, and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
from model_cases import GOLDEN, T2, T2_IDS, random_ids, strong_model, strong_parameters

from mamba_fast.config import MambaConfig
from mamba_fast.mamba1 import block, block_step
from mamba_fast.model import MambaLM
from mamba_fast.params import BLOCK_PARAMETERS, Param
from mamba_fast.registry import get_backend
from mamba_fast.state import DecodeState
from mamba_fast.testing.tolerances import relative_l2, tolerance

BLOCKS = ("alog_clamped", "large_dt", "n16_l70", "odd_dims", "single_step", "tiny_b2_l7")
MODELS = ("model_small", "model_strong")


@pytest.fixture(scope="module", params=["oracle", "cython"])
def backend(request):
    return get_backend(request.param)


def assert_gradients_equal(actual, expected, limit):
    """Every tensor of `expected` is there and within `limit`: the one comparison of these tests."""
    assert actual.keys() >= expected.keys()
    for name, value in expected.items():
        error = relative_l2(actual[name], value)
        assert error <= limit, f"{name}: relative error {error:.2e} above {limit:.0e}"


# ---- blocks -----------------------------------------------------------------------------------


def run_block(backend, data):
    """Output, gradient of x and parameter gradients of a golden block."""
    _, _, d, n, k, e, r = (int(i) for i in data["dims"])
    config = MambaConfig(1, d, 1, d_state=n, d_conv=k, d_inner=e, dt_rank=r)
    params = {}
    for name in BLOCK_PARAMETERS:
        w = data[f"w.{name}"]
        params[name] = Param(backend.from_host(w), backend.zeros(w.shape))
    y, _, backprop = block(backend, config, params, backend.from_host(data["x"]))
    output = backend.to_host(y)
    dx = backend.to_host(backprop(backend.from_host(data["d_out"])))
    return output, dx, {name: backend.to_host(p.grad) for name, p in params.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_reproduces_its_golden_file(backend, name):
    data = np.load(GOLDEN / f"{name}.npz")
    output, dx, grads = run_block(backend, data)
    assert relative_l2(output, data["output"]) <= tolerance(backend.name, "logits")
    limit = tolerance(backend.name, "model_gradient")
    assert relative_l2(dx, data["dx"]) <= limit
    assert_gradients_equal(grads, {n: data[f"g.{n}"] for n in BLOCK_PARAMETERS}, limit)


def test_the_branch_of_a_block_is_visible_beside_its_residual(backend):
    # dx holds the residual's gradient too: without this the tests of dx could pass on the residual alone.
    data = np.load(GOLDEN / "odd_dims.npz")
    _, dx, _ = run_block(backend, data)
    branch = dx - data["d_out"]
    limit = tolerance(backend.name, "model_gradient")
    assert relative_l2(branch, data["dx"] - data["d_out"]) <= limit


def test_a_frozen_parameter_of_a_block_changes_no_other_gradient(backend):
    data = np.load(GOLDEN / "tiny_b2_l7.npz")
    config = MambaConfig(1, 8, 1, d_state=4, d_conv=4, d_inner=16, dt_rank=1)
    _, dx, grads = run_block(backend, data)
    for frozen in BLOCK_PARAMETERS:
        params = {}
        for name in BLOCK_PARAMETERS:
            w = data[f"w.{name}"]
            params[name] = Param(backend.from_host(w), None if name == frozen else backend.zeros(w.shape))
        backprop = block(backend, config, params, backend.from_host(data["x"]))[2]
        assert np.array_equal(backend.to_host(backprop(backend.from_host(data["d_out"]))), dx)
        for name, param in params.items():
            assert param.grad is None or np.array_equal(backend.to_host(param.grad), grads[name])


def test_block_steps_equal_the_block_on_the_whole_sequence(backend):
    data = np.load(GOLDEN / "odd_dims.npz")
    batch, length, d, n, k, e, r = (int(i) for i in data["dims"])
    config = MambaConfig(1, d, 1, d_state=n, d_conv=k, d_inner=e, dt_rank=r)
    params = {name: Param(backend.from_host(data[f"w.{name}"])) for name in BLOCK_PARAMETERS}
    state = DecodeState.zeros(backend, config, batch).layers[0]
    a, _ = backend.decay(params["A_log"].value, grad=False)
    steps = []
    for t in range(length):
        y = block_step(backend, config, params, backend.from_host(data["x"][:, t]), state, a)
        steps.append(backend.to_host(y))
    limit = tolerance(backend.name, "logits")
    assert relative_l2(np.stack(steps, axis=1), data["output"]) <= limit


# ---- whole models -----------------------------------------------------------------------------


def golden_model(name, backend):
    data = np.load(GOLDEN / f"{name}.npz")
    v, d, n, k, e, r, layers = (int(i) for i in data["dims"])
    model = MambaLM(MambaConfig(v, d, layers, d_state=n, d_conv=k, d_inner=e, dt_rank=r), backend)
    model.load_parameters({key[2:]: data[key] for key in data.files if key.startswith("w.")})
    return model, data, {key[2:]: data[key] for key in data.files if key.startswith("g.")}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reproduces_its_golden_logits(backend, name):
    model, data, _ = golden_model(name, backend)
    assert relative_l2(model.logits(data["tokens"]), data["logits"]) <= tolerance(backend.name, "logits")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reproduces_its_golden_loss(backend, name):
    model, data, _ = golden_model(name, backend)
    loss, limit = float(data["loss"][0]), tolerance(backend.name, "logits")
    assert model.loss(data["tokens"], data["targets"]) == pytest.approx(loss, rel=limit)
    assert model.loss_and_grads(data["tokens"], data["targets"])[0] == pytest.approx(loss, rel=limit)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reproduces_its_golden_gradient_of_every_parameter(backend, name):
    model, data, expected = golden_model(name, backend)
    _, grads = model.loss_and_grads(data["tokens"], data["targets"])
    assert list(grads) == list(model.parameters())
    assert grads.keys() == expected.keys()
    assert_gradients_equal(grads, expected, tolerance(backend.name, "model_gradient"))


@pytest.mark.parametrize("name", MODELS)
def test_zeroing_the_gradient_of_any_one_parameter_fails_the_comparison(name):
    model, data, expected = golden_model(name, "oracle")
    _, grads = model.loss_and_grads(data["tokens"], data["targets"])
    for dead in grads:
        broken = {n: np.zeros_like(g) if n == dead else g for n, g in grads.items()}
        # The loosest limit that any backend has: it must catch a dead gradient too.
        with pytest.raises(AssertionError, match=dead):
            assert_gradients_equal(broken, expected, tolerance("wgpu", "model_gradient"))


def test_a_swapped_sign_or_a_transposed_tap_order_fails_the_comparison():
    model, data, expected = golden_model("model_strong", "oracle")
    _, grads = model.loss_and_grads(data["tokens"], data["targets"])
    for name, change in (("layer0.A_log", np.negative), ("layer1.wConv", np.fliplr)):
        with pytest.raises(AssertionError, match=name):
            assert_gradients_equal({**grads, name: change(grads[name])}, expected, 1e-4)


# ---- across backends and against finite differences -------------------------------------------

VARIANTS = {
    "tied": MambaConfig(7, 4, 2, d_state=3, d_conv=3, d_inner=6, dt_rank=2),
    "euler": MambaConfig(7, 4, 2, d_state=3, d_conv=3, d_inner=6, dt_rank=2, discretization="euler"),
    "untied": MambaConfig(
        7, 4, 1, d_state=2, d_conv=1, d_inner=5, dt_rank=1, tie_embeddings=False, norm_eps=1e-2
    ),
    "no_biases": MambaConfig.hf(7, 4, 1, d_state=1, d_conv=5, expand=3, use_conv_bias=False),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cython_model_equals_the_oracle_model(variant):
    config = VARIANTS[variant]
    ids, targets = random_ids(config, (3, 11), 3), random_ids(config, (3, 11), 4)
    targets[1, 7:] = -100
    models = [strong_model(config, name) for name in ("oracle", "cython")]
    logits = [model.logits(ids) for model in models]
    assert relative_l2(logits[1], logits[0]) <= tolerance("cython", "logits")
    (_, expected), (_, grads) = [model.loss_and_grads(ids, targets) for model in models]
    assert_gradients_equal(grads, expected, tolerance("cython", "model_gradient"))


def test_the_tiny_model_gives_the_same_logits_on_every_backend():
    ids = T2_IDS[None, :16]
    oracle, cython = (MambaLM(T2, name, seed=3).logits(ids) for name in ("oracle", "cython"))
    assert relative_l2(cython, oracle) <= tolerance("cython", "logits")


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_central_differences(variant):
    config = VARIANTS[variant]
    weights = {n: w.astype(np.float64) for n, w in strong_parameters(config, 5).items()}
    ids, targets = random_ids(config, (2, 5), 6), random_ids(config, (2, 5), 7)
    targets[0, 2] = -100
    model = MambaLM(config, "oracle", seed=None)
    model.load_parameters(weights)
    _, grads = model.loss_and_grads(ids, targets)
    rng = np.random.default_rng(8)
    step = 1e-5
    for name, w in weights.items():
        largest = np.unravel_index(np.abs(grads[name]).argmax(), w.shape)
        other = tuple(int(rng.integers(size)) for size in w.shape)
        for at in (largest, other):
            losses = []
            for sign in (1, -1):
                moved = w.copy()
                moved[at] += sign * step
                model.load_parameters({**weights, name: moved})
                losses.append(model.loss(ids, targets))
            difference = (losses[0] - losses[1]) / (2 * step)
            assert grads[name][at] == pytest.approx(difference, rel=1e-6, abs=1e-9), f"{name}{list(at)}"
        assert np.abs(grads[name]).max() > 1e-4, f"{name}: too small for the check to mean anything"
