"""Names, shapes and flat memory of parameters."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mamba_fast.config import MambaConfig
from mamba_fast.params import (
    ALIGNMENT,
    DEFAULT_LORA_TARGETS,
    Layout,
    ParamStore,
    Slabs,
    bind,
    model_layout,
    param_matrix_shape,
    parameter_shapes,
)
from mamba_fast.registry import get_backend

CONFIG = MambaConfig(vocab_size=11, d_model=6, n_layers=2, d_state=3, d_conv=4, d_inner=10, dt_rank=2)

BLOCK = {
    "wInProj": (20, 6),
    "bInProj": (20,),
    "wConv": (10, 4),
    "bConv": (10,),
    "wXProj": (8, 10),
    "bXProj": (8,),
    "wDtProj": (10, 2),
    "bDtProj": (10,),
    "A_log": (10, 3),
    "D_vec": (10,),
    "wOutProj": (6, 10),
    "bOutProj": (6,),
    "normWeight": (6,),
}


@pytest.fixture
def backend():
    return get_backend("oracle")


def small_layout() -> Layout:
    shapes = {"a": (3, 5), "b": (7,), "c": (8, 8), "d": (2,), "e": (1, 1)}
    return Layout(shapes, {"a", "c", "e"})


def test_parameters_have_the_names_order_and_shapes_of_the_specification():
    expected = {"embedding": (11, 6)}
    for i in range(2):
        expected.update({f"layer{i}.{name}": shape for name, shape in BLOCK.items()})
    expected.update({"final_norm": (6,), "lm_head_bias": (11,)})
    assert list(parameter_shapes(CONFIG).items()) == list(expected.items())


def test_an_untied_head_stands_between_the_final_norm_and_the_head_bias():
    names = list(parameter_shapes(CONFIG.replace(tie_embeddings=False)))
    assert names[-3:] == ["final_norm", "lm_head", "lm_head_bias"]


@pytest.mark.parametrize(
    ("switch", "absent"),
    [
        ("use_bias", {"bInProj", "bOutProj"}),
        ("use_conv_bias", {"bConv"}),
        ("use_x_proj_bias", {"bXProj"}),
        ("use_lm_head_bias", {"lm_head_bias"}),
    ],
)
def test_a_bias_that_is_switched_off_has_no_parameter(switch, absent):
    full, less = parameter_shapes(CONFIG), parameter_shapes(CONFIG.replace(**{switch: False}))
    assert {name.rpartition(".")[2] for name in full.keys() - less.keys()} == absent
    assert [name for name in full if name in less] == list(less)


@pytest.mark.parametrize("name", BLOCK)
def test_matrices_have_a_matrix_shape_and_vectors_none(name):
    shape = BLOCK[name] if len(BLOCK[name]) == 2 else None
    assert param_matrix_shape(name, CONFIG) == shape
    assert param_matrix_shape(f"layer1.{name}", CONFIG) == shape


def test_the_embedding_and_the_head_are_matrices_of_the_vocabulary():
    assert param_matrix_shape("embedding", CONFIG) == (11, 6)
    assert param_matrix_shape("lm_head", CONFIG) == (11, 6)
    assert param_matrix_shape("lm_head_bias", CONFIG) is None
    assert param_matrix_shape("final_norm", CONFIG) is None


@pytest.mark.parametrize(
    "name", ["gate_proj", "layer2.wInProj", "layer0.embedding", "layer.wInProj", "", "x.y"]
)
def test_a_name_that_no_parameter_has_is_refused(name):
    with pytest.raises(ValueError, match=f"no parameter is named {name!r}"):
        param_matrix_shape(name, CONFIG)


def test_adapters_leave_the_embedding_and_a_log_alone_unless_told():
    assert DEFAULT_LORA_TARGETS == ("wInProj", "wXProj", "wDtProj", "wOutProj")


def test_weight_decay_is_for_matrices_other_than_a_log():
    decayed = {name.rpartition(".")[2] for name in model_layout(CONFIG).decayed}
    assert decayed == {"embedding", "wInProj", "wConv", "wXProj", "wDtProj", "wOutProj"}


def test_a_layout_refuses_to_decay_a_name_without_shape():
    with pytest.raises(ValueError, match="'z'"):
        Layout({"a": (1,)}, {"z"})


def test_tensors_start_aligned_and_never_overlap():
    places, sizes = model_layout(CONFIG).places(None)
    spans = sorted((p.slab, p.start, p.stop) for p in places.values())
    for slab, start, stop in spans:
        assert start % ALIGNMENT == 0
        assert stop <= sizes[slab]
    for (slab, _, stop), (next_slab, start, _) in pairwise(spans):
        assert slab != next_slab or stop <= start


def test_tensors_that_decay_share_no_slab_with_those_that_do_not():
    layout = model_layout(CONFIG)
    places, sizes = layout.places(None)
    assert len(sizes) == 2
    assert {p.slab for n, p in places.items() if n in layout.decayed} == {0}
    assert {p.slab for n, p in places.items() if n not in layout.decayed} == {1}


def test_no_slab_is_larger_than_a_tensor_may_be():
    layout = model_layout(CONFIG)
    places, sizes = layout.places(1024)
    assert max(sizes) <= 256
    assert len(sizes) > 2
    assert places.keys() == layout.shapes.keys()


def test_a_tensor_too_large_for_the_backend_is_named():
    with pytest.raises(ValueError, match=r"parameter c of shape \(8, 8\) takes 256 bytes, more than the 255"):
        small_layout().places(255)


def test_slabs_are_zero_and_views_write_through_to_the_flat_memory(backend):
    slabs = Slabs(backend, small_layout())
    assert not backend.to_host(slabs["a"]).any()
    backend.fill_(slabs["c"], 2.0)
    (flat, _), (_, _) = slabs.runs(["c", "b"])
    assert backend.to_host(flat).tolist() == [2.0] * 64
    assert not backend.to_host(slabs["a"]).any()
    assert not backend.to_host(slabs["e"]).any()


def test_zero_clears_every_tensor(backend):
    slabs = Slabs(backend, small_layout())
    for name in "abcde":
        backend.fill_(slabs[name], 1.0)
    slabs.zero()
    assert not any(backend.to_host(slabs[name]).any() for name in "abcde")


def test_all_names_make_one_run_for_each_group(backend):
    runs = Slabs(backend, small_layout()).runs("abcde")
    assert [(t.shape, decays) for t, decays in runs] == [((64 + 64 + 1,), True), ((64 + 2,), False)]


def test_a_run_ends_where_a_name_is_left_out(backend):
    slabs = Slabs(backend, small_layout())
    assert [(t.shape, decays) for t, decays in slabs.runs({"a", "e", "d"})] == [
        ((15,), True),
        ((1,), True),
        ((2,), False),
    ]
    assert slabs.runs([]) == []


def test_runs_cover_exactly_the_names_asked_for(backend):
    slabs = Slabs(backend, small_layout())
    for tensor, _ in slabs.runs({"a", "c", "b"}):
        backend.fill_(tensor, 3.0)
    for name in "abc":
        assert (backend.to_host(slabs[name]) == 3.0).all()
    for name in "de":
        assert not backend.to_host(slabs[name]).any()


def test_runs_never_cross_a_slab(backend):
    backend.max_tensor_bytes = 512
    slabs = Slabs(backend, small_layout())
    assert [t.shape for t, _ in slabs.runs("abcde")] == [(64 + 64,), (1,), (64 + 2,)]


def test_a_tensor_larger_than_a_slab_should_be_has_one_of_its_own(backend):
    backend.max_slab_bytes = 200
    slabs = Slabs(backend, small_layout())
    assert [t.shape for t, _ in slabs.runs("abcde")] == [(15,), (64,), (1,), (7,), (2,)]
    for name, value in zip("abcde", range(5), strict=True):
        backend.fill_(slabs[name], float(value))
    assert [backend.to_host(slabs[name]).flat[0] for name in "abcde"] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_runs_refuse_an_unknown_name(backend):
    with pytest.raises(ValueError, match="'nope'"):
        Slabs(backend, small_layout()).runs({"a", "nope"})


def test_gradients_are_allocated_on_first_use_and_kept(backend):
    store = ParamStore(backend, small_layout())
    assert store._grads is None
    grads = store.grads
    backend.fill_(grads["a"], 1.0)
    assert store.grads is grads
    assert backend.to_host(store.grads["a"]).all()


def test_everything_is_trainable_at_first(backend):
    store = ParamStore(backend, small_layout())
    assert store.trainable == set("abcde")
    assert store.names == tuple("abcde")


def test_bind_gives_gradients_to_the_wanted_names_only(backend):
    store = ParamStore(backend, small_layout())
    assert all(param.grad is None for param in bind(store.values).top.values())
    assert all(param.grad is not None for param in bind(store.values, store.grads).top.values())
    some = bind(store.values, store.grads, {"b"}).top
    assert [name for name, param in some.items() if param.grad is not None] == ["b"]


def test_a_block_sees_short_names_and_none_for_an_absent_bias(backend):
    config = CONFIG.replace(use_conv_bias=False)
    store = ParamStore(backend, model_layout(config))
    params = bind(store.values)
    assert list(params.top) == ["embedding", "final_norm", "lm_head_bias"]
    assert len(params.layers) == 2
    block = params.layers[1]
    assert list(block) == list(BLOCK)
    assert block["bConv"] is None
    assert np.shape(backend.to_host(block["wConv"].value)) == (10, 4)
    assert block["A_log"].value is store.values["layer1.A_log"]


# ---- what a store keeps -----------------------------------------------------------------------


@pytest.fixture
def store(backend):
    return ParamStore(backend, model_layout(CONFIG))


def with_gradients(params) -> set[str]:
    named = {
        f"layer{i}.{name}": param for i, layer in enumerate(params.layers) for name, param in layer.items()
    }
    return {
        name
        for name, param in {**params.top, **named}.items()
        if param is not None and param.grad is not None
    }


def test_the_parameters_for_reading_are_made_once(store):
    assert store.weights() is store.weights()
    assert with_gradients(store.weights()) == set()


def test_the_parameters_for_training_are_made_once_for_one_trainable_set(store):
    first = store.training()
    assert with_gradients(first) == set(store.names)
    assert store.training() is first
    store.trainable = set(store.names)
    assert store.training() is first


def test_the_parameters_for_training_follow_a_changed_or_replaced_trainable_set(store):
    store.training()
    store.trainable.discard("layer1.A_log")
    assert with_gradients(store.training()) == set(store.names) - {"layer1.A_log"}
    store.trainable = {"embedding", "layer0.wConv"}
    assert with_gradients(store.training()) == {"embedding", "layer0.wConv"}
    store.trainable.add("final_norm")
    assert with_gradients(store.training()) == {"embedding", "layer0.wConv", "final_norm"}


def test_the_decays_are_kept_until_the_weights_are_asked_for_to_be_written(backend, store):
    first = store.decays()
    assert [backend.to_host(a).tolist() for a in first] == [[[-1.0] * 3] * 10] * 2
    assert store.decays() is first
    backend.fill_(store.values["layer1.A_log"], np.log(2.0))
    assert np.allclose([backend.to_host(a)[0, 0] for a in store.decays()], [-1.0, -2.0])


def test_decays_made_while_the_weights_are_written_are_not_kept(backend, store, monkeypatch):
    decay = backend.decay

    def written_meanwhile(a_log, *, grad):
        result = decay(a_log, grad=grad)
        store.changed()
        return result

    monkeypatch.setattr(backend, "decay", written_meanwhile)
    old = store.decays()
    monkeypatch.setattr(backend, "decay", decay)
    assert store.decays() is not old
