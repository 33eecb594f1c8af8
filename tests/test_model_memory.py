"""What a model holds in memory, and what it moves between host and device."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import pytest
from model_cases import T2, random_ids, strong_model

from mamba_fast.config import MambaConfig
from mamba_fast.registry import get_backend
from mamba_fast.testing.loopback import create_backend as create_loopback

DEEP = T2.replace(n_layers=4)


@pytest.fixture(params=["oracle", "cython", "loopback"])
def backend(request):
    return create_loopback() if request.param == "loopback" else get_backend(request.param)


class Saved:
    """Stands for what a scan keeps for its backward pass, so that it can be counted."""

    def __init__(self, value):
        self.value = value


def count_saved_scans(backend, monkeypatch):
    """After each scan with gradients: how many scans' saved values are alive."""
    alive, counts = weakref.WeakSet(), []
    forward, backward = backend.selective_scan, backend.selective_scan_backward

    def selective_scan(*args, **options):
        y, final_state, saved = forward(*args, **options)
        if saved is not None:
            saved = Saved(saved)
            alive.add(saved)
            counts.append(len(alive))
        return y, final_state, saved

    def selective_scan_backward(dy, saved, **options):
        return backward(dy, saved.value, **options)

    monkeypatch.setattr(backend, "selective_scan", selective_scan)
    monkeypatch.setattr(backend, "selective_scan_backward", selective_scan_backward)
    return counts


def test_checkpointing_changes_no_bit_of_loss_and_gradients(backend):
    model = strong_model(DEEP, backend)
    ids, targets = random_ids(DEEP, (2, 13), 3), random_ids(DEEP, (2, 13), 4)
    targets[0, :4] = -100
    seq_start = np.zeros((2, 13), bool)
    seq_start[1, 6] = True
    plain, checkpointed = (
        model.loss_and_grads(ids, targets, seq_start=seq_start, activation_checkpointing=on)
        for on in (False, True)
    )
    assert plain[0] == checkpointed[0]
    assert all(np.array_equal(g, checkpointed[1][name]) for name, g in plain[1].items())


def test_checkpointing_keeps_the_internals_of_one_layer_at_a_time(backend, monkeypatch):
    model = strong_model(DEEP, backend)
    counts = count_saved_scans(backend, monkeypatch)
    ids = random_ids(DEEP, (1, 6))
    model.loss_and_grads(ids, ids, activation_checkpointing=True)
    assert counts == [1, 1, 1, 1]


def test_without_checkpointing_the_internals_of_every_layer_are_kept(backend, monkeypatch):
    model = strong_model(DEEP, backend)
    counts = count_saved_scans(backend, monkeypatch)
    ids = random_ids(DEEP, (1, 6))
    model.loss_and_grads(ids, ids)
    assert counts == [1, 2, 3, 4]


def most_alive(monkeypatch, backend, call):
    """The largest number of saved values that are alive after any scan."""
    counts = []
    forward = backend.selective_scan

    def selective_scan(*args, **options):
        result = forward(*args, **options)
        counts.append(backend.live_saved)
        return result

    monkeypatch.setattr(backend, "selective_scan", selective_scan)
    call()
    return max(counts)


def test_checkpointing_keeps_no_more_for_many_layers_than_for_one(monkeypatch):
    most = {}
    for layers in (1, 5):
        backend = create_loopback()
        model = strong_model(T2.replace(n_layers=layers), backend)
        ids = random_ids(T2, (1, 4))
        for on in (False, True):
            call = partial(model.loss_and_grads, ids, ids, activation_checkpointing=on)
            most[layers, on] = most_alive(monkeypatch, backend, call)
    assert most[5, True] == most[1, True]
    assert most[5, False] > most[1, False] + 4 * 6  # seven ops of a block keep something


def test_nothing_stays_alive_after_a_step():
    backend = create_loopback()
    model = strong_model(T2, backend)
    ids = random_ids(T2, (2, 5))
    model.accumulate_gradients(ids, ids, scale=1.0)  # allocates the gradients
    before = backend.live_tensors
    for on in (False, True):
        model.accumulate_gradients(ids, ids, scale=1.0, activation_checkpointing=on)
        assert backend.live_tensors == before
        assert backend.live_saved == 0


def test_nothing_is_kept_where_no_gradient_is_wanted(backend, monkeypatch):
    model = strong_model(DEEP, backend)
    counts = count_saved_scans(backend, monkeypatch)
    ids = random_ids(DEEP, (1, 6))
    model.loss(ids, ids)
    model.logits(ids)
    model.prefill(ids, model.init_state(1))
    assert counts == []


def test_a_checkpointed_layer_costs_one_input_of_memory():
    config = MambaConfig(vocab_size=16, d_model=32, n_layers=2)
    ids = random_ids(config, (2, 256))
    peaks = {}
    for layers in (2, 10):
        model = strong_model(config.replace(n_layers=layers), "cython")
        model.accumulate_gradients(ids, ids, scale=1.0, activation_checkpointing=True)
        weights_and_gradients = 2 * 4 * model.num_parameters()
        peaks[layers] = model.backend.pool.held_bytes - weights_and_gradients
    one_input = ids.size * 32 * 4
    per_layer = (peaks[10] - peaks[2]) / 8
    assert 0.9 * one_input < per_layer < 1.15 * one_input
    # One layer with its gradients takes about 40 such inputs: the whole must show one of them, not ten.
    assert peaks[10] < 60 * one_input


def test_logits_of_all_positions_are_never_held_in_training():
    config = MambaConfig(vocab_size=20_000, d_model=4, n_layers=1)
    ids = random_ids(config, (4, 512))
    model = strong_model(config, "cython")
    model.accumulate_gradients(ids, ids, scale=1.0)
    peak = model.backend.pool.held_bytes
    assert peak < ids.size * 20_000 * 4 / 3


# ---- transfers --------------------------------------------------------------------------------


def transfers(backend, call):
    before = backend.transfers
    call()
    return backend.transfers - before


def test_a_training_step_sends_ids_and_targets_and_reads_nothing_back(backend):
    model = strong_model(T2, backend)
    ids = random_ids(T2, (2, 6))
    assert transfers(backend, lambda: model.accumulate_gradients(ids, ids, scale=1.0)) == 2
    masks = {"seq_start": np.eye(2, 6, dtype=bool), "lengths": [4, 6]}
    assert transfers(backend, lambda: model.accumulate_gradients(ids, ids, scale=1.0, **masks)) == 4


def test_loss_and_grads_reads_the_loss_and_each_gradient_once(backend):
    model = strong_model(T2, backend)
    ids = random_ids(T2, (2, 6))
    expected = 2 + 1 + len(model.store.names)
    assert transfers(backend, lambda: model.loss_and_grads(ids, ids)) == expected


def test_a_step_sends_ids_and_reads_logits(backend):
    model = strong_model(T2, backend)
    state = model.init_state(2)
    assert transfers(backend, lambda: model.step([1, 2], state)) == 2


# ---- tensors that refuse host access ----------------------------------------------------------


def test_a_model_runs_on_tensors_that_the_host_cannot_touch(tmp_path):
    loopback, oracle = create_loopback(), get_backend("oracle")
    sealed, plain = strong_model(T2, loopback), strong_model(T2, oracle)
    ids = random_ids(T2, (2, 9))
    mask = np.ones((2, 9), int)
    mask[0, :3] = 0
    assert np.array_equal(sealed.logits(ids, mask), plain.logits(ids, mask))
    for on in (False, True):
        loss, grads = sealed.loss_and_grads(ids, ids, attention_mask=mask, activation_checkpointing=on)
        expected_loss, expected = plain.loss_and_grads(ids, ids, attention_mask=mask)
        assert loss == expected_loss
        assert all(np.array_equal(g, expected[name]) for name, g in grads.items())
    states = [model.prefill(ids, model.init_state(2), attention_mask=mask)[1] for model in (sealed, plain)]
    (first, _), (second, _) = (m.step([3, 4], s) for m, s in zip((sealed, plain), states, strict=True))
    assert np.array_equal(first, second)
    assert np.array_equal(sealed.generate(ids, 3, temperature=0), plain.generate(ids, 3, temperature=0))
    sealed.save(tmp_path)
    assert all(np.array_equal(w, plain.parameters()[name]) for name, w in sealed.parameters().items())
