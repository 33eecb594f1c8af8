"""The facade: parameters in and out, files, refusal of bad input."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from model_cases import T2, T2_IDS, random_ids, strong_model, strong_parameters

from mamba_fast.backends.cython import SERIAL_BELOW
from mamba_fast.config import MambaConfig
from mamba_fast.model import MambaLM, load_model
from mamba_fast.params import parameter_shapes
from mamba_fast.registry import get_backend

IDS = T2_IDS[None, :16]
TARGETS = T2_IDS[None, 1:17]


@pytest.fixture(params=["oracle", "cython"])
def backend(request):
    return get_backend(request.param)


# ---- parameters -------------------------------------------------------------------------------


def test_parameters_come_back_in_the_order_and_shapes_of_the_specification(backend):
    parameters = MambaLM(T2, backend).parameters()
    assert [(name, w.shape) for name, w in parameters.items()] == list(parameter_shapes(T2).items())


def test_parameters_are_copies(backend):
    model = MambaLM(T2, backend)
    model.parameters()["embedding"][...] = 7.0
    assert not (model.parameters()["embedding"] == 7.0).any()


def test_a_seed_gives_the_same_weights_on_every_backend():
    oracle, cython = (MambaLM(T2, name, seed=5).parameters() for name in ("oracle", "cython"))
    for name, w in oracle.items():
        assert cython[name].dtype == np.float32
        assert np.array_equal(w.astype(np.float32), cython[name])


def test_loaded_parameters_come_back_bit_for_bit(backend):
    weights = strong_parameters(T2, 1)
    model = MambaLM(T2, backend, seed=None)
    model.load_parameters(weights)
    assert all(np.array_equal(w, weights[name]) for name, w in model.parameters().items())


@pytest.mark.parametrize(
    "form",
    [
        lambda w: w.astype(np.float64),
        lambda w: w.astype(">f4"),
        np.asfortranarray,
        lambda w: np.repeat(w, 2, axis=-1)[..., ::2],
        lambda w: w.tolist(),
    ],
    ids=["float64", "big-endian", "fortran", "strided", "lists"],
)
def test_any_form_of_array_loads_with_the_same_result(backend, form):
    weights = strong_parameters(T2, 1)
    model = MambaLM(T2, backend, seed=None)
    model.load_parameters({name: form(w) for name, w in weights.items()})
    assert all(np.array_equal(w, weights[name]) for name, w in model.parameters().items())


def test_half_precision_and_read_only_weights_load_as_their_float32_values(backend):
    weights = {name: w.astype(np.float16) for name, w in strong_parameters(T2, 1).items()}
    for w in weights.values():
        w.setflags(write=False)
    model = MambaLM(T2, backend, seed=None)
    model.load_parameters(weights)
    assert all(np.array_equal(w, weights[name]) for name, w in model.parameters().items())


def test_loading_copies_the_arrays(backend):
    weights = strong_parameters(T2, 1)
    model = MambaLM(T2, backend, seed=None)
    model.load_parameters(weights)
    before = model.logits(IDS)
    for w in weights.values():
        w[...] = 0.0
    assert np.array_equal(model.logits(IDS), before)


def faulty(**changes):
    weights = strong_parameters(T2, 1)
    for name, change in changes.items():
        name = name.replace("__", ".")
        weights[name] = change(weights.get(name))
    return weights


def with_value(value, at):
    def change(w):
        w = w.astype(np.float64)
        w[at] = value
        return w

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer1__wConv": lambda w: w[:, :2]},
            r"layer1.wConv has shape \(16, 2\), expected \(16, 3\)",
        ),
        ({"layer1__wConv": lambda w: w.T}, r"layer1.wConv has shape \(3, 16\), expected \(16, 3\)"),
        ({"lm_head": lambda _: np.zeros((24, 8))}, r"lm_head of shape \(24, 8\) is not a parameter"),
        ({"final_norm": with_value(np.nan, 3)}, r"final_norm\[3\] is nan, expected a finite float32"),
        ({"layer0__A_log": with_value(-np.inf, (2, 1))}, r"layer0.A_log\[2, 1\] is -inf"),
        ({"embedding": with_value(1e300, (0, 0))}, r"embedding\[0, 0\] is 1e\+300"),
        ({"final_norm": lambda w: w.astype(str)}, "final_norm has dtype <U.*, expected numbers"),
        ({"final_norm": lambda w: w > 0}, "final_norm has dtype bool, expected numbers"),
        ({"final_norm": lambda w: w + 0j}, "final_norm has dtype complex64, expected numbers"),
    ],
)
def test_parameters_that_do_not_fit_are_named_and_nothing_is_loaded(changes, message):
    model = MambaLM(T2, "oracle", seed=1)
    before = model.parameters()
    with pytest.raises(ValueError, match=message):
        model.load_parameters(faulty(**changes))
    assert all(np.array_equal(w, before[name]) for name, w in model.parameters().items())


def test_a_missing_parameter_is_named_with_its_shape_and_nothing_is_loaded():
    model = MambaLM(T2, "oracle", seed=1)
    before = model.parameters()
    weights = strong_parameters(T2, 1)
    del weights["layer1.D_vec"]
    with pytest.raises(ValueError, match=r"layer1.D_vec is missing, expected shape \(16,\)"):
        model.load_parameters(weights)
    assert all(np.array_equal(w, before[name]) for name, w in model.parameters().items())


def test_every_fault_of_a_mapping_is_reported_at_once():
    weights = faulty(surplus=lambda _: np.zeros(3), final_norm=lambda w: w[:2])
    del weights["embedding"]
    with pytest.raises(ValueError, match="embedding is missing.*final_norm has shape.*surplus of shape"):
        MambaLM(T2, "oracle").load_parameters(weights)


def test_num_parameters_counts_every_number_once():
    model = MambaLM(T2, "oracle")
    assert model.num_parameters() == sum(w.size for w in model.parameters().values())
    untied = MambaLM(T2.replace(tie_embeddings=False), "oracle")
    assert untied.num_parameters() == model.num_parameters() + 24 * 8


def test_the_head_bias_is_zero_and_frozen_unless_the_config_trains_it():
    model = MambaLM(T2, "oracle")
    assert not model.parameters()["lm_head_bias"].any()
    assert model.store.trainable == set(model.parameters()) - {"lm_head_bias"}
    assert "lm_head_bias" in MambaLM(T2.replace(train_lm_head_bias=True), "oracle").store.trainable


def test_the_gradient_of_the_frozen_head_bias_is_returned_all_the_same():
    grads = MambaLM(T2, "oracle").loss_and_grads(IDS, TARGETS)[1]
    assert np.abs(grads["lm_head_bias"]).max() > 1e-3


def test_without_a_seed_all_weights_are_zero():
    assert not any(w.any() for w in MambaLM(T2, "oracle", seed=None).parameters().values())


# ---- losses and gradients ---------------------------------------------------------------------


def test_a_model_of_zero_weights_has_the_loss_of_a_uniform_guess(backend):
    model = MambaLM(T2, backend, seed=None)
    assert model.loss(IDS, TARGETS) == pytest.approx(np.log(24), rel=1e-6)


def test_the_loss_is_the_mean_over_the_predicted_positions_only(backend):
    model = strong_model(T2, backend)
    targets = TARGETS.copy()
    targets[0, [0, 3, 15]] = -100
    logits = model.logits(IDS).astype(np.float64)[0]
    kept = np.flatnonzero(targets[0] != -100)
    losses = np.log(np.exp(logits).sum(-1))[kept] - logits[kept, targets[0, kept]]
    assert model.loss(IDS, targets) == pytest.approx(losses.mean(), rel=1e-5)
    total, count = model.loss_sum(IDS, targets)
    assert (total, count) == (pytest.approx(losses.sum(), rel=1e-5), 13)


def test_a_batch_that_predicts_nothing_has_no_mean_loss(backend):
    model = MambaLM(T2, backend)
    nothing = np.full_like(TARGETS, -100)
    assert model.loss_sum(IDS, nothing) == (0.0, 0)
    for call in (model.loss, model.loss_and_grads):
        with pytest.raises(ValueError, match="targets predict nothing"):
            call(IDS, nothing)


def test_loss_and_grads_leaves_the_stored_gradients_alone(backend):
    model = strong_model(T2, backend)
    model.accumulate_gradients(IDS, TARGETS, scale=1.0)
    before = backend.to_host(model.store.grads["embedding"])
    model.loss_and_grads(IDS, TARGETS)
    assert np.array_equal(backend.to_host(model.store.grads["embedding"]), before)


def test_accumulated_gradients_of_two_halves_equal_those_of_the_whole(backend):
    ids, targets = random_ids(T2, (4, 9), 3), random_ids(T2, (4, 9), 4)
    targets[0, 2:] = -100  # the halves do not weigh the same
    model = strong_model(T2, backend)
    loss, whole = model.loss_and_grads(ids, targets)
    count = int((targets != -100).sum())
    total = 0.0
    for half in (slice(0, 2), slice(2, 4)):
        tensor = model.accumulate_gradients(ids[half], targets[half], scale=1.0 / count)
        assert tensor.shape == (1,)
        total += float(backend.to_host(tensor)[0])
    assert total / count == pytest.approx(loss, rel=1e-5)
    for name in model.store.trainable:
        np.testing.assert_allclose(
            backend.to_host(model.store.grads[name]),
            whole[name],
            rtol=1e-4,
            atol=1e-5 * np.abs(whole[name]).max(),
        )


def test_only_trainable_parameters_accumulate_gradients(backend):
    model = strong_model(T2, backend)
    model.store.trainable = {"layer0.wXProj", "layer1.bXProj"}
    model.accumulate_gradients(IDS, TARGETS, scale=1.0)
    moved = {name for name in model.store.names if backend.to_host(model.store.grads[name]).any()}
    assert moved == model.store.trainable


def test_a_frozen_rest_changes_no_bit_of_the_gradients_that_are_wanted(backend):
    model = strong_model(T2, backend)
    model.accumulate_gradients(IDS, TARGETS, scale=0.5)
    wanted = {"embedding", "layer0.wXProj", "layer1.A_log", "layer0.bConv"}
    full = {name: backend.to_host(model.store.grads[name]) for name in wanted}
    model.store.grads.zero()
    model.store.trainable = wanted
    model.accumulate_gradients(IDS, TARGETS, scale=0.5)
    for name in wanted:
        assert np.array_equal(backend.to_host(model.store.grads[name]), full[name])


WIDE = MambaConfig(vocab_size=300, d_model=144, n_layers=2, d_state=9, tie_embeddings=False)
"""Large enough, with 3 rows of 131, that every op is shared among threads: see the test of its sizes."""
ROWS = 3 * 131


@pytest.fixture(scope="module")
def wide_batch():
    ids, targets = random_ids(WIDE, (3, 131), 3), random_ids(WIDE, (3, 131), 4)
    targets[1, 5:9] = -100
    return ids, targets, np.random.default_rng(5).random((3, 131)) < 0.03


def test_the_model_of_the_test_of_threads_has_products_and_kernels_that_are_shared():
    products = [  # multiplications of in_proj, x_proj, out_proj and the head; dt_proj's are few in any model
        ROWS * rows * columns
        for name in ("layer0.wInProj", "layer0.wXProj", "layer0.wOutProj", "lm_head")
        for rows, columns in [parameter_shapes(WIDE)[name]]
    ]
    assert min(products) > 2e6  # what is smaller is one task (_gemm.pyx)
    assert ROWS * WIDE.d_model > SERIAL_BELOW  # the norm, the smallest of the kernels


def test_the_number_of_threads_changes_no_bit_of_loss_logits_and_any_gradient(wide_batch):
    ids, targets, seq_start = wide_batch
    results = []
    for threads in (1, 2, 5):
        model = strong_model(WIDE, get_backend("cython", threads=threads))
        loss, grads = model.loss_and_grads(ids, targets, seq_start=seq_start)
        assert all(np.isfinite(grad).all() and grad.any() for grad in grads.values())
        results.append({"loss": loss, "logits": model.logits(ids).tobytes()})
        results[-1].update({name: grad.tobytes() for name, grad in grads.items()})
    for other in results[1:]:
        assert [name for name in other if other[name] != results[0][name]] == []


def test_everything_that_comes_back_is_float32_and_a_float():
    model = strong_model(T2, "cython")
    loss, grads = model.loss_and_grads(IDS, TARGETS)
    arrays = [model.logits(IDS), *grads.values(), *model.parameters().values()]
    arrays.append(model.prefill(IDS, model.init_state(1))[0])
    arrays.append(model.step([1], model.init_state(1))[0])
    assert {a.dtype for a in arrays} == {np.dtype(np.float32)}
    assert type(loss) is float
    assert type(model.loss(IDS, TARGETS)) is float


def test_a_second_run_gives_the_same_bits(backend):
    model = strong_model(T2, backend)
    first, second = (model.loss_and_grads(IDS, TARGETS) for _ in range(2))
    assert first[0] == second[0]
    assert all(np.array_equal(g, second[1][name]) for name, g in first[1].items())


def test_the_head_in_several_chunks_of_rows_equals_the_head_in_one(backend, monkeypatch):
    model = strong_model(T2, backend)
    ids, targets = random_ids(T2, (3, 11), 3), random_ids(T2, (3, 11), 4)
    loss, grads = model.loss_and_grads(ids, targets)
    logits = model.logits(ids)
    monkeypatch.setattr("mamba_fast.lm._MIN_ROWS", 4)
    monkeypatch.setattr("mamba_fast.lm._LOGITS_ELEMENTS", 1)
    chunked_loss, chunked = model.loss_and_grads(ids, targets)
    assert chunked_loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(model.logits(ids), logits, rtol=1e-5, atol=1e-5)
    for name, g in grads.items():
        np.testing.assert_allclose(chunked[name], g, rtol=1e-4, atol=1e-5 * np.abs(g).max())


# ---- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_loads_with_the_same_bits(backend, tmp_path, tied):
    config = T2.replace(tie_embeddings=tied)
    model = strong_model(config, backend)
    model.save(tmp_path / "model")
    again = load_model(tmp_path / "model", backend)
    assert again.config == config
    assert all(np.array_equal(w, again.parameters()[name]) for name, w in model.parameters().items())
    assert np.array_equal(again.logits(IDS), model.logits(IDS))


def test_a_model_moves_from_one_backend_to_another_through_its_files(tmp_path):
    model = strong_model(T2, "oracle")
    model.save(tmp_path)
    other = load_model(tmp_path, "cython")
    np.testing.assert_allclose(other.logits(IDS), model.logits(IDS), rtol=1e-4, atol=1e-4)


# ---- bad input --------------------------------------------------------------------------------

METHODS = {
    "logits": lambda model, ids: model.logits(ids),
    "loss": lambda model, ids: model.loss(ids, ids),
    "loss_and_grads": lambda model, ids: model.loss_and_grads(ids, ids),
    "accumulate_gradients": lambda model, ids: model.accumulate_gradients(ids, ids, scale=1.0),
    "prefill": lambda model, ids: model.prefill(ids, model.init_state(1)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, -1]], r"ids\[0, 1\] is -1"),
        ([[24]], r"ids\[0, 0\] is 24, expected an id in \[0, 24\)"),
        ([[1.5]], "ids must be integers"),
        ([[]], "ids is empty"),
        (np.zeros((0, 3), int), "ids is empty"),
        ([3], r"expected \(B, L\)"),
    ],
)
def test_every_method_refuses_wrong_ids_and_names_them(method, ids, message):
    with pytest.raises(ValueError, match=message):
        METHODS[method](MambaLM(T2, "oracle"), ids)


@pytest.mark.parametrize(
    ("ids", "message"), [([24], r"ids\[0\] is 24"), ([1, 2], "one id for each sequence")]
)
def test_step_refuses_wrong_ids_and_names_them(ids, message):
    model = MambaLM(T2, "oracle")
    with pytest.raises(ValueError, match=message):
        model.step(ids, model.init_state(1))


@pytest.mark.parametrize("batch", [0, -1, 1.5, True])
def test_a_state_needs_at_least_one_sequence(batch):
    with pytest.raises(ValueError, match="batch must be an integer of at least 1"):
        MambaLM(T2, "oracle").init_state(batch)


def test_a_prompt_of_another_batch_size_than_the_state_is_refused():
    model = MambaLM(T2, "oracle")
    with pytest.raises(ValueError, match="ids has 1 rows, but the state has 2 sequences"):
        model.prefill(IDS, model.init_state(2))


def test_a_config_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="config must be a MambaConfig, got dict"):
        MambaLM({"vocab_size": 3}, "oracle")


def test_the_model_says_what_it_is():
    text = repr(MambaLM(T2, "oracle"))
    assert "vocab_size=24" in text
    assert "'oracle'" in text
    assert f"{MambaLM(T2, 'oracle').num_parameters():,} parameters" in text


def test_running_a_model_imports_no_deep_learning_framework():
    code = (
        "import sys, numpy as np; from mamba_fast import MambaLM, MambaConfig;"
        "m = MambaLM(MambaConfig(24, 8, 2), 'cython'); m.loss_and_grads([[1, 2]], [[2, 3]]);"
        "bad = {'torch', 'triton', 'tensorflow', 'jax', 'wgpu', 'Cython'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
