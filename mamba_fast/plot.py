"""The picture of a training run: loss over steps. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamba_fast.checkpoint import writing_failed
from mamba_fast.metrics import read_log

__all__ = ["can_plot", "plot_losses"]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_losses(log: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    """Draw the training and validation losses of a log (`metrics.read_log`) into a PNG file.

    ModuleNotFoundError without matplotlib; FileNotFoundError without the log; ValueError if the log
    has no loss in it yet; OSError, which names the picture, where it cannot be written.
    """
    figure_module = _import_figure()
    records = read_log(log)
    training = _points(records, "train", "loss")
    validation = _points(records, "validation", "validation_loss")
    if not training and not validation:
        raise ValueError(f"{log} has no losses to draw yet")
    # A Figure made directly draws with Agg and touches none of pyplot's global state.
    figure = figure_module.Figure(figsize=(8.0, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), linewidth=1.0, label="training", color="tab:blue")
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o-", markersize=3.5, linewidth=1.0, label="validation", color="tab:orange")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = Path(picture).with_name(f".{Path(picture).name}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, picture)
    except OSError as error:
        raise writing_failed(picture, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _points(records: Sequence[dict[str, Any]], event: str, key: str) -> list[tuple[int, float]]:
    return [(r["step"], r[key]) for r in records if r["event"] == event and r.get(key) is not None]


def _import_figure() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "a loss curve needs matplotlib, which is not installed: pip install mamba-fast[plot]",
            name="matplotlib",
        ) from None
