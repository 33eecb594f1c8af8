"""Configurations: defaults, what follows from them, validation, JSON."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_fast.config import MambaConfig, TrainConfig


def model(**changes):
    return MambaConfig(**{"vocab_size": 24, "d_model": 8, "n_layers": 2, **changes})


# ---- defaults and what follows ----------------------------------------------------------------


def test_the_defaults_are_those_of_the_specification():
    config = model()
    assert (config.d_state, config.d_conv, config.expand) == (16, 4, 2)
    assert (config.discretization, config.norm_eps, config.init) == ("zoh", 1e-6, "mamba")
    assert config.tie_embeddings
    assert config.use_bias
    assert config.use_conv_bias
    assert not config.train_lm_head_bias


@pytest.mark.parametrize(("d_model", "rank"), [(1, 1), (16, 1), (17, 2), (768, 48)])
def test_dt_rank_auto_is_a_sixteenth_of_d_model_rounded_up(d_model, rank):
    assert model(d_model=d_model).dt_rank == rank
    assert model(d_model=d_model, dt_rank="auto").dt_rank == rank


def test_d_inner_follows_expand_unless_it_is_given():
    assert model(expand=3).d_inner == 24
    assert model(expand=3, d_inner=13).d_inner == 13


def test_training_defaults_are_those_of_the_specification():
    config = TrainConfig()
    assert (config.lr, config.beta1, config.beta2, config.eps) == (1e-4, 0.9, 0.999, 1e-8)
    assert (config.weight_decay, config.max_grad_norm) == (0.01, 1.0)
    assert config.trust_region == 0.0


@pytest.mark.parametrize(
    ("changes", "region"),
    [({"wsla": True}, 0.05), ({"wsla": True, "max_delta": 0.0}, 0.0), ({"max_delta": 0.2}, 0.2)],
)
def test_the_trust_region_is_on_in_wsla_mode_unless_it_is_set(changes, region):
    assert TrainConfig(**changes).trust_region == region


def test_the_hf_preset_has_what_that_form_can_express():
    config = MambaConfig.hf(50280, 768, 24)
    assert config.discretization == "euler"
    assert config.norm_eps == 1e-5
    assert not config.use_bias
    assert not config.use_x_proj_bias
    assert not config.use_lm_head_bias
    assert config.use_conv_bias


def test_the_hf_preset_gives_way_to_what_is_said_explicitly():
    config = MambaConfig.hf(24, 8, 2, use_bias=True, norm_eps=1e-4, d_state=5)
    assert (config.use_bias, config.norm_eps, config.d_state) == (True, 1e-4, 5)


# ---- frozen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [model(), TrainConfig()], ids=["model", "train"])
def test_a_config_cannot_be_changed(config):
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, 3)


def test_equal_configs_are_equal_and_hash_alike():
    assert model() == model(d_inner=16, dt_rank=1)
    assert len({model(), model(), model(d_state=4)}) == 2
    assert hash(TrainConfig()) == hash(TrainConfig())


# ---- validation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["vocab_size", "d_model", "n_layers", "d_state", "d_conv", "expand", "d_inner", "dt_rank"]
)
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, [4]], ids=repr)
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(
        ValueError, match=f"^{name} must be .*{'integer' if value not in (0, -1) else 'at least 1'}"
    ):
        model(**{name: value})


@pytest.mark.parametrize("name", ["vocab_size", "d_model", "n_layers"])
def test_sizes_without_a_default_may_not_be_none(name):
    with pytest.raises(ValueError, match=f"^{name} must be an integer, got None"):
        model(**{name: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"discretization": "bilinear"}, "discretization must be one of 'zoh', 'euler', got 'bilinear'"),
        ({"init": "zeros"}, "init must be one of 'mamba', 'original', got 'zeros'"),
        ({"norm_eps": 0.0}, r"norm_eps must be in \(0, 1\], got 0.0"),
        ({"norm_eps": -1e-6}, r"norm_eps must be in \(0, 1\], got -1e-06"),
        ({"norm_eps": math.nan}, "norm_eps must be a finite number, got nan"),
        ({"norm_eps": "1e-6"}, "norm_eps must be a finite number, got '1e-6'"),
        ({"dt_rank": "full"}, "dt_rank must be an integer or 'auto', got 'full'"),
        ({"tie_embeddings": 1}, "tie_embeddings must be true or false, got 1"),
        ({"use_bias": "no"}, "use_bias must be true or false, got 'no'"),
        (
            {"train_lm_head_bias": True, "use_lm_head_bias": False},
            "train_lm_head_bias=True contradicts use_lm_head_bias=False",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_model_option_is_an_error_that_names_it_and_its_value(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        model(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 1.5}, "steps must be an integer, got 1.5"),
        ({"epochs": 0.0}, r"epochs must be in \(0, inf\), got 0.0"),
        ({"epochs": math.inf}, "epochs must be a finite number, got inf"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"grad_accumulation": 0}, "grad_accumulation must be at least 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"lr": -1e-4}, r"lr must be in \[0, inf\), got -0.0001"),
        ({"lr": math.nan}, "lr must be a finite number, got nan"),
        ({"eps": 0.0}, r"eps must be in \(0, inf\), got 0.0"),
        ({"beta1": 1.0}, "beta1 must be below 1, got 1"),
        ({"beta2": 1.5}, r"beta2 must be in \[0, 1\], got 1.5"),
        ({"weight_decay": -0.1}, r"weight_decay must be in \[0, inf\), got -0.1"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm must be in \[0, inf\), got -1.0"),
        ({"max_delta": -0.1}, r"max_delta must be in \[0, inf\), got -0.1"),
        ({"min_lr_ratio": 2.0}, r"min_lr_ratio must be in \[0, 1\], got 2.0"),
        ({"schedule": "linear"}, "schedule must be one of 'cosine', 'constant', got 'linear'"),
        ({"wsla": 1}, "wsla must be true or false, got 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_training_option_is_an_error_that_names_it_and_its_value(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainConfig(**changes)


# ---- mappings, JSON, changes ------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        model(),
        model(d_inner=13, dt_rank=3, discretization="euler", tie_embeddings=False, init="original"),
        MambaConfig.hf(24, 8, 2),
        TrainConfig(),
        TrainConfig(steps=7, max_delta=0.5, wsla=True, schedule="constant"),
    ],
)
def test_a_config_comes_back_from_json_and_from_a_dict_as_it_was(config):
    assert type(config).from_json(config.to_json()) == config
    assert type(config).from_dict(config.to_dict()) == config


def test_json_holds_every_field_under_its_name():
    assert list(json.loads(model().to_json())) == [field.name for field in dataclasses.fields(MambaConfig)]


# Timing depends on the machine and the seed is fixed: neither may decide a test.
@settings(deadline=None, derandomize=True)
@given(
    sizes=st.fixed_dictionaries(
        {
            name: st.integers(1, 10_000)
            for name in ("vocab_size", "d_model", "n_layers", "d_state", "d_conv", "expand")
        }
    ),
    d_inner=st.none() | st.integers(1, 10_000),
    dt_rank=st.just("auto") | st.integers(1, 10_000),
    norm_eps=st.floats(1e-12, 1.0),
)
def test_any_valid_config_survives_json(sizes, d_inner, dt_rank, norm_eps):
    config = MambaConfig(**sizes, d_inner=d_inner, dt_rank=dt_rank, norm_eps=norm_eps)
    assert MambaConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(("cls", "required"), [(MambaConfig, model().to_dict()), (TrainConfig, {})])
def test_an_unknown_key_is_an_error_that_names_it_and_the_known_ones(cls, required):
    with pytest.raises(
        ValueError, match=rf"unknown key 'hidden_size' in {cls.__name__}; known keys: .*\w+, \w+"
    ):
        cls.from_dict({**required, "hidden_size": 768})


def test_missing_keys_are_an_error_that_names_them_all():
    with pytest.raises(ValueError, match="MambaConfig lacks d_model, n_layers"):
        MambaConfig.from_dict({"vocab_size": 24})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "MambaConfig: not JSON: "),
        ("", "MambaConfig: not JSON: "),
        ("[24, 8, 2]", "MambaConfig: expected a JSON object, got list"),
        ('{"vocab_size": "24", "d_model": 8, "n_layers": 2}', "vocab_size must be an integer, got '24'"),
        ('{"vocab_size": NaN, "d_model": 8, "n_layers": 2}', "vocab_size must be an integer, got nan"),
    ],
)
def test_json_that_is_no_config_is_a_clear_error(text, message):
    with pytest.raises(ValueError, match=f"^{message}".replace("[", r"\[")):
        MambaConfig.from_json(text)


def test_replace_changes_what_is_named_and_validates_again():
    config = model(d_inner=13)
    assert config.replace(d_state=4) == model(d_inner=13, d_state=4)
    with pytest.raises(ValueError, match="d_state must be at least 1, got 0"):
        config.replace(d_state=0)
    with pytest.raises(ValueError, match="unknown key 'd_states'"):
        config.replace(d_states=4)


def test_replace_lets_what_followed_from_d_model_follow_the_new_one():
    changed = model(d_model=8).replace(d_model=64)
    assert (changed.d_inner, changed.dt_rank) == (128, 4)


def test_replace_keeps_what_was_set_apart_from_d_model():
    changed = model(d_model=8, d_inner=13, dt_rank=5).replace(d_model=64)
    assert (changed.d_inner, changed.dt_rank) == (13, 5)


def test_replace_of_a_training_config_keeps_the_rest():
    config = TrainConfig(steps=5, lr=3e-4)
    assert config.replace(lr=1e-3) == TrainConfig(steps=5, lr=1e-3)


# ---- values from elsewhere ----------------------------------------------------------------------------

SIZES = {"vocab_size": 24, "d_model": 8, "n_layers": 1}


def test_scalars_of_numpy_become_pythons():
    config = TrainConfig(
        lr=np.float32(0.25), batch_size=np.int64(3), packed=np.bool_(False), schedule=np.str_("constant")
    )
    assert config == TrainConfig(lr=0.25, batch_size=3, packed=False, schedule="constant")
    assert TrainConfig.from_json(config.to_json()) == config
    kinds = [type(getattr(config, name)) for name in ("lr", "batch_size", "packed")]
    assert kinds == [float, int, bool]


def test_an_architecture_takes_scalars_of_numpy_too():
    config = MambaConfig(np.int32(24), np.int64(8), np.uint8(1), norm_eps=np.float64(1e-5))
    assert config == MambaConfig(24, 8, 1, norm_eps=1e-5)
    assert MambaConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", ["discretization", "init", "dt_rank", "d_inner", "norm_eps", "use_bias"])
def test_an_array_in_place_of_a_value_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"^{name} must be .*got array\(\["):
        MambaConfig(**SIZES, **{name: np.array(["zoh", "euler"])})


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["1e400", "-1e400", "1e5000"])
@pytest.mark.parametrize(
    ("config", "name"), [(MambaConfig, "norm_eps"), (TrainConfig, "lr"), (TrainConfig, "epochs")]
)
def test_an_integer_beyond_every_float_is_refused_by_name(config, name, value):
    sizes = SIZES if config is MambaConfig else {}
    with pytest.raises(ValueError, match=rf"^{name} must be a finite number, got .{{1,200}}$"):
        config(**sizes, **{name: value})


@pytest.mark.parametrize("value", [2**63, 10**5000], ids=["2**63", "1e5000"])
def test_an_integer_beyond_64_bits_is_refused_by_name(value):
    with pytest.raises(ValueError, match="^d_model must be at most 9223372036854775807, got .{1,200}$"):
        MambaConfig(24, value, 1)


def test_a_seed_may_be_as_long_as_the_systems_entropy():
    assert TrainConfig(seed=2**128 - 1).seed == 2**128 - 1
    with pytest.raises(ValueError, match="^seed must be at most"):
        TrainConfig(seed=2**128)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"d_model": 1' + "0" * 5000 + "}"],
    ids=["lists", "objects", "digits"],
)
def test_json_that_python_cannot_take_is_a_value_error_of_the_configuration(text):
    with pytest.raises(ValueError, match="^MambaConfig: "):
        MambaConfig.from_json(text)


def test_a_key_that_comes_twice_is_refused_by_name():
    with pytest.raises(ValueError, match="the key 'd_model' comes twice"):
        MambaConfig.from_json('{"vocab_size": 24, "d_model": 8, "n_layers": 1, "d_model": 16}')
