"""Model files and the atomic writes under them.

A saved model is a folder with `config.json` (a `MambaConfig`) and `model.safetensors` (every
parameter by name). The configuration is also kept in the metadata of `model.safetensors`, so that
this one file is a whole model and its replacement is the single moment at which a save takes
effect:

1. both files are written under temporary names in the same folder and flushed to the disk;
2. a `config.json` that is about to change is removed (the file it belongs to embeds the same text);
3. `model.safetensors` is replaced;
4. `config.json` is replaced.

A process killed between any two of these leaves either the old or the new model, never a mixture;
a full disk fails in step 1, before anything old is touched. Two processes must not save into one
folder at the same time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from mamba_fast.config import MambaConfig

__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "CheckpointError",
    "atomic_folder",
    "read_model",
    "read_tensors",
    "write_bytes",
    "write_model",
    "write_tensors",
]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
# The only key of the metadata: the library writes several in a random order, and the same model is to
# give the same bytes.
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
    directory = Path(directory)
    arrays = {name: _storable(name, value) for name, value in parameters.items()}
    for name, array in arrays.items():
        _refuse_non_finite(name, array, "the model was not saved", ValueError)
    directory.mkdir(parents=True, exist_ok=True)
    text = config.to_json()
    weights, config_file = directory / WEIGHTS_FILE, directory / CONFIG_FILE
    with _temporary(weights) as new_weights, _temporary(config_file) as new_config:
        _write_tensor_file(new_weights, arrays, {_CONFIG_KEY: text})
        _write_byte_file(new_config, text.encode())
        if _is_superseded(config_file, text) and _embeds_config(weights):
            config_file.unlink()
            _sync_folder(directory)
        os.replace(new_weights, weights)
        _sync_folder(directory)
        os.replace(new_config, config_file)
        _sync_folder(directory)


def read_model(directory: str | os.PathLike[str]) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """A saved model: its configuration, and every stored tensor as a fresh float32 or float64 array.

    What a file can say of itself is checked here; whether names and shapes are the configuration's
    is checked by whoever loads them into a model.

    Raises
    ------
    FileNotFoundError
        the folder, the weights, or the only copy of the configuration is missing
    CheckpointError
        a file is truncated or not a safetensors file, holds something other than floats, or NaN or
        infinite weights; config.json is not valid or contradicts the weights
    """
    directory = Path(directory)
    if not directory.exists():
        raise FileNotFoundError(f"no model folder {directory}: it does not exist")
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is a file; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    weights = directory / WEIGHTS_FILE
    if not weights.is_file():
        raise FileNotFoundError(f"no model in {directory}: it has no {WEIGHTS_FILE}")
    metadata = _open_metadata(weights)
    config = _read_config(directory / CONFIG_FILE, metadata.get(_CONFIG_KEY), weights)
    arrays, _ = read_tensors(weights)
    for name, array in arrays.items():
        _refuse_non_finite(name, array, f"{weights} is damaged or its training diverged", CheckpointError)
    return config, arrays


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]
) -> None:
    """One safetensors file of float arrays, written atomically and flushed to the disk."""
    path = Path(path)
    arrays = {name: _storable(name, value) for name, value in tensors.items()}
    with _temporary(path) as temporary:
        _write_tensor_file(temporary, arrays, metadata)
        os.replace(temporary, path)
        _sync_folder(path.parent)


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Every tensor of a safetensors file of floats, and its metadata.

    F16 and BF16 are widened to float32 without loss. CheckpointError names what is wrong with the
    file; a missing one is FileNotFoundError.
    """
    path = Path(path)
    if not path.is_file():
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
        _write_byte_file(temporary, content)
        os.replace(temporary, path)
        _sync_folder(path.parent)


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


def _write_tensor_file(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    try:
        save_file(dict(arrays), str(path), metadata=dict(metadata))
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(f"could not write {path.parent}: {error}") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _write_byte_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
    return config_file.is_file() and config_file.read_bytes() != text.encode()


def _embeds_config(weights: Path) -> bool:
    """Whether an existing weights file can do without its config.json."""
    try:
        return weights.is_file() and _CONFIG_KEY in _open_metadata(weights)
    except CheckpointError:  # damaged already: nothing there to preserve
        return False


# ---- how files are checked --------------------------------------------------------------------------


def _open_metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(str(path), framework="numpy") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not a safetensors file: {error}"
        ) from None


def _read_config(config_file: Path, embedded: str | None, weights: Path) -> MambaConfig:
    if embedded is not None:
        inner = _parse_config(embedded, f"the configuration inside {weights}")
        if not config_file.is_file():
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
    if not config_file.is_file():
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
