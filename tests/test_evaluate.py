"""Evaluation: the numbers against their definitions, which windows are read, bad input."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import mamba_fast
from mamba_fast.config import MambaConfig
from mamba_fast.data import IGNORED, Windows, load_data
from mamba_fast.evaluate import evaluate
from mamba_fast.model import MambaLM
from mamba_fast.tokenizer import ByteTokenizer, train_bpe

V = 24
IDS = np.array([(i * 5 + 3) % V for i in range(64)])
BYTES = ByteTokenizer()


class Told:
    """A stand-in whose logits for a token depend on that token alone: a row of a table."""

    def __init__(self, table):
        self.table = np.asarray(table, np.float32)
        self.config = SimpleNamespace(vocab_size=self.table.shape[1])
        self.read = []

    def logits(self, ids, *, seq_start=None):
        self.read.append(np.array(ids))
        return self.table[ids]


@pytest.fixture(scope="module")
def model():
    return MambaLM(MambaConfig(vocab_size=V, d_model=8, n_layers=2, d_state=4, d_conv=3), seed=2)


@pytest.fixture(scope="module")
def byte_model():
    return MambaLM(MambaConfig(vocab_size=258, d_model=8, n_layers=1), seed=2)


def quiet(*args, **options):
    return evaluate(*args, progress=False, **options)


# ---- the numbers -----------------------------------------------------------------------------------


def test_loss_is_the_models_mean_loss_over_all_windows(model):
    windows = Windows(load_data(IDS), 16)
    nats = sum(model.loss_sum([ids], [targets])[0] for ids, targets, _ in windows)
    result = quiet(model, IDS, seq_len=16)
    assert result["tokens"] == 63
    assert result["loss"] == pytest.approx(nats / 63, rel=1e-5)  # model logits, SPEC 2
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


def test_documents_are_kept_apart_inside_a_window(model):
    documents = [IDS[:7], IDS[7:12], IDS[12:40]]
    result = quiet(model, documents, seq_len=40)
    nats = sum(model.loss_sum([d[:-1]], [d[1:]])[0] for d in documents)
    assert result["tokens"] == 40 - 3
    assert result["loss"] == pytest.approx(nats / 37, rel=1e-5)


def test_unpacked_data_is_one_document(model):
    documents = [IDS[:7], IDS[7:12], IDS[12:40]]
    result = quiet(model, documents, seq_len=40, packed=False)
    assert result["tokens"] == 39
    assert result["loss"] == pytest.approx(model.loss([IDS[:39]], [IDS[1:40]]), rel=1e-5)


def test_the_batch_size_changes_nothing_but_speed(model):
    one, four = (quiet(model, IDS, seq_len=9, batch_size=b) for b in (1, 4))
    for key in ("tokens", "top1", "top5", "windows"):
        assert one[key] == four[key]
    assert one["loss"] == pytest.approx(four["loss"], rel=1e-6)


def test_accuracy_counts_the_targets_rank_and_of_equals_the_lower_id_first():
    # After token t comes t + 1. Ranks of the target: 0, 1 (a tie with a lower id), 4, 5.
    table = np.zeros((6, 6))
    table[0, 1] = 1.0
    table[1] = [1.0, 0.0, 1.0, -1.0, -1.0, -1.0]
    table[2] = [1.0, 2.0, 3.0, 0.5, 4.0, 0.0]
    table[3] = [1.0, 2.0, 3.0, 4.0, 0.0, 5.0]
    result = quiet(Told(table), np.arange(5), seq_len=4)
    assert result["tokens"] == 4
    assert result["top1"] == 1 / 4
    assert result["top5"] == 3 / 4


def test_a_model_that_knows_nothing_needs_log_v_nats():
    result = quiet(Told(np.zeros((V, V))), IDS, seq_len=16)
    assert result["loss"] == pytest.approx(math.log(V), rel=1e-12)
    assert result["perplexity"] == pytest.approx(V)


def test_large_logits_do_not_overflow():
    result = quiet(Told(np.full((V, V), 3e38)), IDS, seq_len=16)
    assert result["loss"] == pytest.approx(math.log(V))


def test_bits_per_byte_of_bytes_is_the_loss_in_bits(byte_model):
    result = quiet(byte_model, np.frombuffer(b"some text " * 9, np.uint8), tokenizer=BYTES, seq_len=16)
    assert result["bytes"] == 89
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))


def test_end_of_text_costs_bits_and_has_no_bytes(byte_model, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("naïve", encoding="utf-8")
    result = quiet(byte_model, path, tokenizer=BYTES, seq_len=16)
    assert (result["tokens"], result["bytes"]) == (6, 5), "the first byte is given, end-of-text is predicted"
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * 6 / math.log(2) / 5)


def test_bits_per_byte_counts_the_bytes_of_learnt_tokens():
    tokenizer = train_bpe(["the cat sat on the mat " * 20], 280, progress=False)
    ids = tokenizer.encode("the cat sat on the mat")
    result = quiet(Told(np.zeros((280, 280))), ids, tokenizer=tokenizer, seq_len=8)
    assert result["bytes"] == tokenizer.count_bytes(ids[1:])
    assert result["bits_per_byte"] == pytest.approx(math.log2(280) * (len(ids) - 1) / result["bytes"])


def test_without_a_tokenizer_there_are_no_bits_per_byte(model):
    result = quiet(model, IDS, seq_len=16)
    assert result["bits_per_byte"] is None
    assert result["bytes"] is None


def test_speed_is_tokens_over_seconds(model):
    result = quiet(model, IDS, seq_len=16)
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])


# ---- what is read ----------------------------------------------------------------------------------


def test_windows_are_drawn_evenly_over_the_data():
    told = Told(np.zeros((V, V)))
    result = quiet(told, np.arange(1001) % V, seq_len=10, windows=4, batch_size=1)
    assert result["windows"] == 4
    assert result["tokens"] == 40
    starts = [int(ids[0, 0]) for ids in told.read]
    assert starts == [window * 10 % V for window in (12, 37, 62, 87)]


def test_more_windows_than_there_are_means_all():
    assert quiet(Told(np.zeros((V, V))), IDS, seq_len=16, windows=99)["windows"] == 4


def test_a_large_vocabulary_is_read_in_small_batches(monkeypatch):
    monkeypatch.setattr(sys.modules["mamba_fast.evaluate"], "_LOGITS", 2 * 16 * V)
    told = Told(np.zeros((V, V)))
    quiet(told, IDS, seq_len=16, batch_size=4)
    assert [ids.shape for ids in told.read] == [(2, 16), (2, 16)]


def test_a_batch_without_anything_to_predict_is_passed_over():
    told = Told(np.zeros((V, V)))
    result = quiet(told, [np.array([1]), np.array([2]), np.array([3, 4])], seq_len=2, batch_size=1)
    assert result["tokens"] == 1
    assert len(told.read) == 1


def test_progress_is_shown_on_stderr(model, capsys):
    evaluate(model, IDS, seq_len=16)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "4/4" in captured.err


def test_the_package_offers_the_function():
    assert mamba_fast.evaluate is evaluate
    assert IGNORED == -100


# ---- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer of at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be an integer of at least 1, got 1.5"),
        ({"windows": -1}, "windows must be an integer of at least 0, got -1"),
        ({"tokenizer": BYTES}, "the tokenizer has 258 ids, the model's vocab_size is 24"),
        ({"data": [V]}, "tokens hold nothing to predict"),
        ({"data": [0, V]}, f"id {V} is out of range"),
        ({"data": [np.array([1]), np.array([2])]}, "nothing to predict"),
        ({"data": "no/such/file"}, "no file or folder"),
    ],
)
def test_bad_input_is_named(model, options, message):
    arguments = {"data": IDS, **options}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        quiet(model, arguments.pop("data"), **arguments)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    with pytest.raises(FloatingPointError, match="not finite"):
        quiet(Told(np.full((V, V), bad)), IDS, seq_len=16)


# ---- hostile values -----------------------------------------------------------------------------------


def test_a_window_longer_than_the_data_costs_no_more_than_the_data():
    told = Told(np.random.default_rng(0).normal(size=(V, V)))
    result = quiet(told, IDS, seq_len=10**12)
    assert [ids.shape for ids in told.read] == [(1, 63)]
    exact = quiet(told, IDS, seq_len=63)
    assert {k: result[k] for k in ("loss", "tokens", "windows")} == {
        k: exact[k] for k in ("loss", "tokens", "windows")
    }


def test_a_tokenizer_may_be_given_by_name(byte_model, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 9)
    by_name = quiet(byte_model, tmp_path / "a.txt", tokenizer="bytes", seq_len=16)
    itself = quiet(byte_model, tmp_path / "a.txt", tokenizer=BYTES, seq_len=16)
    assert by_name["bits_per_byte"] == itself["bits_per_byte"]
    with pytest.raises(TypeError, match="tokenizer must be a Tokenizer, 'bytes' or a path, got 5"):
        quiet(byte_model, IDS, tokenizer=5)


@pytest.mark.parametrize("model", [None, "my_model", 5])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match="model must be a MambaLM .*load_model.*, got "):
        quiet(model, IDS)


def test_sizes_may_be_integers_of_numpy():
    result = quiet(
        Told(np.zeros((V, V))), IDS, seq_len=np.int64(16), batch_size=np.int32(2), windows=np.uint8(3)
    )
    assert result["windows"] == 3


def test_numbers_that_underflow_are_no_error_in_a_program_that_asks_numpy_to_raise():
    table = np.zeros((V, V))
    table[:, 0] = 2000.0
    expected = quiet(Told(table), IDS, seq_len=16)["loss"]
    with np.errstate(all="raise"):
        assert quiet(Told(table), IDS, seq_len=16)["loss"] == expected
