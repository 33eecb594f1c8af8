"""`mamba-fast eval`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import json

from mamba_fast._cli.data import add_data_options, read_data
from mamba_fast._cli.options import add_common_options, choose_backend, model_folder, path, positive, write

NAME = "eval"
SUMMARY = "measure how well a model predicts a text"
USAGE = "MODEL --data PATH [PATH ...] [options]"
DESCRIPTION = """\
Let a model predict a text token by token and print how well it does:

  loss            mean of -ln(probability given to the token that came), in nats
  perplexity      exp(loss): as unsure as between so many equally likely tokens
  bits per byte   bits to write down one byte of the text with the model's help; 8 is no help.
                  The only one of these that compares models with different tokenizers.
  top-1, top-5    how often the token that came was the likeliest, or among the five likeliest
  tokens/s        predicted per second

Use text that the model was not trained on.
"""
EPILOG = """\
examples:
  mamba-fast eval my_model --data other_book.txt
  mamba-fast eval my_model --data src/ --glob "**/*.py" --seq-len 1024 --windows 100
  mamba-fast eval my_model --data other_book.txt --json > result.json
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=path, metavar="MODEL", help="folder of the model")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", nargs="+", type=path, required=True, metavar="PATH", help="files or folders to predict"
    )
    add_data_options(data)
    group = parser.add_argument_group("how to measure")
    group.add_argument(
        "--seq-len", type=positive, default=256, metavar="N",
        help="tokens in a window; each window begins without memory (default: 256)",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="windows at once (default: 8)"
    )
    group.add_argument(
        "--windows",
        type=positive,
        metavar="N",
        help="measure N windows, spread evenly over the data (default: all)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_common_options(parser)


def run(args: argparse.Namespace) -> None:
    from mamba_fast.evaluate import evaluate
    from mamba_fast.model import load_model
    from mamba_fast.tokenizer import load_tokenizer

    folder = model_folder(args.model)
    try:
        tokenizer = load_tokenizer(folder)
    except FileNotFoundError:  # a model of token files; text will be refused by name
        tokenizer = None
    # The model first: a backend that is not there, or no model, is known before data is read.
    model = load_model(folder, backend=choose_backend(args))
    data = read_data(args, args.data, tokenizer)
    result = evaluate(
        model, data, tokenizer=tokenizer, seq_len=args.seq_len, batch_size=args.batch_size,
        windows=args.windows or 0, progress=not args.quiet,
    )  # fmt: skip
    if args.json:
        write(json.dumps(result, indent=2) + "\n")
        return
    bits = result["bits_per_byte"]
    longest = min(args.seq_len, len(data) - 1)
    lines = [
        ("loss", f"{result['loss']:.4f}"),
        ("perplexity", f"{result['perplexity']:.3f}"),
        ("bits per byte", "unknown (the model has no tokenizer)" if bits is None else f"{bits:.4f}"),
        ("top-1", f"{100 * result['top1']:.2f} %"),
        ("top-5", f"{100 * result['top5']:.2f} %"),
        ("tokens", f"{result['tokens']:,} in {result['windows']:,} windows of {longest:,}"),
        ("tokens/s", f"{result['tokens_per_second']:,.0f}"),
    ]
    for name, value in lines:
        write(f"{name:<14} {value}\n")
