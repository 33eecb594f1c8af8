"""`mamba-fast info`: what is installed, what runs here, what a model is."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from mamba_fast._cli.options import (
    BACKEND_VARIABLE,
    add_common_options,
    choose_backend,
    model_folder,
    path,
    write,
)

NAME = "info"
SUMMARY = "what is installed and what runs here; what a model is"
USAGE = "[MODEL] [options]"
DESCRIPTION = """\
Show versions, the backends with what they run on (SIMD variant, threads, graphics adapter) or why
they do not, numpy's BLAS and the environment variables that matter. With MODEL, show its
architecture and size as well. Put the output into every bug report.
"""
EPILOG = """\
examples:
  mamba-fast info
  mamba-fast info my_model
  mamba-fast info --json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=path, metavar="MODEL", nargs="?", help="folder of a model (default: none)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_common_options(parser)


def run(args: argparse.Namespace) -> None:
    from mamba_fast.environment import environment, format_environment

    folder = None if args.model is None else model_folder(args.model)
    report = environment()
    if args.json:
        if folder is not None:
            report["model"] = describe_model(folder)
        write(json.dumps(report, indent=2) + "\n")
    else:
        # First the report, which cannot fail; then what can.
        write(format_environment(report) + "\n")
        if folder is not None:
            write(format_model(folder, describe_model(folder)))
    if args.backend or args.threads or args.adapter or os.environ.get(BACKEND_VARIABLE):
        chosen = choose_backend(args).describe()
        if not args.json:
            write(f"asked for   {chosen}\n")


def describe_model(folder: str) -> dict[str, Any]:
    """Configuration, size and tokenizer of a saved model."""
    from mamba_fast.checkpoint import read_model
    from mamba_fast.tokenizer import load_tokenizer

    config, parameters = read_model(folder)
    try:
        tokenizer = repr(load_tokenizer(folder))
    except (FileNotFoundError, ModuleNotFoundError) as error:  # a model is one without a tokenizer too
        tokenizer = f"none: {error}"
    return {
        "config": config.to_dict(),
        "parameters": sum(array.size for array in parameters.values()),
        "tensors": len(parameters),
        "tokenizer": tokenizer,
    }


def format_model(name: str, model: dict[str, Any]) -> str:
    lines = [
        f"model       {name}",
        f"  {'parameters':<20} {model['parameters']:,} in {model['tensors']} tensors",
        f"  {'tokenizer':<20} {model['tokenizer']}",
        *(f"  {key:<20} {value}" for key, value in model["config"].items()),
    ]
    return "\n".join(lines) + "\n"
