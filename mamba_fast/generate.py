"""Writing text with a model: prefill once, then one recurrent step per token.

The state of a Mamba model has a fixed size, so a token costs the same however long the text already
is. Nothing here looks at the prefix twice: the prompt goes through `model.prefill` once, every new
token through `model.step`.

Choosing a token is done on the host in float64, row by row. Row i of a batch draws from a random
stream of its own, so what it says does not depend on the rows beside it.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mamba_fast import inputs
from mamba_fast.config import shown
from mamba_fast.tokenizer import as_tokenizer, bar_interval

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from mamba_fast.model import MambaLM
    from mamba_fast.tokenizer import Tokenizer

__all__ = ["Sampler", "check_model", "generate", "pad_left", "stream"]

# A longer prompt goes through the model in pieces of this many tokens, so that the activations of a
# prefill do not grow with the prompt. The state carries everything from piece to piece.
PREFILL_PIECE = 4096

_HUGE = float(np.finfo(np.float64).max)
_LARGEST_ID = int(np.iinfo(np.int64).max)


def generate(
    model: MambaLM,
    ids: ArrayLike,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] | None = 0,
    stop: Any = None,
    attention_mask: ArrayLike | None = None,
    pad_id: int | None = None,
    vocab_limit: int | None = None,
    tokenizer: Tokenizer | str | None = None,
    progress: bool = False,
) -> NDArray[np.int64]:
    """Continue each row of a batch of prompts.

    Parameters
    ----------
    model : MambaLM
    ids : (B, L) integers, 0 <= id < V; a flat list of L ids is a batch of one
        The prompts. `pad_left` makes a batch of prompts of different lengths.
    max_new_tokens : int >= 0
        Most tokens to add to a row.
    temperature : float >= 0
        Logits are divided by it; 0 always takes the most probable token (the lowest id of equals).
    top_k : int >= 0 or None
        Draw from the k most probable tokens only; 0, None or anything from V up: from all.
    top_p : float in (0, 1]
        Draw from the smallest set of most probable tokens that together have at least this
        probability (Holtzman et al. 2020); applied after temperature and top_k.
    repetition_penalty : float > 0
        Makes tokens that are in the row already less likely (Keskar et al. 2019, CTRL, section 4.1):
        a positive logit is divided by it, a negative one multiplied, once however often the token
        occurred. 1 changes nothing; the usual value is 1.2.
    seed : int, B ints, or None
        The same seed gives the same text. Row i of a batch with one seed draws from stream i of that
        seed; with B seeds, from stream 0 of its own, as it would alone. None takes a new seed from
        the system.
    stop : None, an id, a string, or a list of ids, strings and lists of ids
        A row is finished when it has produced one of these: [0, [5, 6]] means "id 0, or 5 then 6".
        The stop itself is part of the row. The prompt is not searched. Strings need `tokenizer`.
    attention_mask : (B, L), 1 at real positions and 0 at padding, or None
        Padding may be at the left or at the right of a row, not inside it; ids there are not looked
        at and come back as they are. Continuations begin at column L in every row.
    pad_id : int or None
        Follows a row that is finished while others go on. None: the first single id in `stop`, else
        the tokenizer's, else 0.
    vocab_limit : int or None
        Ids from here up are never produced: for a model whose vocabulary was rounded up.
    tokenizer : Tokenizer, what `load_tokenizer` takes, or None
        Needed for strings in `stop` only.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    (B, L + new) int64
        Prompts (padding included) and continuations. new is at most `max_new_tokens`, less where
        every row was finished before.

    Raises
    ------
    TypeError, ValueError
        an argument is wrong: the message names it, its value and what is expected
    FloatingPointError
        the model's logits are not finite
    """
    steps: Any = stream(
        model, ids, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=stop, attention_mask=attention_mask,
        pad_id=pad_id, vocab_limit=vocab_limit, tokenizer=tokenizer,
    )  # fmt: skip
    if progress:
        from tqdm import tqdm

        steps = tqdm(steps, total=max_new_tokens, desc="generate", unit="tok", mininterval=bar_interval())
    prompt = _rectangle(ids).astype(np.int64)
    return np.concatenate([prompt, *(token[:, None] for token in steps)], axis=1)


def stream(
    model: MambaLM,
    ids: ArrayLike,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int | Sequence[int] | None = 0,
    stop: Any = None,
    attention_mask: ArrayLike | None = None,
    pad_id: int | None = None,
    vocab_limit: int | None = None,
    tokenizer: Tokenizer | str | None = None,
) -> Iterator[NDArray[np.int64]]:
    """The new tokens of `generate` one step at a time, as they are made.

    Takes what `generate` takes and checks it at once. Yields (B,) int64 arrays, at most
    `max_new_tokens` of them; finished rows yield `pad_id`. The model computes between two yields, so
    to stop early is to stop asking.
    """
    check_model(model)
    tokenizer = as_tokenizer(tokenizer)
    vocab = int(model.config.vocab_size)
    prompt, mask = _check_prompt(ids, attention_mask, vocab)
    count = _integer("max_new_tokens", max_new_tokens, low=0)
    limit = vocab if vocab_limit is None else _integer("vocab_limit", vocab_limit, low=1, high=vocab)
    sampler = Sampler(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
    )
    streams = _random_streams(seed, len(prompt))
    stops = _read_stop(stop, vocab, tokenizer)
    if pad_id is not None:
        pad = _integer("pad_id", pad_id, low=0, high=vocab - 1)
    else:
        single = [s[0] for s in stops.sequences if len(s) == 1]
        pad = single[0] if single else (tokenizer.pad_id if tokenizer is not None else 0)

    seen = None
    if sampler.repetition_penalty != 1.0:
        seen = np.zeros((len(prompt), vocab), bool)
        for row in range(len(prompt)):
            seen[row, prompt[row] if mask is None else prompt[row][mask[row]]] = True
    watches = [_Watch(stops, tokenizer) for _ in prompt]
    return _steps(model, prompt, mask, count, sampler, streams, watches, pad, limit, seen)


def _steps(
    model: MambaLM,
    prompt: NDArray[np.int64],
    mask: NDArray[np.bool_] | None,
    count: int,
    sampler: Sampler,
    streams: list[np.random.Generator],
    watches: list[_Watch],
    pad: int,
    limit: int,
    seen: NDArray[np.bool_] | None,
) -> Iterator[NDArray[np.int64]]:
    """The loop behind `stream`; its arguments have been checked."""
    if count == 0:
        return
    logits, state = _prefill(model, prompt, mask)
    for made in range(1, count + 1):
        rows = np.asarray(logits)[:, :limit]
        token = np.full(len(prompt), pad, np.int64)
        for row, watch in enumerate(watches):
            if watch.finished:
                continue
            chosen = sampler.choose(rows[row], streams[row], None if seen is None else seen[row, :limit])
            token[row] = chosen
            if seen is not None:
                seen[row, chosen] = True
            watch.push(chosen)
        # The caller gets a copy: changing it must not change what the model reads next.
        yield token.copy()
        if made == count or all(watch.finished for watch in watches):
            return
        logits, state = model.step(token, state)


def _prefill(model: MambaLM, prompt: NDArray[np.int64], mask: NDArray[np.bool_] | None) -> tuple[Any, Any]:
    """Logits (B, V) after the prompts, and the state there."""
    state = model.init_state(len(prompt))
    logits = None
    for start in range(0, prompt.shape[1], PREFILL_PIECE):
        piece = slice(start, start + PREFILL_PIECE)
        if mask is None:
            logits, state = model.prefill(prompt[:, piece], state)
            continue
        new, state = model.prefill(prompt[:, piece], state, attention_mask=mask[:, piece])
        # A row that is padding throughout this piece keeps its state, and has no logits here.
        present = mask[:, piece].any(axis=1)[:, None]
        logits = new if logits is None else np.where(present, new, logits)
    return logits, state


class Sampler:
    """Chooses a token from logits; the parameters are those of `generate`."""

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
    ) -> None:
        self.temperature = _number("temperature", temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or above, got {shown(temperature)}")
        self.top_k = 0 if top_k is None else _integer("top_k", top_k, low=0)
        self.top_p = _number("top_p", top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {shown(top_p)}")
        self.repetition_penalty = _number("repetition_penalty", repetition_penalty)
        if self.repetition_penalty <= 0:
            raise ValueError(
                f"repetition_penalty must be above 0 (1 is off), got {shown(repetition_penalty)}"
            )

    # Overflow and underflow are meant here, whatever the program around has set numpy to do.
    @np.errstate(all="ignore")
    def choose(
        self, logits: ArrayLike, random: np.random.Generator, seen: NDArray[np.bool_] | None = None
    ) -> int:
        """One token of one row.

        Parameters
        ----------
        logits : (V,) floats; -inf forbids a token
        random : Generator; one uniform number is taken from it, none when temperature is 0
        seen : (V,) bool or None
            The tokens that `repetition_penalty` is for.

        Cost: O(V), and O(V log V) with top_p below 1.
        """
        x = np.array(logits, np.float64)  # a copy: changed below
        best = x.max()  # NaN if any is
        if not math.isfinite(best):
            raise FloatingPointError(
                f"the model's largest logit is {best}: its weights have diverged or are damaged; "
                "go back to an earlier checkpoint or train with a smaller lr"
            )
        if seen is not None and self.repetition_penalty != 1.0:
            old = x[seen]
            new = np.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
            # An extreme penalty overflows: to the largest number there is, so that what was allowed
            # stays so, and what was not (-inf) as well.
            x[seen] = np.where(np.isfinite(old), np.clip(new, -_HUGE, _HUGE), old)
        if self.temperature == 0:
            return int(x.argmax())
        x -= x.max()  # before the division, which then overflows to -inf only
        x /= self.temperature  # a tiny temperature leaves the best alone
        if 0 < self.top_k < len(x):
            x[~_largest(x, self.top_k)] = -np.inf
        p = np.exp(x)
        if self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= self.top_p * p.sum()]] = 0.0
        # Candidates stay in the order of their ids, so a filter that removes nothing changes nothing.
        cumulated = np.cumsum(p)
        point = min(random.random() * cumulated[-1], np.nextafter(cumulated[-1], 0.0))
        return int(np.searchsorted(cumulated, point, side="right"))


def _largest(x: NDArray[np.float64], k: int) -> NDArray[np.bool_]:
    """Which are the k largest, exactly k of them: of equals, those with the lowest ids."""
    threshold = np.partition(x, len(x) - k)[len(x) - k]
    keep = x > threshold
    equal = np.flatnonzero(x == threshold)
    keep[equal[: k - int(keep.sum())]] = True
    return keep


def pad_left(prompts: Sequence[ArrayLike], pad_id: int = 0) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Prompts of different lengths as one batch: (ids (B, L), attention_mask (B, L)) for `generate`."""
    if not hasattr(prompts, "__iter__") or isinstance(prompts, str):
        raise TypeError(f"pad_left needs a list of prompts, each a list of ids, got {shown(prompts)}")
    rows = []
    for i, prompt in enumerate(prompts):
        try:
            rows.append(np.asarray(prompt))
        except (ValueError, OverflowError):  # numpy's messages speak of its own internals
            raise ValueError(f"prompt {i} must be a flat list of ids, got {shown(prompt)}") from None
    if not rows:
        raise ValueError("pad_left needs at least one prompt, got none")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0:
            raise ValueError(f"prompt {i} has shape {row.shape}, expected a list of at least one id")
        if row.dtype.kind not in "iu":
            raise ValueError(f"prompt {i} has dtype {row.dtype}, expected integers")
    length = max(map(len, rows))
    ids = np.full((len(rows), length), _integer("pad_id", pad_id, low=0, high=_LARGEST_ID), np.int64)
    mask = np.zeros(ids.shape, bool)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = row
        mask[i, length - len(row) :] = True
    return ids, mask


# ---- stops -----------------------------------------------------------------------------------------


class _Stops(NamedTuple):
    sequences: list[tuple[int, ...]]
    strings: list[str]


def _read_stop(stop: Any, vocab: int, tokenizer: Tokenizer | None) -> _Stops:
    sequences: list[tuple[int, ...]] = []
    strings: list[str] = []
    if stop is None:
        items: list[Any] = []
    elif isinstance(stop, str) or not hasattr(stop, "__iter__"):
        items = [stop]
    else:
        items = list(stop)
    for item in items:
        if isinstance(item, str):
            if not item:
                raise ValueError("stop holds an empty string, which is everywhere")
            if tokenizer is None:
                raise ValueError(f"stop holds the string {item!r}: pass tokenizer=, or the ids for it")
            strings.append(item)
            continue
        sequence = item if hasattr(item, "__iter__") else [item]
        sequence = tuple(_integer("an id in stop", i, low=0, high=vocab - 1) for i in sequence)
        if not sequence:
            raise ValueError("stop holds an empty list of ids, which is everywhere")
        sequences.append(sequence)
    return _Stops(sequences, strings)


class _Watch:
    """Watches one row's new tokens for a stop."""

    def __init__(self, stops: _Stops, tokenizer: Tokenizer | None) -> None:
        self.finished = False
        self._sequences = stops.sequences
        self._recent: deque[int] = deque(maxlen=max(map(len, stops.sequences), default=1))
        self._strings = stops.strings
        self._decoder = tokenizer.stream_decoder() if stops.strings and tokenizer is not None else None
        self._text = ""
        self._keep = max(map(len, stops.strings), default=1) - 1

    def push(self, token: int) -> None:
        self._recent.append(token)
        recent = tuple(self._recent)
        if any(recent[-len(s) :] == s for s in self._sequences):
            self.finished = True
        if self._decoder is not None:
            self._text += self._decoder.push(token)
            if any(s in self._text for s in self._strings):
                self.finished = True
            # The end of the text may be the beginning of a stop; what lies further back cannot.
            self._text = self._text[max(0, len(self._text) - self._keep) :]


# ---- checks of arguments ---------------------------------------------------------------------------


def _integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    try:
        number = operator.index(value)
        if isinstance(value, bool | np.bool_):
            raise TypeError
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}") from None
    if number < low or (high is not None and number > high):
        wanted = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {wanted}, got {shown(number)}")
    return number


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {shown(value)}") from None
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    return number


def check_model(model: Any) -> None:
    """TypeError for what is no model, a folder's name above all."""
    if not hasattr(model, "config") or not hasattr(model.config, "vocab_size"):
        raise TypeError(f"model must be a MambaLM (load_model reads one from a folder), got {shown(model)}")


def _rectangle(ids: ArrayLike) -> NDArray[Any]:
    if isinstance(ids, np.ma.MaskedArray):
        raise ValueError("ids is masked, and its mask would be lost: say what is padding with attention_mask")
    try:
        array = np.asarray(ids)
    except OverflowError:
        raise ValueError("ids holds an integer that is too large for any vocabulary") from None
    except ValueError:
        raise ValueError("ids has rows of different lengths: make a batch of them with pad_left") from None
    return array[None, :] if array.ndim == 1 else array


def _check_prompt(
    ids: ArrayLike, attention_mask: ArrayLike | None, vocab: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Prompts (B, L), a copy, and which of their positions are real, None where all are."""
    array = _rectangle(ids)
    if array.size == 0:
        raise ValueError(
            f"ids has shape {array.shape}: a prompt needs at least one id (the end-of-text id begins a text)"
        )
    mask = None
    if attention_mask is not None:
        mask = np.asarray(attention_mask)
        mask = mask[None, :] if mask.ndim == 1 and len(array) == 1 else mask
    inputs.model_batch(array, vocab, attention_mask=mask)  # raises what is wrong with them
    mask = None if mask is None or (mask != 0).all() else mask != 0
    return array.astype(np.int64), mask


def _random_streams(seed: int | Sequence[int] | None, rows: int) -> list[np.random.Generator]:
    """One independent generator for each row."""
    if seed is None:
        children = np.random.SeedSequence().spawn(rows)
    elif hasattr(seed, "__iter__") and not isinstance(seed, str):
        seeds = [_integer("an element of seed", s, low=0) for s in seed]  # type: ignore[union-attr]
        if len(seeds) != rows:
            raise ValueError(f"seed has {len(seeds)} elements for {rows} rows: give {rows}, or a single one")
        children = [np.random.SeedSequence(s, spawn_key=(0,)) for s in seeds]
    else:
        number = _integer("seed", seed, low=0)
        children = [np.random.SeedSequence(number, spawn_key=(row,)) for row in range(rows)]
    return [np.random.Generator(np.random.PCG64(child)) for child in children]
