"""Generation: what is asked of the model, how a token is chosen, when a row ends, bad input."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from mamba_fast import generate as generate_function
from mamba_fast.config import MambaConfig
from mamba_fast.generate import PREFILL_PIECE, Sampler, generate, pad_left, stream
from mamba_fast.model import MambaLM
from mamba_fast.tokenizer import ByteTokenizer

V = 24
PROMPT = np.array([(i * 5 + 3) % V for i in range(7)])


class Scripted:
    """A stand-in for a model: row b's t-th new token is certain to be script[b][t].

    Counts what it is asked for. Its state is the number of tokens each row has read.
    """

    def __init__(self, script, vocab_size=V):
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.script = np.atleast_2d(script)
        self.prefilled = []
        self.stepped = []

    def init_state(self, batch):
        return {"new": 0, "batch": batch}

    def prefill(self, ids, state, *, attention_mask=None):
        self.prefilled.append((np.array(ids), attention_mask))
        return self._logits(state), state

    def step(self, ids, state):
        self.stepped.append(np.array(ids))
        state["new"] += 1
        return self._logits(state), state

    def _logits(self, state):
        logits = np.zeros((state["batch"], self.config.vocab_size), np.float32)
        for row in range(state["batch"]):
            logits[row, self.script[row][state["new"] % self.script.shape[1]]] = 50.0
        return logits


class Fixed:
    """A stand-in whose logits are always the same, one row of them for each row of the batch."""

    def __init__(self, logits):
        self.logits = np.atleast_2d(np.asarray(logits, np.float32))
        self.config = SimpleNamespace(vocab_size=self.logits.shape[1])

    def init_state(self, batch):
        return batch

    def prefill(self, ids, state, *, attention_mask=None):
        return np.broadcast_to(self.logits, (state, self.config.vocab_size)), state

    def step(self, ids, state):
        return self.prefill(ids, state)


@pytest.fixture(scope="module", params=["cython", "oracle"])
def model(request):
    config = MambaConfig(vocab_size=V, d_model=8, n_layers=2, d_state=4, d_conv=3)
    model = MambaLM(config, backend=request.param, seed=1)
    # Larger weights than a fresh model's, so that the logits are far apart and greedy text varies.
    parameters = model.parameters()
    rng = np.random.default_rng(5)
    for name in ("embedding", *(n for n in parameters if n.endswith(("Proj", "wConv")))):
        parameters[name] = rng.normal(0, 0.7, parameters[name].shape)
    model.load_parameters(parameters)
    return model


# ---- the recurrence --------------------------------------------------------------------------------


def test_the_prompt_is_read_once_and_every_new_token_once():
    model = Scripted([list(range(10))])
    out = generate(model, [PROMPT], 6, temperature=0)
    assert [ids.tolist() for ids, _ in model.prefilled] == [[PROMPT.tolist()]]
    assert [ids.tolist() for ids in model.stepped] == [[0], [1], [2], [3], [4]], "the last is not read"
    assert out.tolist() == [[*PROMPT, 0, 1, 2, 3, 4, 5]]


def test_a_long_prompt_is_read_in_pieces_each_once():
    model = Scripted([[1]])
    ids = np.arange(PREFILL_PIECE + 5) % V
    generate(model, ids, 1)
    assert [len(piece[0]) for piece, _ in model.prefilled] == [PREFILL_PIECE, 5]
    assert np.concatenate([piece[0] for piece, _ in model.prefilled]).tolist() == ids.tolist()


def test_greedy_text_is_what_the_full_forward_says_at_each_length(model):
    expected = [PROMPT.tolist()]
    for _ in range(12):
        expected[0].append(int(model.logits(expected)[0, -1].argmax()))
    out = generate(model, [PROMPT], 12, temperature=0)
    assert out.tolist() == expected
    assert len(set(out[0, len(PROMPT) :].tolist())) > 3, "a constant text would prove little"


def test_padded_rows_get_the_text_that_they_get_alone(model):
    prompts = [PROMPT[:3], PROMPT, PROMPT[::-1][:5]]
    ids, mask = pad_left(prompts)
    together = generate(model, ids, 8, temperature=0, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt, 8, temperature=0)[0, len(prompt) :]
        assert together[row, ids.shape[1] :].tolist() == alone.tolist()


def test_padding_at_the_right_is_passed_over(model):
    ids = np.array([[3, 8, 13, 0, 0], [3, 8, 13, 18, 23]])
    mask = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    out = generate(model, ids, 6, temperature=0, attention_mask=mask)
    assert out[0, 5:].tolist() == generate(model, [3, 8, 13], 6, temperature=0)[0, 3:].tolist()
    assert out[:, :5].tolist() == ids.tolist()


def test_padding_that_fills_whole_pieces_of_a_long_prompt_is_passed_over(model, monkeypatch):
    monkeypatch.setattr(sys.modules["mamba_fast.generate"], "PREFILL_PIECE", 4)
    ids, mask = pad_left([[3, 8], PROMPT[:7]])
    left = generate(model, ids, 5, temperature=0, attention_mask=mask)
    right = generate(
        model, [[3, 8, 0, 0, 0, 0, 0], PROMPT], 5, temperature=0,
        attention_mask=[[1, 1, 0, 0, 0, 0, 0], [1] * 7],
    )  # fmt: skip
    for row, prompt in enumerate([[3, 8], PROMPT]):
        alone = generate(model, prompt, 5, temperature=0)[0, len(prompt) :].tolist()
        assert left[row, 7:].tolist() == alone
        assert right[row, 7:].tolist() == alone


def test_a_model_generates_by_its_own_method_too(model):
    expected = generate(model, PROMPT, 5, seed=3)
    assert model.generate(PROMPT, 5, seed=3).tolist() == expected.tolist()
    assert [t.tolist() for t in model.stream(PROMPT, 5, seed=3)] == expected[:, len(PROMPT) :].T.tolist()


def test_the_package_offers_the_function():
    assert generate_function is generate


# ---- the shape of the result -----------------------------------------------------------------------


def test_a_flat_list_of_ids_is_a_batch_of_one():
    out = generate(Scripted([[5]]), [1, 2, 3], 2)
    assert out.tolist() == [[1, 2, 3, 5, 5]]
    assert out.dtype == np.int64


def test_no_new_tokens_gives_a_copy_of_the_prompt_and_no_work():
    model = Scripted([[5]])
    prompt = np.array([[1, 2, 3]])
    out = generate(model, prompt, 0)
    assert out.tolist() == prompt.tolist()
    assert not np.shares_memory(out, prompt)
    assert model.prefilled == []


def test_stream_yields_what_generate_returns():
    def make():
        return Fixed(np.linspace(0, 2, V))

    steps = list(stream(make(), [PROMPT, PROMPT], 9, seed=4))
    assert all(step.shape == (2,) for step in steps)
    assert np.stack(steps, axis=1).tolist() == generate(make(), [PROMPT, PROMPT], 9, seed=4)[:, 7:].tolist()


def test_changing_a_streamed_array_does_not_change_what_follows():
    model = Scripted([[1, 2, 3]])
    for token in stream(model, [0], 3):
        token[:] = 9
    assert [ids.tolist() for ids in model.stepped] == [[1], [2]]


def test_stream_makes_no_token_before_it_is_asked_for():
    model = Scripted([[1, 2, 3]])
    steps = stream(model, [0], 3)
    assert model.prefilled == []
    next(steps)
    assert model.stepped == []


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.astype(">i4"),
        lambda a: np.asfortranarray(a.astype(np.uint16)),
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a.tolist(),
    ],
    ids=["big-endian", "fortran uint16", "strided", "lists"],
)
def test_prompts_of_any_integer_type_and_layout_are_accepted(change):
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    out = generate(Scripted([[7], [8]]), change(ids), 1)
    assert out.tolist() == [[1, 2, 3, 7], [4, 5, 6, 8]]


def test_a_read_only_prompt_is_accepted():
    ids = np.array([[1, 2, 3]])
    ids.setflags(write=False)
    assert generate(Scripted([[7]]), ids, 1).tolist() == [[1, 2, 3, 7]]


def test_progress_writes_to_stderr_only(capsys):
    generate(Scripted([[7]]), [1], 3, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err


# ---- choosing a token ------------------------------------------------------------------------------

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0, 0.5])


def draws(sampler, logits=LOGITS, n=4000, seed=0, seen=None):
    random = np.random.Generator(np.random.PCG64(seed))
    return Counter(sampler.choose(logits, random, seen) for _ in range(n))


def test_temperature_zero_takes_the_lowest_of_the_best_and_no_random_number():
    random = np.random.Generator(np.random.PCG64(0))
    before = random.bit_generator.state
    assert Sampler(temperature=0).choose(LOGITS, random) == 1
    assert random.bit_generator.state == before


def test_top_k_of_one_is_greedy():
    assert draws(Sampler(top_k=1), n=50) == {1: 50}


def test_a_very_small_top_p_is_greedy():
    assert draws(Sampler(top_p=1e-9), n=50) == {1: 50}


def test_a_vanishing_temperature_draws_among_the_best_alone():
    assert set(draws(Sampler(temperature=5e-324), n=200)) == {1, 3}


def test_frequencies_are_those_of_the_softmax():
    p = np.exp(LOGITS / 0.8) / np.exp(LOGITS / 0.8).sum()
    n = 20000
    found = draws(Sampler(temperature=0.8), n=n)
    for token, probability in enumerate(p):
        # five standard deviations of a binomial count
        assert abs(found[token] - n * probability) < 5 * np.sqrt(n * probability) + 1


def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids():
    assert set(draws(Sampler(top_k=2, temperature=50.0), logits=np.zeros(6))) == {0, 1}
    assert set(draws(Sampler(top_k=3, temperature=50.0))) == {1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.38, {1}), (0.39, {1, 3}), (0.78, {1, 2, 3}), (0.95, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    # tokens 1, 3, 2, 0 have probabilities .384, .384, .141, .052
    assert set(draws(Sampler(top_p=top_p))) == kept


def test_top_p_looks_at_what_temperature_and_top_k_left():
    # Of the two best alone each has one half.
    assert set(draws(Sampler(top_k=2, top_p=0.5))) == {1}
    assert set(draws(Sampler(top_k=2, top_p=0.51))) == {1, 3}


@pytest.mark.parametrize(
    "off", [{"top_k": 0}, {"top_k": None}, {"top_k": 6}, {"top_k": 1000}, {"top_p": 1.0}]
)
def test_a_filter_that_removes_nothing_changes_nothing(off):
    random = [np.random.Generator(np.random.PCG64(8)) for _ in range(2)]
    for _ in range(300):
        assert Sampler(**off).choose(LOGITS, random[0]) == Sampler().choose(LOGITS, random[1])


def test_a_forbidden_token_is_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0])
    assert set(draws(Sampler(temperature=1e9), logits=logits)) == {1, 3}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    seen = np.array([True, True, False, False, True, False])
    penalised = np.array([1.0 / 1.2, 3.0 / 1.2, 2.0, 3.0, -1.0 * 1.2, 0.5])
    random = [np.random.Generator(np.random.PCG64(2)) for _ in range(2)]
    for _ in range(300):
        expected = Sampler().choose(penalised, random[1])
        assert Sampler(repetition_penalty=1.2).choose(LOGITS, random[0], seen) == expected


def test_repetition_penalty_covers_the_prompt_and_what_was_generated():
    logits = np.full(6, -9.0)
    logits[[1, 2, 3]] = [2.0, 1.9, 1.8]
    out = generate(Fixed(logits), [1, 0], 3, temperature=0, repetition_penalty=1.2)
    # 1 is in the prompt: 2.0/1.2 is below 1.9 and 1.8; then all three were used, and 1 is best again
    assert out[0, 2:].tolist() == [2, 3, 1]


def test_repetition_penalty_does_not_count_padding():
    logits = np.full(6, -9.0)
    logits[[1, 2]] = [2.0, 1.9]
    out = generate(
        Fixed(logits), [[1, 1, 4]], 1, temperature=0, repetition_penalty=1.2, attention_mask=[[0, 0, 1]]
    )
    assert out[0, -1] == 1


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 3, "top_p": 0.7}, {}]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_choosing_leaves_the_logits_alone(options, dtype):
    logits, seen = LOGITS.astype(dtype), np.array([True, False, True, True, True, False])
    before = logits.copy(), seen.copy()
    Sampler(repetition_penalty=1.5, **options).choose(logits, np.random.default_rng(0), seen)
    assert np.array_equal(logits, before[0])
    assert np.array_equal(seen, before[1])


def test_ids_from_the_limit_up_are_never_produced():
    out = generate(Fixed([0.0, 0.0, 0.0, 9.0]), [3], 40, vocab_limit=3)
    assert set(out[0, 1:].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error_that_says_so(bad):
    with pytest.raises(FloatingPointError, match="logit"):
        generate(Fixed(np.full(6, bad)), [1], 2)


# ---- seeds -----------------------------------------------------------------------------------------

FLAT = Fixed(np.zeros(V))


def test_the_same_seed_gives_the_same_text():
    assert generate(FLAT, PROMPT, 20, seed=5).tolist() == generate(FLAT, PROMPT, 20, seed=5).tolist()


def test_another_seed_gives_another_text():
    assert generate(FLAT, PROMPT, 20, seed=5).tolist() != generate(FLAT, PROMPT, 20, seed=6).tolist()


def test_no_seed_gives_another_text_each_time():
    assert generate(FLAT, PROMPT, 40, seed=None).tolist() != generate(FLAT, PROMPT, 40, seed=None).tolist()


def test_rows_of_one_batch_say_different_things():
    out = generate(FLAT, [PROMPT, PROMPT], 20, seed=5)
    assert out[0].tolist() != out[1].tolist()


def test_a_row_says_the_same_whatever_rows_are_beside_it():
    three = generate(FLAT, [PROMPT] * 3, 20, seed=5)
    assert generate(FLAT, [PROMPT] * 2, 20, seed=5).tolist() == three[:2].tolist()


def test_a_row_with_its_own_seed_says_what_it_says_alone():
    out = generate(FLAT, [PROMPT] * 2, 20, seed=[11, 12])
    assert out[1].tolist() == generate(FLAT, PROMPT, 20, seed=12)[0].tolist()


def test_a_row_that_finished_does_not_disturb_the_draws_of_the_others():
    alone = generate(FLAT, [PROMPT] * 2, 30, seed=5)
    first = int(alone[0, 7])
    stopped = generate(FLAT, [PROMPT] * 2, 30, seed=5, stop=first)
    length = stopped.shape[1]
    until = alone[1].tolist().index(first, 7) + 1 if first in alone[1, 7:] else length
    assert stopped[1, :until].tolist() == alone[1, :until].tolist()


# ---- stops -----------------------------------------------------------------------------------------


def test_a_row_ends_with_its_stop_and_is_padded_while_others_go_on():
    out = generate(
        Scripted([[1, 2, 0, 4, 5], [1, 2, 3, 4, 0]]), [[9], [9]], 5, temperature=0, stop=0, pad_id=7
    )
    assert out.tolist() == [[9, 1, 2, 0, 7, 7], [9, 1, 2, 3, 4, 0]]


def test_padding_is_the_stop_itself_by_default():
    out = generate(Scripted([[1, 6, 4], [1, 2, 3]]), [[9], [9]], 3, temperature=0, stop=[[2, 2], 6, 5])
    assert out.tolist() == [[9, 1, 6, 6], [9, 1, 2, 3]]


def test_generation_ends_early_when_every_row_has_ended():
    model = Scripted([[1, 0, 5, 5], [1, 2, 0, 5]])
    out = generate(model, [[9], [9]], 100, temperature=0, stop=0)
    assert out.tolist() == [[9, 1, 0, 0], [9, 1, 2, 0]]
    assert len(model.stepped) == 2


def test_any_id_of_a_list_is_a_stop():
    assert generate(Scripted([[1, 2, 3]]), [9], 9, stop=[5, 3]).tolist() == [[9, 1, 2, 3]]


def test_a_list_inside_the_list_is_a_sequence():
    out = generate(Scripted([[1, 2, 1, 3, 4]]), [9], 5, stop=[[1, 3]])
    assert out.tolist() == [[9, 1, 2, 1, 3]]


def test_a_stop_in_the_prompt_does_not_end_the_text():
    assert generate(Scripted([[2, 3, 4]]), [0, 1], 3, stop=[0, [1, 2]]).tolist() == [[0, 1, 2, 3, 4]]


def test_a_string_stops_wherever_token_boundaries_lie():
    script = list(b"one\ntwo END three")
    model = Scripted([script], vocab_size=258)
    out = generate(model, [65], 50, stop="END", tokenizer=ByteTokenizer())
    assert bytes(out[0, 1:].tolist()) == b"one\ntwo END"


def test_a_string_outside_ascii_stops_when_its_last_byte_is_there():
    model = Scripted([list("é日本語".encode())], vocab_size=258)
    out = generate(model, [65], 50, stop=["日本"], tokenizer=ByteTokenizer())
    assert bytes(out[0, 1:].tolist()).decode() == "é日本"


def test_a_model_stops_each_row_where_its_own_text_has_the_stop(model):
    prompts = [PROMPT, PROMPT[::-1]]
    free = generate(model, prompts, 12, temperature=0)[:, len(PROMPT) :].tolist()
    stop = next(token for token in free[0] if free[0].index(token) >= 2)
    out = generate(model, prompts, 12, temperature=0, stop=stop)[:, len(PROMPT) :].tolist()
    ends = [row.index(stop) + 1 if stop in row else 12 for row in free]
    assert ends[0] < 12
    for row, (text, end) in enumerate(zip(free, ends, strict=True)):
        assert out[row] == text[:end] + [stop] * (max(ends) - end)


# ---- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite, got nan"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_k": 2.0}, "top_k must be an integer, got 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0 .* got 0.0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer, got 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": [1, 2, 3]}, "seed has 3 elements for 2 rows"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"stop": V}, rf"an id in stop must be in \[0, {V - 1}\], got {V}"),
        ({"stop": [[]]}, "stop holds an empty list"),
        ({"stop": "x"}, "stop holds the string 'x': pass tokenizer="),
        ({"stop": [""], "tokenizer": ByteTokenizer()}, "stop holds an empty string"),
        ({"stop": 1.5}, "an id in stop must be an integer, got 1.5"),
        ({"pad_id": -5}, rf"pad_id must be in \[0, {V - 1}\], got -5"),
        ({"vocab_limit": 0}, r"vocab_limit must be in \[1, 24\], got 0"),
        ({"ids": [[1, -1]]}, r"ids\[0, 1\] is -1, expected an id in \[0, 24\)"),
        ({"ids": [[1, V]]}, r"ids\[0, 1\] is 24"),
        ({"ids": [[1.5, 2.0]]}, r"ids must be integers, got dtype float64 \(the first value is 1.5\)"),
        ({"ids": [[True]]}, "ids must be integers, got dtype bool"),
        ({"ids": ["text"]}, "ids must be integers"),
        ({"ids": []}, "a prompt needs at least one id"),
        ({"ids": np.zeros((0, 3), int)}, r"ids has shape \(0, 3\)"),
        ({"ids": np.zeros((2, 0), int)}, r"ids has shape \(2, 0\)"),
        ({"ids": 5}, r"ids has shape \(\), expected \(B, L\)"),
        ({"ids": [[[1]]]}, r"ids has shape \(1, 1, 1\), expected \(B, L\)"),
        ({"ids": [[1, 2], [3]]}, "ids has rows of different lengths: make a batch of them with pad_left"),
        ({"attention_mask": [[1, 1]]}, r"attention_mask has shape \(1, 2\), expected \(2, 3\)"),
        ({"attention_mask": [[1, 0, 1], [1, 1, 1]]}, "attention_mask row 0 has a 0 between"),
        ({"attention_mask": [[1, 1, 1], [0, 0, 0]]}, "attention_mask row 1 is all 0"),
        ({"attention_mask": [[2, 1, 1], [1, 1, 1]]}, "attention_mask must hold 1 .* and 0"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(options, message):
    model = Scripted([[1], [1]])
    arguments = {"ids": [[1, 2, 3], [4, 5, 6]], "max_new_tokens": 4, **options}
    ids, count = arguments.pop("ids"), arguments.pop("max_new_tokens")
    for function in (generate, stream):
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            function(model, ids, count, **arguments)
        assert "\n" not in str(caught.value)
    assert model.prefilled == []


def test_pad_left_puts_prompts_of_different_lengths_side_by_side():
    ids, mask = pad_left([[1, 2, 3], [4]], pad_id=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []], [[[1]]], [[1.5]]])
def test_pad_left_refuses_what_is_no_prompt(prompts):
    with pytest.raises(ValueError, match="prompt"):
        pad_left(prompts)
