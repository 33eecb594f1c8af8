"""Going on with a run: bit for bit, after Ctrl-C, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Tensor
from mamba_fast.checkpoint import CheckpointError
from mamba_fast.config import MambaConfig, TrainConfig
from mamba_fast.interrupts import Terminated
from mamba_fast.metrics import read_log
from mamba_fast.model import MambaLM, load_model
from mamba_fast.train import TrainResult, train

TRAIN = importlib.import_module("mamba_fast.train")  # the attribute of the package is the function
CONFIG = MambaConfig(vocab_size=24, d_model=8, n_layers=2, d_state=4, d_conv=3)
IDS = (np.arange(300) * 5 + 3) % 24
# 15 windows of the training part make 4 steps an epoch, the last of them short.
RUN = TrainConfig(
    epochs=6.0, batch_size=2, grad_accumulation=2, seq_len=16, lr=1e-2, validation_fraction=0.2,
    warmup_steps=3, log_every=3, eval_every=5,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes longer than everything else here."""
    monkeypatch.setattr(TRAIN, "can_plot", lambda: False)


class Interrupted(MambaLM):
    """Presses Ctrl-C in the middle of a step, so many times."""

    def __init__(self, *args: Any, at: int, times: int = 1) -> None:
        super().__init__(*args)
        self.calls, self.at, self.times = 0, at, times

    def accumulate_gradients(self, *args: Any, **options: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        return super().accumulate_gradients(*args, **options)


def run(
    out: Path | None, config: TrainConfig = RUN, model: MambaLM | None = None, **options: Any
) -> TrainResult:
    data = options.pop("data", IDS)
    # Another seed than a fresh model's: what is resumed must come from the checkpoint.
    model = MambaLM(CONFIG, seed=5 if "resume" in options else 0) if model is None else model
    return train(model, data, config, out=out, progress=False, **options)


def stop_at(out: Path, call: int, config: TrainConfig = RUN, backend: str = "cython") -> str:
    """A run that Ctrl-C stops in the step of this micro-batch; the message."""
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(out, config, Interrupted(CONFIG, backend, at=call))
    return str(stopped.value)


def fingerprint(out: Path) -> dict[str, str]:
    """Hashes of the weights, the moments and everything else that the newest checkpoint holds."""
    newest = max((out / "checkpoints").iterdir())
    files = {path.name: path.read_bytes() for path in newest.iterdir()}
    described = json.loads(files["trainer.json"])
    for volatile in ("config", "version"):
        del described[volatile]
    files["trainer.json"] = json.dumps(described).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def curve(out: Path) -> list[dict[str, Any]]:
    """The log without the speeds."""
    records = read_log(out / "log.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The folder of a run that was never interrupted."""
    out = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRAIN, "can_plot", lambda: False)
        run(out)
    return out


# ---- bit for bit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 9, 14, 15, 44])
def test_a_run_stopped_by_ctrl_c_goes_on_bit_for_bit(tmp_path, straight, call):
    stop_at(tmp_path, call)
    run(tmp_path, resume=True)
    assert fingerprint(tmp_path) == fingerprint(straight)
    assert curve(tmp_path) == curve(straight)


def test_three_epochs_and_three_more_are_six(tmp_path):
    config = RUN.replace(schedule="constant")
    run(tmp_path / "straight", config)
    run(tmp_path / "parts", config.replace(epochs=3.0))
    second = run(tmp_path / "parts", config, resume=True)
    assert second.steps == 24
    assert len(second.losses) == 12
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "straight")
    kept = [r for r in curve(tmp_path / "parts") if (r["event"], r["step"]) != ("validation", 12)]
    assert kept == curve(tmp_path / "straight")  # but for the validation at the end of the first part
    models = [(tmp_path / part / "model.safetensors").read_bytes() for part in ("parts", "straight")]
    assert models[0] == models[1]


def test_three_epochs_and_three_more_are_six_on_the_oracle(tmp_path):
    config = RUN.replace(schedule="constant", steps=4, batch_size=1, seq_len=8, eval_windows=2)
    run(tmp_path / "straight", config, MambaLM(CONFIG, "oracle"))
    run(tmp_path / "parts", config.replace(steps=2), MambaLM(CONFIG, "oracle"))
    run(tmp_path / "parts", config, MambaLM(CONFIG, "oracle", seed=5), resume=True)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "straight")


def test_a_run_goes_on_from_a_periodic_checkpoint_after_a_crash(tmp_path, straight):
    class Crashes(MambaLM):
        calls = 0

        def accumulate_gradients(self, *args: Any, **options: Any) -> Tensor:
            self.calls += 1
            if self.calls == 30:
                raise MemoryError("out of memory")
            return super().accumulate_gradients(*args, **options)

    with pytest.raises(MemoryError):
        run(tmp_path, RUN.replace(checkpoint_every=7), Crashes(CONFIG))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000007", "step-00000014"]
    run(tmp_path, resume=True)
    assert fingerprint(tmp_path) == fingerprint(straight)
    assert curve(tmp_path) == curve(straight)


def test_a_run_with_skipped_steps_goes_on_bit_for_bit(tmp_path):
    class Spoilt(Interrupted):
        def accumulate_gradients(self, ids: Any, *args: Any, **options: Any) -> Tensor:
            loss = super().accumulate_gradients(ids, *args, **options)
            if int(np.sum(ids)) % 5 == 0:  # depends on the data, so it happens alike in both runs
                self.backend.fill_(self.backend.view(self.store.grads["final_norm"], 0, 0, 1), np.nan)
            return loss

    whole = run(tmp_path / "straight", model=Spoilt(CONFIG, at=0))
    assert 3 <= whole.skipped <= 20
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", model=Spoilt(CONFIG, at=21))
    resumed = run(tmp_path / "parts", model=Spoilt(CONFIG, at=0), resume=True)
    assert resumed.skipped == whole.skipped
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert fingerprint(tmp_path / "parts")[name] == fingerprint(tmp_path / "straight")[name]


def test_the_losses_of_both_parts_are_those_of_the_whole(tmp_path):
    whole = run(None)
    stop_at(tmp_path, 20)
    resumed = run(tmp_path, resume=True)
    assert resumed.losses == whole.losses[10:]
    assert resumed.validation == [v for v in whole.validation if v[0] >= 10]  # Ctrl-C came before the tenth's
    assert resumed.tokens == whole.tokens


def test_what_does_not_touch_the_weights_may_change(tmp_path, straight):
    stop_at(tmp_path, 20)
    changed = RUN.replace(
        log_every=1, eval_every=2, checkpoint_every=4, keep_checkpoints=1, activation_checkpointing=True
    )
    run(tmp_path, changed, resume=True)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert fingerprint(tmp_path)[name] == fingerprint(straight)[name]


def test_a_finished_run_can_be_resumed_and_stays_as_it_is(tmp_path):
    first = run(tmp_path)
    before = fingerprint(tmp_path), curve(tmp_path)
    again = run(tmp_path, resume=True)
    assert again.losses == []
    assert again.steps == first.steps
    assert again.validation_loss == first.validation_loss
    assert (fingerprint(tmp_path), curve(tmp_path)) == before


def test_wsla_goes_on_bit_for_bit(tmp_path):
    config = RUN.replace(wsla=True)
    run(tmp_path / "straight", config)
    stop_at(tmp_path / "parts", 20, config)
    run(tmp_path / "parts", config, resume=True, model=MambaLM(CONFIG))
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "straight")
    saved = (tmp_path / "parts" / "checkpoints" / "step-00000024" / "optimizer.safetensors").stat().st_size
    assert saved < 8000  # moments of the two trained parameters of each layer only


# ---- Ctrl-C -----------------------------------------------------------------------------------------


def test_the_first_ctrl_c_finishes_the_step_and_says_where_the_checkpoint_is(tmp_path, capfd):
    message = stop_at(tmp_path, 9)  # the first micro-batch of step 5
    checkpoint = tmp_path / "checkpoints" / "step-00000005"
    assert message == f"stopped after step 5 of 24; checkpoint {checkpoint}: resume to go on"
    assert load_model(checkpoint).config == CONFIG
    assert "press Ctrl-C again to stop at once" in capfd.readouterr().err
    assert not (tmp_path / "model.safetensors").exists()


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    model = Interrupted(CONFIG, at=9, times=2)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(tmp_path, model=model)
    assert str(stopped.value) == ""
    assert model.calls == 9
    assert not (tmp_path / "checkpoints").exists()


def test_ctrl_c_without_a_folder_says_that_nothing_was_saved():
    with pytest.raises(KeyboardInterrupt, match="nothing was saved, because no out folder was given"):
        run(None, model=Interrupted(CONFIG, at=9))


def test_ctrl_c_during_a_validation_stops_it_and_the_rest_is_done_on_resuming(tmp_path, straight):
    class InterruptedLater(MambaLM):
        def loss_sum(self, *args: Any, **options: Any) -> tuple[float, int]:
            signal.raise_signal(signal.SIGINT)
            return super().loss_sum(*args, **options)

    config = RUN.replace(eval_every=0)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 24 of 24"):
        run(tmp_path, config, InterruptedLater(CONFIG))
    result = run(tmp_path, config, resume=True)
    assert [step for step, _ in result.validation] == [24]
    assert fingerprint(tmp_path)["model.safetensors"] == fingerprint(straight)["model.safetensors"]


def test_the_handler_before_is_put_back(tmp_path):
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        run(tmp_path / "a", RUN.replace(steps=1))
        stop_at(tmp_path / "b", 1)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [signal.SIGINT]


def test_sigterm_is_treated_as_ctrl_c_and_its_handler_put_back(tmp_path, capfd):
    class Killed(MambaLM):
        def accumulate_gradients(self, *args: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)
            return super().accumulate_gradients(*args, **options)

    with pytest.raises(Terminated, match="stopped after step 1 of 48; checkpoint"):
        run(tmp_path, RUN.replace(grad_accumulation=1), Killed(CONFIG))
    assert names(tmp_path) == ["step-00000001"]
    assert "a second SIGTERM stops at once" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_program_with_a_handler_for_sigterm_keeps_it():
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))

    class Killed(MambaLM):
        def accumulate_gradients(self, *args: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)
            return super().accumulate_gradients(*args, **options)

    try:
        assert run(None, RUN.replace(steps=1, grad_accumulation=1), Killed(CONFIG)).steps == 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert seen == [signal.SIGTERM]


def test_an_ignored_ctrl_c_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(None, RUN.replace(steps=5), Interrupted(CONFIG, at=3)).steps == 5
    finally:
        signal.signal(signal.SIGINT, previous)


def test_training_in_another_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    results: list[TrainResult] = []
    thread = threading.Thread(target=lambda: results.append(run(None, RUN.replace(steps=2))))
    thread.start()
    thread.join(timeout=60)
    assert results[0].steps == 2
    assert signal.getsignal(signal.SIGINT) is before


# ---- checkpoints on disk ------------------------------------------------------------------------------


def names(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())


@pytest.mark.parametrize(("keep", "left"), [(1, [24]), (2, [20, 24]), (0, [5, 10, 15, 20, 24])])
def test_the_newest_checkpoints_are_kept(tmp_path, keep, left):
    run(tmp_path, RUN.replace(checkpoint_every=5, keep_checkpoints=keep))
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]


def test_a_full_disk_leaves_the_checkpoints_before_and_no_debris(tmp_path, monkeypatch):
    import mamba_fast.checkpoint as module

    real, left = module._safetensors, 3

    def full(*args: Any) -> Iterator[Any]:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        yield from real(*args)

    monkeypatch.setattr(module, "_safetensors", full)
    with pytest.raises(OSError, match=r"could not write .*step-00000010.*No space left"):
        run(tmp_path, RUN.replace(checkpoint_every=5, keep_checkpoints=1))
    assert names(tmp_path) == ["step-00000005"]
    monkeypatch.undo()
    assert run(tmp_path, resume=True).steps == 24


def test_what_a_killed_process_left_half_written_is_passed_over(tmp_path):
    stop_at(tmp_path, 9)
    half = tmp_path / "checkpoints" / ".step-00000007.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints" / "step-00000008").mkdir()  # foreign: no trainer.json
    assert len(run(tmp_path, resume=True).losses) == 19


def test_a_run_can_be_named_and_goes_on_in_its_folder(tmp_path):
    run(tmp_path, RUN.replace(steps=8))
    result = run(None, RUN.replace(steps=9), resume=str(tmp_path))
    assert len(result.losses) == 1
    assert result.out == tmp_path


def test_a_checkpoint_can_be_named_and_goes_on_in_its_folder(tmp_path):
    run(tmp_path, RUN.replace(steps=8, checkpoint_every=4))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")
    result = run(None, RUN.replace(steps=8), resume=tmp_path / "checkpoints" / "step-00000004")
    assert len(result.losses) == 4
    assert names(tmp_path) == ["step-00000004", "step-00000008"]


def test_a_branch_goes_to_a_folder_of_its_own(tmp_path):
    run(tmp_path / "a", RUN.replace(steps=8, checkpoint_every=4))
    older = tmp_path / "a" / "checkpoints" / "step-00000004"
    before = fingerprint(tmp_path / "a"), curve(tmp_path / "a")
    with pytest.raises(
        FileExistsError, match="holds checkpoints up to step 8, beyond the step 4 to resume from"
    ):
        run(tmp_path / "a", resume=older)
    branch = run(tmp_path / "b", RUN.replace(steps=8), resume=older)
    assert len(branch.losses) == 4
    assert (fingerprint(tmp_path / "a"), curve(tmp_path / "a")) == before
    assert fingerprint(tmp_path / "b") == before[0]


def test_a_branch_is_not_mixed_into_a_third_run(tmp_path):
    run(tmp_path / "a", RUN.replace(steps=4))
    run(tmp_path / "b", RUN.replace(steps=2))
    with pytest.raises(FileExistsError, match="holds a training run already"):
        run(tmp_path / "b", resume=tmp_path / "a")


# ---- what is refused ----------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path) -> Path:
    """A run stopped after step 5, to be resumed wrongly."""
    stop_at(tmp_path, 9)
    return tmp_path


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing to resume: no complete checkpoint in"):
        run(tmp_path, resume=True)
    with pytest.raises(ValueError, match="resume=True needs out"):
        run(None, resume=True)
    with pytest.raises(FileNotFoundError, match="nothing to resume: there is no folder .*nowhere"):
        run(None, resume=tmp_path / "nowhere")


@pytest.mark.parametrize("change", ["content", "length"])
def test_other_data_is_refused_and_the_model_is_left_alone(stopped, change):
    data = (IDS if change == "content" else IDS[:250]).copy()
    data[3] = 23 - data[3]
    model = MambaLM(CONFIG)
    before = model.parameters()
    expected = "240 in 1 (the contents differ)" if change == "content" else "200 in 1 (the contents differ)"
    with pytest.raises(ValueError, match="trained on other data: 240 tokens in 1 documents") as refused:
        run(stopped, model=model, data=data, resume=True)
    assert expected in str(refused.value)
    for name, array in model.parameters().items():
        np.testing.assert_array_equal(array, before[name])


def test_another_configuration_is_refused_with_every_difference(stopped):
    with pytest.raises(ValueError, match=r"lr=0\.01 \(now 0\.02\), schedule='cosine' \(now 'constant'\)"):
        run(stopped, RUN.replace(lr=0.02, schedule="constant"), resume=True)


def test_another_model_is_refused_with_every_difference(stopped):
    model = MambaLM(CONFIG.replace(norm_eps=1e-5))
    with pytest.raises(ValueError, match=r"the model was started with norm_eps=1e-06 \(now 1e-05\)"):
        run(stopped, model=model, resume=True)


def test_fewer_steps_than_were_taken_are_refused(stopped):
    with pytest.raises(ValueError, match="is at step 5, beyond the 3 steps asked for"):
        run(stopped, RUN.replace(steps=3), resume=True)


def test_a_missing_optimizer_is_a_warning_and_the_run_goes_on(stopped):
    (stopped / "checkpoints" / "step-00000005" / "optimizer.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"has no optimizer\.safetensors: the optimizer starts afresh"):
        result = run(stopped, resume=True)
    assert result.steps == 24
    assert result.losses[-1] < result.losses[0]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_a_truncated_checkpoint_is_refused_by_name_and_the_model_is_left_alone(stopped, file):
    path = stopped / "checkpoints" / "step-00000005" / file
    path.write_bytes(path.read_bytes()[:-10])
    model = MambaLM(CONFIG)
    before = model.parameters()
    with pytest.raises(CheckpointError, match=file):
        run(stopped, model=model, resume=True)
    for name, array in model.parameters().items():
        np.testing.assert_array_equal(array, before[name])


def test_a_state_of_another_version_is_refused(stopped):
    path = stopped / "checkpoints" / "step-00000005" / "trainer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match="has version 99, expected 1"):
        run(stopped, resume=True)


def rewrite(out: Path, change: Any) -> None:
    """Let `change` alter what the checkpoint of step 5 says of the run."""
    path = out / "checkpoints" / "step-00000005" / "trainer.json"
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


@pytest.mark.parametrize("field", ["wsla", "max_grad_norm", "packed", "min_lr_ratio"])
def test_a_checkpoint_older_than_a_field_goes_on_with_the_fields_default(stopped, straight, field):
    rewrite(stopped, lambda described: described["config"].pop(field))
    run(stopped, resume=True)
    assert fingerprint(stopped) == fingerprint(straight)


def test_a_field_younger_than_the_checkpoint_is_refused_at_another_value_than_its_default(stopped):
    rewrite(stopped, lambda described: described["config"].pop("max_grad_norm"))
    with pytest.raises(ValueError, match=r"started with max_grad_norm=1\.0 \(now 2\.0\)"):
        run(stopped, RUN.replace(max_grad_norm=2.0), resume=True)


def test_a_checkpoint_with_a_field_of_another_version_is_refused_by_its_name(stopped):
    rewrite(stopped, lambda described: described["config"].update(momentum=0.9))
    with pytest.raises(CheckpointError, match=r"trainer\.json: the run's configuration .*'momentum'"):
        run(stopped, resume=True)


def test_a_validation_that_is_not_finite_is_kept_in_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(MambaLM, "loss_sum", lambda self, *args, **options: (np.inf, 3))
    whole = run(tmp_path / "straight")
    assert not np.isfinite(whole.validation_loss)
    stop_at(tmp_path / "parts", 14)
    resumed = run(tmp_path / "parts", resume=True)
    assert [step for step, _ in resumed.validation] == [10, 15, 20, 24]
    assert not np.isfinite(resumed.validation_loss)
