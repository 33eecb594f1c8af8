"""Initial weights."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_fast.config import MambaConfig
from mamba_fast.init import initial_parameters
from mamba_fast.params import parameter_shapes

CONFIG = MambaConfig(vocab_size=300, d_model=64, n_layers=4)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@pytest.fixture(scope="module")
def weights():
    return initial_parameters(CONFIG, 0)


@pytest.fixture(scope="module")
def original():
    return initial_parameters(CONFIG.replace(init="original"), 0)


def test_every_parameter_is_there_in_order_shape_and_float32(weights):
    assert {name: w.shape for name, w in weights.items()} == parameter_shapes(CONFIG)
    assert list(weights) == list(parameter_shapes(CONFIG))
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("name", "std"),
    [("embedding", 0.02), ("layer2.wInProj", 0.02), ("layer2.wXProj", 0.01), ("layer2.wOutProj", 0.02 / 2)],
)
def test_normal_weights_have_the_standard_deviation_of_the_specification(weights, name, std):
    assert weights[name].std() == pytest.approx(std, rel=0.05)
    assert abs(weights[name].mean()) < std / 10
    assert np.abs(weights[name]).max() > 2.5 * std  # not uniform


def test_convolution_and_dt_projection_are_uniform_within_their_bounds(weights):
    for name, bound in (("wConv", 1 / np.sqrt(4)), ("wDtProj", 1 / np.sqrt(CONFIG.dt_rank))):
        w = weights[f"layer1.{name}"]
        assert np.abs(w).max() <= bound
        assert np.abs(w).max() > 0.98 * bound
        assert w.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)


def test_initial_step_sizes_are_log_uniform_between_a_thousandth_and_a_tenth(weights):
    bias = np.concatenate([weights[f"layer{i}.bDtProj"].astype(np.float64) for i in range(4)])
    delta = softplus(bias)
    assert delta.min() >= 1e-3 * (1 - 1e-5)
    assert delta.max() <= 1e-1 * (1 + 1e-5)
    assert np.median(delta) == pytest.approx(1e-2, rel=0.25)
    quarters = np.log10(np.quantile(delta, [0.25, 0.75]))
    assert quarters == pytest.approx([-2.5, -1.5], abs=0.12)


def test_a_log_is_the_logarithm_of_one_to_n(weights):
    expected = np.log(np.arange(1, 17)).astype(np.float32)
    assert (weights["layer3.A_log"] == expected).all()


def test_the_skip_and_the_norms_start_at_one_and_other_biases_at_zero(weights):
    for name in ("layer0.D_vec", "layer0.normWeight", "final_norm"):
        assert (weights[name] == 1).all()
    for name in ("layer0.bInProj", "layer0.bConv", "layer0.bXProj", "layer0.bOutProj", "lm_head_bias"):
        assert (weights[name] == 0).all()


@pytest.mark.parametrize(
    ("name", "std"), [("embedding", 1 / 8), ("layer0.wConv", 0.01), ("layer0.wDtProj", 0.02)]
)
def test_the_original_scheme_has_its_own_standard_deviations(original, name, std):
    assert original[name].std() == pytest.approx(std, rel=0.1)


def test_the_original_scheme_starts_the_step_bias_at_zero(original):
    assert not original["layer0.bDtProj"].any()


def test_an_untied_head_starts_like_the_embedding_and_not_equal_to_it():
    weights = initial_parameters(CONFIG.replace(tie_embeddings=False), 0)
    assert weights["lm_head"].std() == pytest.approx(0.02, rel=0.05)
    assert not np.array_equal(weights["lm_head"], weights["embedding"])


def test_a_seed_gives_the_same_bits_again_and_another_seed_others(weights):
    again, other = initial_parameters(CONFIG, 0), initial_parameters(CONFIG, 1)
    assert all(np.array_equal(again[name], w) for name, w in weights.items())
    assert not np.array_equal(other["embedding"], weights["embedding"])


def test_layers_differ_from_each_other(weights):
    for name in ("wInProj", "wConv", "wXProj", "wDtProj", "bDtProj", "wOutProj"):
        assert not np.array_equal(weights[f"layer0.{name}"], weights[f"layer1.{name}"])


@pytest.mark.parametrize("seed", [-1, 1.5, True, "0", None])
def test_a_seed_that_is_not_a_natural_number_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be an integer of at least 0"):
        initial_parameters(CONFIG, seed)
