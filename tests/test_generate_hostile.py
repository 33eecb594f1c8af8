"""Sampling and its arguments at the ends of what numbers can be, and arguments of other types."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mamba_fast.config import MambaConfig
from mamba_fast.generate import Sampler, generate, pad_left, stream
from mamba_fast.model import MambaLM
from mamba_fast.tokenizer import ByteTokenizer

V = 6
LOGITS = np.array([3.0, -np.inf, -2.0, 0.0, -np.inf, 1e4])
ALLOWED = {0, 2, 3, 5}
SEEN = np.array([True, True, True, False, False, True])


@pytest.fixture(scope="module")
def model():
    return MambaLM(MambaConfig(vocab_size=258, d_model=8, n_layers=1, d_state=4), seed=2)


@pytest.fixture
def raising():
    """A program that has told numpy to raise wherever a number over- or underflows."""
    with np.errstate(all="raise"):
        yield


# ---- the sampler --------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1.7e308])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0, 1.7e308])
@pytest.mark.parametrize("rest", [{}, {"top_k": 3}, {"top_p": 5e-324}, {"top_k": 5, "top_p": 0.9}])
def test_no_extreme_chooses_a_token_that_is_forbidden(penalty, temperature, rest):
    sampler = Sampler(repetition_penalty=penalty, temperature=temperature, **rest)
    for seed in range(20):
        assert sampler.choose(LOGITS, np.random.default_rng(seed), SEEN) in ALLOWED


@pytest.mark.parametrize("penalty", [5e-324, 1e300])
def test_an_extreme_penalty_leaves_something_to_choose_where_all_tokens_were_seen(penalty):
    logits = np.array([-np.inf, -1e300, -np.inf])
    sampler = Sampler(repetition_penalty=penalty, temperature=0)
    assert sampler.choose(logits, np.random.default_rng(0), np.ones(3, bool)) == 1


def test_an_extreme_penalty_goes_through_a_whole_text(model):
    ids = generate(model, [[1, 2, 3]], 8, repetition_penalty=5e-324)
    assert ids.shape == (1, 11)


def test_a_sampler_overflows_and_underflows_in_a_program_that_asks_numpy_to_raise(raising):
    for options in ({}, {"temperature": 1e-300}, {"temperature": 1.7e308}, {"repetition_penalty": 5e-324}):
        for top_p in (1.0, 0.5):
            assert Sampler(**options, top_p=top_p).choose(LOGITS, np.random.default_rng(0), SEEN) in ALLOWED


def test_logits_that_are_not_numbers_are_named_in_a_program_that_asks_numpy_to_raise(raising):
    with pytest.raises(FloatingPointError, match="the model's largest logit is nan"):
        Sampler().choose([math.nan, 1.0], np.random.default_rng(0))


# ---- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**400, 10**5000], ids=["1e400", "1e5000"])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p"])
def test_an_integer_beyond_every_float_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be finite, got .{{1,200}}$"):
        Sampler(**{name: value})


def test_a_count_beyond_all_digits_is_refused_by_name(model):
    with pytest.raises(ValueError, match="^max_new_tokens must be at least 0, got .{1,200}$"):
        generate(model, [1], -(10**5000))


@pytest.mark.parametrize("function", [generate, stream])
@pytest.mark.parametrize("value", [None, "my_model"])
def test_what_is_no_model_is_refused(function, value):
    with pytest.raises(TypeError, match="model must be a MambaLM .*load_model.*, got "):
        function(value, [1], 1)


def test_a_tokenizer_may_be_given_by_name(model):
    by_name = generate(model, [65], 30, stop="e", tokenizer="bytes")
    itself = generate(model, [65], 30, stop="e", tokenizer=ByteTokenizer())
    assert by_name.tolist() == itself.tolist()
    with pytest.raises(TypeError, match="tokenizer must be a Tokenizer, 'bytes' or a path, got 5"):
        generate(model, [65], 1, tokenizer=5)


def test_a_masked_prompt_is_refused_because_its_mask_would_be_lost(model):
    with pytest.raises(ValueError, match="ids is masked.*attention_mask"):
        generate(model, np.ma.masked_array([[1, 2]], [[True, False]]), 1)


def test_an_id_beyond_all_types_is_refused(model):
    with pytest.raises(ValueError, match="ids"):
        generate(model, [[1, 10**30]], 1)


@pytest.mark.parametrize("prompts", [5, None, "text"])
def test_pad_left_refuses_what_is_no_list_of_prompts(prompts):
    with pytest.raises(TypeError, match="pad_left needs a list of prompts, each a list of ids, got "):
        pad_left(prompts)


@pytest.mark.parametrize("prompts", [[[1], [1, [2, 3]]], [[1], [10**30]], [[1], 5]])
def test_pad_left_names_the_prompt_that_is_no_list_of_ids(prompts):
    with pytest.raises(ValueError, match="^prompt 1 "):
        pad_left(prompts)


def test_pad_left_refuses_a_padding_id_beyond_all_types():
    with pytest.raises(ValueError, match=r"pad_id must be in \[0, 9223372036854775807\], got 1000"):
        pad_left([[1]], pad_id=10**30)
