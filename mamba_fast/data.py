"""Token data: where it comes from, how it is split, and the windows that training reads.

Everything a model is trained on becomes a `TokenData`: documents, end to end, as one long stream of
token ids. Text is tokenized into memory; token files stay on disk and are mapped, so that they may
be larger than memory. `Windows` cuts the stream into pieces of `seq_len` predicted tokens such that
every (token, next token) pair of a document comes up exactly once.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

__all__ = ["IGNORED", "TokenData", "TokenizerNeededError", "Windows", "evenly", "load_data", "shuffled"]

IGNORED = -100
"""The target that means: nothing is to be predicted here."""

TOKEN_SUFFIXES = (".bin", ".npy")
_TOKEN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

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
        """Tokens [start, stop) of the stream as int64, whatever type they are stored in."""
        out = np.empty(stop - start, np.int64)
        position = start
        piece = bisect.bisect_right(self._piece_starts, start) - 1
        while position < stop:
            last = piece + 1 == len(self._pieces)
            end = min(stop, len(self) if last else self._piece_starts[piece + 1])
            store, offset, _ = self._documents[self._pieces[piece]]
            offset += position - self._piece_starts[piece]
            out[position - start : end - start] = self._stores[store].ids[offset : offset + end - position]
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
        self.seq_len = seq_len
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
          dot left out;
        * a list of paths; a 1-D integer array or list of ids: one stream; a list of those: one
          document each;
        * a `TokenData`, returned as it is.
    tokenizer
        needed for text. Its `eos_id`, if it has one, is appended to every document of text, and ends
        a document wherever it occurs in a token file or an array.
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
    ValueError
        a file is empty, not UTF-8 (with the byte's offset), binary, or not what its name says; a
        line of a `.jsonl` file is wrong (with its number); ids are not integers
    """
    if isinstance(source, TokenData):
        return source
    eos_id = None if tokenizer is None else tokenizer.eos_id
    if isinstance(source, np.ndarray):
        return _from_arrays([source], eos_id)
    if isinstance(source, str | os.PathLike):
        paths = [Path(source)]
    elif isinstance(source, Sequence) and len(source) > 0:
        if all(isinstance(item, str | os.PathLike) for item in source):
            paths = [Path(item) for item in source]
        elif all(isinstance(item, np.ndarray | list | tuple) for item in source):
            return _from_arrays([np.asarray(item) for item in source], eos_id)
        else:
            return _from_arrays([np.asarray(source)], eos_id)
    else:
        raise ValueError(
            f"data must be a path, a list of paths, an array of ids or a TokenData, got {source!r:.80}"
        )
    reader = _Reader(tokenizer, text_field, token_dtype, skip_undecodable)
    files = [file for path in paths for file in _files(path, glob)]
    with tqdm(
        total=sum(file.size for file in files),
        desc="read text",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for file in files:
            reader.add(file)
            bar.update(file.size)
    return reader.finish(", ".join(map(str, paths)))


def _from_arrays(arrays: Sequence[np.ndarray], eos_id: int | None) -> TokenData:
    stores = []
    for i, array in enumerate(arrays):
        name = "the array of ids" if len(arrays) == 1 else f"array {i} of ids"
        if array.ndim != 1 or array.size == 0:
            raise ValueError(f"{name} has shape {array.shape}, expected (n,) with n at least 1")
        if array.dtype.kind not in "iu":
            raise ValueError(f"{name} has type {array.dtype}, expected integers")
        stores.append((array, name))
    return TokenData(stores, np.array([(i, 0, len(ids)) for i, (ids, _) in enumerate(stores)]), eos_id=eos_id)


class _File(NamedTuple):
    path: Path
    size: int
    listed: bool
    """Named by the user, rather than found in a folder."""


def _files(path: Path, glob: str) -> list[_File]:
    """The file itself, or a folder's files in the order of their names."""
    if path.is_file():
        return [_File(path, path.stat().st_size, True)]
    if not path.is_dir():
        raise FileNotFoundError(f"no file or folder {path}")
    wants_hidden = any(part.startswith(".") for part in Path(glob).parts)
    found = []
    try:
        matches = list(path.glob(glob))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"glob {glob!r} is not a pattern inside a folder: {error}") from None
    for file in matches:
        parts = file.relative_to(path).parts
        if file.is_file() and (wants_hidden or not any(part.startswith(".") for part in parts)):
            found.append((parts, file))
    if not found:
        raise FileNotFoundError(f"no file in {path} matches the glob {glob!r}")
    return [_File(file, file.stat().st_size, False) for _, file in sorted(found)]


class _Reader:
    """Collects files into one `TokenData`: text into memory, token files mapped."""

    def __init__(
        self, tokenizer: Encoder | None, text_field: str, token_dtype: str | None, skip_undecodable: bool
    ) -> None:
        if token_dtype is not None and token_dtype not in _TOKEN_DTYPES:
            raise ValueError(f"token_dtype must be one of {', '.join(_TOKEN_DTYPES)}, got {token_dtype!r}")
        self._tokenizer = tokenizer
        self._text_field = text_field
        self._token_dtype = token_dtype
        self._skip_undecodable = skip_undecodable
        self._stores: list[tuple[np.ndarray, str]] = []
        self._documents: list[np.ndarray] = []

    def add(self, file: _File) -> None:
        if file.size == 0:
            if file.listed:
                raise ValueError(f"{file.path} is empty")
            return
        if file.path.suffix in TOKEN_SUFFIXES:
            ids = _map_npy(file.path) if file.path.suffix == ".npy" else self._map_bin(file)
            self._append(ids, str(file.path), np.array([len(ids)]))
        elif file.path.suffix == ".jsonl":
            self._tokenize(str(file.path), _json_lines(file.path, self._text_field))
        else:
            try:
                text = _read_text(file.path)
            except UnicodeError as error:
                if not self._skip_undecodable:
                    raise ValueError(str(error)) from None
            else:
                self._tokenize(str(file.path), iter([text]))

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

    def _map_bin(self, file: _File) -> np.ndarray:
        path, chosen = file.path, self._token_dtype
        if chosen is None:
            large = self._tokenizer is not None and self._tokenizer.vocab_size > 1 << 16
            chosen = "uint32" if large else "uint16"
        dtype = _TOKEN_DTYPES[chosen]
        if file.size % dtype.itemsize:
            raise ValueError(
                f"{path} has {file.size} bytes, not a multiple of {dtype.itemsize} as {chosen} ids are"
            )
        ids = np.memmap(path, dtype, mode="r")
        if self._token_dtype is None and chosen == "uint16":
            head = ids[:4096]
            if len(ids) % 2 == 0 and not head[1::2].any() and head[::2].any():
                raise ValueError(
                    f"{path} looks like uint32 ids, not uint16: say token_dtype='uint32' or 'uint16'"
                )
        return ids


def _map_npy(path: Path) -> np.ndarray:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a readable .npy file: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}, expected integers of shape (n,)")
    return ids


def _read_text(path: Path) -> str:
    """A file's text. UnicodeError, with a message for people, where it is none."""
    raw = path.read_bytes()
    remedy = "convert it to UTF-8 or leave it out (a narrower glob, or skip_undecodable)"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnicodeError(
            f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}; {remedy}"
        ) from None
    if "\0" in text:
        raise UnicodeError(f"{path} is binary, not text: a zero byte at offset {raw.index(0)}; {remedy}")
    return text


def _json_lines(path: Path, field: str) -> Iterator[str]:
    """The texts of a .jsonl file; lines that are blank, and texts that are empty, are passed over."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                entry = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at {error.start}"
                ) from None
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} is not JSON: {error}") from None
            if not isinstance(entry, dict):
                raise ValueError(
                    f"{place} is a {type(entry).__name__}, expected an object with a field {field!r}"
                )
            if field not in entry:
                raise ValueError(
                    f"{place} has no field {field!r}; it has {', '.join(map(repr, entry)) or 'none'}"
                )
            text = entry[field]
            if not isinstance(text, str):
                raise ValueError(f"{place}: field {field!r} is a {type(text).__name__}, expected a string")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError(
                    f"{place}: field {field!r} has half of a surrogate pair, no character"
                ) from None
            if text:
                yield text


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
