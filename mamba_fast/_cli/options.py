"""Options that the commands share: the backend, and flags made from the configuration classes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mamba_fast.backend import Backend

__all__ = [
    "BACKEND_VARIABLE",
    "DEBUG_VARIABLE",
    "FailedError",
    "UsageError",
    "add_common_options",
    "add_config_options",
    "choose_backend",
    "flush",
    "given_fields",
    "in_flags",
    "model_folder",
    "path",
    "positive",
    "write",
]

BACKEND_VARIABLE = "MAMBA_FAST_BACKEND"
DEBUG_VARIABLE = "MAMBA_FAST_DEBUG"


class UsageError(ValueError):
    """The command line asks for something that cannot be done; the message is for its author."""


class FailedError(Exception):
    """A command could not do its work, through no fault of the program; the message says why."""


def positive(text: str) -> int:
    """An argparse type: an integer from 1 up."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def path(text: str) -> str:
    """An argparse type: a path, which must not be empty: that would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty (the current folder is .)")
    return text


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """--backend, --threads, --adapter, --quiet and --debug."""
    group = parser.add_argument_group("general")
    group.add_argument(
        "--backend",
        metavar="NAME",
        help="what computes: cython (CPU), wgpu (GPU, a plugin), oracle (slow, exact) or auto, the fastest "
        f"that works here (default: ${BACKEND_VARIABLE} where it is set, else auto)",
    )
    group.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads of the kernels (default: all usable CPUs)"
    )
    group.add_argument(
        "--adapter",
        metavar="NAME",
        help="graphics adapter of a GPU backend, by a part of its name as `mamba-fast info` shows it "
        "(default: the best)",
    )
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no remarks on stderr")
    group.add_argument(
        "--debug",
        action="store_true",
        help=f"show a traceback with every error (also: {DEBUG_VARIABLE}=1 in the environment)",
    )


def choose_backend(args: argparse.Namespace) -> Backend:
    """The backend that --backend, the environment, --threads and --adapter ask for."""
    from mamba_fast.backend import BackendError
    from mamba_fast.registry import get_backend

    name = args.backend or os.environ.get(BACKEND_VARIABLE) or "auto"
    options = {key: value for key in ("threads", "adapter") if (value := getattr(args, key)) is not None}
    try:
        if options and name == "auto":
            name = "wgpu" if "adapter" in options else get_backend(name).name
        return get_backend(name, **options)
    except TypeError as error:
        flags = " and ".join(f"--{key}" for key in options)
        verb = "does" if len(options) == 1 else "do"
        raise UsageError(f"{flags} {verb} not go with the backend {name!r}: {error}") from None
    except BackendError as error:
        if args.backend or not os.environ.get(BACKEND_VARIABLE):
            raise
        raise UsageError(f"{BACKEND_VARIABLE} in the environment is {name!r}: {error}") from error


def model_folder(model: str) -> str:
    """The folder of a model, or an error that says what one is."""
    folder = Path(model)
    if not folder.exists():
        raise UsageError(f"no model folder {model}: give the folder that `mamba-fast train --out` made")
    if not folder.is_dir():
        raise UsageError(f"{model} is a file: give the folder of the model")
    return model


def write(text: str) -> None:
    """Text to stdout at once; what its encoding does not have becomes '?'."""
    if not text:
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = text.encode(encoding, errors="replace").decode(encoding)
    with _naming_stdout():
        sys.stdout.write(text)
        sys.stdout.flush()


def flush() -> None:
    """Send on what has been written to stdout."""
    with _naming_stdout():
        sys.stdout.flush()


@contextmanager
def _naming_stdout() -> Iterator[None]:
    """An error of the disk behind stdout says what it is about; a pipe's end is left as it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


# ---- flags from configuration classes --------------------------------------------------------------


def add_config_options(
    parser: argparse._ArgumentGroup,
    config: type,
    helps: Mapping[str, str],
    *,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """A flag for each field of a configuration class that `helps` describes.

    A flag that is not given leaves no trace in the namespace (`given_fields`), so that a resumed or
    fine-tuned model can tell "not given" from "given, and equal to the default".
    """
    for field in dataclasses.fields(config):
        if field.name not in helps:
            continue
        default = (defaults or {}).get(field.name, field.default)
        text = helps[field.name]
        if "(default" not in text:
            text += f" (default: {_shown(default)})"
        flag = "--" + field.name.replace("_", "-")
        keywords: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
        kind = str(field.type)
        if kind == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **keywords)
        else:
            parser.add_argument(flag, type=_PARSERS[kind], metavar=_METAVARS[kind], **keywords)


def given_fields(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of a configuration class that were given as flags."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(config) if hasattr(args, f.name)}


# Fields whose names are no words, so that they mean the option wherever they stand.
_NO_WORDS = {"lr", "eps", "beta1", "beta2", "wsla"}


def in_flags(message: str, flags: Collection[str]) -> str:
    """A message of the library, which names keyword arguments, with the options that stand for them.

    >>> in_flags("seq_len=9 is too much: a smaller seq_len, or packed=False", ["--seq-len", "--no-packed"])
    '--seq-len 9 is too much: a smaller --seq-len, or --no-packed'
    """
    message = message.replace("a narrower glob", "a narrower --glob").replace(" by resume,", " by --resume,")
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        alone = rf"(?<![\w./\\'\"-]){re.escape(name)}"  # and no part of a path or a quotation
        if name.startswith("no_"):
            message = re.sub(rf"(?<![\w./-]){name[3:]}=False\b", flag, message)
            continue
        message = re.sub(rf"{alone}=True\b", flag, message)
        message = re.sub(rf"{alone}=(?!False)(?=[\w.'\"-])", f"{flag} ", message)
        message = re.sub(rf"{alone}=(?![\w.'\"=-])", flag, message)  # one that stands without a value
        if name == "glob":
            message = re.sub(rf"{alone}(?= ['\"])", flag, message)
        elif "_" in name or name in _NO_WORDS:
            message = re.sub(rf"{alone}(?![=\w/\\'\"-]|\.\w)", flag, message)
        else:
            message = re.sub(rf"^{name}(?= must )", flag, message)
        message = message.replace(f"{flag} ({flag})", flag)
    return message


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _int_or_word(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:  # a word; the configuration knows which ones there are
        return text


# By the annotation of the field, as it is written in `config.py`.
_PARSERS = {
    "int": _int,
    "int | None": _int,
    "float": _float,
    "float | None": _float,
    "int | str": _int_or_word,
    "str": str,
}
_METAVARS = {
    "int": "N",
    "int | None": "N",
    "float": "X",
    "float | None": "X",
    "int | str": "N",
    "str": "NAME",
}
