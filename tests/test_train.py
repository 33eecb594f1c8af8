"""The trainer: what a step does, what a run leaves behind, and what it refuses."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Tensor
from mamba_fast.config import MambaConfig, TrainConfig
from mamba_fast.data import IGNORED, TokenizerNeededError, Windows, load_data
from mamba_fast.metrics import read_log
from mamba_fast.model import MambaLM, load_model
from mamba_fast.registry import get_backend
from mamba_fast.testing.loopback import create_backend as create_loopback
from mamba_fast.testing.tolerances import relative_l2
from mamba_fast.tokenizer import ByteTokenizer, load_tokenizer
from mamba_fast.train import TrainingDivergedError, TrainResult, train

TRAIN = importlib.import_module("mamba_fast.train")  # the attribute of the package is the function
CONFIG = MambaConfig(vocab_size=24, d_model=8, n_layers=2, d_state=4, d_conv=3)
IDS = (np.arange(300) * 5 + 3) % 24
SHORT = TrainConfig(steps=6, batch_size=3, seq_len=16, lr=1e-2, validation_fraction=0.0)


def digest(model: MambaLM) -> str:
    value = hashlib.sha256()
    for name, array in model.parameters().items():
        value.update(name.encode() + array.tobytes())
    return value.hexdigest()


def run(
    config: TrainConfig = SHORT, model: MambaLM | None = None, data: Any = IDS, **options: Any
) -> TrainResult:
    return train(MambaLM(CONFIG) if model is None else model, data, config, progress=False, **options)


class Recorder(MambaLM):
    """Notes the batches it is trained on, and may spoil gradients."""

    def __init__(self, *args: Any, spoil: dict[int, float] | None = None, everything: bool = False) -> None:
        super().__init__(*args)
        self.batches: list[tuple[np.ndarray, np.ndarray]] = []
        self.scales: list[float] = []
        self.spoil = spoil or {}
        self.everything = everything

    def accumulate_gradients(self, ids: Any, targets: Any, **options: Any) -> Tensor:
        self.batches.append((np.array(ids), np.array(targets)))
        self.scales.append(options["scale"])
        loss = super().accumulate_gradients(ids, targets, **options)
        value = self.spoil.get(len(self.batches))
        if value is not None:
            if self.everything:
                for name in self.store.names:
                    self.backend.fill_(self.store.grads[name], value)
                self.backend.fill_(loss, value)
            else:
                self.backend.fill_(self.backend.view(self.store.grads["final_norm"], 0, 1, 2), value)
        return loss


# ---- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cython", "oracle"])
def test_the_loss_falls_on_a_text_with_a_rule(backend):
    steps = 60 if backend == "cython" else 12
    config = SHORT.replace(steps=steps, lr=3e-2, batch_size=2)
    result = run(config, MambaLM(CONFIG, backend))
    assert len(result.losses) == result.steps == steps
    assert result.losses[0] == pytest.approx(math.log(24), abs=0.2)
    assert result.losses[-1] < (0.3 if backend == "cython" else 2.6)


def test_both_backends_train_alike():
    results = [
        run(SHORT.replace(steps=4, batch_size=2), MambaLM(CONFIG, backend))
        for backend in ("cython", "oracle")
    ]
    assert relative_l2(np.array(results[0].losses), np.array(results[1].losses)) < 1e-5


def test_one_step_is_adamw_on_the_gradient_of_the_mean_loss():
    model = MambaLM(CONFIG, "oracle")
    before = model.parameters()
    windows = Windows(load_data(IDS[:20]), 16)
    ids, targets, _ = windows.batch([0, 1])
    _, grads = model.loss_and_grads(ids, targets)
    run(SHORT.replace(steps=1, batch_size=2, schedule="constant", max_grad_norm=0.0), model, IDS[:20])
    after = model.parameters()
    for name, old in before.items():
        gradient = grads[name]
        step = 1e-2 * gradient / (np.abs(gradient) + 1e-8)  # Adam's first step, bias corrected
        decay = 0.01 if old.ndim == 2 and not name.endswith("A_log") else 0.0
        expected = old if name == "lm_head_bias" else old * (1 - 1e-2 * decay) - step
        assert relative_l2(after[name], expected) < 1e-9 or not expected.any()


@pytest.mark.parametrize("parts", [(1, 6), (2, 3), (3, 2), (6, 1), (4, 2)])
def test_accumulated_micro_batches_equal_one_batch(parts):
    """299 pairs make 19 windows, the last of them padded; (4, 2) also splits the end unevenly."""
    batch_size, accumulation = parts
    config = SHORT.replace(epochs=1.0, steps=None, schedule="constant", max_grad_norm=0.0)
    reference, model = MambaLM(CONFIG), MambaLM(CONFIG)
    whole = batch_size * accumulation
    run(config.replace(batch_size=whole), reference)
    run(config.replace(batch_size=batch_size, grad_accumulation=accumulation), model)
    expected = reference.parameters()
    for name, array in model.parameters().items():
        assert relative_l2(array, expected[name]) < 1e-4 or not expected[name].any()


def test_micro_batches_are_weighted_by_their_predicted_positions():
    model = Recorder(CONFIG)
    run(SHORT.replace(steps=None, epochs=1.0, batch_size=4, grad_accumulation=2), model)
    counts = [int((targets != IGNORED).sum()) for _, targets in model.batches]
    assert sum(counts) == len(IDS) - 1
    assert len(counts) == 5
    for first in (0, 2, 4):
        for scale in model.scales[first : first + 2]:
            assert scale == 1.0 / sum(counts[first : first + 2])


def test_every_pair_is_trained_on_once_an_epoch():
    # Unique ids, so that a pair is recognised.
    config = MambaConfig(vocab_size=300, d_model=4, n_layers=1)
    model = Recorder(config)
    run(SHORT.replace(steps=None, epochs=2.0, batch_size=4), model, np.arange(300))
    pairs: list[int] = []
    for ids, targets in model.batches:
        predicted = targets != IGNORED
        np.testing.assert_array_equal(ids[predicted] + 1, targets[predicted])
        pairs += ids[predicted].tolist()
    half = len(pairs) // 2
    assert sorted(pairs[:half]) == sorted(pairs[half:]) == list(range(299))
    assert pairs[:half] != pairs[half:]


def test_without_shuffling_windows_come_in_their_order():
    model = Recorder(MambaConfig(vocab_size=300, d_model=4, n_layers=1))
    run(SHORT.replace(steps=None, shuffle=False), model, np.arange(300))
    assert np.concatenate([ids.ravel() for ids, _ in model.batches])[:299].tolist() == list(range(299))


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 7), (2.5, 18), (0.1, 1)])
def test_epochs_are_turned_into_steps(epochs, steps):
    assert run(SHORT.replace(steps=None, epochs=epochs)).steps == steps


@pytest.mark.parametrize(("epochs", "steps"), [(0.07, 7), (0.071, 8), (1.1, 110), (1e-12, 1)])
def test_epochs_are_turned_into_steps_whatever_their_product_rounds_to(epochs, steps):
    ids = np.arange(101) % 24  # 100 windows of one pair
    config = SHORT.replace(steps=None, epochs=epochs, batch_size=1, seq_len=1)
    assert run(config, MambaLM(CONFIG.replace(n_layers=1)), ids).steps == steps


def test_packed_documents_are_trained_on_as_if_they_were_alone():
    model = MambaLM(CONFIG, "oracle")
    ends = np.cumsum([3, 5, 6, 2])
    documents = [IDS[end - length : end] for length, end in zip((3, 5, 6, 2), ends, strict=True)]
    ids, targets, seq_start = Windows(load_data(documents), 16).batch([0])
    packed, count = model.loss_sum(ids, targets, seq_start=seq_start)
    alone = [model.loss_sum([document[:-1]], [document[1:]]) for document in documents]
    assert count == sum(number for _, number in alone) == 12
    assert packed == pytest.approx(sum(total for total, _ in alone), rel=1e-12)
    loss, grads = model.loss_and_grads(ids, targets, seq_start=seq_start)
    assert loss == pytest.approx(packed / count, rel=1e-12)
    separate = {name: np.zeros_like(grad) for name, grad in grads.items()}
    for document in documents:
        _, parts = model.loss_and_grads([document[:-1]], [document[1:]])
        for name, part in parts.items():
            separate[name] += part * (len(document) - 1) / count
    for name, grad in grads.items():
        assert relative_l2(grad, separate[name]) < 1e-9


def test_a_step_without_anything_to_predict_changes_nothing():
    model = MambaLM(CONFIG)
    before = digest(model)
    config = SHORT.replace(steps=2, seq_len=1, batch_size=1, shuffle=False)
    result = run(config, model, [[1], [2], [3], [4, 5]])  # the only pair would be the fourth step's
    assert digest(model) == before
    assert all(math.isnan(loss) for loss in result.losses)
    assert result.tokens == 0


def test_activation_checkpointing_gives_the_same_bits():
    digests = set()
    for activation_checkpointing in (False, True):
        model = MambaLM(CONFIG)
        run(SHORT.replace(activation_checkpointing=activation_checkpointing), model)
        digests.add(digest(model))
    assert len(digests) == 1


def test_the_same_run_gives_the_same_bits_again_and_at_any_number_of_threads():
    digests = set()
    for threads in (1, 1, 2, 8):
        model = MambaLM(CONFIG, get_backend("cython", threads=threads))
        run(model=model)
        digests.add(digest(model))
    assert len(digests) == 1


def test_the_seed_decides_the_order():
    losses = [run(SHORT.replace(seed=seed)).losses for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


# ---- WSLA -----------------------------------------------------------------------------------------


def test_wsla_moves_the_selective_projections_and_not_a_bit_of_the_rest():
    model = MambaLM(CONFIG)
    before = model.parameters()
    run(SHORT.replace(wsla=True), model)
    for name, array in model.parameters().items():
        moved = not np.array_equal(array, before[name])
        assert moved == name.endswith((".wXProj", ".bXProj"))


def test_wsla_limits_each_step_to_its_trust_region():
    model = MambaLM(CONFIG)
    before = model.parameters()
    result = run(SHORT.replace(wsla=True, steps=1, lr=1.0, weight_decay=0.0, schedule="constant"), model)
    change = [np.abs(a - before[n]).max() for n, a in model.parameters().items()]
    assert max(change) == pytest.approx(0.05, rel=1e-5)
    assert result.steps == 1


def test_what_is_trainable_is_restored_after_wsla():
    model = MambaLM(CONFIG)
    before = set(model.store.trainable)
    run(SHORT.replace(wsla=True, steps=1), model)
    assert model.store.trainable == before


# ---- numbers that are not finite --------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cython", "oracle"])
@pytest.mark.parametrize(("value", "everything"), [(np.nan, False), (np.inf, True)])
def test_a_spoilt_gradient_costs_one_step_that_is_counted_and_reported(
    tmp_path, backend, value, everything, caplog
):
    model = Recorder(CONFIG, backend, spoil={3: value}, everything=everything)
    result = run(SHORT.replace(steps=10, log_every=1, batch_size=1, lr=3e-2), model, out=tmp_path)
    assert result.skipped == 1
    assert all(np.isfinite(array).all() for array in model.parameters().values())
    assert result.losses[-1] < result.losses[0] - 0.1
    warnings = [r for r in read_log(tmp_path / "log.jsonl") if r["event"] == "warning"]
    assert [(r["step"], r["skipped"]) for r in warnings] == [(3, 1)]
    assert "1 of the last 1 steps up to step 3 skipped" in caplog.text
    assert math.isnan(result.losses[2]) == everything


def test_a_spoilt_step_leaves_weights_and_moments_as_a_run_without_it(tmp_path):
    """Step 3 of 4 is skipped, so the same weights come from steps 1, 2 and 4 alone."""
    config = SHORT.replace(steps=4, batch_size=2, schedule="constant", shuffle=False)
    spoilt = Recorder(CONFIG, spoil={3: np.nan})
    data = IDS.copy()
    data[96] = data[64]  # both follow the second step's last token
    run(config, spoilt, data)
    model = MambaLM(CONFIG)
    without = np.concatenate([data[:64], data[96:129]])  # the same windows but the third step's
    run(config.replace(steps=3), model, without)
    assert digest(spoilt) == digest(model)


def test_the_mean_in_the_log_leaves_out_a_loss_that_is_not_finite(tmp_path):
    model = Recorder(CONFIG, spoil={3: np.nan}, everything=True)
    result = run(SHORT.replace(steps=5, log_every=5), model, out=tmp_path)
    record = [r for r in read_log(tmp_path / "log.jsonl") if r["event"] == "train"][-1]
    finite = [loss for loss in result.losses[1:] if not math.isnan(loss)]
    assert record["loss"] == pytest.approx(np.mean(finite), rel=1e-3)
    assert record["skipped"] == 1


def test_a_line_of_the_log_is_the_mean_over_the_tokens_since_the_last_one(tmp_path):
    result = run(SHORT.replace(steps=7, log_every=3, batch_size=4, shuffle=False), out=tmp_path)
    lines = {r["step"]: r["loss"] for r in read_log(tmp_path / "log.jsonl") if r["event"] == "train"}
    counts = [64, 64, 64, 64, 43, 64, 64]  # 19 windows are 5 steps an epoch
    for first, last in ((1, 1), (2, 3), (4, 6), (7, 7)):
        steps = slice(first - 1, last)
        mean = np.average(result.losses[steps], weights=counts[steps])
        assert lines[last] == pytest.approx(mean, rel=1e-6)


def test_a_log_of_the_first_and_the_last_step_alone_keeps_no_list_of_losses(tmp_path):
    config = SHORT.replace(steps=140, batch_size=1, seq_len=2, log_every=0, checkpoint_every=130)
    result = run(config, data=np.arange(301) % 24, out=tmp_path)
    state = json.loads((tmp_path / "checkpoints/step-00000130/trainer.json").read_text())["state"]
    assert not any(isinstance(value, list | dict) for value in state.values())
    assert state["interval_tokens"] == 2 * 129
    assert state["interval_loss"] == pytest.approx(2 * sum(result.losses[1:130]), rel=1e-9)
    last = read_log(tmp_path / "log.jsonl")[-1]
    assert last["loss"] == pytest.approx(np.mean(result.losses[1:]), rel=1e-9)


def test_a_run_whose_gradients_stay_spoilt_is_given_up():
    config = MambaConfig(vocab_size=24, d_model=2, n_layers=1, d_state=1, d_conv=1)
    model = Recorder(config, spoil=dict.fromkeys(range(5, 1000), np.nan))
    with pytest.raises(
        TrainingDivergedError, match=r"last 10\d steps were not finite.* smaller lr \(now 0\.01\)"
    ):
        run(SHORT.replace(steps=500, batch_size=1), model)
    assert len(model.batches) < 120


# ---- looking at the device ------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 50])
def test_steps_read_nothing_back_between_lines_of_the_log(steps, monkeypatch):
    model = MambaLM(CONFIG)
    reads: list[tuple[int, ...]] = []
    real = model.backend.to_host

    def counted(tensor: Tensor) -> np.ndarray:
        reads.append(tuple(tensor.shape))
        return real(tensor)

    monkeypatch.setattr(model.backend, "to_host", counted)
    run(SHORT.replace(steps=steps, log_every=0), model)
    assert len(reads) == 4  # losses and counters, at the first step and at the last


def test_all_losses_are_kept_however_rarely_they_are_read():
    model = Recorder(MambaConfig(vocab_size=24, d_model=2, n_layers=1, d_state=1, d_conv=1))
    config = SHORT.replace(steps=150, batch_size=1, seq_len=4)
    seldom = run(config.replace(log_every=0), MambaLM(model.config)).losses
    often = run(config.replace(log_every=1), model).losses
    assert len(seldom) == 150
    assert seldom == often


def test_training_needs_nothing_of_a_backend_but_the_contract(tmp_path):
    config = SHORT.replace(
        steps=3, batch_size=1, grad_accumulation=2, seq_len=7, log_every=2, eval_every=2, eval_windows=2,
        checkpoint_every=1, validation_fraction=0.1,
    )  # fmt: skip
    digests = set()
    for name, backend in (("loopback", create_loopback()), ("oracle", get_backend("oracle"))):
        run(config.replace(steps=2), MambaLM(CONFIG, backend), out=tmp_path / name)
        model = MambaLM(CONFIG, backend, seed=1)
        run(config, model, out=tmp_path / name, resume=True)
        digests.add(digest(model))
    assert len(digests) == 1


def test_no_tensor_outlives_its_step():
    backend = create_loopback()
    model = MambaLM(CONFIG, backend)
    live: list[int] = []
    real = model.accumulate_gradients

    def counted(*args: Any, **options: Any) -> Tensor:
        live.append(backend.live_tensors)
        return real(*args, **options)

    model.accumulate_gradients = counted  # type: ignore[method-assign]
    run(SHORT.replace(steps=5, batch_size=1, seq_len=5, log_every=0), model)
    assert len(live) == 5
    assert len(set(live[1:])) == 1


# ---- what a run leaves ------------------------------------------------------------------------------


def test_the_log_tells_what_happened(tmp_path):
    config = SHORT.replace(steps=6, log_every=2, eval_every=3, validation_fraction=0.2, warmup_steps=2)
    result = run(config, out=tmp_path)
    records = read_log(tmp_path / "log.jsonl")
    training = [r for r in records if r["event"] == "train"]
    assert [r["step"] for r in training] == [1, 2, 4, 6]
    assert [r["lr"] for r in training[:2]] == [5e-3, 1e-2]
    assert training[0]["loss"] == pytest.approx(result.losses[0], rel=1e-6)
    assert training[-1]["loss"] == pytest.approx(np.mean(result.losses[4:]), rel=1e-2)
    assert training[-1]["tokens"] == result.tokens
    assert training[-1]["epoch"] == 6 / 5
    for record in training:
        assert record["tokens_per_second"] > 0
        assert record["grad_norm"] > 0
        assert record["skipped"] == record["clamped"] == 0
    validation = [(r["step"], r["validation_loss"]) for r in records if r["event"] == "validation"]
    assert validation == result.validation
    assert [step for step, _ in validation] == [3, 6]


def test_a_run_leaves_a_model_a_tokenizer_a_log_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs the extra mamba-fast[plot]")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text to learn from, " * 20)
    out = tmp_path / "out"
    model = MambaLM(MambaConfig(vocab_size=258, d_model=8, n_layers=1))
    result = run(SHORT, model, tmp_path / "text", out=out, tokenizer=ByteTokenizer())
    assert result.out == out
    assert {"config.json", "model.safetensors", "log.jsonl", "loss.png", "checkpoints"} <= {
        p.name for p in out.iterdir()
    }
    loaded = load_model(out)
    np.testing.assert_array_equal(loaded.logits([[1, 2, 3]]), model.logits([[1, 2, 3]]))
    assert load_tokenizer(out).eos_id == ByteTokenizer().eos_id
    assert load_tokenizer(out / "checkpoints" / "step-00000006").vocab_size == 258


def test_text_is_read_as_bytes_unless_a_tokenizer_is_given(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from, " * 20)
    model = Recorder(MambaConfig(vocab_size=258, d_model=8, n_layers=1))
    run(
        SHORT.replace(shuffle=False, steps=1, batch_size=1),
        model,
        str(tmp_path / "a.txt"),
        out=tmp_path / "out",
    )
    assert bytes(model.batches[0][0][0].astype(np.uint8)) == b"some text to lea"
    assert isinstance(load_tokenizer(tmp_path / "out"), ByteTokenizer)


def test_a_run_without_matplotlib_leaves_no_picture_and_no_complaint(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TRAIN, "can_plot", lambda: False)
    run(SHORT.replace(steps=1), out=tmp_path)
    assert not (tmp_path / "loss.png").exists()
    assert caplog.text == ""


def test_a_picture_that_cannot_be_drawn_does_not_lose_the_training(tmp_path, monkeypatch, caplog):
    def broken(*args: Path) -> None:
        raise ImportError("libfreetype is missing")

    monkeypatch.setattr(TRAIN, "plot_losses", broken)
    monkeypatch.setattr(TRAIN, "can_plot", lambda: True)
    assert run(SHORT.replace(steps=1), out=tmp_path).steps == 1
    assert "the loss curve was not drawn: libfreetype is missing" in caplog.text


def test_a_run_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run()
    assert result.out is None
    assert list(tmp_path.iterdir()) == []


def test_the_bar_shows_loss_speed_and_time_left(capsys):
    train(MambaLM(CONFIG), IDS, SHORT)
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "loss " in shown
    assert "tokens/s" in shown


# ---- validation -------------------------------------------------------------------------------------


def test_validation_is_the_mean_loss_over_the_held_out_tokens():
    model = MambaLM(CONFIG)
    result = run(SHORT.replace(validation_fraction=0.2, eval_windows=0), model)
    assert [step for step, _ in result.validation] == [6]
    held_out = IDS[240:]
    windows = Windows(load_data(held_out), 16)
    total, count = 0.0, 0
    for i in range(len(windows)):
        part, predicted = model.loss_sum(*(a[None] for a in windows[i][:2]))
        total, count = total + part, count + predicted
    assert count == 59
    assert result.validation_loss == pytest.approx(total / count, rel=1e-6)


def test_validation_data_can_be_given():
    model = MambaLM(CONFIG)
    result = run(SHORT.replace(validation_fraction=0.5), model, validation=IDS[:17])
    assert result.validation_loss == pytest.approx(model.loss([IDS[:16]], [IDS[1:17]]), rel=1e-6)


def test_validation_text_needs_the_tokenizer_of_ids(tmp_path):
    text = tmp_path / "held_out.txt"
    text.write_text("text whose bytes are no ids of the data, " * 4)
    model = MambaLM(CONFIG.replace(vocab_size=300))
    before = digest(model)
    with pytest.raises(TokenizerNeededError, match=r"held_out\.txt is text: give a tokenizer"):
        run(SHORT, model, validation=str(text), out=tmp_path / "out")
    assert digest(model) == before
    assert not (tmp_path / "out").exists()


def test_validation_text_of_a_text_without_a_tokenizer_is_read_as_bytes_too(tmp_path):
    for name in ("data", "held_out"):
        (tmp_path / f"{name}.txt").write_text(f"{name}: some text to learn from, " * 9)
    model = MambaLM(CONFIG.replace(vocab_size=258))
    result = run(SHORT, model, str(tmp_path / "data.txt"), validation=str(tmp_path / "held_out.txt"))
    assert result.validation_loss is not None


def test_held_out_tokens_are_not_trained_on():
    model = Recorder(MambaConfig(vocab_size=300, d_model=4, n_layers=1))
    run(SHORT.replace(steps=None, validation_fraction=0.1), model, np.arange(300))
    assert max(int(targets.max()) for _, targets in model.batches) == 269


def test_a_limited_validation_draws_its_windows_evenly():
    class Seen(MambaLM):
        first: tuple[int, ...] = ()

        def loss_sum(self, ids: Any, targets: Any, **options: Any) -> tuple[float, int]:
            self.first += tuple(ids[:, 0].tolist())
            return super().loss_sum(ids, targets, **options)

    model = Seen(MambaConfig(vocab_size=300, d_model=4, n_layers=1))
    run(
        SHORT.replace(steps=1, eval_windows=3, batch_size=2), model, np.arange(100), validation=np.arange(289)
    )
    assert model.first == (48, 144, 240)


# ---- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "pairs"), [(16, 15), (1, 0)])
def test_data_shorter_than_one_window_is_refused_with_both_numbers(tokens, pairs):
    with pytest.raises(ValueError, match=rf"{pairs} tokens to predict, fewer than one window of seq_len=16"):
        run(data=IDS[:tokens])


def test_data_that_is_too_short_for_what_is_held_out_says_so():
    with pytest.raises(ValueError, match=r"13 tokens to predict \(after holding out 6 for validation\)"):
        run(SHORT.replace(validation_fraction=0.3), data=IDS[:20])


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 20)
    with pytest.raises(ValueError, match="the tokenizer has 258 ids, the model's vocab_size is 24"):
        run(data=tmp_path / "a.txt", tokenizer=ByteTokenizer())


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place():
    ids = IDS.copy()
    ids[123] = 24
    with pytest.raises(ValueError, match="token 123: id 24 is out of range, expected 0 to 23"):
        run(SHORT.replace(steps=None), data=ids)


def test_a_configuration_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="config must be a TrainConfig, got dict"):
        train(MambaLM(CONFIG), IDS, {"steps": 3})


def test_a_folder_that_holds_a_run_is_not_mixed_with_another(tmp_path):
    run(out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(FileExistsError, match="holds a training run already"):
        run(out=tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_default_configuration_is_used_when_none_is_given():
    config = MambaConfig(vocab_size=24, d_model=2, n_layers=1, d_state=1, d_conv=1)
    result = train(MambaLM(config), np.tile(IDS, 2), progress=False)
    assert result.steps == 1
    assert json.loads(json.dumps(result.losses)) == result.losses
