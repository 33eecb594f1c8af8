"""Decoding from a state: whose state is taken, and what is kept from token to token."""

from __future__ import annotations

import numpy as np
import pytest
from model_cases import T2, T2_IDS, random_ids, strong_model, strong_parameters

from mamba_fast.backend import Backend
from mamba_fast.model import MambaLM
from mamba_fast.optim import AdamW
from mamba_fast.registry import get_backend
from mamba_fast.state import DecodeState, LayerState

PROMPT = T2_IDS[None, :5]


@pytest.fixture(params=["oracle", "cython"])
def backend(request):
    return get_backend(request.param)


# ---- whose state ------------------------------------------------------------------------------


def contents(backend: Backend, state: DecodeState) -> list[np.ndarray]:
    return [backend.to_host(tensor) for layer in state.layers for tensor in layer]


def filled(backend: Backend, state: DecodeState) -> DecodeState:
    for layer in state.layers:
        for tensor in layer:
            backend.fill_(tensor, 0.5)
    return state


def other_states(backend: Backend) -> dict[str, tuple[DecodeState, str]]:
    """States that are not those of a model T2, and what the error says of them."""

    def zeros(**changes):
        return DecodeState.zeros(backend, T2.replace(**changes), 1)

    uneven = DecodeState.zeros(backend, T2, 1)
    uneven.layers[1] = DecodeState.zeros(backend, T2, 2).layers[1]
    mixed = DecodeState.zeros(backend, T2, 1)
    mixed.layers[1] = LayerState(mixed.layers[1].conv, zeros(d_state=5).layers[1].ssm)
    return {
        "a layer more": (zeros(n_layers=3), "3 layers, expected 2"),
        "a layer less": (zeros(n_layers=1), "1 layers, expected 2"),
        "no layer": (DecodeState(backend, []), "0 layers, expected 2"),
        "other states": (zeros(d_state=5), r"layer 0 .*\(1, 16, 5\), expected .*\(1, 16, 4\)"),
        "other taps": (zeros(d_conv=4), r"layer 0 .*\(1, 3, 16\) .*expected \(1, 2, 16\)"),
        "other width": (zeros(d_inner=17), r"layer 0 .*\(1, 17, 4\)"),
        "another batch above": (uneven, r"layer 1 .*\(2, 16, 4\)"),
        "another layer above": (mixed, r"layer 1 .*\(1, 16, 5\)"),
    }


OTHER_STATES = list(other_states(get_backend("oracle")))


@pytest.mark.parametrize("kind", OTHER_STATES)
@pytest.mark.parametrize("method", ["step", "prefill"])
def test_a_state_of_another_model_is_refused_and_left_as_it_is(backend, method, kind):
    model = strong_model(T2, backend)
    state, message = other_states(backend)[kind]
    filled(backend, state)
    layers = list(state.layers)
    with pytest.raises(ValueError, match=f"state is not one of this model: .*{message}.*init_state"):
        getattr(model, method)(PROMPT if method == "prefill" else [3], state)
    assert all(now is then for now, then in zip(state.layers, layers, strict=True))
    assert all((array == 0.5).all() for array in contents(backend, state))


@pytest.mark.parametrize("method", ["step", "prefill"])
def test_a_state_of_another_backend_object_is_refused(method):
    model, other = (MambaLM(T2, get_backend("cython", threads=1)) for _ in range(2))
    with pytest.raises(ValueError, match="state is not one of this model: it lies on another backend"):
        getattr(model, method)(PROMPT if method == "prefill" else [3], other.init_state(1))


def test_a_piece_that_fails_leaves_the_state_as_it_was(backend, monkeypatch):
    model = strong_model(T2, backend)
    _, state = model.prefill(PROMPT, model.init_state(1))
    before, layers = contents(backend, state), state.layers

    linear = backend.linear

    def broken_head(x, w, *args, **options):
        if w.shape[0] == T2.vocab_size:
            raise MemoryError
        return linear(x, w, *args, **options)

    monkeypatch.setattr(backend, "linear", broken_head)  # every block is done by then
    with pytest.raises(MemoryError):
        model.prefill(PROMPT, state)
    assert state.layers is layers
    assert all(np.array_equal(a, b) for a, b in zip(contents(backend, state), before, strict=True))


def test_rows_are_put_back_only_where_a_row_sits_out(backend, monkeypatch):
    model = strong_model(T2, backend)
    ids = random_ids(T2, (2, 3))
    state = model.init_state(2)
    copies = []
    monkeypatch.setattr(backend, "copy_", lambda dst, src: copies.append(tuple(dst.shape)))
    model.prefill(ids, state)
    assert copies == []
    model.prefill(ids, state, lengths=[2, 0])
    assert copies == [(1, 2, 16), (1, 16, 4)] * 2


# ---- what is kept -----------------------------------------------------------------------------


def next_logits(model: MambaLM) -> np.ndarray:
    _, state = model.prefill(PROMPT, model.init_state(1))
    return model.step([7], state)[0]


def fresh(model: MambaLM, backend: Backend) -> MambaLM:
    copy = MambaLM(model.config, backend, seed=None)
    copy.load_parameters(model.parameters())
    return copy


def count_decays(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    calls: list[tuple[int, ...]] = []
    decay = backend.decay

    def counted(a_log, **options):
        calls.append(tuple(a_log.shape))
        return decay(a_log, **options)

    monkeypatch.setattr(backend, "decay", counted)
    return calls


def test_the_decay_is_computed_once_for_all_tokens(backend, monkeypatch):
    model = strong_model(T2, backend)
    state = model.init_state(1)
    calls = count_decays(backend, monkeypatch)
    for token in (1, 2, 3):
        model.step([token], state)
    assert calls == [(16, 4)] * 2
    model.step([4], model.init_state(1))
    assert len(calls) == 2


def train_one_step(model: MambaLM) -> None:
    optimizer = AdamW(model.backend, model.store)
    model.accumulate_gradients(PROMPT[:, :-1], PROMPT[:, 1:], scale=1.0)
    optimizer.step(0.1)


def load_others(model: MambaLM) -> None:
    model.load_parameters(strong_parameters(T2, 99))


def write_one(model: MambaLM) -> None:
    model.backend.fill_(model.store.values["layer1.A_log"], 0.3)


@pytest.mark.parametrize("write", [train_one_step, load_others, write_one], ids=lambda f: f.__name__)
def test_decoding_after_the_weights_were_written_is_that_of_a_fresh_model(backend, write):
    model = strong_model(T2, backend)
    before = next_logits(model)
    write(model)
    after = next_logits(model)
    assert not np.array_equal(after, before)
    assert np.array_equal(after, next_logits(fresh(model, backend)))


def test_an_optimizer_goes_on_writing_and_decoding_follows(backend):
    """The optimizer holds the weights' tensors from its start, and asks the store for nothing later."""
    model = strong_model(T2, backend)
    model.store.trainable = {"layer0.A_log", "layer1.A_log"}
    optimizer = AdamW(backend, model.store)
    seen = [next_logits(model)]
    for _ in range(3):
        model.store.grads.zero()
        model.accumulate_gradients(PROMPT[:, :-1], PROMPT[:, 1:], scale=1.0)
        optimizer.step(0.1)
        seen.append(next_logits(model))
        assert np.array_equal(seen[-1], next_logits(fresh(model, backend)))
        assert not np.array_equal(seen[-1], seen[-2])


def test_an_optimizer_step_that_fails_midway_is_a_change_too(backend, monkeypatch):
    model = strong_model(T2, backend)
    optimizer = AdamW(backend, model.store)
    next_logits(model)

    def broken(params, *args, **options):
        for tensor in params:
            backend.fill_(tensor, 0.25)
        raise MemoryError

    monkeypatch.setattr(backend, "adamw_", broken)
    with pytest.raises(MemoryError):
        optimizer.step(0.1)
    assert np.array_equal(next_logits(model), next_logits(fresh(model, backend)))
