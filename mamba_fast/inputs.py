"""Checks of what people pass in as host arrays: token ids, targets, masks, lengths.

The model and the functional API validate here, at the edge; behind it everything trusts its input.
Each check returns a fresh or shared int32 array, and raises ValueError naming the argument, the
value that is wrong, where it is, and what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["IGNORED", "Batch", "check_lengths", "check_seq_start", "model_batch", "next_ids", "piece"]

IGNORED = -100
"""The target of a position that is not predicted."""


@dataclass(frozen=True)
class Batch:
    """One checked batch, int32 arrays throughout."""

    ids: np.ndarray
    """(B, L); 0 at masked positions"""
    seq_start: np.ndarray | None = None
    """(B, L), or None: no restart"""
    lengths: np.ndarray | None = None
    """(B), or None: every row has all L positions"""
    targets: np.ndarray | None = None
    """(B, L); -100 at masked positions"""
    last: np.ndarray | None = None
    """(B): index of each row's last real position in the B*L rows"""
    absent: tuple[int, ...] = ()
    """rows without any real position; their `lengths` say 1, because no op takes 0"""

    @property
    def predicted(self) -> int:
        """How many positions are predicted."""
        return 0 if self.targets is None else int(np.count_nonzero(self.targets != IGNORED))


def model_batch(
    ids: Any,
    vocab_size: int,
    *,
    targets: Any = None,
    seq_start: Any = None,
    lengths: Any = None,
    attention_mask: Any = None,
) -> Batch:
    """A whole batch for the model, checked; every row must have a real position.

    Ids and targets at masked positions are not looked at: nothing depends on them.
    """
    return _batch(ids, vocab_size, targets, seq_start, lengths, attention_mask, shortest=1)


def piece(ids: Any, vocab_size: int, *, lengths: Any = None, attention_mask: Any = None) -> Batch:
    """A piece of each sequence for `prefill`: as `model_batch`, but a row may sit a piece out."""
    return _batch(ids, vocab_size, None, None, lengths, attention_mask, shortest=0)


def next_ids(ids: Any, vocab_size: int, batch: int) -> np.ndarray:
    """One id for each of `batch` sequences, (B), checked."""
    ids = _integers("ids", ids)
    if ids.shape != (batch,):
        raise ValueError(
            f"ids has shape {ids.shape}, expected ({batch},): one id for each sequence of the state"
        )
    _in_vocabulary("ids", ids, vocab_size)
    return ids.astype(np.int32)


def check_seq_start(seq_start: Any, shape: tuple[int, int]) -> np.ndarray | None:
    """A restart mask (B, L), bool or integer; None where nothing restarts."""
    if seq_start is None:
        return None
    mask = _array("seq_start", seq_start)
    if mask.dtype.kind not in "biu":
        raise ValueError(f"seq_start must be bool or integer (not 0: restart), got dtype {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(f"seq_start has shape {mask.shape}, expected {shape} = (B, L)")
    return (mask != 0).astype(np.int32)


def check_lengths(lengths: Any, batch: int, length: int, *, shortest: int = 1) -> np.ndarray | None:
    """Real positions of each row, (B), each in [shortest, length]."""
    if lengths is None:
        return None
    values = _integers("lengths", lengths)
    if values.shape != (batch,):
        raise ValueError(f"lengths has shape {values.shape}, expected ({batch},) = (B,)")
    wrong = np.flatnonzero((values < shortest) | (values > length))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(f"lengths[{row}] is {values[row]}, expected a value in [{shortest}, {length}]")
    return values.astype(np.int32)


# ---- parts ------------------------------------------------------------------------------------


def _batch(
    ids: Any,
    vocab_size: int,
    targets: Any,
    seq_start: Any,
    lengths: Any,
    attention_mask: Any,
    *,
    shortest: int,
) -> Batch:
    ids = _integers("ids", ids)
    if ids.ndim != 2:
        raise ValueError(f"ids has shape {ids.shape}, expected (B, L); for a single sequence pass [ids]")
    batch, length = ids.shape
    restarts = check_seq_start(seq_start, (batch, length))
    if attention_mask is not None:
        if lengths is not None:
            raise ValueError("give attention_mask or lengths, not both: they say the same thing")
        starts, ends = _real_positions(attention_mask, (batch, length), shortest)
    else:
        starts = np.zeros(batch, np.int32)
        ends = check_lengths(lengths, batch, length, shortest=shortest)
        ends = np.full(batch, length, np.int32) if ends is None else ends

    position = np.arange(length)
    real = (position >= starts[:, None]) & (position < ends[:, None])
    ids = np.where(real, ids, 0)
    _in_vocabulary("ids", ids, vocab_size)
    if targets is not None:
        targets = _integers("targets", targets)
        if targets.shape != ids.shape:
            raise ValueError(f"targets has shape {targets.shape}, expected {ids.shape} = the shape of ids")
        targets = np.where(real, targets, IGNORED)
        _in_vocabulary("targets", targets, vocab_size, ignored=True)
        targets = targets.astype(np.int32)

    padded_left = np.flatnonzero(starts)
    if padded_left.size:
        restarts = np.zeros((batch, length), np.int32) if restarts is None else restarts
        restarts[padded_left, starts[padded_left]] = 1
    absent = np.flatnonzero(ends == 0)
    ends = np.maximum(ends, 1)
    return Batch(
        ids=ids.astype(np.int32),
        seq_start=restarts,
        lengths=None if (ends == length).all() else ends.astype(np.int32),
        targets=targets,
        last=(np.arange(batch) * length + ends - 1).astype(np.int32),
        absent=tuple(int(row) for row in absent),
    )


def _real_positions(
    attention_mask: Any, shape: tuple[int, int], shortest: int
) -> tuple[np.ndarray, np.ndarray]:
    """First real position of each row, and the one after its last; (0, 0) for a row without any."""
    mask = _array("attention_mask", attention_mask)
    if mask.shape != shape:
        raise ValueError(f"attention_mask has shape {mask.shape}, expected {shape} = the shape of ids")
    if mask.dtype.kind not in "biuf" or not ((mask == 0) | (mask == 1)).all():
        raise ValueError("attention_mask must hold 1 at real positions and 0 at padding, and nothing else")
    mask = mask != 0
    counts = mask.sum(axis=1)
    if shortest > 0 and not counts.all():
        row = int(np.flatnonzero(counts == 0)[0])
        raise ValueError(f"attention_mask row {row} is all 0: every row needs a real position")
    starts = np.where(counts > 0, mask.argmax(axis=1), 0)
    ends = np.where(counts > 0, shape[1] - mask[:, ::-1].argmax(axis=1), 0)
    broken = np.flatnonzero(ends - starts != counts)
    if broken.size:
        raise ValueError(
            f"attention_mask row {broken[0]} has a 0 between real positions: only padding at the left or the "
            f"right of a row is possible"
        )
    return starts, ends


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # numpy's message speaks of its own internals
        raise ValueError(f"{name} must be a rectangular array: its rows differ in length") from None
    if array.size == 0:
        raise ValueError(f"{name} is empty: shape {array.shape}")
    return array


def _integers(name: str, value: Any) -> np.ndarray:
    array = _array(name, value)
    if array.dtype.kind not in "iu":
        first = array.reshape(-1)[:1].tolist()[0]
        raise ValueError(f"{name} must be integers, got dtype {array.dtype} (the first value is {first!r})")
    return array


def _in_vocabulary(name: str, ids: np.ndarray, vocab_size: int, *, ignored: bool = False) -> None:
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignored:
        wrong &= ids != IGNORED
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        also = f", or {IGNORED} for a position that is not predicted" if ignored else ""
        raise ValueError(
            f"{name}[{', '.join(map(str, at))}] is {ids[at]}, expected an id in [0, {vocab_size}){also}"
        )
