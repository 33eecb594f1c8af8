"""What goes wrong during a training: diverged, full, unreadable; and what it leaves then."""

from __future__ import annotations

import errno
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Tensor
from mamba_fast.checkpoint import CheckpointError, read_tensors, write_tensors
from mamba_fast.config import MambaConfig, TrainConfig
from mamba_fast.metrics import read_log
from mamba_fast.model import MambaLM, load_model
from mamba_fast.tokenizer import load_tokenizer
from mamba_fast.train import TrainingDivergedError, TrainResult, train
from mamba_fast.training_state import run_config

TRAIN = importlib.import_module("mamba_fast.train")  # the attribute of the package is the function
DATA = importlib.import_module("mamba_fast.training_data")
CONFIG = MambaConfig(vocab_size=24, d_model=4, n_layers=1, d_state=2, d_conv=2)
IDS = (np.arange(300) * 5 + 3) % 24
RUN = TrainConfig(steps=6, batch_size=2, seq_len=8, lr=1e-2, log_every=1, validation_fraction=0.2)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes longer than everything else here."""
    monkeypatch.setattr(TRAIN, "can_plot", lambda: False)


def run(
    config: TrainConfig = RUN, model: MambaLM | None = None, data: Any = IDS, **options: Any
) -> TrainResult:
    return train(MambaLM(CONFIG) if model is None else model, data, config, progress=False, **options)


def names(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())


Act = Callable[[MambaLM], None]


class Acts(MambaLM):
    """Does something in the micro-batches with these numbers, before their gradients."""

    def __init__(self, acts: dict[int, Act]) -> None:
        super().__init__(CONFIG)
        self.acts, self.calls = acts, 0

    def accumulate_gradients(self, *args: Any, **options: Any) -> Tensor:
        self.calls += 1
        if self.calls in self.acts:
            self.acts[self.calls](self)
        return super().accumulate_gradients(*args, **options)


def press_ctrl_c(model: MambaLM) -> None:
    signal.raise_signal(signal.SIGINT)


def spoil(model: MambaLM) -> None:
    """A weight that is not finite, as an overflow leaves it."""
    model.backend.fill_(model.backend.view(model.store.values["final_norm"], 0, 1, 2), np.inf)


def overflow(model: MambaLM) -> None:
    """Finite weights whose logits are not."""
    model.backend.fill_(model.store.values["final_norm"], 3e38)
    model.backend.fill_(model.store.values["embedding"], 3e38)


# ---- a validation that is not finite -----------------------------------------------------------------


def test_a_diverged_training_is_saved_and_said_to_have_diverged(tmp_path, caplog):
    result = run(model=Acts({2: overflow}), out=tmp_path)
    assert not np.isfinite(result.validation_loss)
    assert "the validation loss at step 6 is nan: the training has diverged; start again with" in caplog.text
    warnings = [r["message"] for r in read_log(tmp_path / "log.jsonl") if r["event"] == "warning"]
    assert any("smaller lr (now 0.01)" in message for message in warnings)
    assert load_model(tmp_path).config == CONFIG
    assert names(tmp_path) == ["step-00000006"]


def test_a_validation_that_is_not_finite_does_not_stop_the_checkpoints(tmp_path):
    run(RUN.replace(eval_every=1, checkpoint_every=2), Acts({2: overflow}), out=tmp_path)
    assert names(tmp_path) == ["step-00000004", "step-00000006"]
    described = json.loads((tmp_path / "checkpoints/step-00000004/trainer.json").read_text())
    assert described["state"]["validated"] == [4, None]
    assert run(RUN, out=tmp_path, resume=True).steps == 6


def test_ctrl_c_after_a_validation_that_is_not_finite_saves_a_checkpoint(tmp_path):
    config = RUN.replace(eval_every=2, eval_windows=2)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3 of 6; checkpoint .*step-00000003"):
        run(config, Acts({2: overflow, 3: press_ctrl_c}), out=tmp_path)
    described = json.loads((tmp_path / "checkpoints/step-00000003/trainer.json").read_text())
    assert described["state"]["validated"] == [2, None]
    assert run(config, out=tmp_path, resume=True).steps == 6


@pytest.mark.parametrize("every", [0, 2])
def test_weights_that_are_not_finite_end_the_training_in_one_line_that_names_the_checkpoint(tmp_path, every):
    config = RUN.replace(checkpoint_every=every)
    with pytest.raises(TrainingDivergedError, match="weights are not finite.* final_norm") as diverged:
        run(config, Acts({4: spoil}), out=tmp_path)
    message = str(diverged.value)
    assert "\n" not in message
    assert "start again with a smaller lr (now 0.01)" in message
    if every:
        assert "after step 4 weights" in message
        assert str(tmp_path / "checkpoints" / "step-00000002") in message
        assert names(tmp_path) == ["step-00000002"]
    else:
        assert "there is no checkpoint before it" in message
    assert not (tmp_path / "model.safetensors").exists()


class Spoilt(MambaLM):
    """Gradients that are not finite, from the third call on."""

    calls = 0

    def accumulate_gradients(self, *args: Any, **options: Any) -> Tensor:
        self.calls += 1
        loss = super().accumulate_gradients(*args, **options)
        if self.calls > 3:
            self.backend.fill_(self.backend.view(self.store.grads["final_norm"], 0, 0, 1), np.nan)
        return loss


@pytest.mark.parametrize("every", [0, 3])
def test_a_run_that_is_given_up_leaves_and_names_a_checkpoint(tmp_path, every, monkeypatch):
    monkeypatch.setattr(TRAIN, "_SKIPPED_LIMIT", 2)
    config = RUN.replace(steps=50, checkpoint_every=every, keep_checkpoints=1)
    with pytest.raises(TrainingDivergedError, match="last 2 steps were not finite") as diverged:
        run(config, Spoilt(CONFIG), out=tmp_path)
    (kept,) = names(tmp_path)
    assert kept == ("step-00000003" if every else "step-00000005")  # the older one is the better one
    assert f"the newest checkpoint is {tmp_path / 'checkpoints' / kept}; start again from it" in str(
        diverged.value
    )
    load_model(tmp_path / "checkpoints" / kept)


# ---- nothing to learn from ---------------------------------------------------------------------------


def test_documents_of_one_token_each_are_no_training_data(tmp_path):
    model = MambaLM(CONFIG)
    before = model.parameters()
    with pytest.raises(ValueError, match="training data has nothing to predict: none of its 400 documents"):
        run(RUN.replace(validation_fraction=0.0), model, [[i % 24] for i in range(400)], out=tmp_path / "out")
    assert all(np.array_equal(a, before[n]) for n, a in model.parameters().items())
    assert not (tmp_path / "out").exists()


def test_documents_of_one_token_each_are_data_where_documents_do_not_matter():
    documents = [[i % 24] for i in range(400)]
    assert run(RUN.replace(validation_fraction=0.0, packed=False), data=documents).tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": [[i % 24] for i in range(40)]}, "the validation data has nothing to predict"),
        (
            {"data": [list(IDS), *([i % 24] for i in range(40))]},
            r"what validation_fraction=0\.1 holds out has nothing",
        ),
    ],
)
def test_a_validation_without_anything_to_predict_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(RUN.replace(validation_fraction=0.1), **options)


# ---- ids outside the vocabulary ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["data", "validation"])
@pytest.mark.parametrize("wrong", [24, -1, 2**40])
def test_a_wrong_id_is_found_before_the_first_step(tmp_path, where, wrong):
    ids = IDS.copy()
    ids[-1] = wrong
    model = MambaLM(CONFIG)
    before = model.parameters()
    options = {"data": ids} if where == "data" else {"validation": ids}
    with pytest.raises(ValueError, match=f"token 299: id {wrong} is out of range, expected 0 to 23"):
        run(RUN.replace(steps=1), model, **options, out=tmp_path / "out")
    assert all(np.array_equal(a, before[n]) for n, a in model.parameters().items())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["data", "validation"])
def test_a_wrong_id_in_data_too_large_to_look_through_costs_no_step(tmp_path, where, monkeypatch):
    monkeypatch.setattr(DATA, "_CHECKED_AHEAD", 100)
    ids = IDS.copy()
    ids[290] = 24
    config = RUN.replace(steps=None, shuffle=False, validation_fraction=0.0, eval_windows=0)
    options = {"data": ids} if where == "data" else {"validation": ids}
    model = MambaLM(CONFIG)
    last = 18 if where == "data" else 19  # the validation comes after the last step
    with pytest.raises(ValueError, match="token 290: id 24 is out of range") as refused:
        run(config, model, **options, out=tmp_path)
    checkpoint = tmp_path / "checkpoints" / f"step-{last:08d}"
    assert f"the training ended after step {last} of 19, which checkpoint {checkpoint} holds" in str(
        refused.value
    )
    saved = load_model(checkpoint).parameters()
    assert all(np.array_equal(a, saved[n]) for n, a in model.parameters().items())


# ---- a full disk -------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes to stand for a full disk")
@pytest.mark.parametrize("before", [True, False])
def test_a_full_disk_names_the_file_and_the_checkpoint_that_is_intact(tmp_path, before):
    """A limit on file sizes that only the second step's checkpoint, or already the first, exceeds."""
    code = """
import resource, signal, sys
import numpy as np
from mamba_fast import MambaConfig, MambaLM, TrainConfig, train
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
class Fills(MambaLM):
    calls = 0
    def accumulate_gradients(self, *args, **options):
        self.calls += 1
        if self.calls == (3 if sys.argv[2] == "True" else 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        return super().accumulate_gradients(*args, **options)
model = Fills(MambaConfig(vocab_size=24, d_model=4, n_layers=1, d_state=2, d_conv=2))
config = TrainConfig(
    steps=6, batch_size=2, seq_len=8, lr=1e-2, validation_fraction=0.0, checkpoint_every=2, log_every=0
)
train(model, (np.arange(300) * 5 + 3) % 24, config, out=sys.argv[1], progress=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, str(before)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    step = 4 if before else 2
    assert "could not write " in last
    assert "model.safetensors: File too large" in last
    assert f"the checkpoint of step {step} could not be written" in last
    if before:
        kept = tmp_path / "checkpoints" / "step-00000002"
        assert last.endswith(f"; the one before it, {kept}, is intact")
        assert names(tmp_path) == ["step-00000002"]
        assert run(RUN.replace(validation_fraction=0.0), out=tmp_path, resume=True).steps == 6
    else:
        assert last.endswith("; there is none before it")
        assert names(tmp_path) == []


def test_a_folder_of_checkpoints_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(OSError, match="checkpoints.*: the checkpoint of step 6 could not be written"):
        run(out=tmp_path)


def test_an_error_of_the_system_keeps_its_number(tmp_path, monkeypatch):
    import mamba_fast.training_state as module

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "weights")

    monkeypatch.setattr(module, "write_model", full)
    with pytest.raises(OSError, match="^weights: No space left on device: the checkpoint of") as caught:
        run(out=tmp_path)
    assert caught.value.errno == errno.ENOSPC


# ---- folders that are no checkpoints -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "file", "without weights", "without a description"])
def test_what_stands_at_a_checkpoints_place_is_set_aside_and_the_checkpoint_written(tmp_path, kind, caplog):
    place = tmp_path / "checkpoints" / "step-00000006"
    if kind in ("folder", "file"):
        place.parent.mkdir()
        place.touch() if kind == "file" else place.mkdir()
    else:
        run(out=tmp_path)
        (place / ("model.safetensors" if kind == "without weights" else "trainer.json")).unlink()
        if kind == "without weights":  # which does not keep the folder from being a run's
            place.rename(place.with_name("step-00000006.moved"))
            run(RUN.replace(steps=5), out=tmp_path)
            place.with_name("step-00000006.moved").rename(place)
            (place / "trainer.json").rename(place / "trainer.old")
    resume = kind == "without weights"
    result = run(out=tmp_path, **({"resume": True} if resume else {}))
    assert result.steps == 6
    assert load_model(place).parameters().keys() == MambaLM(CONFIG).parameters().keys()
    assert (place / "trainer.json").is_file()
    assert place.with_name("step-00000006.incomplete").exists()
    assert "was no complete checkpoint: it is now step-00000006.incomplete" in caplog.text
    assert run(out=tmp_path, resume=True).losses == []


def test_nothing_that_was_set_aside_is_overwritten(tmp_path):
    place = tmp_path / "checkpoints" / "step-00000006"
    for name in (place.name, f"{place.name}.incomplete"):
        place.with_name(name).mkdir(parents=True)
        (place.with_name(name) / name).touch()
    run(out=tmp_path)
    assert names(tmp_path) == [place.name, f"{place.name}.incomplete", f"{place.name}.incomplete1"]


# ---- damaged checkpoints -----------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path) -> Path:
    run(out=tmp_path)
    return tmp_path / "checkpoints" / "step-00000006"


def refused(checkpoint: Path, message: str) -> str:
    """Resuming fails with a CheckpointError of one line, and leaves the model alone."""
    model = MambaLM(CONFIG, seed=3)
    before = model.parameters()
    with pytest.raises(CheckpointError, match=message) as error:
        run(model=model, out=checkpoint.parent.parent, resume=True)
    assert "\n" not in str(error.value)
    assert all(np.array_equal(a, before[n]) for n, a in model.parameters().items())
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("m.embedding", np.nan),
        ("m.final_norm", -np.inf),
        ("v.embedding", np.nan),
        ("v.layer0.A_log", np.inf),
        ("v.layer0.A_log", -1.0),
    ],
)
def test_moments_that_cannot_be_are_refused_by_name(finished, name, value):
    file = finished / "optimizer.safetensors"
    arrays, _ = read_tensors(file)
    arrays[name].reshape(-1)[2] = value
    write_tensors(file, arrays, {})
    message = refused(finished, rf"optimizer\.safetensors: {name}\[[012, ]+\] is {value}, expected a finite")
    assert "start anew from this one's model" in message


@pytest.mark.parametrize("value", [np.nan, -1.0])
def test_a_count_of_skipped_steps_that_cannot_be_is_refused(finished, value):
    file = finished / "optimizer.safetensors"
    arrays, _ = read_tensors(file)
    arrays["stats"][0] = value
    write_tensors(file, arrays, {})
    refused(finished, rf"stats\[0\] is {value}, expected a number of at least 0")


def changed(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(described: dict[str, Any]) -> None:
        for key in path[:-1]:
            described = described[key]
        described[path[-1]] = value

    return change


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(described: dict[str, Any]) -> None:
        for key in path[:-1]:
            described = described[key]
        del described[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("data", value={}), r"it has no data\.tokens"),
        (changed("data", value=5), "data is 5, expected an object"),
        (changed("data", "tokens", value=-1), r"data\.tokens is -1, expected an integer of at least 0"),
        (changed("data", "documents", value="1"), r"data\.documents is '1', expected an integer"),
        (changed("data", "fingerprint", value=None), r"data\.fingerprint is None, expected a string"),
        (changed("config", value=[]), r"config is \[\], expected an object"),
        (changed("config", value=None), "config is None, expected an object"),
        (changed("config", "lr", value="fast"), "configuration is none of this version: lr must be"),
        (changed("state", value=[]), r"state is \[\], expected an object"),
        (changed("state", "step", value="4"), r"state\.step is '4', expected an integer of at least 0"),
        (changed("state", "step", value=-4), r"state\.step is -4, expected an integer of at least 0"),
        (changed("state", "step", value=4.0), r"state\.step is 4\.0, expected an integer"),
        (changed("state", "step", value=True), r"state\.step is True, expected an integer"),
        (changed("state", "step", value=10**30), r"state\.step is 1000000000000000000000000000000, expected"),
        (changed("state", "tokens", value=None), r"state\.tokens is None"),
        (changed("state", "skipped", value=7), r"state\.skipped is 7, expected an integer from 0 to 6"),
        (changed("state", "skipped_in_a_row", value=-1), r"state\.skipped_in_a_row is -1"),
        (changed("state", "seen", value=7), r"state\.seen is 7"),
        (changed("state", "validated", value=3), r"state\.validated is 3, expected \[step, loss\] or null"),
        (changed("state", "validated", value=[7, 1.0]), r"state\.validated is \[7, 1\.0\]"),
        (changed("state", "validated", value=[6, "low"]), r"state\.validated is \[6, 'low'\]"),
        (changed("state", "interval_loss", value=float("nan")), r"state\.interval_loss is nan"),
        (changed("state", "interval_loss", value=[1.0]), r"state\.interval_loss is \[1\.0\]"),
        (changed("state", "interval_tokens", value=10**6), r"state\.interval_tokens is 1000000"),
        (changed("state", "momentum", value=1), "state has the unknown key 'momentum'"),
        (changed("optimizer_attempts", value=1e300), r"optimizer_attempts is 1e\+300, expected .* 0 to 6"),
        (changed("optimizer_attempts", value=7), "optimizer_attempts is 7, expected an integer from 0 to 6"),
        (changed("optimizer_attempts", value=-1), "optimizer_attempts is -1"),
        (changed("version", value=[1]), r"has version \[1\], expected 1"),
        *((without(key), f"it has no {key}") for key in ("version", "state", "config", "data")),
        (without("optimizer_attempts"), "it has no optimizer_attempts"),
        (without("state", "step"), r"it has no state\.step"),
        (without("state", "seen"), r"it has no state\.seen"),
    ],
)
def test_a_damaged_description_is_refused_with_its_file_and_key(finished, change, message):
    file = finished / "trainer.json"
    described = json.loads(file.read_text())
    change(described)
    file.write_text(json.dumps(described))
    assert str(file) in refused(finished, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", r"it is \[1\], expected an object"),
        (b"", "not JSON"),
        (b"\xff\xfe\xfd", "is damaged: not JSON"),
        (b'{"version": 1' + b"0" * 5000 + b"}", "is damaged"),
        (b'{"version": 1, "version": 1}', "the key 'version' comes twice"),
    ],
)
def test_a_description_that_is_none_is_refused_with_its_file(finished, content, message):
    (finished / "trainer.json").write_bytes(content)
    assert str(finished / "trainer.json") in refused(finished, message)


def test_the_configuration_of_a_checkpoint_can_be_read_by_itself(finished):
    assert run_config(finished) == RUN
    (finished / "trainer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="it has no version"):
        run_config(finished)


# ---- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, CONFIG, "model"])
def test_what_is_no_model_cannot_be_trained(model):
    with pytest.raises(TypeError, match=f"model must be a MambaLM, got {type(model).__name__}"):
        train(model, IDS, RUN)


def test_a_tokenizer_may_be_named(tmp_path):
    (tmp_path / "a.txt").write_text("some text to learn from, " * 20)
    run(
        model=MambaLM(CONFIG.replace(vocab_size=258)),
        data=tmp_path / "a.txt",
        tokenizer="bytes",
        out=tmp_path / "m",
    )
    assert load_tokenizer(tmp_path / "m").vocab_size == 258


@pytest.mark.parametrize("tokenizer", [5, object, ["bytes"]])
def test_what_is_no_tokenizer_is_refused(tokenizer):
    with pytest.raises(TypeError, match="tokenizer must be a Tokenizer, 'bytes' or a path"):
        run(tokenizer=tokenizer)


def test_resume_and_out_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="resume must be True, False, None or a path, got 3"):
        run(resume=3, out=tmp_path)
    with pytest.raises(ValueError, match="resume is an empty path"):
        run(resume="", out=tmp_path)
    with pytest.raises(ValueError, match="out is an empty path"):
        run(out="")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("epochs", [1e308, 1e16])
def test_more_epochs_than_can_be_counted_are_refused(epochs):
    with pytest.raises(
        ValueError, match=f"epochs={epochs:g} of 15 steps each are more than the 90071992".replace("+", r"\+")
    ):
        run(RUN.replace(steps=None, epochs=epochs))


def test_more_steps_than_can_be_counted_are_refused():
    with pytest.raises(ValueError, match="steps=9223372036854775807 is more than the 9007199254740992 steps"):
        run(RUN.replace(steps=2**63 - 1))


def test_a_warm_up_that_never_ends_is_a_warning(caplog):
    run(RUN.replace(warmup_steps=6))
    assert caplog.text == ""
    run(RUN.replace(warmup_steps=12))
    assert (
        "warmup_steps=12 is more than the run's 6 steps: the learning rate only rises to 0.005" in caplog.text
    )
