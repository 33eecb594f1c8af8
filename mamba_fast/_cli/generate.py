"""`mamba-fast generate`: write text with a model."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_fast._cli.options import (
    UsageError,
    add_common_options,
    choose_backend,
    model_folder,
    path,
    positive,
    write,
)

if TYPE_CHECKING:
    from mamba_fast.model import MambaLM
    from mamba_fast.tokenizer import Tokenizer

NAME = "generate"
SUMMARY = "write text with a model"
USAGE = "MODEL [--prompt TEXT | --prompt-file FILE] [options]"
DESCRIPTION = """\
Continue a prompt with a trained model. The text appears as it is written, the prompt first.

The model is a folder that `mamba-fast train` made. Its tokenizer lies in the same folder.
"""
EPILOG = """\
examples:
  mamba-fast generate my_model --prompt "Once upon a time"
  mamba-fast generate my_model --prompt "Once" --temperature 0          always the likeliest token
  mamba-fast generate my_model --prompt "Once" --top-p 0.9 --seed 7     another text each seed
  mamba-fast generate my_model --prompt-file chapter1.txt --max-new-tokens 1000 > chapter2.txt
  echo "def main():" | mamba-fast generate my_model --prompt-file - --stop "def "
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=path, metavar="MODEL", help="folder of the model")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="text to continue (default: none, the model begins a new document)"
    )
    prompt.add_argument(
        "--prompt-file", type=path, metavar="FILE", help="read the prompt from a UTF-8 file; - is stdin"
    )
    group = parser.add_argument_group("how to write")
    group.add_argument(
        "--max-new-tokens",
        "-n",
        type=int,
        default=256,
        metavar="N",
        help="most tokens to write (default: 256)",
    )
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="X",
        help="below 1 safer, above 1 wilder, 0 always the likeliest token (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="choose among the K likeliest tokens; 0: all (default: 0)",
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="choose among the likeliest tokens that have probability P together (default: 1, all)",
    )  # fmt: skip
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X",
        help="above 1, tokens that occurred already become less likely; 1.2 is usual (default: 1, off)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another seed, another text (default: 0)"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="end before this text appears; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--ignore-eos", action="store_true", help="write on after the end-of-text token (default: end there)"
    )
    group.add_argument(
        "--samples",
        type=positive,
        default=1,
        metavar="N",
        help="write N texts, with seeds SEED, SEED+1, ... (default: 1)",
    )
    group.add_argument("--no-echo", action="store_true", help="do not print the prompt")
    add_common_options(parser)


def run(args: argparse.Namespace) -> None:
    from mamba_fast.generate import Sampler
    from mamba_fast.model import load_model
    from mamba_fast.tokenizer import check_vocabulary, load_tokenizer

    if args.max_new_tokens < 0:
        raise UsageError(f"--max-new-tokens must be at least 0, got {args.max_new_tokens}")
    if args.seed < 0:
        raise UsageError(f"--seed must be at least 0, got {args.seed}")
    if "" in args.stop:
        raise UsageError("--stop must not be empty")
    Sampler(  # checks them before the model is read
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
    )
    prompt = read_prompt(args.prompt, args.prompt_file)
    folder = model_folder(args.model)
    backend = choose_backend(args)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, backend)
    check_vocabulary(tokenizer, model.config.vocab_size)

    tokens, seconds = 0, 0.0
    for sample in range(args.samples):
        if args.samples > 1:
            gap = "\n" if sample else ""
            write(f"{gap}--- sample {sample + 1}, seed {args.seed + sample} ---\n")
        started = time.perf_counter()
        tokens += _write_sample(args, model, tokenizer, prompt, args.seed + sample)
        seconds += time.perf_counter() - started
    if not args.quiet:
        speed = f", {tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
        # After the text, which goes to another stream: flush, so that the two do not mix.
        sys.stdout.flush()
        print(f"{tokens} tokens in {seconds:.1f} s{speed}; {model.backend.describe()}", file=sys.stderr)


def _write_sample(
    args: argparse.Namespace, model: MambaLM, tokenizer: Tokenizer, prompt: str, seed: int
) -> int:
    """Write one text to stdout as it is made; the number of new tokens."""
    from mamba_fast.generate import stream

    ids = tokenizer.encode(prompt).tolist()
    # A document begins after the end of the one before; that is how the model saw it in training.
    ids = ids or [tokenizer.eos_id]
    eos = [] if args.ignore_eos else [tokenizer.eos_id]
    steps = stream(
        model, ids, args.max_new_tokens, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        repetition_penalty=args.repetition_penalty, seed=seed, stop=[*eos, *args.stop],
        vocab_limit=tokenizer.vocab_size, tokenizer=tokenizer,
    )  # fmt: skip
    if not args.no_echo:
        write(prompt)
    decoder = tokenizer.stream_decoder()
    until = TextUntil(args.stop)
    tokens = 0
    for token in steps:
        tokens += 1
        write(until.push(decoder.push(int(token[0]))))
    write(until.push(decoder.flush()) + until.flush() + "\n")
    return tokens


class TextUntil:
    """Passes text on up to the first of some stops; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(stops)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> str:
        if self._stopped:
            return ""
        text = self._held + text
        found = [text.index(stop) for stop in self._stops if stop in text]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)]
        hold = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def read_prompt(text: str | None, file: str | None) -> str:
    """The prompt of the options --prompt and --prompt-file."""
    if file is None:
        return text or ""
    if file == "-":
        if sys.stdin is None:
            raise UsageError("--prompt-file - reads the prompt from stdin, which is closed")
        name, content = "stdin", sys.stdin.buffer.read()
    else:
        name, content = file, Path(file).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt in {name} is not UTF-8 (byte {error.start})") from None
