"""Copies of models and of their states, by `copy` and by `pickle`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from model_cases import T2, T2_IDS, strong_model

from mamba_fast.model import MambaLM
from mamba_fast.registry import get_backend
from mamba_fast.testing.loopback import create_backend as create_loopback

IDS = T2_IDS[None, :9]
TARGETS = T2_IDS[None, 1:10]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.fixture(params=["oracle", "cython"])
def model(request) -> MambaLM:
    return strong_model(T2.replace(d_conv=1) if request.param == "oracle" else T2, request.param)


copies = pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, pickled], ids=["deep", "copy", "pickle"]
)


def one_step(model: MambaLM) -> None:
    """Change all weights, as an optimizer does: through the flat memory."""
    model.store.grads.zero()
    model.accumulate_gradients(IDS, TARGETS, scale=1.0)
    for tensor, _ in model.store.values.runs(model.store.names):
        model.backend.scale_(tensor, 0.5)


@copies
def test_a_copy_has_the_same_weights_and_computes_the_same(model, copied):
    twin = copied(model)
    assert twin.config == model.config
    assert twin.backend.name == model.backend.name
    for name, array in model.parameters().items():
        np.testing.assert_array_equal(twin.parameters()[name], array)
    np.testing.assert_array_equal(twin.logits(IDS), model.logits(IDS))
    assert twin.loss_and_grads(IDS, TARGETS)[0] == model.loss_and_grads(IDS, TARGETS)[0]


@copies
@pytest.mark.parametrize("changed", ["the copy", "the original"])
def test_a_copy_is_independent(model, copied, changed):
    twin = copied(model)
    before = model.logits(IDS)
    one, other = (twin, model) if changed == "the copy" else (model, twin)
    one_step(one)
    assert not np.array_equal(one.logits(IDS), before)
    np.testing.assert_array_equal(other.logits(IDS), before)


@copies
def test_a_copy_can_be_trained_like_the_original(model, copied):
    model.store.trainable = {"embedding", "layer1.A_log"}
    twin = copied(model)
    assert twin.store.trainable == model.store.trainable
    twin.store.trainable.add("final_norm")
    assert "final_norm" not in model.store.trainable
    one_step(twin)
    one_step(model)
    np.testing.assert_array_equal(twin.logits(IDS), model.logits(IDS))


def test_copies_keep_what_a_subclass_adds(model):
    model.note = ["mine"]
    for copied in (copy.deepcopy, pickled):
        twin = copied(model)
        assert twin.note == ["mine"]
        assert twin.note is not model.note


def test_a_deep_copy_needs_nothing_of_a_backend_but_the_contract():
    model = strong_model(T2, create_loopback())
    twin = copy.deepcopy(model)
    assert twin.backend is model.backend
    np.testing.assert_array_equal(twin.logits(IDS), model.logits(IDS))


def test_models_that_occur_twice_are_copied_once(model):
    first, second = copy.deepcopy([model, model])
    assert first is second
    assert first is not model


def test_parts_whose_memory_is_shared_are_not_copied_by_themselves(model):
    for copied in (copy.deepcopy, copy.copy, pickled):
        with pytest.raises(TypeError, match="cannot be copied or pickled by themselves: copy the model"):
            copied(model.store.values)


# ---- states -----------------------------------------------------------------------------------


@copies
def test_a_copied_state_goes_on_where_the_original_stood(model, copied: Callable[[Any], Any]):
    _, state = model.prefill(IDS[:, :5], model.init_state(1))
    twin = copied(state)
    expected, _ = model.step(IDS[:, 5], state)
    model.step(IDS[:, 6], state)  # does not reach the copy
    actual, _ = model.step(IDS[:, 5], twin)
    np.testing.assert_array_equal(actual, expected)


def test_a_state_pickled_with_its_model_goes_on_with_it(model):
    _, state = model.prefill(IDS[:, :5], model.init_state(1))
    twin, its_state = pickled((model, state))
    np.testing.assert_array_equal(twin.step(IDS[:, 5], its_state)[0], model.step(IDS[:, 5], state)[0])


def test_a_state_of_the_original_is_one_of_a_deep_copy(model):
    _, state = model.prefill(IDS[:, :5], model.init_state(1))
    twin, its_state = copy.deepcopy((model, state))
    expected = model.step(IDS[:, 5], state.copy())[0]
    np.testing.assert_array_equal(twin.step(IDS[:, 5], its_state)[0], expected)
    np.testing.assert_array_equal(twin.step(IDS[:, 5], state)[0], expected)


def test_an_unpickled_state_belongs_to_the_model_that_uses_it_first(model):
    other = MambaLM(model.config, get_backend("cython", threads=1))
    state = pickled(model.init_state(1))
    copied = state.copy()
    for free in (state, copied):
        model.step(IDS[:, 0], free)
        with pytest.raises(ValueError, match="it lies on another backend object"):
            other.step(IDS[:, 0], free)
    with pytest.raises(ValueError, match="it has 2 layers, expected 1"):
        MambaLM(model.config.replace(n_layers=1)).step(IDS[:, 0], pickled(state))
