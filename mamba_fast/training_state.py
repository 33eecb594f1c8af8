"""Checkpoints of a training run: everything that it needs to go on as if it had never stopped.

A run's folder holds the finished model and

    checkpoints/step-00000100/
        model.safetensors config.json    the model, loadable by itself
        optimizer.safetensors            Adam's moments m.{name}, v.{name} and its counters
        trainer.json                     TrainerState, the TrainConfig, what the data was
        (the tokenizer's files)

A checkpoint folder is written under another name and renamed, so it is complete or absent. There is
no random state to keep but the seed: the order of an epoch's windows is a function of the seed and
the epoch, and the position in it one of the step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamba_fast.checkpoint import (
    CheckpointError,
    atomic_folder,
    read_model,
    read_tensors,
    write_bytes,
    write_model,
    write_tensors,
)
from mamba_fast.config import TrainConfig
from mamba_fast.data import TokenData
from mamba_fast.model import MambaLM
from mamba_fast.optim import AdamW
from mamba_fast.tokenizer import Tokenizer

__all__ = [
    "TrainerState",
    "check_fresh",
    "find_checkpoint",
    "load_checkpoint",
    "run_folder",
    "save_checkpoint",
]

FOLDER = "checkpoints"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer.json"
VERSION = 1

# What may differ between a run and its continuation: how long it is, and what does not touch the weights.
_MAY_CHANGE = {
    "steps", "epochs", "eval_every", "eval_windows", "log_every", "checkpoint_every", "keep_checkpoints",
    "activation_checkpointing",
}  # fmt: skip


@dataclass
class TrainerState:
    """What changes from step to step besides weights and moments."""

    step: int = 0
    """Optimizer steps taken."""
    tokens: int = 0
    """Predicted positions trained on."""
    skipped: int = 0
    """Steps that the NaN guard skipped, when it was last looked at."""
    skipped_in_a_row: int = 0
    seen: int = 0
    """The step at which it was last looked at."""
    validated: tuple[int, float] | None = None
    """Step and loss of the last validation."""
    interval_loss: float = 0.0
    """Summed losses since the last regular line of the log, of the steps whose loss is finite, in their
    order."""
    interval_tokens: int = 0
    """Predicted positions of those steps."""

    def add_loss(self, total: float, predicted: int) -> None:
        """Count a step with this sum of losses, unless it is not finite or nothing was predicted."""
        if predicted and math.isfinite(total):
            self.interval_loss += total
            self.interval_tokens += predicted

    @property
    def mean_loss(self) -> float:
        """Mean loss per token since the last regular line of the log; NaN if no step counts."""
        return self.interval_loss / self.interval_tokens if self.interval_tokens else math.nan

    def start_interval(self) -> None:
        """A regular line of the log was written."""
        self.interval_loss, self.interval_tokens = 0.0, 0

    def to_dict(self) -> dict[str, Any]:
        """JSON types; a validation's loss that is not finite becomes None."""
        values = dataclasses.asdict(self)
        if self.validated is not None and not math.isfinite(self.validated[1]):
            values["validated"] = self.validated[0], None
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainerState:
        state = cls(**values)
        if state.validated is not None:
            step, loss = state.validated
            state.validated = step, math.nan if loss is None else loss
        return state


# ---- writing ------------------------------------------------------------------------------------


def save_checkpoint(
    out: Path,
    model: MambaLM,
    optimizer: AdamW,
    state: TrainerState,
    config: TrainConfig,
    data: TokenData,
    *,
    steps_per_epoch: int,
    tokenizer: Tokenizer | None,
) -> Path:
    """Write the checkpoint of `state.step` unless it is there already, then remove the oldest.

    OSError if the disk is full; the checkpoints before are untouched then.
    """
    path = out / FOLDER / f"step-{state.step:08d}"
    if not path.exists():
        described = {
            "version": VERSION,
            "state": state.to_dict(),
            "optimizer_attempts": optimizer.attempts,
            "epoch": state.step // steps_per_epoch,
            "step_in_epoch": state.step % steps_per_epoch,
            "config": config.to_dict(),
            "data": _describe(data),
            "tokenizer": None if tokenizer is None else tokenizer.kind,
        }
        to_host = model.backend.to_host
        with atomic_folder(path) as folder:
            write_model(folder, model.config, model.parameters())
            moments = {name: to_host(tensor) for name, tensor in optimizer.state().items()}
            write_tensors(folder / OPTIMIZER_FILE, moments, {})
            if tokenizer is not None:
                tokenizer.save(folder)
            write_bytes(folder / TRAINER_FILE, json.dumps(described, indent=2, allow_nan=False).encode())
    if config.keep_checkpoints:
        older = [p for step, p in _checkpoints(out) if step <= state.step]
        for superseded in older[: -config.keep_checkpoints]:
            shutil.rmtree(superseded)
    return path


def _describe(data: TokenData) -> dict[str, Any]:
    return {"tokens": len(data), "documents": data.n_documents, "fingerprint": data.fingerprint()}


def _checkpoints(out: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints of a run's folder, oldest first."""
    found = []
    for path in (out / FOLDER).glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdecimal() and (path / TRAINER_FILE).is_file():
            found.append((int(number), path))
    return sorted(found)


# ---- reading ------------------------------------------------------------------------------------


def find_checkpoint(resume: bool | str | os.PathLike[str], out: Path | None) -> Path:
    """The checkpoint folder that `resume` stands for: the newest of a run, or the one named.

    Parameters
    ----------
    resume
        True: the newest in `out`; else a checkpoint's folder, or a run's: its newest

    Raises
    ------
    FileNotFoundError
        there is none
    """
    if resume is True:
        if out is None:
            raise ValueError("resume=True needs out: the folder of the run to go on with")
        folder = out
    else:
        folder = Path(resume)
        if not folder.is_dir():
            raise FileNotFoundError(f"nothing to resume: there is no folder {folder}")
        if (folder / TRAINER_FILE).is_file():
            return folder
    found = _checkpoints(folder)
    if not found:
        raise FileNotFoundError(f"nothing to resume: no complete checkpoint in {folder / FOLDER}")
    return found[-1][1]


def run_folder(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in, if it still lies in one."""
    parent = checkpoint.resolve().parent
    return parent.parent if parent.name == FOLDER else None


def check_fresh(out: Path, step: int) -> None:
    """Refuse to mix two runs in one folder: `out` must have no checkpoint beyond `step` (0: none)."""
    found = _checkpoints(out)
    if found and found[-1][0] > step:
        newest, path = found[-1]
        if step == 0:
            raise FileExistsError(
                f"{out} holds a training run already ({path.name}): go on with it by resume, "
                f"or choose another folder"
            )
        raise FileExistsError(
            f"{out} holds checkpoints up to step {newest}, beyond the step {step} to resume from: "
            f"choose another folder for the new branch, or delete them"
        )


def load_checkpoint(
    path: Path, model: MambaLM, optimizer: AdamW, config: TrainConfig, data: TokenData
) -> TrainerState:
    """Take over a checkpoint into a model and a fresh optimizer. Nothing is changed if it does not fit.

    Raises
    ------
    ValueError
        it belongs to another model, configuration or data (each difference is named), or is damaged

    Warns
    -----
    UserWarning
        the optimizer's file is missing: its moments start from zero, so that the run goes on, but not
        as if it had never stopped
    """
    described = _read_description(path)
    model_config, parameters = read_model(path)
    _same(f"{path}: the model", model_config.to_dict(), model.config.to_dict())
    then = _run_config(path, described)
    _same(f"{path}: the run", then.to_dict(), config.to_dict(), may_change=_MAY_CHANGE)
    was, is_now = described["data"], _describe(data)
    if was != is_now:
        raise ValueError(
            f"{path} was trained on other data: {was['tokens']} tokens in {was['documents']} documents, "
            f"now {is_now['tokens']} in {is_now['documents']}"
            f"{'' if was['fingerprint'] == is_now['fingerprint'] else ' (the contents differ)'}; "
            f"resume with the same data, or start a new run from this checkpoint's model"
        )
    state: TrainerState = described["state"]
    if (path / OPTIMIZER_FILE).exists():
        arrays, _ = read_tensors(path / OPTIMIZER_FILE)
        tensors = {name: model.backend.from_host(array) for name, array in arrays.items()}
        try:
            optimizer.load(tensors, described["optimizer_attempts"])
        except ValueError as error:
            raise CheckpointError(f"{path / OPTIMIZER_FILE}: {error}") from None
    else:
        warnings.warn(
            f"{path} has no {OPTIMIZER_FILE}: the optimizer starts afresh, so the run will not continue "
            f"as if it had never stopped",
            stacklevel=4,
        )
        state.skipped = 0
    model.load_parameters(parameters)
    return state


def _read_description(path: Path) -> dict[str, Any]:
    file = path / TRAINER_FILE
    try:
        described = json.loads(file.read_bytes())
        if described["version"] != VERSION:
            raise CheckpointError(f"{file} has version {described['version']}, expected {VERSION}")
        described["state"] = TrainerState.from_dict(described["state"])
        for key in ("config", "data", "optimizer_attempts"):
            described[key]
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from None
    return described


def _run_config(path: Path, described: Mapping[str, Any]) -> TrainConfig:
    """The checkpoint's configuration; a field that is younger than the checkpoint has its default."""
    try:
        return TrainConfig.from_dict(described["config"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path / TRAINER_FILE}: the run's configuration is none of this version: {error}"
        ) from None


def _same(
    what: str, then: Mapping[str, Any], now: Mapping[str, Any], *, may_change: Collection[str] = ()
) -> None:
    differing = [key for key in now if key not in may_change and then[key] != now[key]]
    if differing:
        listed = ", ".join(f"{key}={then[key]!r} (now {now[key]!r})" for key in differing)
        raise ValueError(f"{what} was started with {listed}: resume with the same values")
