"""What a run reads: the windows to train on and those to validate on, checked before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mamba_fast.config import TrainConfig
from mamba_fast.data import IGNORED, TokenData, TokenizerNeededError, Windows, evenly, load_data
from mamba_fast.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary

__all__ = ["TrainingData", "training_data"]

# Ids are looked at before the first step in data of up to so many tokens (a third of a second); in more,
# which is most likely a mapped file, as they are read.
_CHECKED_AHEAD = 1 << 26
_CHECKED_AT_ONCE = 1 << 16


class TrainingData(NamedTuple):
    """What a run reads."""

    training: Windows
    validation: Windows | None
    """None where nothing is held out"""
    validated: list[int]
    """the windows of one validation"""
    tokenizer: Tokenizer | None


def training_data(
    source: Any,
    validation: Any,
    tokenizer: Tokenizer | None,
    config: TrainConfig,
    vocab_size: int,
    *,
    progress: bool,
) -> TrainingData:
    """Read and check the data of a run; the arguments are `train`'s.

    Raises
    ------
    ValueError
        what `load_data` raises; the data is shorter than one window, has an id outside the vocabulary,
        or has nothing to predict (every document is a single token)
    """
    tokens, tokenizer = _load(source, tokenizer, progress)
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocab_size)
    if validation is None:
        training, held_out = tokens.split(config.validation_fraction, config.seed)
    else:
        training, held_out = tokens, load_data(validation, tokenizer, progress=progress)
    _check_length(training, config, tokens)
    for data in (training, held_out):
        if data is not None:
            _check_ids(data, vocab_size)

    windows = Windows(training, config.seq_len, config.packed, vocab_size=vocab_size)
    if not _predicts(windows, range(len(windows))):
        raise ValueError(
            f"the training data has nothing to predict: none of its {training.n_documents:,} documents has "
            f"two tokens in a row (packed=False takes all of them as one)"
        )
    if held_out is None:
        return TrainingData(windows, None, [], tokenizer)
    held = Windows(held_out, config.seq_len, config.packed, vocab_size=vocab_size)
    chosen = evenly(len(held), config.eval_windows)
    if not _predicts(held, chosen):
        origin = (
            "the validation data has"
            if validation is not None
            else f"what validation_fraction={config.validation_fraction:g} holds out has"
        )
        raise ValueError(
            f"{origin} nothing to predict in the {len(chosen)} windows of a validation: none has two tokens "
            f"of one document in a row; give other validation data, or validation_fraction=0 for none"
        )
    return TrainingData(windows, held, chosen, tokenizer)


def _load(source: Any, tokenizer: Tokenizer | None, progress: bool) -> tuple[TokenData, Tokenizer | None]:
    """The data to train on, and its tokenizer: bytes where text comes without one."""
    try:
        return load_data(source, tokenizer, progress=progress), tokenizer
    except TokenizerNeededError:
        tokenizer = ByteTokenizer()
        return load_data(source, tokenizer, progress=progress), tokenizer


def _check_length(training: TokenData, config: TrainConfig, tokens: TokenData) -> None:
    pairs = max(0, len(training) - 1)
    if pairs < config.seq_len:
        held = len(tokens) - len(training)
        after = f" (after holding out {held} for validation)" if held else ""
        raise ValueError(
            f"the training data has {pairs} tokens to predict{after}, fewer than one window of "
            f"seq_len={config.seq_len}: give more data or a smaller seq_len (--seq-len)"
        )


def _check_ids(data: TokenData, vocab_size: int) -> None:
    """Read all ids once, unless there are very many: a window that is read is checked."""
    if 2 <= len(data) <= _CHECKED_AHEAD:
        pieces = Windows(data, min(len(data) - 1, _CHECKED_AT_ONCE), packed=False, vocab_size=vocab_size)
        for i in range(len(pieces)):
            pieces[i]


def _predicts(windows: Windows, indices: Iterable[int]) -> bool:
    """Whether any of the windows has something to predict: the first of them, as a rule."""
    return any(np.any(windows[i][1] != IGNORED) for i in indices)
