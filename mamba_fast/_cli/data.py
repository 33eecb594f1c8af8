"""Options that say how data is read, for the commands that read some."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mamba_fast.data import TokenData
    from mamba_fast.tokenizer import Tokenizer

__all__ = ["add_data_options", "read_data", "read_texts"]


def add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--glob", default="**/*", metavar="PATTERN", help='files of a folder to take (default: "**/*", all)'
    )
    group.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field of a .jsonl line with its text (default: text)",
    )
    group.add_argument(
        "--token-dtype",
        choices=("uint16", "uint32"),
        help="type of the ids in .bin files (default: by the vocabulary)",
    )
    group.add_argument(
        "--skip-undecodable",
        action="store_true",
        help="leave out files that are not UTF-8 text instead of ending",
    )


def read_data(args: argparse.Namespace, paths: Sequence[str], tokenizer: Tokenizer | None) -> TokenData:
    """The data of --data or --validation as tokens."""
    from mamba_fast.data import load_data

    return load_data(list(paths), tokenizer, **_how(args))


def read_texts(args: argparse.Namespace, paths: Sequence[str]) -> list[str]:
    """The texts of the data, without those of token files."""
    from mamba_fast.data import load_data

    collector = _Collector()
    load_data(list(paths), collector, **_how(args))
    return collector.texts


def _how(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "glob": args.glob,
        "text_field": args.text_field,
        "token_dtype": args.token_dtype,
        "skip_undecodable": args.skip_undecodable,
        "progress": not args.quiet,
    }


class _Collector:
    """Stands where a tokenizer would, and keeps the texts: `load_data` knows all kinds of sources."""

    vocab_size = 1
    eos_id = None

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        self.texts += texts
        return [[] for _ in texts]
