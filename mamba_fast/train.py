"""Training: from data and a configuration to a trained, saved model.

`train` puts the parts together and `_Run` is the loop. A step reads its windows, adds up gradients
over its micro-batches, and applies them; nothing waits for the device except every `log_every` steps,
at a validation and at a checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mamba_fast.backend import Tensor
from mamba_fast.checkpoint import given_path, write_model
from mamba_fast.config import TrainConfig
from mamba_fast.data import IGNORED, Windows, shuffled
from mamba_fast.interrupts import Stop, ctrl_c
from mamba_fast.metrics import MetricsLog
from mamba_fast.model import MambaLM
from mamba_fast.optim import AdamW, OptimizerStats, schedule
from mamba_fast.plot import can_plot, plot_losses
from mamba_fast.run_lock import locked
from mamba_fast.tokenizer import Tokenizer, as_tokenizer, bar_interval
from mamba_fast.training_data import TrainingData, training_data
from mamba_fast.training_state import (
    NotFiniteError,
    TrainerState,
    check_fresh,
    find_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    run_folder,
    save_checkpoint,
)

__all__ = ["LOG_FILE", "PICTURE_FILE", "TrainResult", "TrainingDivergedError", "train"]

LOG_FILE = "log.jsonl"
PICTURE_FILE = "loss.png"

# Steps skipped in a row after which a run is given up. The weights do not move while steps are
# skipped, so by then nearly every batch gives gradients that are not finite.
_SKIPPED_LIMIT = 100

# Losses kept on the device before they are read back, if no line of the log is due before.
_LOSS_SLOTS = 64

# Beyond this a float no longer counts steps one by one, and no run ends.
_MOST_STEPS = 2**53

_log = logging.getLogger("mamba_fast")


class TrainingDivergedError(RuntimeError):
    """Gradients stay not finite, or weights are: training cannot go on."""


@dataclass
class TrainResult:
    """What a call of `train` did."""

    steps: int
    """Optimizer steps of the whole run, those before a resume included."""
    losses: list[float] = field(default_factory=list)
    """Mean training loss of each step of this call, in nats per token; NaN where it was not finite."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean loss) of each validation of this call."""
    skipped: int = 0
    """Steps of the whole run that changed nothing, because a gradient was not finite."""
    tokens: int = 0
    """Predicted positions of the whole run."""
    seconds: float = 0.0
    """Duration of this call's loop."""
    out: Path | None = None
    """Where the model was saved."""

    @property
    def validation_loss(self) -> float | None:
        """The last validation's loss, or None."""
        return self.validation[-1][1] if self.validation else None


def train(
    model: MambaLM,
    data: Any,
    config: TrainConfig | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    resume: bool | str | os.PathLike[str] | None = None,
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    validation: Any = None,
    progress: bool = True,
) -> TrainResult:
    """Train a model in place (SPEC 5) and save it.

    Parameters
    ----------
    model : MambaLM
        its weights are changed
    data, validation
        anything `mamba_fast.data.load_data` takes: a text file, a folder, a `.jsonl` file, a list of
        paths, a token file, an array of ids, or a `TokenData`. Without `validation`, the part
        `config.validation_fraction` of the data is held out.
    config : TrainConfig
    out
        folder for the finished model (`config.json`, `model.safetensors`, the tokenizer), the log
        (`log.jsonl`), the loss curve (`loss.png`, if matplotlib is installed) and `checkpoints/`.
        None saves nothing.
    resume
        True goes on from the newest checkpoint in `out`; a path from that checkpoint, or from that
        run's newest. The run continues bit for bit as if it had never stopped, given the same
        configuration (`steps` or `epochs` may grow; a cosine follows the new total) and the same data.
    tokenizer
        of the data, saved with the model; an object, or what `load_tokenizer` takes. Where `data` is
        text without one, both `data` and `validation` are read as bytes (`ByteTokenizer`).
    progress
        show a bar with loss, tokens/s and the time left, on stderr

    Returns
    -------
    TrainResult

    Raises
    ------
    ValueError
        the data is shorter than one window, has nothing to predict or does not fit the model's
        vocabulary; what `load_data` raises; `validation` is text, while `data` is ids and no tokenizer
        says what they mean; the checkpoint belongs to another model, configuration or data, or is
        damaged. Ids in data of more than 64 million tokens are looked at as they are read; where one is
        wrong, a checkpoint of the steps so far is written first.
    FileExistsError
        `out` holds another run already, or another training is writing into it
    FileNotFoundError
        there is no data or nothing to resume
    KeyboardInterrupt
        Ctrl-C or SIGTERM: the step was finished and a checkpoint written; the message says where. A
        second one stops at once. (In the main thread only; elsewhere Python does not deliver it.)
    TrainingDivergedError
        the gradients of 100 steps in a row were not finite, or a weight is not finite where it should
        be saved
    OSError
        a checkpoint could not be written; those before it are untouched
    """
    if not isinstance(model, MambaLM):
        raise TypeError(f"model must be a MambaLM, got {type(model).__name__}")
    config = TrainConfig() if config is None else config
    if not isinstance(config, TrainConfig):
        raise TypeError(f"config must be a TrainConfig, got {type(config).__name__}")
    tokenizer = as_tokenizer(tokenizer)
    folder = None if out is None else given_path(out, "out")
    checkpoint = None if resume is None or resume is False else find_checkpoint(resume, folder)
    if checkpoint is not None and folder is None:
        folder = run_folder(checkpoint)
    goes_on = checkpoint is not None and folder is not None and run_folder(checkpoint) == folder.resolve()
    before = set(model.store.trainable)
    with nullcontext() if folder is None else locked(folder):
        if folder is not None and not goes_on:
            check_fresh(folder, 0)
        read = training_data(data, validation, tokenizer, config, model.config.vocab_size, progress=progress)
        if config.wsla:
            model.store.trainable = {n for n in model.store.names if n.endswith((".wXProj", ".bXProj"))}
        try:
            run = _Run(model, read, config, folder)
            if checkpoint is not None:
                run.resume(checkpoint)
            if folder is not None and goes_on:
                check_fresh(folder, run.state.step)
            return run.run(progress, resumed_step=run.state.step if goes_on else None)
        finally:
            model.store.trainable = before


class _Run:
    """One run: what it works on, and where it stands."""

    def __init__(
        self,
        model: MambaLM,
        data: TrainingData,
        config: TrainConfig,
        out: Path | None,
    ) -> None:
        self.model = model
        self.config = config
        self.out = out
        self.windows, self.validation, self.validated, self.tokenizer = data
        self.optimizer = AdamW(
            model.backend,
            model.store,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            max_delta=config.trust_region,
        )
        self.state = TrainerState()
        self.result = TrainResult(steps=0, out=out)
        self.windows_per_step = config.batch_size * config.grad_accumulation
        self.steps_per_epoch = math.ceil(len(self.windows) / self.windows_per_step)
        self.total = config.steps or _steps(config.epochs, self.steps_per_epoch)
        _check_schedule(config, self.total)
        self._order: tuple[int, np.ndarray] | None = None
        self._slots = model.backend.zeros((_LOSS_SLOTS,))
        self._pending: list[int] = []  # predicted positions of the steps whose losses are in the slots

    def resume(self, checkpoint: Path) -> None:
        self.state = load_checkpoint(checkpoint, self.model, self.optimizer, self.config, self.windows.data)
        if self.state.step > self.total:
            raise ValueError(
                f"{checkpoint} is at step {self.state.step}, beyond the {self.total} steps asked for: "
                f"ask for more steps or epochs"
            )

    def run(self, progress: bool, *, resumed_step: int | None) -> TrainResult:
        """Take all steps and save; `resumed_step` is where the log in `out` is taken up, if it is."""
        started = time.perf_counter()
        with _open_log(self.out, resumed_step) as log, ctrl_c() as stop:
            with tqdm(
                total=self.total, initial=self.state.step, desc="train", unit="step", disable=not progress,
                mininterval=bar_interval(),
            ) as bar:  # fmt: skip
                self._loop(log, stop, bar)
            if stop.requested:
                self._stop(log, stop)
            self._finish(log, stop)
        self.result.seconds = time.perf_counter() - started
        return self.result

    # ---- the loop -----------------------------------------------------------------------------

    def _loop(self, log: _Log, stop: Stop, bar: tqdm) -> None:
        state, config = self.state, self.config
        self._validate_if_due(log, stop)  # Ctrl-C may have come before it, in the run that is resumed
        clock = _Clock(state.tokens)
        while state.step < self.total and not stop.requested:
            step = state.step + 1
            lr = schedule(config, step, self.total)
            self._step(self._read_batches(step, log), lr)
            state.step = step
            bar.update()
            last = step == self.total
            regular = step == 1 or _due(step, config.log_every)
            if regular or last or len(self._pending) == _LOSS_SLOTS:
                stats = self._read_back(log)
                speed = clock.tokens_per_second(state.tokens)
                loss = state.mean_loss
                bar.set_postfix_str(f"loss {loss:.4f}, {speed:,.0f} tokens/s", refresh=False)
                if regular or last:
                    self._log_training(log, loss, lr, stats, speed)
                if regular:
                    state.start_interval()
                self._give_up_if_diverged(log)
            if last:
                break  # what is due at the end is `_finish`'s
            with clock.paused():
                self._validate_if_due(log, stop)
                if self.out is not None and _due(step, config.checkpoint_every):
                    self._save_checkpoint(log)

    def _read_batches(self, step: int, log: _Log) -> list[_Batch]:
        """The micro-batches of a step."""
        indices, size = self._windows_of(step), self.config.batch_size
        return [self._read(self.windows, indices[i : i + size], log) for i in range(0, len(indices), size)]

    def _read(self, windows: Windows, indices: Sequence[int] | np.ndarray, log: _Log) -> _Batch:
        """Windows as arrays; where one cannot be used, what was trained so far is saved before the error."""
        try:
            return windows.batch(indices)
        except ValueError as error:
            if self.out is None or self.state.step == 0:
                raise
            path = self._save_checkpoint(log)
            raise ValueError(
                f"{error}; the training ended after step {self.state.step} of {self.total}, "
                f"which checkpoint {path} holds"
            ) from error

    def _step(self, batches: list[_Batch], lr: float) -> None:
        """One optimizer step: gradients of the mean loss over all micro-batches' predicted positions."""
        model, config = self.model, self.config
        counts = [int(np.count_nonzero(targets != IGNORED)) for _, targets, _ in batches]
        predicted = sum(counts)
        total: Tensor | None = None
        if predicted:
            model.store.grads.zero()
            for (ids, targets, seq_start), count in zip(batches, counts, strict=True):
                if count == 0:
                    continue
                loss = model.accumulate_gradients(
                    ids,
                    targets,
                    scale=1.0 / predicted,
                    seq_start=seq_start,
                    activation_checkpointing=config.activation_checkpointing,
                )
                if total is None:
                    total = loss
                else:
                    model.backend.add_(total, loss)
            self.optimizer.step(lr)
        slot = model.backend.view(self._slots, 0, len(self._pending), len(self._pending) + 1)
        if total is None:
            model.backend.fill_(slot, 0.0)
        else:
            model.backend.copy_(slot, total)
        self._pending.append(predicted)
        self.state.tokens += predicted

    def _windows_of(self, step: int) -> np.ndarray:
        """The windows of a step. An epoch's last step takes what is left, so that epochs do not mix."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            count = len(self.windows)
            order = shuffled(count, self.config.seed, epoch) if self.config.shuffle else np.arange(count)
            self._order = epoch, order
        start = position * self.windows_per_step
        return self._order[1][start : start + self.windows_per_step]

    # ---- looking at it --------------------------------------------------------------------------

    def _read_back(self, log: _Log) -> OptimizerStats:
        """Losses and counters since the last time. Waits for the device."""
        state = self.state
        sums = self.model.backend.to_host(self._slots)[: len(self._pending)].tolist()
        for total, count in zip(sums, self._pending, strict=True):
            state.add_loss(total, count)
            counts = count > 0 and math.isfinite(total)
            self.result.losses.append(total / count if counts else math.nan)
        self._pending.clear()
        stats = self.optimizer.stats()
        newly, looked_at = stats.skipped - state.skipped, state.step - state.seen
        state.skipped_in_a_row = state.skipped_in_a_row + newly if newly == looked_at else 0
        state.skipped, state.seen = stats.skipped, state.step
        if newly:
            self._warn(
                log,
                f"{newly} of the last {looked_at} steps up to step {state.step} skipped: "
                f"their gradients were not finite; {stats.skipped} in all",
                skipped=stats.skipped,
            )
        return stats

    def _log_training(self, log: _Log, loss: float, lr: float, stats: OptimizerStats, speed: float) -> None:
        state = self.state
        log.write(
            "train",
            state.step,
            loss=loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            clip=stats.clip,
            skipped=stats.skipped,
            clamped=stats.clamped,
            epoch=state.step / self.steps_per_epoch,
            tokens=state.tokens,
            tokens_per_second=round(speed, 1),
        )

    def _give_up_if_diverged(self, log: _Log) -> None:
        if self.state.skipped_in_a_row < _SKIPPED_LIMIT:
            return
        remedy = f"start again from it with a smaller lr (now {self.config.lr:g}) or max_grad_norm"
        if self.out is None:
            remedy = remedy.replace(" from it", "")
        else:
            # An older checkpoint is better than this one, and must not be removed for it.
            kept = newest_checkpoint(self.out) or self._save_checkpoint(log)
            remedy = f"the newest checkpoint is {kept}; {remedy}"
        raise TrainingDivergedError(
            f"the gradients of the last {self.state.skipped_in_a_row} steps were not finite, up to step "
            f"{self.state.step}: {remedy}"
        )

    def _validate_if_due(self, log: _Log, stop: Stop) -> None:
        if self.state.step > 0 and _due(self.state.step, self.config.eval_every):
            self._validate(log, stop)

    def _validate(self, log: _Log, stop: Stop) -> None:
        """Mean loss over windows spread evenly over the held-out data, unless this step has it already."""
        validated = self.state.validated
        if self.validation is None or (validated is not None and validated[0] == self.state.step):
            return
        chosen = self.validated
        total, count = 0.0, 0
        for i in range(0, len(chosen), self.config.batch_size):
            if stop.requested:
                return
            ids, targets, seq_start = self._read(self.validation, chosen[i : i + self.config.batch_size], log)
            if (targets != IGNORED).any():
                part, predicted = self.model.loss_sum(ids, targets, seq_start=seq_start)
                total, count = total + part, count + predicted
        if count:
            loss = total / count
            self.state.validated = self.state.step, loss
            self.result.validation.append((self.state.step, loss))
            log.write("validation", self.state.step, validation_loss=loss, tokens=count)
            if not math.isfinite(loss):
                self._warn(
                    log,
                    f"the validation loss at step {self.state.step} is {loss}: the training has diverged; "
                    f"start again with a smaller lr (now {self.config.lr:g})",
                )

    def _warn(self, log: _Log, message: str, **values: Any) -> None:
        _log.warning(message)
        log.write("warning", self.state.step, message=message, **values)

    # ---- saving ---------------------------------------------------------------------------------

    def _save_checkpoint(self, log: _Log) -> Path:
        assert self.out is not None
        if self._pending:
            self._read_back(log)
        try:
            return save_checkpoint(
                self.out,
                self.model,
                self.optimizer,
                self.state,
                self.config,
                self.windows.data,
                steps_per_epoch=self.steps_per_epoch,
                tokenizer=self.tokenizer,
            )
        except NotFiniteError as error:
            kept = newest_checkpoint(self.out)
            left = "there is no checkpoint before it" if kept is None else f"the newest checkpoint is {kept}"
            raise TrainingDivergedError(
                f"after step {self.state.step} {error}: it was not saved, and {left}; start again with a "
                f"smaller lr (now {self.config.lr:g}) or max_grad_norm"
            ) from None

    def _stop(self, log: _Log, stop: Stop) -> None:
        done = f"stopped after step {self.state.step} of {self.total}"
        if self.out is None:
            raise stop.error(f"{done}; nothing was saved, because no out folder was given")
        path = self._save_checkpoint(log)
        raise stop.error(f"{done}; checkpoint {path}: resume to go on")

    def _finish(self, log: _Log, stop: Stop) -> None:
        """The last validation, the last checkpoint and the finished model."""
        state, result = self.state, self.result
        self._validate(log, stop)
        if stop.requested:
            self._stop(log, stop)
        if not result.validation and state.validated is not None:
            result.validation.append(state.validated)  # of a run that was finished already
        result.steps, result.skipped, result.tokens = state.step, state.skipped, state.tokens
        if self.out is None:
            return
        self._save_checkpoint(log)
        write_model(self.out, self.model.config, self.model.parameters())
        if self.tokenizer is not None:
            self.tokenizer.save(self.out)
        if can_plot():
            try:
                plot_losses(self.out / LOG_FILE, self.out / PICTURE_FILE)
            except (ImportError, OSError, ValueError) as error:  # no reason to lose a finished training
                _log.warning("the loss curve was not drawn: %s", error)


# ---- small parts --------------------------------------------------------------------------------


class _NoLog:
    """Takes a log's records where there is no folder to write them to."""

    def write(self, event: str, step: int, **values: Any) -> None:
        """Do nothing."""


_Log = MetricsLog | _NoLog

_Batch = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""ids (B, L), targets (B, L), and where states restart (B, L) or None."""


@contextmanager
def _open_log(out: Path | None, resumed_step: int | None) -> Iterator[_Log]:
    if out is None:
        yield _NoLog()
    else:
        out.mkdir(parents=True, exist_ok=True)
        with MetricsLog(out / LOG_FILE, resumed_step=resumed_step) as log:
            yield log


class _Clock:
    """Speed between two looks at it, pauses not counted."""

    def __init__(self, tokens: int) -> None:
        self._time, self._tokens = time.perf_counter(), tokens

    def tokens_per_second(self, tokens: int) -> float:
        now = time.perf_counter()
        speed = (tokens - self._tokens) / max(now - self._time, 1e-9)
        self._time, self._tokens = now, tokens
        return speed

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._time += time.perf_counter() - before


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _steps(epochs: float, steps_per_epoch: int) -> int:
    """Steps that cover so many epochs, the last one in part: at least one."""
    steps = epochs * steps_per_epoch
    if steps > _MOST_STEPS:
        raise ValueError(
            f"epochs={epochs:g} of {steps_per_epoch} steps each are more than the {_MOST_STEPS} steps that a "
            f"run may have: ask for fewer (Ctrl-C ends a run whenever you like)"
        )
    # Rounded first: 0.07 * 100 is 7.000000000000001, and an eighth step is not what was asked for.
    return max(1, math.ceil(round(steps, 9)))


def _check_schedule(config: TrainConfig, total: int) -> None:
    """Refuse more steps than can be counted; warn of a warm-up that never ends."""
    if total > _MOST_STEPS:
        raise ValueError(
            f"steps={total} is more than the {_MOST_STEPS} steps that a run may have: ask for fewer (Ctrl-C "
            f"ends a run whenever you like)"
        )
    if config.warmup_steps > total:  # no error: a first part of a longer run may be as short
        _log.warning(
            "warmup_steps=%d is more than the run's %d steps: the learning rate only rises to %.3g and never "
            "reaches lr=%g; for a run of this length give a smaller warmup_steps",
            config.warmup_steps, total, schedule(config, total, total), config.lr,
        )  # fmt: skip
