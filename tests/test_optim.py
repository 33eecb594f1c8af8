"""AdamW over a parameter store, and the schedule. The op itself is the conformance suite's business."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_fast.backend import Backend
from mamba_fast.config import MambaConfig, TrainConfig
from mamba_fast.optim import AdamW, schedule
from mamba_fast.params import Layout, ParamStore, model_layout
from mamba_fast.registry import get_backend

SHAPES = {"w": (3, 5), "b": (3,), "A_log": (3, 2), "u": (2, 7)}
LAYOUT = Layout(SHAPES, {"w", "u"})


@pytest.fixture(params=["oracle", "cython"])
def backend(request) -> Backend:
    return get_backend(request.param)


def make_store(backend: Backend, layout: Layout = LAYOUT, value: float = 1.0) -> ParamStore:
    store = ParamStore(backend, layout)
    for name in store.names:
        backend.fill_(store.values[name], value)
    return store


def values(backend: Backend, store: ParamStore) -> dict[str, np.ndarray]:
    return {name: backend.to_host(store.values[name]) for name in store.names}


def fill_grads(backend: Backend, store: ParamStore, value: float) -> None:
    for name in store.names:
        backend.fill_(store.grads[name], value)


def scalar(backend: Backend, grads: list[float], lr: float = 1e-4, **options: float) -> float:
    """A single matrix element that starts at 1, after one step for each gradient."""
    store = make_store(backend, Layout({"w": (1, 1)}, {"w"}))
    optimizer = AdamW(backend, store, **options)
    for gradient in grads:
        fill_grads(backend, store, gradient)
        optimizer.step(lr)
    return float(values(backend, store)["w"][0, 0])


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (1, {}, 0.999899000002),
        (1, {"lr": 1.0, "max_delta": 0.05}, 0.94),
        (3, {"lr": 0.1}, 0.697302904994),
    ],
)
def test_the_steps_worked_out_by_hand(backend, steps, options, expected):
    tolerance = 1e-11 if backend.name == "oracle" else 1e-7
    assert scalar(backend, [0.5] * steps, **options) == pytest.approx(expected, abs=tolerance)


def test_one_nan_gradient_leaves_no_trace_in_the_moments(backend):
    with_nan = scalar(backend, [1.0, np.nan, 1.0, 1.0, 1.0], lr=0.1)
    pure_decay = (1 - 0.1 * 0.01) ** 5
    assert with_nan == scalar(backend, [1.0, 1.0, 1.0, 1.0], lr=0.1)
    assert abs(with_nan - pure_decay) > 0.3


def test_a_skipped_step_is_counted_and_changes_nothing(backend):
    store = make_store(backend)
    optimizer = AdamW(backend, store)
    fill_grads(backend, store, 0.1)
    optimizer.step(0.1)
    before = {**values(backend, store), **{n: backend.to_host(t) for n, t in optimizer.state().items()}}
    row = backend.view(store.grads["u"], 0, 1, 2)
    backend.fill_(row, np.inf)
    optimizer.step(0.1)
    after = {**values(backend, store), **{n: backend.to_host(t) for n, t in optimizer.state().items()}}
    for name, array in before.items():
        if name != "stats":
            np.testing.assert_array_equal(after[name], array)
    assert optimizer.stats().skipped == 1
    assert optimizer.attempts == 2


def test_decay_skips_vectors_and_a_log(backend):
    store = make_store(backend)
    AdamW(backend, store, weight_decay=0.5).step(0.1)  # all gradients are 0
    after = values(backend, store)
    for name, expected in {"w": 0.95, "u": 0.95, "b": 1.0, "A_log": 1.0}.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-6)


def test_a_model_decays_its_matrices_but_not_a_log():
    layout = model_layout(MambaConfig(vocab_size=24, d_model=8, n_layers=1))
    skipped = {name.removeprefix("layer0.") for name in layout.shapes if name not in layout.decayed}
    assert skipped == {
        "bInProj", "bConv", "bXProj", "bDtProj", "A_log", "D_vec", "bOutProj", "normWeight", "final_norm",
        "lm_head_bias",
    }  # fmt: skip


def test_the_norm_is_that_of_all_gradients_together(backend):
    store = make_store(backend)
    optimizer = AdamW(backend, store, max_grad_norm=1.0)
    fill_grads(backend, store, 2.0)
    optimizer.step(0.1)
    count = sum(int(np.prod(shape)) for shape in SHAPES.values())
    stats = optimizer.stats()
    assert stats.grad_norm == pytest.approx(2.0 * count**0.5, rel=1e-6)
    assert stats.clip == pytest.approx(1.0 / (2.0 * count**0.5), rel=1e-5)


def test_the_trust_region_counts_what_it_limits(backend):
    store = make_store(backend)
    optimizer = AdamW(backend, store, max_delta=0.01)
    fill_grads(backend, store, 1.0)
    optimizer.step(0.1)
    assert optimizer.stats().clamped == sum(int(np.prod(shape)) for shape in SHAPES.values())
    np.testing.assert_allclose(values(backend, store)["b"], 0.99, rtol=1e-6)


def test_only_trainable_parameters_have_moments_and_move(backend):
    store = make_store(backend)
    store.trainable = {"b", "u"}
    optimizer = AdamW(backend, store)
    assert set(optimizer.state()) == {"m.b", "m.u", "v.b", "v.u", "stats"}
    fill_grads(backend, store, 1.0)
    optimizer.step(0.1)
    after = values(backend, store)
    for name in SHAPES:
        assert (after[name] != 1.0).all() == (name in {"b", "u"})


def test_training_a_part_gives_the_steps_that_training_all_gives_it(backend):
    results = []
    for trainable in ({"b", "u"}, set(SHAPES)):
        store = make_store(backend)
        store.trainable = trainable
        optimizer = AdamW(backend, store, max_grad_norm=0.0)
        for _ in range(3):
            fill_grads(backend, store, 0.3)
            optimizer.step(0.1)
        results.append(values(backend, store))
    for name in ("b", "u"):
        np.testing.assert_array_equal(results[0][name], results[1][name])


def test_a_whole_model_is_a_handful_of_tensors_to_the_backend(monkeypatch):
    backend = get_backend("oracle")
    store = ParamStore(backend, model_layout(MambaConfig(vocab_size=24, d_model=8, n_layers=12)))
    store.trainable.discard("lm_head_bias")
    optimizer = AdamW(backend, store)
    calls: list[int] = []
    monkeypatch.setattr(backend, "adamw_", lambda params, *args, **kwargs: calls.append(len(params)))
    monkeypatch.setattr(backend, "global_norm", lambda tensors: None)
    optimizer.step(0.1)
    assert calls == [2]


def test_nothing_to_train_is_refused(backend):
    store = make_store(backend)
    store.trainable = set()
    with pytest.raises(ValueError, match="no parameter is trainable"):
        AdamW(backend, store)


# ---- state ------------------------------------------------------------------------------------------


def test_a_state_taken_over_continues_bit_for_bit(backend):
    def steps(store: ParamStore, optimizer: AdamW, gradients: list[float]) -> None:
        for gradient in gradients:
            fill_grads(backend, store, gradient)
            optimizer.step(0.01)

    straight = make_store(backend)
    steps(straight, AdamW(backend, straight), [0.5, np.nan, -0.2, 0.7, 0.1])
    store = make_store(backend)
    first = AdamW(backend, store)
    steps(store, first, [0.5, np.nan, -0.2])
    second = AdamW(backend, store)
    second.load(first.state(), first.attempts)
    steps(store, second, [0.7, 0.1])
    for name, array in values(backend, straight).items():
        np.testing.assert_array_equal(values(backend, store)[name], array)
    assert second.stats().skipped == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"lacks 'm\.w' of shape \(3, 5\)"),
        ("surplus", r"has 'm\.x' of shape \(2,\), which is not trained"),
        ("shape", r"'m\.w' has shape \(2,\), expected \(3, 5\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(backend, change, message):
    store = make_store(backend)
    optimizer = AdamW(backend, store)
    state = {name: backend.zeros(tuple(t.shape)) for name, t in optimizer.state().items()}
    for tensor in state.values():
        backend.fill_(tensor, 7.0)
    if change == "missing":
        del state["m.w"]
    else:
        state["m.x" if change == "surplus" else "m.w"] = backend.zeros((2,))
    with pytest.raises(ValueError, match=message):
        optimizer.load(state, 5)
    assert optimizer.attempts == 0
    assert not any(backend.to_host(t).any() for t in optimizer.state().values())


# ---- schedule ---------------------------------------------------------------------------------------


def test_the_warm_up_is_linear_and_reaches_the_full_rate():
    config = TrainConfig(lr=1.0, warmup_steps=4, schedule="constant")
    assert [schedule(config, step, 10) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_cosine_falls_from_the_full_rate_to_its_floor_at_the_last_step():
    config = TrainConfig(lr=2.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [schedule(config, step, 30) for step in range(10, 31)]
    assert rates[0] == 2.0
    assert rates[10] == pytest.approx(1.1)
    assert rates[-1] == pytest.approx(0.2)
    assert rates == sorted(rates, reverse=True)


def test_a_warm_up_longer_than_the_run_only_warms_up():
    config = TrainConfig(lr=1.0, warmup_steps=100)
    assert [schedule(config, step, 3) for step in (1, 2, 3)] == pytest.approx([0.01, 0.02, 0.03])
