"""Token data: where it comes from, how it is split, and the windows that training reads.

Everything a model is trained on becomes a `TokenData`: documents, end to end, as one long stream of
token ids. Text is tokenized into memory; token files stay on disk and are mapped, so that they may
be larger than memory. `Windows` cuts the stream into pieces of `seq_len` predicted tokens such that
every (token, next token) pair of a document comes up exactly once.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from mamba_fast.checkpoint import given_path
from mamba_fast.config import shown
from mamba_fast.inputs import IGNORED
from mamba_fast.sources import DataFile, find_files, json_lines, map_bin, map_npy, read_text
from mamba_fast.tokenizer import as_tokenizer, bar_interval

__all__ = ["IGNORED", "TokenData", "TokenizerNeededError", "Windows", "evenly", "load_data", "shuffled"]

# Documents handed to the tokenizer at once: enough to keep its threads busy, few enough to hold.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 1 << 22

# A fingerprint reads everything up to this many tokens; beyond, as many blocks as a slow disk fetches
# in a second.
_FINGERPRINT_TOKENS = 1 << 24
_FINGERPRINT_BLOCK = 1 << 14
_FINGERPRINT_SAMPLES = 64


class TokenizerNeededError(ValueError):
    """The data is text, and no tokenizer was given."""


class Encoder(Protocol):
    """What is needed of a tokenizer here."""

    vocab_size: int
    eos_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Any]: ...


# ---- the stream ---------------------------------------------------------------------------------


class _Store(NamedTuple):
    """Token ids as they lie in memory or in a mapped file."""

    ids: np.ndarray
    origin: str


class TokenData:
    """Documents of token ids, end to end.

    Use `load_data` to make one.

    Parameters
    ----------
    stores
        1-D integer arrays, in memory or mapped, and what to call them in errors
    documents : (n, 3) int64
        for each document: store, start, stop
    eos_id
        an id that ends a document wherever it occurs in the stream, or None

    `len()` is the number of tokens.
    """

    def __init__(
        self, stores: Sequence[tuple[np.ndarray, str]], documents: np.ndarray, *, eos_id: int | None = None
    ) -> None:
        self._stores = [_Store(*store) for store in stores]
        self._documents = np.asarray(documents, np.int64).reshape(-1, 3)
        self.eos_id = eos_id
        self._fingerprint: str | None = None
        lengths = self._documents[:, 2] - self._documents[:, 1]
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        # Neighbours in the stream that are neighbours in their store are read in one piece.
        first = np.ones(len(lengths), bool)
        before, after = self._documents[:-1], self._documents[1:]
        first[1:] = (after[:, 0] != before[:, 0]) | (after[:, 1] != before[:, 2])
        self._pieces = np.flatnonzero(first)
        self._piece_starts: list[int] = self._starts[self._pieces].tolist()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def n_documents(self) -> int:
        """Documents as they were given; a token file is one, whatever end-of-text ids it holds."""
        return len(self._documents)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream as int64, whatever type they are stored in.

        ValueError, which says where, for an id that is none in any vocabulary: from 2^63 up.
        """
        out = np.empty(stop - start, np.int64)
        position = start
        piece = bisect.bisect_right(self._piece_starts, start) - 1
        while position < stop:
            last = piece + 1 == len(self._pieces)
            end = min(stop, len(self) if last else self._piece_starts[piece + 1])
            store, offset, _ = self._documents[self._pieces[piece]]
            offset += position - self._piece_starts[piece]
            ids = self._stores[store].ids[offset : offset + end - position]
            if ids.dtype == np.uint64 and (large := ids > np.iinfo(np.int64).max).any():
                first = int(np.argmax(large))
                raise ValueError(f"{self.where(position + first)}: id {ids[first]} is out of range")
            out[position - start : end - start] = ids
            position, piece = end, piece + 1
        return out

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Which of the positions [start, stop) are a document's first (stop - start,) bool."""
        mask = np.zeros(stop - start, bool)
        low, high = np.searchsorted(self._starts, (start, stop))
        mask[self._starts[low:high] - start] = True
        return mask

    def where(self, position: int) -> str:
        """A position in the stream as people know it: the file, and the token's number in it."""
        document = int(np.searchsorted(self._ends, position, side="right"))
        store, start, _ = self._documents[document]
        return f"{self._stores[store].origin}, token {int(start + position - self._starts[document])}"

    def split(self, fraction: float, seed: int) -> tuple[TokenData, TokenData | None]:
        """(training, validation): whole documents held out, about `fraction` of the tokens.

        Documents are drawn in an order that depends on the seed and their number only, those that
        would take more than the fraction being passed over. Where no document is small enough, or
        there is but one, the end of the stream is held out instead. None for a fraction of 0, or if
        the data is too short to hold out a single pair.
        """
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"fraction must be in [0, 1), got {fraction}")
        total = len(self)
        wanted = round(total * fraction)
        if fraction == 0.0 or total < 4:
            return self, None
        held = np.zeros(self.n_documents, bool)
        count = 0
        lengths = self._ends - self._starts
        for document in shuffled(self.n_documents, seed):
            if count + lengths[document] <= wanted:
                held[document] = True
                count += int(lengths[document])
            elif 2 * count > wanted:
                break  # going on would only pick the shortest ones
        if count >= 2:
            return self._with(self._documents[~held]), self._with(self._documents[held])
        cut = total - max(2, wanted)
        document = int(np.searchsorted(self._ends, cut, side="right"))
        head, tail = self._documents[: document + 1].copy(), self._documents[document:].copy()
        head[-1, 2] = tail[0, 1] = tail[0, 1] + cut - self._starts[document]
        return self._with(head[head[:, 1] < head[:, 2]]), self._with(tail)

    def _with(self, documents: np.ndarray) -> TokenData:
        return TokenData(self._stores, documents, eos_id=self.eos_id)

    def fingerprint(self) -> str:
        """A hash of the tokens and the documents' lengths: equal for equal data wherever it lies.

        Data beyond 16 million tokens is sampled, in blocks spread evenly over it. Computed once.
        """
        if self._fingerprint is None:
            self._fingerprint = self._hash()
        return self._fingerprint

    def _hash(self) -> str:
        digest = hashlib.sha256()
        digest.update(repr((len(self), self.n_documents, self.eos_id)).encode())
        digest.update(self._ends.astype("<i8").tobytes())
        step = _FINGERPRINT_BLOCK
        blocks = -(-len(self) // step)
        for block in evenly(blocks, 0 if len(self) <= _FINGERPRINT_TOKENS else _FINGERPRINT_SAMPLES):
            digest.update(self.read(block * step, min(len(self), (block + 1) * step)).astype("<i8").tobytes())
        return digest.hexdigest()


class Windows(Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]):
    """A `TokenData` as windows of `seq_len` positions, each used once an epoch.

    Data that is shorter than `seq_len` makes one window of its own length, whose `seq_len` that is.

    Window i holds the positions i*seq_len to (i+1)*seq_len - 1 as inputs and their successors as
    targets. A target that is another document's first token is `IGNORED`, and so is the padding of
    the last window (id 0).

    Parameters
    ----------
    packed
        documents are kept apart: the state restarts at each one's first token. False takes the
        whole stream as one document.
    vocab_size
        ids are checked to be below, as they are read; None: to be no less than 0

    `windows[i]` is ids (seq_len,) int32, targets (seq_len,) int32, seq_start (seq_len,) bool.
    """

    def __init__(
        self, data: TokenData, seq_len: int, packed: bool = True, *, vocab_size: int | None = None
    ) -> None:
        if len(data) < 2:
            raise ValueError(f"{len(data)} tokens hold nothing to predict; at least 2 are needed")
        self.data = data
        # Longer windows would hold padding only, and a model would compute all of it.
        self.seq_len = min(seq_len, len(data) - 1)
        self.packed = packed
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return -(-(len(self.data) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = index % len(self) * self.seq_len
        end = min(begin + self.seq_len + 1, len(self.data))
        tokens = self.data.read(begin, end)
        self._check(tokens, begin)
        size = end - begin - 1
        ids = np.zeros(self.seq_len, np.int32)
        targets = np.full(self.seq_len, IGNORED, np.int32)
        seq_start = np.zeros(self.seq_len, bool)
        ids[:size] = tokens[:-1]
        targets[:size] = tokens[1:]
        if self.packed:
            first = self.data.starts(begin, end)
            if self.data.eos_id is not None:
                first[1:] |= tokens[:-1] == self.data.eos_id
            targets[:size][first[1:]] = IGNORED
            seq_start[:size] = first[:-1]
        return ids, targets, seq_start

    def batch(self, indices: Iterable[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Several windows as ids (B, L), targets (B, L) and seq_start (B, L).

        seq_start is None where no state restarts inside a window: a window begins without one.
        """
        ids, targets, seq_start = (np.stack(part) for part in zip(*(self[i] for i in indices), strict=True))
        return ids, targets, seq_start if seq_start[:, 1:].any() else None

    def _check(self, tokens: np.ndarray, begin: int) -> None:
        bad = tokens < 0
        if self.vocab_size is not None:
            bad |= tokens >= self.vocab_size
        if bad.any():
            first = int(np.argmax(bad))
            limit = "0 or more" if self.vocab_size is None else f"0 to {self.vocab_size - 1}"
            raise ValueError(
                f"{self.data.where(begin + first)}: id {tokens[first]} is out of range, expected {limit}"
            )


def shuffled(count: int, *seed: int) -> np.ndarray:
    """The numbers 0 to count-1 in an order that depends on the seeds alone.

    Sorts the raw output of PCG64: numpy promises those bits for every version and platform, unlike
    the results of its `permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(keys, kind="stable")


def evenly(count: int, wanted: int) -> list[int]:
    """At most `wanted` (0: all) of the numbers 0 to count-1, spread evenly, increasing."""
    if wanted == 0 or wanted >= count:
        return list(range(count))
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


# ---- sources --------------------------------------------------------------------------------------


def load_data(
    source: Any,
    tokenizer: Encoder | None = None,
    *,
    glob: str = "**/*",
    text_field: str = "text",
    token_dtype: str | None = None,
    skip_undecodable: bool = False,
    progress: bool = False,
) -> TokenData:
    """Training or evaluation data from any of the supported sources.

    Parameters
    ----------
    source
        * a path: a UTF-8 text file (one document); a `.jsonl` file (one document a line); a token
          file, `.bin` (raw little-endian uint16 or uint32) or `.npy` (1-D, integers), which is
          mapped and never read whole; a folder, of which every file that matches `glob` is taken in
          the order of their names, empty ones and those with a name or folder that begins with a
          dot left out. A folder that may not be read is an error, as its files would be missed;
        * a list of paths; a 1-D integer array or list of ids: one stream; a list of those: one
          document each;
        * a `TokenData`, returned as it is.
    tokenizer
        needed for text: a tokenizer, or what `load_tokenizer` takes. Its `eos_id`, if it has one, is
        appended to every document of text, and ends a document wherever it occurs in a token file or
        an array.
    token_dtype
        "uint16" or "uint32" for `.bin` files; None: uint16, or uint32 where the tokenizer has more
        than 65,536 ids
    skip_undecodable
        leave out text files that are not UTF-8 instead of refusing them
    progress
        show a bar while text is read

    Raises
    ------
    FileNotFoundError
        a path does not exist or nothing matches the glob
    TokenizerNeededError
        there is text and no tokenizer
    PermissionError
        a file or folder may not be read
    ValueError
        a file is empty, not UTF-8 (with the byte's offset), binary, not what its name says, or larger
        than memory; a line of a `.jsonl` file is wrong (with its number); a path is empty, or no file
        and no folder; ids are not integers, or masked
    """
    if isinstance(source, TokenData):
        return source
    tokenizer = as_tokenizer(tokenizer)
    eos_id = None if tokenizer is None else tokenizer.eos_id
    if isinstance(source, np.ndarray):
        return _from_arrays([source], eos_id)
    if isinstance(source, str | os.PathLike):
        paths = [given_path(source, "the data's path")]
    elif isinstance(source, Sequence) and len(source) > 0:
        if all(isinstance(item, str | os.PathLike) for item in source):
            paths = [given_path(item, "a path of the data") for item in source]
        elif all(isinstance(item, np.ndarray | list | tuple) for item in source):
            return _from_arrays(source, eos_id)
        else:
            return _from_arrays([source], eos_id)
    else:
        raise ValueError(
            f"data must be a path, a list of paths, an array of ids or a TokenData, got {shown(source)}"
        )
    reader = _Reader(tokenizer, text_field, token_dtype, skip_undecodable)
    files = [file for path in paths for file in find_files(path, glob)]
    with tqdm(
        total=sum(file.size for file in files),
        desc="read text",
        unit="B",
        unit_scale=True,
        mininterval=bar_interval(),
        disable=not progress,
    ) as bar:
        for file in files:
            reader.add(file)
            bar.update(file.size)
    return reader.finish(", ".join(map(str, paths)))


def _from_arrays(arrays: Sequence[Any], eos_id: int | None) -> TokenData:
    stores = []
    for i, given in enumerate(arrays):
        name = "the array of ids" if len(arrays) == 1 else f"array {i} of ids"
        if isinstance(given, np.ma.MaskedArray):
            raise ValueError(f"{name} is masked, and a mask would be lost: pass array.compressed()")
        try:
            array = np.asarray(given)
        except (ValueError, OverflowError):  # numpy's messages speak of its own internals
            raise ValueError(f"{name} must be a flat list of integers, got {shown(given)}") from None
        if array.ndim != 1 or array.size == 0:
            raise ValueError(f"{name} has shape {array.shape}, expected (n,) with n at least 1")
        if array.dtype.kind not in "iu":
            raise ValueError(f"{name} has type {array.dtype}, expected integers")
        stores.append((array, name))
    return TokenData(stores, np.array([(i, 0, len(ids)) for i, (ids, _) in enumerate(stores)]), eos_id=eos_id)


class _Reader:
    """Collects files into one `TokenData`: text into memory, token files mapped."""

    def __init__(
        self, tokenizer: Encoder | None, text_field: str, token_dtype: str | None, skip_undecodable: bool
    ) -> None:
        if token_dtype not in (None, "uint16", "uint32"):
            raise ValueError(f"token_dtype must be 'uint16' or 'uint32', got {shown(token_dtype)}")
        self._tokenizer = tokenizer
        self._text_field = text_field
        self._token_dtype = token_dtype
        self._skip_undecodable = skip_undecodable
        self._stores: list[tuple[np.ndarray, str]] = []
        self._documents: list[np.ndarray] = []

    def add(self, file: DataFile) -> None:
        if file.size == 0:
            if file.listed:
                raise ValueError(f"{file.path} is empty")
            return
        kind = file.path.suffix.lower()
        if kind in (".npy", ".bin"):
            vocab_size = 0 if self._tokenizer is None else self._tokenizer.vocab_size
            ids = map_npy(file.path) if kind == ".npy" else map_bin(file.path, self._token_dtype, vocab_size)
            self._append(ids, str(file.path), np.array([len(ids)]))
            return
        try:
            if kind == ".jsonl":
                self._tokenize(str(file.path), json_lines(file.path, self._text_field))
            else:
                self._add_text(file.path)
        except MemoryError:
            raise ValueError(
                f"{file.path} ({file.size:,} bytes) does not fit into memory: split it, or tokenize it "
                "into a .bin or .npy file, which is mapped"
            ) from None

    def _add_text(self, path: Path) -> None:
        try:
            text = read_text(path)
        except UnicodeError as error:
            if not self._skip_undecodable:
                raise ValueError(str(error)) from None
        else:
            self._tokenize(str(path), iter([text]))

    def finish(self, origin: str) -> TokenData:
        if not self._documents:
            raise ValueError(f"{origin}: there is no text in it")
        eos_id = None if self._tokenizer is None else self._tokenizer.eos_id
        return TokenData(self._stores, np.concatenate(self._documents), eos_id=eos_id)

    def _append(self, ids: np.ndarray, origin: str, lengths: np.ndarray) -> None:
        stops = np.cumsum(lengths)
        store = np.full(len(stops), len(self._stores))
        self._stores.append((ids, origin))
        self._documents.append(np.stack([store, stops - lengths, stops], axis=1))

    def _tokenize(self, origin: str, texts: Iterator[str]) -> None:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise TokenizerNeededError(f"{origin} is text: give a tokenizer, for example ByteTokenizer()")
        dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        ending = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype)
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        for batch in _batches(texts):
            for ids in tokenizer.encode_batch(batch):
                parts += [np.asarray(ids, dtype), ending]
                lengths.append(len(ids) + len(ending))
        if lengths:
            self._append(np.concatenate(parts), origin, np.array(lengths))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
