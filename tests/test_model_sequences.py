"""Padding, packed documents, pieces and steps: all equal to each sequence run alone, whole."""

from __future__ import annotations

import numpy as np
import pytest
from model_cases import T2, T2_IDS, random_ids, strong_model

from mamba_fast.config import MambaConfig
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance

DOCUMENTS = (3, 5, 6, 2)


@pytest.fixture(scope="module", params=["oracle", "cython"])
def backend(request):
    return get_backend(request.param)


@pytest.fixture(scope="module")
def model(backend):
    return strong_model(T2, backend)  # every bias of it is non-zero


def close(backend, actual, expected):
    assert relative_l2(actual, expected) <= tolerance(backend.name, "logits")


def states_close(backend, state, expected):
    for layer, other in zip(state.layers, expected.layers, strict=True):
        for tensor, wanted in zip(layer, other, strict=True):
            close(backend, backend.to_host(tensor), backend.to_host(wanted))


def prompts():
    """Prompts of 3 and 7 ids."""
    return [T2_IDS[10:13], T2_IDS[20:27]]


def padded(side, pad=0):
    """The prompts in one batch, and its mask."""
    ids, mask = np.full((2, 7), pad), np.zeros((2, 7), int)
    for row, prompt in enumerate(prompts()):
        where = slice(7 - len(prompt), 7) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = prompt, 1
    return ids, mask


# ---- padding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_logits_of_each_row_alone(backend, model, side):
    ids, mask = padded(side)
    logits = model.logits(ids, mask)
    assert logits.shape == (2, 7, 24)
    for row, prompt in enumerate(prompts()):
        close(backend, logits[row, mask[row] == 1], model.logits([prompt])[0])


def test_without_the_mask_left_padding_would_leak(backend, model):
    ids, mask = padded("left")
    error = relative_l2(model.logits(ids)[0, mask[0] == 1], model.logits([prompts()[0]])[0])
    assert error > 1e3 * tolerance("cython", "logits")


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_id_makes_no_difference(backend, model, side):
    _, mask = padded(side)
    zero, other = (model.logits(padded(side, pad)[0], mask) for pad in (0, 17))
    assert np.array_equal(zero[mask == 1], other[mask == 1])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_the_loss_and_gradients_of_the_rows_alone(backend, model, side):
    ids, mask = padded(side)
    targets = (ids + 1) % 24  # at padding too: they must not count
    loss, grads = model.loss_and_grads(ids, targets, attention_mask=mask)
    alone = [model.loss_and_grads([p], [(p + 1) % 24]) for p in prompts()]
    weights = np.array([3, 7]) / 10
    assert loss == pytest.approx(sum(w * a[0] for w, a in zip(weights, alone, strict=True)), rel=1e-5)
    assert model.loss(ids, targets, attention_mask=mask) == pytest.approx(loss, rel=1e-6)
    for name, g in grads.items():
        expected = sum(w * a[1][name] for w, a in zip(weights, alone, strict=True))
        assert relative_l2(g, expected) <= tolerance(backend.name, "model_gradient"), name


def test_lengths_mean_the_same_as_a_mask_of_right_padding(backend, model):
    ids, mask = padded("right")
    model.store.grads.zero()
    total = model.accumulate_gradients(ids, (ids + 1) % 24, scale=0.1, lengths=[3, 7])
    loss, grads = model.loss_and_grads(ids, (ids + 1) % 24, attention_mask=mask)
    assert float(backend.to_host(total)[0]) / 10 == pytest.approx(loss, rel=1e-6)
    close(backend, backend.to_host(model.store.grads["layer0.wInProj"]), grads["layer0.wInProj"])
    model.store.grads.zero()


# ---- packed documents -------------------------------------------------------------------------


def packed():
    """Documents of 3, 5, 6 and 2 ids in one row, and their restarts."""
    seq_start = np.zeros((1, 16), bool)
    seq_start[0, np.cumsum((0, *DOCUMENTS[:-1]))] = True
    return T2_IDS[None, :16], (T2_IDS[None, 1:17] * 7) % 24, seq_start


def test_packed_documents_have_the_logits_of_each_alone(backend, model):
    ids, _, seq_start = packed()
    logits = model.logits(ids, seq_start=seq_start)[0]
    alone = [model.logits([part])[0] for part in np.split(ids[0], np.cumsum(DOCUMENTS)[:-1])]
    close(backend, logits, np.concatenate(alone))


def test_without_restarts_packed_documents_would_leak(backend, model):
    ids, _, seq_start = packed()
    error = relative_l2(model.logits(ids), model.logits(ids, seq_start=seq_start))
    assert error > 1e3 * tolerance("cython", "logits")


def test_packed_documents_have_the_loss_and_gradients_of_each_alone(backend, model):
    ids, targets, seq_start = packed()
    loss, grads = model.loss_and_grads(ids, targets, seq_start=seq_start)
    cuts = np.cumsum(DOCUMENTS)[:-1]
    parts = zip(np.split(ids[0], cuts), np.split(targets[0], cuts), strict=True)
    alone = [model.loss_and_grads([i], [t]) for i, t in parts]
    weights = np.array(DOCUMENTS) / 16
    assert loss == pytest.approx(sum(w * a[0] for w, a in zip(weights, alone, strict=True)), rel=1e-5)
    for name, g in grads.items():
        expected = sum(w * a[1][name] for w, a in zip(weights, alone, strict=True))
        assert relative_l2(g, expected) <= tolerance(backend.name, "model_gradient"), name


# ---- pieces and steps -------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(23,), (1, 2, 5, 15), (15, 5, 2, 1), (1,) * 23])
def test_a_prompt_in_pieces_gives_the_logits_and_state_of_the_whole(backend, model, pieces):
    ids = np.stack([T2_IDS[:23], T2_IDS[30:53]])
    whole = model.logits(ids)
    state, start = model.init_state(2), 0
    for length in pieces:
        logits, state = model.prefill(ids[:, start : start + length], state)
        start += length
        close(backend, logits, whole[:, start - 1])
    _, at_once = model.prefill(ids, model.init_state(2))
    states_close(backend, state, at_once)


def test_steps_give_the_logits_of_the_whole_sequence(backend, model):
    ids = np.stack([T2_IDS[:20], T2_IDS[30:50]])
    whole = model.logits(ids)
    state = model.init_state(2)
    for t in range(20):
        logits, state = model.step(ids[:, t], state)
        close(backend, logits, whole[:, t])
    _, at_once = model.prefill(ids, model.init_state(2))
    states_close(backend, state, at_once)


@pytest.mark.parametrize("taps", [1, 2, 4, 6])
@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_a_prompt_shorter_than_the_convolution_decodes_like_the_whole(backend, taps, prompt):
    config = MambaConfig(vocab_size=24, d_model=5, n_layers=2, d_state=3, d_conv=taps, expand=3)
    model = strong_model(config, backend)
    ids = random_ids(config, (2, prompt + 5))
    whole = model.logits(ids)
    logits, state = model.prefill(ids[:, :prompt], model.init_state(2))
    close(backend, logits, whole[:, prompt - 1])
    for t in range(prompt, prompt + 5):
        logits, state = model.step(ids[:, t], state)
        close(backend, logits, whole[:, t])


@pytest.mark.parametrize("width", [5, 7, 13])
@pytest.mark.parametrize("expand", [1, 3])
def test_widths_that_are_no_multiple_of_anything_work(backend, width, expand):
    config = MambaConfig(vocab_size=9, d_model=width, n_layers=1, d_state=5, expand=expand)
    ids = random_ids(config, (2, 6))
    expected = strong_model(config, "oracle").logits(ids)
    close(get_backend("cython"), strong_model(config, backend).logits(ids), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_gives_each_rows_last_real_logits_and_state(backend, model, side):
    ids, mask = padded(side)
    logits, state = model.prefill(ids, model.init_state(2), attention_mask=mask)
    following = np.array([5, 6])
    then, _ = model.step(following, state)
    for row, prompt in enumerate(prompts()):
        alone, alone_state = model.prefill([prompt], model.init_state(1))
        close(backend, logits[row : row + 1], alone)
        close(backend, then[row : row + 1], model.step(following[row : row + 1], alone_state)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_padded_prompt_in_pieces_gives_the_state_of_each_row_alone(backend, model, side, size):
    ids, mask = padded(side)
    state = model.init_state(2)
    for start in range(0, 7, size):
        part = slice(start, start + size)
        _, state = model.prefill(ids[:, part], state, attention_mask=mask[:, part])
    then, _ = model.step([5, 6], state)
    for row, prompt in enumerate(prompts()):
        _, alone = model.prefill([prompt], model.init_state(1))
        close(backend, then[row : row + 1], model.step([5 + row], alone)[0])


def test_a_row_sits_a_piece_out_with_a_single_tap_too(backend):
    config = T2.replace(d_conv=1)
    model = strong_model(config, backend)
    ids = np.stack([T2_IDS[:6], T2_IDS[9:15]])
    _, state = model.prefill(ids, model.init_state(2), lengths=[6, 0])
    _, alone = model.prefill(ids[:1], model.init_state(1))
    assert np.array_equal(backend.to_host(state.layers[1].ssm)[:1], backend.to_host(alone.layers[1].ssm))
    assert not backend.to_host(state.layers[1].ssm)[1].any()


def test_lengths_of_a_piece_may_be_zero(backend, model):
    ids = np.stack([T2_IDS[:6], T2_IDS[9:15]])
    _, state = model.prefill(ids, model.init_state(2))
    _, state = model.prefill(ids, state, lengths=[0, 4])
    _, expected_state = model.prefill(ids, model.init_state(2))
    _, other = model.prefill([np.concatenate([ids[1], ids[1, :4]])], model.init_state(1))
    for layer, kept, moved in zip(state.layers, expected_state.layers, other.layers, strict=True):
        for tensor, first, second in zip(layer, kept, moved, strict=True):
            host = backend.to_host(tensor)
            assert np.array_equal(host[0], backend.to_host(first)[0])
            close(backend, host[1], backend.to_host(second)[0])


def test_a_copied_state_goes_on_independently(backend, model):
    _, state = model.prefill([T2_IDS[:5]], model.init_state(1))
    copy = state.copy()
    expected, _ = model.step([7], state)
    model.step([9], state)
    assert np.array_equal(model.step([7], copy)[0], expected)


def test_the_state_does_not_grow(backend, model):
    state = model.init_state(1)
    shapes = [(layer.conv.shape, layer.ssm.shape) for layer in state.layers]
    assert shapes == [((1, 2, 16), (1, 16, 4))] * 2
    _, state = model.prefill([T2_IDS], state)
    _, state = model.step([1], state)
    assert [(layer.conv.shape, layer.ssm.shape) for layer in state.layers] == shapes


def test_generation_continues_with_the_most_probable_token_of_the_full_forward(backend, model):
    ids = T2_IDS[None, :6]
    new = model.generate(ids, 5, temperature=0)
    assert new.shape == (1, 11)
    expected = ids.copy()
    for _ in range(5):
        following = model.logits(expected)[:, -1].argmax(-1)
        expected = np.concatenate([expected, following[:, None]], axis=1)
    assert np.array_equal(new, expected)


def test_streaming_yields_what_generation_appends(backend, model):
    ids = T2_IDS[None, :6]
    new = model.generate(ids, 5, temperature=1.0, seed=3)[:, 6:]
    assert np.array_equal(np.stack(list(model.stream(ids, 5, temperature=1.0, seed=3)), axis=1), new)
