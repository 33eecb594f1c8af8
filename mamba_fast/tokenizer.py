"""Text to token ids and back: bytes (built in), or any Hugging Face `tokenizer.json`.

`ByteTokenizer` needs nothing. `HFTokenizer` and `train_bpe` use the `tokenizers` package, an extra:
`pip install mamba-fast[text]`. A tokenizer is saved beside the model that was trained with it, as
`mamba_fast_tokenizer.json` (its kind and special tokens) and, for a Hugging Face one, the
`tokenizer.json` itself.
"""

from __future__ import annotations

import codecs
import importlib
import json
import numbers
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from mamba_fast.checkpoint import given_path, unfinished_run, write_bytes
from mamba_fast.config import parse_json, shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "ByteTokenizer",
    "HFTokenizer",
    "StreamDecoder",
    "Tokenizer",
    "as_tokenizer",
    "bar_interval",
    "check_bpe_size",
    "check_vocabulary",
    "load_tokenizer",
    "train_bpe",
]

KIND_FILE = "mamba_fast_tokenizer.json"
HF_FILE = "tokenizer.json"

# Names under which published tokenizers keep their end-of-text and padding tokens.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>", "[SEP]")
_PAD_NAMES = ("<|pad|>", "<|padding|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")


# What a vocabulary learnt here has besides the bytes.
_BPE_SPECIALS = ("<|endoftext|>", "<|pad|>")

# The library makes room for a vocabulary at once and ends the process where there is none.
_LARGEST_VOCABULARY = 1 << 20
_LARGEST_FREQUENCY = 1 << 40


class StreamDecoder(Protocol):
    """Turns ids into text as they come, a character only when all its bytes are there."""

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; may be empty."""

    def flush(self) -> str:
        """What is still held back (bytes of an unfinished character, as U+FFFD)."""


class Tokenizer(ABC):
    """What the trainer, the evaluation and the command line need of a tokenizer."""

    kind: ClassVar[str]
    """What `mamba_fast_tokenizer.json` calls it."""

    vocab_size: int
    """Largest id + 1: what a model's `vocab_size` must be at least."""

    eos_id: int
    """End of text: follows every document in training."""

    pad_id: int
    """Fills rows of a batch; never a target."""

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int32]:
        """The ids (n,) of a text, without end-of-text."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """The text of ids (n,). Special tokens are left out, bytes that are no UTF-8 become U+FFFD.

        ValueError for an id outside the vocabulary.
        """

    @abstractmethod
    def stream_decoder(self) -> StreamDecoder:
        """A new decoder for one stream of ids."""

    @abstractmethod
    def count_bytes(self, ids: ArrayLike) -> int:
        """UTF-8 bytes of the text that ids (n,) stand for; special tokens have none."""

    @abstractmethod
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the tokenizer into a directory, where `load_tokenizer` finds it."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """`encode` of each text; may use several threads."""
        return [self.encode(text) for text in texts]

    def _check_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        array = np.asarray(ids)
        if array.size == 0:
            return np.empty(0, np.int64)
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ValueError(f"ids must be a list of integers, got shape {array.shape}, dtype {array.dtype}")
        wrong = array[(array < 0) | (array >= self.vocab_size)]
        if wrong.size:
            raise ValueError(f"id {wrong[0]} is outside the tokenizer's vocabulary 0..{self.vocab_size - 1}")
        return array.astype(np.int64)


class ByteTokenizer(Tokenizer):
    """One token for each UTF-8 byte: ids 0 to 255, then end-of-text 256 and padding 257.

    Any text can be written with it and nothing has to be learnt or stored; a text takes more tokens
    than with a learnt vocabulary.
    """

    kind = "bytes"
    vocab_size = 258
    eos_id = 256
    pad_id = 257

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: ArrayLike) -> str:
        return self._bytes(ids).decode("utf-8", errors="replace")

    def stream_decoder(self) -> StreamDecoder:
        return _ByteStream()

    def count_bytes(self, ids: ArrayLike) -> int:
        return len(self._bytes(ids))

    def save(self, directory: str | os.PathLike[str]) -> None:
        _save_file(Path(directory), KIND_FILE, json.dumps({"kind": self.kind}) + "\n")

    def __repr__(self) -> str:
        return "ByteTokenizer()"

    def _bytes(self, ids: ArrayLike) -> bytes:
        array = self._check_ids(ids)
        return array[array < 256].astype(np.uint8).tobytes()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class HFTokenizer(Tokenizer):
    """A Hugging Face tokenizer, from its `tokenizer.json`.

    Where a text spells out a special token, such as `<|endoftext|>`, that token is what it becomes;
    every other text of a byte-level vocabulary comes back from `decode` as it was.

    Parameters
    ----------
    path
        The file, or the directory that holds it.
    eos_token, pad_token
        The end-of-text and the padding token. By default those that `tokenizer_config.json` beside
        the file names, else a token of a usual name such as `<|endoftext|>`; padding falls back to
        end-of-text.

    Raises
    ------
    FileNotFoundError, ValueError
        there is no such file, it is no tokenizer, or no end-of-text token can be found in it
    ModuleNotFoundError
        the `tokenizers` package is not installed
    """

    kind = "huggingface"

    def __init__(
        self, path: str | os.PathLike[str], *, eos_token: str | None = None, pad_token: str | None = None
    ) -> None:
        file = given_path(path, "the tokenizer's path")
        if file.is_dir():
            file = file / HF_FILE
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer file {file}")
        tokenizers = _import_tokenizers()
        try:
            self._json = file.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(self._json)
        except OSError:
            raise
        except Exception as error:  # the parser raises bare Exception
            raise ValueError(f"{file} is not a Hugging Face tokenizer.json: {error}") from None
        named = _special_tokens_beside(file)
        eos_token = named.get("eos_token") if eos_token is None else eos_token
        pad_token = named.get("pad_token") if pad_token is None else pad_token
        self._finish(str(file), eos_token, pad_token)

    @classmethod
    def _of(cls, tokenizer: Any, eos_token: str, pad_token: str) -> HFTokenizer:
        """From a `tokenizers.Tokenizer` object."""
        self = cls.__new__(cls)
        self._tokenizer = tokenizer
        self._json = tokenizer.to_str(pretty=True)
        self._finish("the tokenizer", eos_token, pad_token)
        return self

    def _finish(self, origin: str, eos_token: str | None, pad_token: str | None) -> None:
        # A published file may pad or cut what it encodes; both would damage training data.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{origin} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have holes
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        for key, name in (("eos_token", eos_token), ("pad_token", pad_token)):
            if name is not None and not isinstance(name, str):
                raise ValueError(f"{key} of {origin} must be a token's text, got {shown(name)}")
            if name is not None and name not in vocabulary:
                raise ValueError(f"{origin} has no token {name!r}; special tokens: {self._special_names()}")
        self.eos_token = eos_token or next((n for n in _EOS_NAMES if n in vocabulary), None)
        if self.eos_token is None:
            raise ValueError(
                f"no end-of-text token found in {origin}: name one with eos_token=; "
                f"special tokens: {self._special_names()}"
            )
        self.pad_token = pad_token or next((n for n in _PAD_NAMES if n in vocabulary), self.eos_token)
        self.eos_id = vocabulary[self.eos_token]
        self.pad_id = vocabulary[self.pad_token]
        # An end-of-text token is no text, whether the file marks it as special or not.
        self._special |= {self.eos_id, self.pad_id}
        self._byte_level = _is_byte_level(self._json)

    def _special_names(self) -> str:
        return ", ".join(repr(self._tokenizer.id_to_token(i)) for i in sorted(self._special)) or "none"

    def encode(self, text: str) -> NDArray[np.int32]:
        _utf8(text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        for text in texts:
            _utf8(text)
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: ArrayLike) -> str:
        text = [token for token in self._check_ids(ids).tolist() if token not in self._special]
        return self._tokenizer.decode(text)

    def stream_decoder(self) -> StreamDecoder:
        return _HFStream(self)

    def count_bytes(self, ids: ArrayLike) -> int:
        """See `Tokenizer.count_bytes`. Exact for byte-level vocabularies (GPT-2, GPT-NeoX and
        everything that `train_bpe` makes); for others the length of the decoded text, which may
        differ by a few bytes where the ids begin or end inside a character or at a space."""
        array = self._check_ids(ids)
        if not self._byte_level:
            return len(self.decode(array).encode())
        unique, counts = np.unique(array, return_counts=True)
        # A byte-level token is spelt with one character for each byte.
        spell = self._tokenizer.id_to_token
        return sum(
            count * len(spell(token) or "")
            for token, count in zip(unique.tolist(), counts.tolist(), strict=True)
            if token not in self._special
        )

    def save(self, directory: str | os.PathLike[str]) -> None:
        directory = Path(directory)
        # The kind file goes last: while it names no tokenizer.json, a half-written one is not found.
        _save_file(directory, HF_FILE, self._json)
        described = {"kind": self.kind, "eos_token": self.eos_token, "pad_token": self.pad_token}
        _save_file(directory, KIND_FILE, json.dumps(described) + "\n")

    def __repr__(self) -> str:
        return f"HFTokenizer(vocab_size={self.vocab_size}, eos_token={self.eos_token!r})"


class _HFStream:
    """Decodes a window of recent ids and gives out what was added at its end.

    A token's text can depend on those before it (spaces, bytes of one character), so it is read off
    two decodings of the same window, without and with the new token.
    """

    LONGEST = 16  # ids held back before broken bytes are given out as they are

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # how many ids of the window are in the text given out

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith("\ufffd") and len(self._window) - self._given < self.LONGEST:
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._tokenizer.decode(self._window)) if len(self._window) > self._given else ""

    def _give(self, text: str) -> str:
        new = text[len(self._tokenizer.decode(self._window[: self._given])) :]
        # The ids just given out become the context of the next ones.
        self._window = self._window[self._given :]
        self._given = len(self._window)
        return new


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    progress: bool = True,
) -> HFTokenizer:
    """Learn a byte-level BPE vocabulary (Sennrich et al. 2016; Radford et al. 2019) from texts.

    Parameters
    ----------
    texts : iterable of str
        Read once.
    vocab_size : int in [258, 2^20]
        Ids in all: 256 bytes, `<|endoftext|>`, `<|pad|>` and the merges learnt. A small text may
        give fewer; the result's `vocab_size` says how many there are.
    min_frequency : int in [1, 2^40]
        A pair must occur this often to be merged.
    progress : bool
        Show how many texts have been read, on stderr.

    The same texts give the same tokenizer. ModuleNotFoundError without the `tokenizers` package.
    """
    if isinstance(texts, str):
        raise TypeError("texts must be an iterable of texts, got one string: pass [text]")
    specials = list(_BPE_SPECIALS)
    vocab_size = check_bpe_size(vocab_size)
    min_frequency = _size("min_frequency", min_frequency, 1, _LARGEST_FREQUENCY)
    tokenizers = _import_tokenizers()
    models, trainers = tokenizers.models, tokenizers.trainers
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=specials,
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    if progress:
        from tqdm import tqdm

        texts = tqdm(texts, desc="learn vocabulary", unit="text", mininterval=bar_interval())
    count = 0

    def counted() -> Iterable[str]:
        nonlocal count
        for text in texts:
            _utf8(text)
            count += 1
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    if count == 0:
        raise ValueError("no text to learn a vocabulary from")
    return HFTokenizer._of(tokenizer, *specials)


def check_bpe_size(vocab_size: int) -> int:
    """A number of ids that `train_bpe` can make; ValueError for any other."""
    return _size("vocab_size", vocab_size, 256 + len(_BPE_SPECIALS), _LARGEST_VOCABULARY)


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer by name or from where it was saved.

    Parameters
    ----------
    source
        "bytes"; a `tokenizer.json`; or a directory: of a model trained here, or with a
        `tokenizer.json` in it.

    Raises
    ------
    FileNotFoundError
        nothing is there, or the directory holds no tokenizer
    ValueError
        a file is there, but damaged or of an unknown kind
    """
    if source == ByteTokenizer.kind:
        return ByteTokenizer()
    path = given_path(source, "the tokenizer's path")
    if not path.is_dir():
        if path.exists():
            return HFTokenizer(path)
        raise FileNotFoundError(
            f"no tokenizer {str(source)!r}: give 'bytes', a tokenizer.json or a directory"
        )
    kind_file = path / KIND_FILE
    if not kind_file.exists():
        if (path / HF_FILE).exists():
            return HFTokenizer(path)
        raise FileNotFoundError(
            unfinished_run(path) or f"directory {path} holds no tokenizer: expected {KIND_FILE} or {HF_FILE}"
        )
    try:
        described = parse_json(kind_file.read_bytes())
        kind = described["kind"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{kind_file} is damaged: expected a JSON object with the key 'kind'") from None
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    if kind == HFTokenizer.kind:
        return HFTokenizer(path, eos_token=described.get("eos_token"), pad_token=described.get("pad_token"))
    raise ValueError(f"{kind_file} names the kind {shown(kind)}, expected 'bytes' or 'huggingface'")


def as_tokenizer(tokenizer: Any) -> Any:
    """What a function's `tokenizer` argument stands for: a tokenizer or None as it is, a name or path
    through `load_tokenizer`. TypeError for anything else."""
    if isinstance(tokenizer, str | os.PathLike):
        return load_tokenizer(tokenizer)
    if tokenizer is not None and (isinstance(tokenizer, type) or not hasattr(tokenizer, "eos_id")):
        raise TypeError(f"tokenizer must be a Tokenizer, 'bytes' or a path, got {shown(tokenizer)}")
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """ValueError if a tokenizer makes ids that a model with this `vocab_size` does not have."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocab_size is {vocab_size}: "
            "use the tokenizer that the model was trained with, or a model with a larger vocabulary"
        )


def bar_interval() -> float:
    """Seconds between two pictures of a progress bar: many on a terminal; in a file, where each is a new
    piece of one long line, few."""
    return 0.1 if sys.stderr is not None and sys.stderr.isatty() else 5.0


# ---- helpers ---------------------------------------------------------------------------------------


def _import_tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        raise ModuleNotFoundError(
            "this needs the package 'tokenizers': pip install 'mamba-fast[text]', or use the byte tokenizer",
            name="tokenizers",
        ) from None


def _size(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")
    return int(value)


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"a text must be a str, got {type(text).__name__}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds {text[error.start]!r} at position {error.start}, which has no UTF-8 form"
        ) from None


def _special_tokens_beside(file: Path) -> dict[str, str]:
    """What `tokenizer_config.json` beside a tokenizer file says of eos_token and pad_token."""
    config = file.parent / "tokenizer_config.json"
    if not config.is_file():
        return {}
    try:
        values = parse_json(config.read_bytes())
        found = {}
        for key in ("eos_token", "pad_token"):
            token = values.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
    except (ValueError, AttributeError):
        raise ValueError(f"{config} is damaged: expected a JSON object") from None
    return found


def _save_file(directory: Path, name: str, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_bytes(directory / name, text.encode())


def _is_byte_level(tokenizer_json: str) -> bool:
    """Whether the tokens of a tokenizer.json are spelt with one character for each byte."""
    decoder = json.loads(tokenizer_json).get("decoder") or {}
    return decoder.get("type") == "ByteLevel"
