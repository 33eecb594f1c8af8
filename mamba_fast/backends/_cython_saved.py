"""What the forward ops of the CPU backend keep for their backward ops: references to their inputs, and the
little that is not cheap to compute again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ConvSaved",
    "DecaySaved",
    "EmbeddingSaved",
    "LinearSaved",
    "NormSaved",
    "ScanSaved",
    "read_saved",
]


class DecaySaved(NamedTuple):
    a_log: np.ndarray
    a: np.ndarray


class EmbeddingSaved(NamedTuple):
    ids: np.ndarray


class LinearSaved(NamedTuple):
    x: np.ndarray


class NormSaved(NamedTuple):
    x: np.ndarray
    inv: np.ndarray


class ConvSaved(NamedTuple):
    x: np.ndarray
    bias: np.ndarray | None
    initial_state: np.ndarray | None
    seq_start: np.ndarray | None
    lengths: np.ndarray | None
    silu: bool


class ScanSaved(NamedTuple):
    u: np.ndarray
    delta: np.ndarray
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray | None
    z: np.ndarray | None
    delta_bias: np.ndarray | None
    seq_start: np.ndarray | None
    lengths: np.ndarray | None
    checkpoints: np.ndarray
    softplus: bool
    zoh: bool


def read_saved(op: str, saved: Any, kind: type[Any]) -> Any:
    if saved is None:
        raise ValueError(f"{op}: saved is None: run the forward op with grad=True")
    if not isinstance(saved, kind):
        raise TypeError(f"{op}: saved is a {type(saved).__name__}, expected what the forward op returned")
    return saved
