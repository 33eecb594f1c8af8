"""Files of training data: found, and read or mapped, each error naming the file.

Nothing here knows what becomes of them; `mamba_fast.data` makes a stream of tokens.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mamba_fast.config import parse_json

__all__ = [
    "DataFile",
    "find_files",
    "is_token_file",
    "json_lines",
    "map_bin",
    "map_npy",
    "read_text",
]

_TOKEN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

# As much of a file as is looked at for what no text has, before all of it is read.
_HEAD = 1 << 16


class DataFile(NamedTuple):
    path: Path
    size: int
    listed: bool
    """Named by the user, rather than found in a folder."""


def is_token_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file of this name holds ids, rather than text."""
    return Path(path).suffix.lower() in (".bin", ".npy")


def find_files(path: Path, glob: str) -> list[DataFile]:
    """The file itself, or a folder's files that match a glob in the order of their names.

    Files and folders whose name begins with a dot are passed over unless the glob names such.

    Raises
    ------
    FileNotFoundError
        there is nothing of that name, or nothing matches
    PermissionError
        the folder, or one inside that the glob leads into, may not be read
    ValueError
        it is a pipe or a device; the glob is no pattern inside a folder
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"no file or folder {path}") from None
    if stat.S_ISREG(found.st_mode):
        return [DataFile(path, found.st_size, True)]
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(
            f"{path} is a pipe or a device, and data is read more than once: save it in a file first"
        )
    files = []
    try:
        if ".." in Path(glob).parts:
            raise ValueError("it has '..' in it")
        matches = list(path.glob(glob))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"glob {glob!r} is not a pattern inside a folder: {error}") from None
    hidden = any(part.startswith(".") for part in Path(glob).parts)
    _refuse_unreadable(path, glob, hidden)
    for file in matches:
        if (hidden or not _is_hidden(file, path)) and (size := _size(file)) is not None:
            files.append((file.relative_to(path).parts, DataFile(file, size, False)))
    if not files:
        raise FileNotFoundError(f"no file in {path} matches the glob {glob!r}")
    return [file for _, file in sorted(files)]


def _refuse_unreadable(folder: Path, glob: str, hidden: bool) -> None:
    """PermissionError for a folder that a glob leads into: `Path.glob` passes over it silently."""
    parts = Path(glob).parts
    # A last "**" leads into all folders; any other last part only names what is taken.
    for n in range(len(parts) + (parts[-1] == "**")):
        for entered in folder.glob(str(Path(*parts[:n]))) if n else [folder]:
            if (hidden or not _is_hidden(entered, folder)) and _is_folder(entered):
                os.scandir(entered).close()


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _size(path: Path) -> int | None:
    """Bytes of a regular file; None for everything else, and for a link that leads nowhere."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


# ---- token files ----------------------------------------------------------------------------------


def map_npy(path: Path) -> np.ndarray:
    """The ids (n,) of a .npy file, mapped."""
    with open(path, "rb"):  # an error here is about permissions or the disk, and says so
        pass
    try:
        ids = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header makes numpy's parser fail in many ways
        raise ValueError(f"{path} is not a readable .npy file: {error or type(error).__name__}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}, expected integers of shape (n,)")
    return ids


def map_bin(path: Path, token_dtype: str | None, vocab_size: int) -> np.ndarray:
    """The ids (n,) of a .bin file, mapped; `token_dtype` None goes by the vocabulary, 0 if unknown."""
    chosen = token_dtype or ("uint32" if vocab_size > 1 << 16 else "uint16")
    dtype, size = _TOKEN_DTYPES[chosen], path.stat().st_size
    if size % dtype.itemsize:
        raise ValueError(f"{path} has {size} bytes, not a multiple of {dtype.itemsize} as {chosen} ids are")
    ids = np.memmap(path, dtype, mode="r")
    if token_dtype is None and chosen == "uint16":
        head = ids[:4096]
        if len(ids) % 2 == 0 and not head[1::2].any() and head[::2].any():
            raise ValueError(
                f"{path} looks like uint32 ids, not uint16: say token_dtype='uint32' or 'uint16'"
            )
    return ids


# ---- text -----------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """A file's text. UnicodeError, with a message for people, where it is none."""
    remedy = "convert it to UTF-8 or leave it out (a narrower glob, or skip_undecodable)"
    with open(path, "rb") as file:
        # A large file of another kind, or one that is mostly a hole, is refused before it is read.
        raw = file.read(_HEAD)
        if b"\0" not in raw:
            file.seek(0)
            raw = file.read()
    if b"\0" in raw:
        raise UnicodeError(f"{path} is binary, not text: a zero byte at offset {raw.index(0)}; {remedy}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnicodeError(
            f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}; {remedy}"
        ) from None


def json_lines(path: Path, field: str) -> Iterator[str]:
    """The texts of a .jsonl file; lines that are blank, and texts that are empty, are passed over."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)
        if b"\0" in head:
            raise ValueError(f"{path} is binary, not JSON lines: a zero byte at offset {head.index(0)}")
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                entry = parse_json(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at {error.start}"
                ) from None
            except ValueError as error:
                raise ValueError(f"{place} is {error}") from None
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
