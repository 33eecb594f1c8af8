"""How well a model predicts a text: loss, perplexity, bits per byte, accuracy."""

from __future__ import annotations

import math
import numbers
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mamba_fast.config import shown
from mamba_fast.data import Windows, evenly, load_data
from mamba_fast.generate import check_model
from mamba_fast.inputs import IGNORED
from mamba_fast.tokenizer import as_tokenizer, bar_interval, check_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mamba_fast.model import MambaLM
    from mamba_fast.tokenizer import Tokenizer

__all__ = ["evaluate"]

# Logits of one forward pass held on the host, in numbers: 256 MB of float32.
_LOGITS = 1 << 26


def evaluate(
    model: MambaLM,
    data: Any,
    *,
    tokenizer: Tokenizer | str | None = None,
    seq_len: int = 256,
    batch_size: int = 8,
    windows: int = 0,
    packed: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure a model on data that it predicts token by token.

    The data is cut into windows of `seq_len` predicted tokens. Each window begins with an empty
    state, so the first tokens of a window are predicted from little: longer windows give a lower
    loss. Compare models at the same `seq_len` and tokenizer (bits per byte: at any tokenizer).

    Parameters
    ----------
    model : MambaLM
    data
        A `TokenData`, or anything that `mamba_fast.data.load_data` reads with `tokenizer`.
    tokenizer : Tokenizer, what `load_tokenizer` takes, or None
        Needed for text, and for bits per byte.
    seq_len, batch_size : int >= 1
        A `seq_len` beyond the data makes one window of all of it.
    windows : int >= 0
        How many windows, drawn evenly over the data; 0: all of them.
    packed : bool
        Whether the state restarts where a document begins inside a window.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    dict
        `loss` (mean over the predicted tokens, in nats), `perplexity` (its exponential, per token),
        `bits_per_byte` (all nats / ln 2 / UTF-8 bytes predicted; None without a tokenizer),
        `top1` and `top5` (share of tokens that were the most probable, or among the five most
        probable; of equals the lower id counts first), `tokens` (predicted), `bytes` (or None),
        `windows`, `seconds`, `tokens_per_second`.

    Raises
    ------
    TypeError
        `model` is no model, or `tokenizer` no tokenizer
    ValueError
        the data is unusable or has nothing to predict, an argument is out of range, or the
        tokenizer's vocabulary is larger than the model's
    FloatingPointError
        the model's logits are not finite
    """
    check_model(model)
    tokenizer = as_tokenizer(tokenizer)
    for name, value, low in (("seq_len", seq_len, 1), ("batch_size", batch_size, 1), ("windows", windows, 0)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
            raise ValueError(f"{name} must be an integer of at least {low}, got {shown(value)}")
    seq_len, batch_size, windows = int(seq_len), int(batch_size), int(windows)
    vocab = model.config.vocab_size
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocab)
    pieces = Windows(load_data(data, tokenizer), seq_len, packed, vocab_size=vocab)
    chosen = evenly(len(pieces), windows)
    rows = max(1, min(batch_size, _LOGITS // (pieces.seq_len * vocab)))

    started = time.perf_counter()
    nats, tokens, top1, top5, n_bytes = 0.0, 0, 0, 0, 0
    bar = _bar(len(chosen), progress)
    with bar:
        for first in range(0, len(chosen), rows):
            batch = chosen[first : first + rows]
            ids, targets, seq_start = pieces.batch(batch)
            keep = targets != IGNORED
            wanted = targets[keep]
            if wanted.size:
                logits = model.logits(ids, seq_start=seq_start)[keep]
                loss, ranks = _score(logits, wanted)
                nats += loss
                tokens += wanted.size
                top1 += int((ranks < 1).sum())
                top5 += int((ranks < 5).sum())
                if tokenizer is not None:
                    n_bytes += sum(tokenizer.count_bytes(row[row != IGNORED]) for row in targets)
                bar.set_postfix_str(f"loss {nats / tokens:.3f}", refresh=False)
            bar.update(len(batch))
    seconds = time.perf_counter() - started
    if tokens == 0:
        raise ValueError("the data has nothing to predict: every document has a single token")
    loss = nats / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nats / math.log(2) / n_bytes if n_bytes else None,
        "top1": top1 / tokens,
        "top5": top5 / tokens,
        "tokens": tokens,
        "bytes": n_bytes if tokenizer is not None else None,
        "windows": len(chosen),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


# What underflows to 0 is meant to, whatever the program around has set numpy to do.
@np.errstate(all="ignore")
def _score(logits: NDArray[Any], targets: NDArray[np.int32]) -> tuple[float, NDArray[np.int64]]:
    """Summed loss in nats of logits (T, V) for targets (T), and each target's rank, 0 the best."""
    total = 0.0
    ranks = np.empty(len(targets), np.int64)
    token_ids = np.arange(logits.shape[1])
    # A few rows at a time: the float64 copy of a row of a large vocabulary is large too.
    step = max(1, (1 << 20) // logits.shape[1])
    for start in range(0, len(targets), step):
        x = logits[start : start + step].astype(np.float64)
        target = targets[start : start + step, None]
        best = x.max(axis=1, keepdims=True)
        if not np.isfinite(best).all():
            raise FloatingPointError(
                "the model's logits are not finite: its weights have diverged or are damaged"
            )
        own = np.take_along_axis(x, target, axis=1)
        total += float((np.log(np.exp(x - best).sum(axis=1, keepdims=True)) - (own - best)).sum())
        ranks[start : start + step] = ((x > own) | ((x == own) & (token_ids < target))).sum(axis=1)
    return total, ranks


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="evaluate", unit="window", disable=not progress, mininterval=bar_interval())
