"""`mamba-fast train`: learn from text, go on with a run, or train a model further."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_fast._cli.data import add_data_options, read_data, read_texts
from mamba_fast._cli.options import (
    FailedError,
    UsageError,
    add_common_options,
    add_config_options,
    choose_backend,
    given_fields,
    model_folder,
    path,
    write,
)
from mamba_fast.config import MambaConfig, TrainConfig, shown

if TYPE_CHECKING:
    from mamba_fast.backend import Backend
    from mamba_fast.model import MambaLM
    from mamba_fast.tokenizer import Tokenizer

NAME = "train"
SUMMARY = "train a model on text"
USAGE = "--data PATH [PATH ...] --out DIR [options]"
DESCRIPTION = """\
Train a Mamba language model on your text and save it in a folder, from which
`mamba-fast generate` writes and `mamba-fast eval` measures.

Data may be text files (UTF-8), folders of them, .jsonl files with a text field, or token files
(.bin, .npy; may be larger than memory). Part of it is held out to measure progress.

The folder gets config.json and model.safetensors (the model), the tokenizer, log.jsonl, loss.png
(with matplotlib installed) and checkpoints/. Ctrl-C or SIGTERM stops after the step and saves a
checkpoint; --resume goes on from the newest one exactly as if the run had never stopped.
"""
EPILOG = """\
examples:
  mamba-fast train --data book.txt --out my_model
      a small byte-level model, one pass over the book
  mamba-fast train --data src/ --glob "**/*.py" --out coder --lr 2e-3 --epochs 3 --batch-size 16
      all Python files under src/, three passes
  mamba-fast train --data texts.jsonl --tokenizer bpe:8000 --out my_model --d-model 256 --n-layers 8
      learn a vocabulary of 8,000 tokens first, and a larger model
  mamba-fast train --data book.txt --out my_model --resume
      go on with a run that was stopped; --epochs or --steps may be larger than before
  mamba-fast train --data letters.txt --init-from my_model --out my_letters --lr 1e-4
      train a finished model further, on other text
"""

# A model that learns something in minutes on two cores.
MODEL_DEFAULTS = {"d_model": 128, "n_layers": 4}

MODEL_HELP = {
    "vocab_size": "size of the vocabulary (default: the tokenizer's)",
    "d_model": "width of the model",
    "n_layers": "number of layers",
    "d_state": "states of each channel: the memory of the scan",
    "d_conv": "width of the convolution, in tokens",
    "expand": "width inside a layer, as a multiple of d-model",
    "d_inner": "width inside a layer, instead of --expand (default: expand * d-model)",
    "dt_rank": "rank of the step size's projection (default: auto, d-model / 16)",
    "discretization": "zoh (exact) or euler (as published checkpoints)",
    "norm_eps": "added to the variance in RMSNorm",
    "tie_embeddings": "use the embedding as the output matrix too",
    "use_bias": "biases on the projections into and out of a layer",
    "use_conv_bias": "bias on the convolution",
    "use_x_proj_bias": "bias on the projection to step size, B and C",
    "use_lm_head_bias": "bias on the output, zero unless trained",
    "train_lm_head_bias": "train the output's bias",
    "init": "initial weights: mamba, or original (the original project's)",
}

TRAIN_HELP = {
    "steps": "optimizer steps to take in all (default: as --epochs says)",
    "epochs": "passes over the data, where --steps is not given",
    "batch_size": "windows computed at once; memory grows with it",
    "seq_len": "tokens in a window; memory grows with it",
    "grad_accumulation": "batches to one step: a larger batch without its memory",
    "lr": "learning rate; small models like 1e-3 to 3e-3",
    "schedule": "of the learning rate: cosine (falls to the end) or constant",
    "warmup_steps": "steps over which the learning rate rises from 0",
    "min_lr_ratio": "where the cosine ends, as a share of --lr",
    "beta1": "AdamW's beta1",
    "beta2": "AdamW's beta2",
    "eps": "AdamW's epsilon",
    "weight_decay": "AdamW's weight decay; vectors and A_log have none",
    "max_grad_norm": "gradients are clipped to this norm; 0: never",
    "max_delta": "most that a weight may change in a step; 0: any (default: 0.05 with --wsla, else 0)",
    "wsla": "train only the rows that make step size, B and C",
    "activation_checkpointing": "compute some things twice to save memory",
    "packed": "begin each document with an empty state inside a window",
    "shuffle": "take the windows in random order",
    "seed": "of initial weights, order and held-out documents",
    "validation_fraction": "share of the data held out to measure progress; 0: none",
    "eval_every": "steps between measurements; 0: at the end only",
    "eval_windows": "windows of one measurement, spread evenly; 0: all",
    "log_every": "steps between lines of the log",
    "checkpoint_every": "steps between checkpoints; 0: at the end and on Ctrl-C only",
    "keep_checkpoints": "how many checkpoints are kept; 0: all",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=path, required=True, metavar="DIR", help="folder for the model, its log and checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument(
        "--init-from",
        type=path,
        metavar="DIR",
        help="start from the model in this folder (default: from random weights)",
    )
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", nargs="+", type=path, required=True, metavar="PATH", help="files or folders to learn from"
    )
    data.add_argument(
        "--validation",
        nargs="+",
        type=path,
        metavar="PATH",
        help="measure progress on these (default: held out of --data)",
    )
    data.add_argument(
        "--tokenizer", type=path, metavar="NAME",
        help="bytes (no vocabulary), bpe:SIZE (learn one of SIZE tokens from the data), or a Hugging Face "
        "tokenizer.json (default: bytes, or the model's with --resume and --init-from)",
    )  # fmt: skip
    data.add_argument(
        "--eos-token",
        metavar="TOKEN",
        help="end-of-text token of a tokenizer.json (default: by its usual names)",
    )
    add_data_options(data)
    training = parser.add_argument_group("training")
    add_config_options(training, TrainConfig, TRAIN_HELP)
    model = parser.add_argument_group("model (from random weights only)")
    add_config_options(model, MambaConfig, MODEL_HELP, defaults=MODEL_DEFAULTS)
    add_common_options(parser)


def run(args: argparse.Namespace) -> None:
    from mamba_fast.train import TrainingDivergedError, train

    out = Path(args.out)
    origin, config = _plan(args, out)
    backend = choose_backend(args)  # one that is not there is known before data is read
    tokenizer, data = _data(args, origin)
    model = _model(args, origin, tokenizer, config, backend)
    validation = None
    if args.validation is not None:
        validation = read_data(args, args.validation, tokenizer)
    if not args.quiet:
        print(
            f"{model.num_parameters():,} parameters, {len(data):,} tokens in {data.n_documents:,} documents; "
            f"{backend.describe()}",
            file=sys.stderr,
        )
        if tokenizer is None:
            print(
                "no tokenizer is saved with this model: `mamba-fast generate` needs one (--tokenizer NAME, "
                "the one that made the ids); in Python, model.generate works on ids",
                file=sys.stderr,
            )
    try:
        result = train(
            model, data, config, out=out, resume=args.resume, tokenizer=tokenizer, validation=validation,
            progress=not args.quiet,
        )  # fmt: skip
    except TrainingDivergedError as error:
        raise FailedError(str(error)) from error
    except KeyboardInterrupt as stop:
        if stop.args:
            stop.args = (f"{stop.args[0]} (the same command with --resume)",)
        raise
    if args.resume and not result.losses:
        write(f"already finished: {result.steps} steps, {result.tokens:,} tokens\n")
    else:
        # The tokens of a resumed run are not all of this call's seconds.
        timed = result.seconds > 0 and not args.resume
        speed = f", {result.tokens / result.seconds:,.0f} tokens/s" if timed else ""
        write(f"{result.steps} steps, {result.tokens:,} tokens in {result.seconds:.0f} s{speed}\n")
    if result.skipped:
        write(f"{result.skipped} steps skipped: their gradients were not finite\n")
    if result.validation_loss is not None:
        loss = result.validation_loss
        write(f"validation loss {loss:.4f} (perplexity {math.exp(min(loss, 700.0)):.2f} per token)\n")
    write(f"model saved in {out}\n")


def _plan(args: argparse.Namespace, out: Path) -> tuple[Path | None, TrainConfig]:
    """Where weights and tokenizer come from, if from somewhere, and how to train; all that can be
    checked before data is read."""
    from mamba_fast.training_state import check_fresh, find_checkpoint, run_config

    given = given_fields(args, TrainConfig)
    shape = given_fields(args, MambaConfig)
    if args.resume:
        if args.init_from is not None:
            raise UsageError("--resume goes on with the run in --out; it does not go with --init-from")
        checkpoint = find_checkpoint(True, out)
        return checkpoint, run_config(checkpoint).replace(**given)
    check_fresh(out, 0)
    config = TrainConfig(**given)
    if args.init_from is None:
        MambaConfig(**{"vocab_size": 1, **MODEL_DEFAULTS, **shape})
        return None, config
    if shape:
        flag = "--" + next(iter(shape)).replace("_", "-")
        raise UsageError(f"{flag} is for a new model; the one in {args.init_from} has its own")
    return Path(model_folder(args.init_from)), config


def _data(args: argparse.Namespace, origin: Path | None) -> tuple[Tokenizer | None, Any]:
    """The tokenizer (None: token files of an unknown one) and the data as tokens."""
    from mamba_fast.sources import is_token_file
    from mamba_fast.tokenizer import ByteTokenizer, HFTokenizer, check_bpe_size, load_tokenizer, train_bpe

    name = args.tokenizer
    if args.eos_token is not None and (name is None or name == "bytes" or name.startswith("bpe:")):
        raise UsageError("--eos-token is for a tokenizer.json: give one with --tokenizer")
    if name is None and origin is not None:
        try:
            tokenizer: Tokenizer | None = load_tokenizer(origin)
        except FileNotFoundError:  # a model of token files
            tokenizer = None
    elif name is None and all(map(is_token_file, args.data)):
        if not hasattr(args, "vocab_size"):
            raise UsageError("token files need --vocab-size, or --tokenizer: the one that made them")
        tokenizer = None
    elif name is None:
        tokenizer = ByteTokenizer()
    elif name.startswith("bpe:"):
        if origin is not None:
            raise UsageError(
                f"--tokenizer {name} would not fit the model in {origin}, which has its vocabulary"
            )
        size = name.removeprefix("bpe:")
        if not size.isdecimal() or len(size) > 1000:  # of which Python makes no integer
            raise UsageError(f"--tokenizer bpe:SIZE needs a number of tokens, got {shown(name)}")
        try:
            vocab_size = check_bpe_size(int(size))  # before the texts are read
        except ValueError as error:
            raise UsageError(f"--tokenizer bpe:SIZE: {str(error).replace('vocab_size', 'SIZE')}") from None
        tokenizer = train_bpe(read_texts(args, args.data), vocab_size, progress=not args.quiet)
    elif args.eos_token is not None:
        tokenizer = HFTokenizer(name, eos_token=args.eos_token)
    else:
        if not Path(name).exists() and name != ByteTokenizer.kind:
            raise UsageError(
                f"no tokenizer {shown(name)}: --tokenizer takes bytes, bpe:SIZE (learns one of SIZE tokens), "
                "a tokenizer.json or a folder with one"
            )
        tokenizer = load_tokenizer(name)
    return tokenizer, read_data(args, args.data, tokenizer)


def _model(
    args: argparse.Namespace,
    origin: Path | None,
    tokenizer: Tokenizer | None,
    config: TrainConfig,
    backend: Backend,
) -> MambaLM:
    from mamba_fast.model import MambaLM, load_model

    shape = given_fields(args, MambaConfig)
    if origin is None:
        vocabulary = {} if tokenizer is None else {"vocab_size": tokenizer.vocab_size}
        return MambaLM(MambaConfig(**{**vocabulary, **MODEL_DEFAULTS, **shape}), backend, seed=config.seed)
    model = load_model(origin, backend)
    for name, value in shape.items():
        has = getattr(model.config, name)
        if value not in (has, "auto"):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value} contradicts the run in {args.out}, whose model has {has}")
    return model
