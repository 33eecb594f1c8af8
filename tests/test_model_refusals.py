"""What a model refuses: arguments that are none, sizes that no memory holds, files of another model."""

from __future__ import annotations

import json

import numpy as np
import pytest
from model_cases import T2, T2_IDS, strong_parameters
from safetensors.numpy import save_file

import mamba_fast.model as module
from mamba_fast.checkpoint import CheckpointError
from mamba_fast.config import MambaConfig
from mamba_fast.model import MambaLM, load_model
from mamba_fast.params import parameter_count, parameter_shapes

IDS = T2_IDS[None, :9]


@pytest.fixture(scope="module")
def model() -> MambaLM:
    return MambaLM(T2)


# ---- targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options"),
    [("loss", {}), ("loss_sum", {}), ("loss_and_grads", {}), ("accumulate_gradients", {"scale": 1.0})],
)
def test_targets_are_needed_for_a_loss(model, method, options):
    with pytest.raises(ValueError, match="targets is None, expected the ids to predict .*-100 where nothing"):
        getattr(model, method)(IDS, None, **options)


@pytest.mark.parametrize("ids", [None, "text", [None], [[1, 2], [3]], {}])
def test_what_is_no_array_of_ids_is_named(model, ids):
    with pytest.raises(ValueError, match="^ids "):
        model.logits(ids)
    with pytest.raises(ValueError, match="^targets "):
        model.loss(IDS, ids or [])


# ---- parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [None, [1, 2], 3.0, "weights", np.zeros(3)])
def test_parameters_are_a_mapping(model, parameters):
    with pytest.raises(TypeError, match=f"must be a mapping .*, got {type(parameters).__name__}$"):
        model.load_parameters(parameters)


@pytest.mark.parametrize("name", ["layer0.wConv", "surplus"])
def test_ragged_values_are_named_and_nothing_is_loaded(name):
    model = MambaLM(T2)
    before = model.parameters()
    message = "is ragged: its rows differ in length" if name != "surplus" else "is not a parameter"
    with pytest.raises(ValueError, match=f"nothing was loaded: {name} {message}"):
        model.load_parameters({**strong_parameters(T2, 1), name: [[1.0, 2.0], [3.0]]})
    assert all(np.array_equal(w, before[n]) for n, w in model.parameters().items())


@pytest.mark.parametrize("value", [None, "weights", {}])
def test_values_that_are_no_numbers_are_named(model, value):
    with pytest.raises(ValueError, match="final_norm has dtype"):
        model.load_parameters({**strong_parameters(T2, 1), "final_norm": value})


def test_names_need_not_be_words(model):
    with pytest.raises(ValueError, match=r"7 of shape \(2,\) is not a parameter of this model"):
        model.load_parameters({**strong_parameters(T2, 1), 7: [1.0, 2.0]})


# ---- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [None, 5, [], (np.zeros((1, 2, 16)), np.zeros((1, 16, 4)))])
def test_what_is_no_state_is_refused_with_what_to_do(model, state):
    for call in (lambda: model.step([1], state), lambda: model.prefill([[1]], state)):
        with pytest.raises(TypeError, match=f"state must be a DecodeState, got {type(state).__name__}: make"):
            call()


# ---- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        T2,
        T2.replace(tie_embeddings=False, use_lm_head_bias=False, use_bias=False),
        T2.replace(n_layers=1, use_conv_bias=False, use_x_proj_bias=False),
    ],
)
def test_parameters_are_counted_without_a_model(config):
    assert parameter_count(config) == sum(int(np.prod(shape)) for shape in parameter_shapes(config).values())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"vocab_size": 10**13},
            r"90,000,000,001,530 parameters is too large: its 335,276\.1 GiB of weights do not",
        ),
        ({"vocab_size": 2**62}, f"vocab_size={2**62}"),
        ({"d_model": 2**40}, f"d_model={2**40}"),
        ({"n_layers": 2**50}, f"n_layers={2**50}"),
        ({"d_state": 2**50}, f"d_state={2**50}"),
        ({"d_conv": 2**50}, f"d_conv={2**50}"),
    ],
)
@pytest.mark.parametrize("seed", [0, None])
def test_a_model_that_no_memory_holds_is_refused_with_its_size(sizes, message, seed):
    with pytest.raises(ValueError, match=message):
        MambaLM(T2.replace(**sizes), seed=seed)


def test_memory_that_is_not_given_is_refused_with_the_models_size(monkeypatch):
    def full(*args: object) -> None:
        raise MemoryError("Unable to allocate 3 GiB")

    monkeypatch.setattr(module, "ParamStore", full)
    with pytest.raises(
        ValueError, match=r"parameters is too large: its .* GiB of weights could not be alloc"
    ):
        MambaLM(T2)


@pytest.mark.parametrize("answer", [-1, ValueError("unrecognized configuration name")])
def test_a_system_that_does_not_tell_its_memory_refuses_what_none_has(monkeypatch, answer):
    def sysconf(name: str) -> int:
        if isinstance(answer, Exception):
            raise answer
        return answer if name == "SC_PHYS_PAGES" else 4096

    monkeypatch.setattr(module.os, "sysconf", sysconf)
    MambaLM(T2)
    with pytest.raises(ValueError, match=r"do not fit into this machine's 65,536\.0 GiB"):
        MambaLM(T2.replace(vocab_size=2**50))


# ---- files ------------------------------------------------------------------------------------


def foreign(folder, **changes: object):
    """Weights without an embedded configuration, and a config.json that says something else."""
    save_file(strong_parameters(T2, 1), str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({**T2.to_dict(), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 10**13}, r"embedding has shape \(24, 8\), expected \(10000000000000, 8\)"),
        ({"vocab_size": 2**63 - 1}, r"embedding has shape \(24, 8\), expected \(9223372036854775807, 8\)"),
        ({"n_layers": 3_000_000}, r"layer2\.wInProj is missing, expected shape \(32, 8\); .*; and more$"),
        ({"n_layers": 2**63 - 1}, r"layer2\.wInProj is missing"),
        ({"n_layers": 1}, r"layer1\.wInProj of shape \(32, 8\) is not a parameter"),
        ({"d_state": 2**40}, r"layer0\.wXProj has shape"),
    ],
)
def test_weights_of_another_size_than_the_configuration_are_refused_before_a_model_is_made(
    tmp_path, monkeypatch, changes, message
):
    def no_model(*args: object, **options: object) -> None:
        raise AssertionError("a model was made")

    folder = foreign(tmp_path, **changes)
    monkeypatch.setattr(module, "MambaLM", no_model)
    with pytest.raises(CheckpointError, match=message) as refused:
        load_model(folder)
    assert f"{tmp_path}: model.safetensors does not hold the model that its config" in str(refused.value)
    assert len(str(refused.value)) < 3000


def test_weights_without_an_embedded_configuration_load(tmp_path):
    model = load_model(foreign(tmp_path))
    assert all(np.array_equal(w, model.parameters()[n]) for n, w in strong_parameters(T2, 1).items())


def test_a_configuration_is_a_configuration():
    with pytest.raises(TypeError, match="config must be a MambaConfig, got dict"):
        MambaLM({"vocab_size": 24})
    assert MambaConfig(vocab_size=24, d_model=8, n_layers=1)
