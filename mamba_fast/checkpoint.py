"""Model files and the atomic writes under them.

A saved model is a folder with `config.json` (a `MambaConfig`) and `model.safetensors` (every
parameter by name). The configuration is also kept in the metadata of `model.safetensors`, so that
this one file is a whole model and its replacement is the single moment at which a save takes
effect:

1. both files are written under temporary names in the same folder and flushed to the disk;
2. a `config.json` that is about to change is removed: the weights that it belongs to embed the same
   text, or, where they come from elsewhere, are first given it;
3. `model.safetensors` is replaced;
4. `config.json` is replaced.

A process killed between any two of these leaves either the old or the new model, never a mixture;
a full disk fails before anything old is touched. A temporary name is fixed, so that the next save
takes away what a killed one left. Files get the permissions that the user's umask gives, and keep
them when they are replaced. The tensors go from memory to the file without a copy. Two processes must
not save into one folder at the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from mamba_fast.config import MambaConfig

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "CheckpointError",
    "atomic_folder",
    "given_path",
    "read_model",
    "read_tensors",
    "unfinished_run",
    "write_bytes",
    "write_model",
    "write_tensors",
    "writing_failed",
]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# The key of the metadata that holds the configuration.
_CONFIG_KEY = "mamba_fast.config"

# Storage types that hold parameters, and what they are read as. Half precision is widened, because
# all arithmetic is float32; float64 (the oracle's) stays, so that nothing is lost.
_READ_AS = {"F64": np.float64, "F32": np.float32, "F16": np.float32, "BF16": np.float32}


class CheckpointError(ValueError):
    """A file or folder that does not hold what it should."""


def write_model(
    directory: str | os.PathLike[str], config: MambaConfig, parameters: Mapping[str, Any]
) -> None:
    """Save a model, replacing one that is there, so that a crash leaves the old or the new one whole.

    Parameters
    ----------
    directory
        made if it does not exist.
    parameters
        name -> float array of any layout. float64 is stored as such, everything else as float32.

    Raises
    ------
    ValueError
        a parameter is not a float array, or has NaN or infinite elements: such a file could not be
        read back, so it does not replace one that can.
    OSError
        the disk is full or the folder cannot be written; what was there before is untouched.
    """
    directory = given_path(directory, "the model's folder")
    arrays = {name: _storable(name, value) for name, value in parameters.items()}
    for name, array in arrays.items():
        _refuse_non_finite(name, array, "the model was not saved", ValueError)
    directory.mkdir(parents=True, exist_ok=True)
    text = config.to_json()
    weights, config_file = directory / WEIGHTS_FILE, directory / CONFIG_FILE
    with (
        _temporary(weights) as new_weights,
        _temporary(config_file) as new_config,
        _temporary(directory / f"{WEIGHTS_FILE}.old") as old_weights,
    ):
        _write_file(new_weights, weights, _safetensors(arrays, {_CONFIG_KEY: text}))
        _write_file(new_config, config_file, [text.encode()])
        if _is_superseded(config_file, text):
            if _needs_config(weights, config_file):
                old_text = _config_text(config_file)
                _write_file(old_weights, weights, _with_metadata(weights, {_CONFIG_KEY: old_text}))
                _put(old_weights, weights)
            config_file.unlink()
            _sync_folder(directory)
        _put(new_weights, weights)
        _put(new_config, config_file)


def read_model(directory: str | os.PathLike[str]) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """A saved model: its configuration, and every stored tensor as a fresh float32 or float64 array.

    What a file can say of itself is checked here; whether names and shapes are the configuration's
    is checked by whoever loads them into a model.

    Raises
    ------
    FileNotFoundError
        the folder, the weights, or the only copy of the configuration is missing
    OSError
        a file may not be read, or the disk fails; the error names it
    CheckpointError
        a file is truncated or not a safetensors file, holds something other than floats, or NaN or
        infinite weights; config.json is not valid or contradicts the weights
    """
    directory = given_path(directory, "the model's folder")
    mode = _mode(directory)
    if mode is None:
        raise FileNotFoundError(f"no model folder {directory}: it does not exist")
    if not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"{directory} is a file; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    weights = directory / WEIGHTS_FILE
    if not _is_file(weights):
        raise FileNotFoundError(
            unfinished_run(directory) or f"no model in {directory}: it has no {WEIGHTS_FILE}"
        )
    metadata = _open_metadata(weights)
    config = _read_config(directory / CONFIG_FILE, metadata.get(_CONFIG_KEY), weights)
    arrays, _ = read_tensors(weights)
    for name, array in arrays.items():
        _refuse_non_finite(name, array, f"{weights} is damaged or its training diverged", CheckpointError)
    return config, arrays


def unfinished_run(directory: Path) -> str | None:
    """What to say of a training's folder that has checkpoints and no model yet; None for any other."""
    if _is_file(directory / WEIGHTS_FILE):
        return None
    newest = max(
        directory.glob("checkpoints/step-*/trainer.json"), key=lambda p: _number(p.parent.name), default=None
    )
    if newest is None:
        return None
    return (
        f"the training in {directory} is not finished; its newest checkpoint is {newest.parent}: go on "
        f"with it by resume, or give that folder"
    )


def _number(name: str) -> int:
    """The step of a checkpoint's folder, -1 for a folder of another kind."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """One safetensors file of float arrays, written atomically and flushed to the disk."""
    path = Path(path)
    arrays = {name: _storable(name, value) for name, value in tensors.items()}
    with _temporary(path) as temporary:
        _write_file(temporary, path, _safetensors(arrays, metadata))
        _put(temporary, path)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Every tensor of a safetensors file of floats, and its metadata.

    F16 and BF16 are widened to float32 without loss. CheckpointError names what is wrong with the
    file; a missing one is FileNotFoundError, one that may not be read another OSError.
    """
    path = Path(path)
    if not _is_file(path):
        raise FileNotFoundError(f"no file {path}")
    metadata = _open_metadata(path)
    arrays: dict[str, np.ndarray] = {}
    bf16 = []
    with safe_open(str(path), framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            kind = file.get_slice(name).get_dtype()
            if kind not in _READ_AS:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has type {kind}, expected one of {', '.join(_READ_AS)}"
                )
            if kind == "BF16":
                bf16.append(name)
            else:
                arrays[name] = np.array(file.get_tensor(name), dtype=_READ_AS[kind])
    if bf16:
        # numpy has no such type, so the library hands out the 16-bit words only.
        for name, entry in deserialize(path.read_bytes()):
            if entry["dtype"] == "BF16":
                words = np.frombuffer(entry["data"], dtype="<u2").astype(np.uint32)
                arrays[name] = (words << 16).view(np.float32).reshape(entry["shape"])
    return arrays, metadata


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """One file, written atomically and flushed to the disk."""
    path = Path(path)
    with _temporary(path) as temporary:
        _write_file(temporary, path, [content])
        _put(temporary, path)


def given_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path that somebody gave. An empty one is a ValueError: `Path("")` would be the current folder."""
    if isinstance(path, str) and not path:
        raise ValueError(f"{what} is an empty path: give a name, or '.' for the current folder")
    return Path(path)


def writing_failed(path: str | os.PathLike[str], error: OSError) -> OSError:
    """The same error with the file's name in it, which the system leaves out of a full disk's."""
    named = type(error)(f"could not write {os.fspath(path)}: {error.strerror or error}")
    named.errno = error.errno
    return named


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the block ends well.

    It appears complete or not at all; on any failure, Ctrl-C included, nothing is left. Something
    that stands at `path` already is a FileExistsError.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    temporary = path.parent / f".{path.name}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        _sync_folder(temporary)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---- how files are written --------------------------------------------------------------------------


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A name beside `path`, free at the start and free again at the end whatever happens.

    It is a fixed name, so that what a killed process left there is overwritten by the next save.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _write_file(temporary: Path, path: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write and flush what is to become `path`, with the permissions of the file that is there."""
    try:
        with open(temporary, "wb") as file:
            for part in content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        if _is_file(path):
            shutil.copymode(path, temporary)
    except OSError as error:
        raise writing_failed(path, error) from error


def _put(temporary: Path, path: Path) -> None:
    """Give a finished file its name."""
    try:
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise writing_failed(path, error) from error


def _safetensors(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The parts of a safetensors file, in the order and to the byte as the library writes them.

    Written here, because the library writes through a file of its own: readable by its owner only,
    with a random name that a killed process leaves behind. Format:
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # The widest type first, so that every tensor begins at a multiple of its element's size.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    begin = 0
    for name, array in ordered:
        end = begin + array.nbytes
        header[name] = {
            "dtype": f"F{8 * array.itemsize}", "shape": list(array.shape), "data_offsets": [begin, end]
        }  # fmt: skip
        begin = end
    yield _encoded_header(header)
    for _, array in ordered:
        yield array.reshape(-1).view(np.uint8).data


def _with_metadata(path: Path, metadata: Mapping[str, str]) -> Iterator[bytes]:
    """The parts of a copy of a safetensors file with more metadata."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        # First in the file, as everywhere; offsets count from the header's end, so they stay.
        header = {"__metadata__": {**(header.pop("__metadata__", None) or {}), **metadata}, **header}
        yield _encoded_header(header)
        while part := file.read(1 << 20):
            yield part


def _encoded_header(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sync_folder(directory: Path) -> None:
    """Make a rename survive a power failure, where the system can (Windows has no such call)."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _storable(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind != "f":
        raise ValueError(f"tensor {name!r} has type {array.dtype}, expected a float type")
    wide = array.dtype.itemsize >= 8
    return np.require(array, dtype=np.dtype("<f8" if wide else "<f4"), requirements="C")


def _refuse_non_finite(name: str, array: np.ndarray, consequence: str, error: type[Exception]) -> None:
    finite = np.isfinite(array)
    if finite.all():
        return
    first = tuple(int(i) for i in np.argwhere(~finite)[0])
    count = array.size - int(np.count_nonzero(finite))
    raise error(
        f"tensor {name!r} has {count} elements that are not finite "
        f"(the first is {array[first]} at {list(first)}): {consequence}"
    )


def _is_superseded(config_file: Path, text: str) -> bool:
    return _is_file(config_file) and config_file.read_bytes() != text.encode()


def _needs_config(weights: Path, config_file: Path) -> bool:
    """Whether an existing model consists of both files: weights from elsewhere and their config.json."""
    try:
        if not _is_file(weights) or _CONFIG_KEY in _open_metadata(weights):
            return False
        _parse_config(_config_text(config_file), str(config_file))
    except CheckpointError:  # damaged, or of another program: no model that could be read anyway
        return False
    return True


# ---- how files are checked --------------------------------------------------------------------------


def _mode(path: Path) -> int | None:
    """What kind of thing is there, None for nothing. One that may not be looked at is an OSError, while
    `Path.is_file` of some Python versions takes it for none."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_file(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def _open_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, which is checked as far as its header says what it holds."""
    with open(path, "rb") as file:  # an error here is about permissions or the disk, and says so
        begin = file.read(8)
    try:
        if len(begin) < 8:  # which a file that cannot be mapped into memory may be, too
            raise SafetensorError("header too small")
        with safe_open(str(path), framework="numpy") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not a safetensors file: {error}"
        ) from None
    except OSError as error:
        raise OSError(f"could not read {path}: {error}") from error


def _read_config(config_file: Path, embedded: str | None, weights: Path) -> MambaConfig:
    if embedded is not None:
        inner = _parse_config(embedded, f"the configuration inside {weights}")
        if not _is_file(config_file):
            return inner
        outer = _parse_config(_config_text(config_file), str(config_file))
        for key, value in outer.to_dict().items():
            if value != inner.to_dict()[key]:
                raise CheckpointError(
                    f"{config_file} says {key}={value!r} but {weights.name} was saved with "
                    f"{key}={inner.to_dict()[key]!r}: put that value back, or delete {config_file.name} "
                    f"to use the configuration kept in {weights.name}"
                )
        return outer
    if not _is_file(config_file):
        raise FileNotFoundError(
            f"no {CONFIG_FILE} in {config_file.parent}, and {weights.name} does not embed one"
        )
    return _parse_config(_config_text(config_file), str(config_file))


def _config_text(config_file: Path) -> str:
    try:
        return config_file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{config_file} is not UTF-8 (byte {error.start})") from None


def _parse_config(text: str, origin: str) -> MambaConfig:
    try:
        return MambaConfig.from_json(text)
    except ValueError as error:
        raise CheckpointError(f"{origin}: {error}") from None
