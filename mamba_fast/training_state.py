"""Checkpoints of a training run: everything that it needs to go on as if it had never stopped.

A run's folder holds the finished model and

    checkpoints/step-00000100/
        model.safetensors config.json    the model, loadable by itself
        optimizer.safetensors            Adam's moments m.{name}, v.{name} and its counters
        trainer.json                     TrainerState, the TrainConfig, what the data was
        (the tokenizer's files)

A checkpoint folder is written under another name and renamed, so it is complete or absent. What
stands at its place and is none (a copy that was cut short) is set aside, not removed. There is no
random state to keep but the seed: the order of an epoch's windows is a function of the seed and
the epoch, and the position in it one of the step.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mamba_fast.checkpoint import (
    WEIGHTS_FILE,
    CheckpointError,
    atomic_folder,
    given_path,
    read_model,
    read_tensors,
    write_bytes,
    write_model,
    write_tensors,
)
from mamba_fast.config import TrainConfig, parse_json, shown
from mamba_fast.data import TokenData
from mamba_fast.model import MambaLM
from mamba_fast.optim import AdamW
from mamba_fast.tokenizer import Tokenizer

__all__ = [
    "NotFiniteError",
    "TrainerState",
    "check_fresh",
    "find_checkpoint",
    "load_checkpoint",
    "newest_checkpoint",
    "run_config",
    "run_folder",
    "save_checkpoint",
]

FOLDER = "checkpoints"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer.json"
VERSION = 1

# What a 64-bit integer holds: no count is larger.
_LARGEST = 2**63 - 1

# What may differ between a run and its continuation: how long it is, and what does not touch the weights.
_MAY_CHANGE = {
    "steps", "epochs", "eval_every", "eval_windows", "log_every", "checkpoint_every", "keep_checkpoints",
    "activation_checkpointing",
}  # fmt: skip

_log = logging.getLogger("mamba_fast")


class NotFiniteError(ValueError):
    """The weights are not finite: they are not worth a checkpoint."""


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
        """What `to_dict` gave; ValueError names the entry that is missing, surplus or impossible."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ValueError(f"state has the unknown key {shown(key)}")
        step = _count(values, "step", where="state")
        tokens = _count(values, "tokens", where="state")
        validated = _entry(values, "validated", where="state")
        if validated is not None:
            if not isinstance(validated, list) or len(validated) != 2:
                raise ValueError(f"state.validated is {shown(validated)}, expected [step, loss] or null")
            at, loss = validated
            if not _is_count(at, step) or not (loss is None or _is_finite(loss)):
                raise ValueError(
                    f"state.validated is {shown(validated)}, expected [step up to {step}, loss or null]"
                )
            validated = at, math.nan if loss is None else float(loss)
        interval_loss = _entry(values, "interval_loss", where="state")
        if not _is_finite(interval_loss):
            raise ValueError(f"state.interval_loss is {shown(interval_loss)}, expected a finite number")
        return cls(
            step=step,
            tokens=tokens,
            skipped=_count(values, "skipped", step, where="state"),
            skipped_in_a_row=_count(values, "skipped_in_a_row", step, where="state"),
            seen=_count(values, "seen", step, where="state"),
            validated=validated,
            interval_loss=float(interval_loss),
            interval_tokens=_count(values, "interval_tokens", tokens, where="state"),
        )


def _entry(values: Mapping[str, Any], key: str, *, where: str = "") -> Any:
    if key not in values:
        raise ValueError(f"it has no {where}{'.' if where else ''}{key}")
    return values[key]


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _count(values: Mapping[str, Any], key: str, most: int | None = None, *, where: str = "") -> int:
    """An entry that counts something, at most `most`."""
    value = _entry(values, key, where=where)
    if not _is_count(value, _LARGEST if most is None else most):
        expected = "of at least 0" if most is None else f"from 0 to {most}"
        raise ValueError(
            f"{where}{'.' if where else ''}{key} is {shown(value)}, expected an integer {expected}"
        )
    return value


def _object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = _entry(values, key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} is {shown(value)}, expected an object")
    return value


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

    Raises
    ------
    OSError
        the disk is full, or the folder cannot be written to; the checkpoints before are untouched
    NotFiniteError
        a weight is not finite; nothing was written
    """
    path = out / FOLDER / f"step-{state.step:08d}"
    if not _is_complete(path):
        parameters = model.parameters()
        _refuse_non_finite(parameters)
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
        before = newest_checkpoint(out)
        try:
            _set_aside(path)
            with atomic_folder(path) as folder:
                write_model(folder, model.config, parameters)
                moments = {name: to_host(tensor) for name, tensor in optimizer.state().items()}
                write_tensors(folder / OPTIMIZER_FILE, moments, {})
                if tokenizer is not None:
                    tokenizer.save(folder)
                write_bytes(folder / TRAINER_FILE, json.dumps(described, indent=2, allow_nan=False).encode())
        except OSError as error:
            left = "there is none before it" if before is None else f"the one before it, {before}, is intact"
            raise _explained(
                error, f"the checkpoint of step {state.step} could not be written; {left}"
            ) from error
    if config.keep_checkpoints:
        older = [p for step, p in _checkpoints(out) if step <= state.step]
        for superseded in older[: -config.keep_checkpoints]:
            shutil.rmtree(superseded)
    return path


def _describe(data: TokenData) -> dict[str, Any]:
    return {"tokens": len(data), "documents": data.n_documents, "fingerprint": data.fingerprint()}


def _refuse_non_finite(parameters: Mapping[str, np.ndarray]) -> None:
    for name, array in parameters.items():
        if not np.isfinite(array).all():
            raise NotFiniteError(f"weights are not finite, among them those of {name}")


def _explained(error: OSError, consequence: str) -> OSError:
    """The same kind of error with its file and what follows from it in the message."""
    name = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    cause = f"{name}{error.strerror}" if error.strerror else str(error)
    explained = type(error)(f"{cause}: {consequence}")
    explained.errno = error.errno
    return explained


def _is_complete(path: Path) -> bool:
    return (path / TRAINER_FILE).is_file() and (path / WEIGHTS_FILE).is_file()


def _set_aside(path: Path) -> None:
    """Give what stands at a checkpoint's place, and is none, another name."""
    if not os.path.lexists(path):
        return
    number = 0
    while os.path.lexists(aside := path.with_name(f"{path.name}.incomplete{number or ''}")):
        number += 1
    os.replace(path, aside)
    _log.warning("%s was no complete checkpoint: it is now %s", path, aside.name)


def newest_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint of a run's folder, None without one."""
    found = _checkpoints(out)
    return found[-1][1] if found else None


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
        if not isinstance(resume, str | os.PathLike):
            raise TypeError(f"resume must be True, False, None or a path, got {shown(resume)}")
        folder = given_path(resume, "resume")
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
    then = _parsed_config(path, described)
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
        _check_moments(path / OPTIMIZER_FILE, arrays)
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


def run_config(path: Path) -> TrainConfig:
    """The configuration that a checkpoint's run was started with. CheckpointError if it is damaged."""
    return _parsed_config(path, _read_description(path))


def _read_description(path: Path) -> dict[str, Any]:
    """What trainer.json says, every entry checked; its state as a `TrainerState`."""
    file = path / TRAINER_FILE
    try:
        described = parse_json(file.read_bytes(), unique=True)
        if not isinstance(described, dict):
            raise ValueError(f"it is {shown(described)}, expected an object")
        if _entry(described, "version") != VERSION:
            raise CheckpointError(f"{file} has version {shown(described['version'])}, expected {VERSION}")
        state = TrainerState.from_dict(_object(described, "state"))
        _count(described, "optimizer_attempts", state.step)
        _object(described, "config")
        data = _object(described, "data")
        for key in ("tokens", "documents"):
            _count(data, key, where="data")
        if not isinstance(_entry(data, "fingerprint", where="data"), str):
            raise ValueError(f"data.fingerprint is {shown(data['fingerprint'])}, expected a string")
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"{file} is damaged: {error}; delete this checkpoint to go on from the one before"
        ) from None
    return {**described, "state": state}


def _parsed_config(path: Path, described: Mapping[str, Any]) -> TrainConfig:
    """The checkpoint's configuration; a field that is younger than the checkpoint has its default."""
    try:
        return TrainConfig.from_dict(described["config"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path / TRAINER_FILE}: the run's configuration is none of this version: {error}"
        ) from None


def _check_moments(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Adam's moments are finite, and those of the squares not negative: CheckpointError names the tensor."""
    for name, array in arrays.items():
        kind = name.partition(".")[0]
        if name == "stats":  # the norm of a step that was skipped is not finite
            wrong = ~(array.reshape(-1)[:1] >= 0) | ~np.isfinite(array.reshape(-1)[:1])
            expected = "a number of at least 0"
        elif kind == "v":
            wrong, expected = ~(np.isfinite(array) & (array >= 0)), "a finite number of at least 0"
        else:
            wrong, expected = ~np.isfinite(array), "a finite number"
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise CheckpointError(
                f"{file}: {name}{list(at)} is {array[at]}, expected {expected}: it is damaged or its "
                f"training diverged; resume from an earlier checkpoint, or start anew from this one's model"
            )


def _same(
    what: str, then: Mapping[str, Any], now: Mapping[str, Any], *, may_change: Collection[str] = ()
) -> None:
    differing = [key for key in now if key not in may_change and then[key] != now[key]]
    if differing:
        listed = ", ".join(f"{key}={then[key]!r} (now {now[key]!r})" for key in differing)
        raise ValueError(f"{what} was started with {listed}: resume with the same values")
