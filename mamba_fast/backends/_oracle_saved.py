"""What the forward ops of the oracle keep for their backward ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mamba_fast.backends._oracle_scan import ConvInputs, ScanInputs

__all__ = ["ConvSaved", "DecaySaved", "EmbeddingSaved", "LinearSaved", "NormSaved", "ScanSaved", "read_saved"]


class DecaySaved(NamedTuple):
    a_log: np.ndarray
    a: np.ndarray


class EmbeddingSaved(NamedTuple):
    ids: np.ndarray


class LinearSaved(NamedTuple):
    x: np.ndarray


class NormSaved(NamedTuple):
    x: np.ndarray
    inverse_rms: list[float]


class ConvSaved(NamedTuple):
    shape: tuple[int, ...]
    inputs: ConvInputs
    before: Any


class ScanSaved(NamedTuple):
    shape: tuple[int, ...]
    inputs: ScanInputs


def read_saved(op: str, saved: Any, kind: type[Any]) -> Any:
    """What the forward op saved, or an error that says what went wrong."""
    if saved is None:
        raise ValueError(f"{op}: saved is None: run the forward op with grad=True")
    if not isinstance(saved, kind):
        raise TypeError(f"{op}: saved is a {type(saved).__name__}, expected what the forward op returned")
    return saved
