"""Train a small byte-level language model on the source of the running Python's own standard library.

    python examples/stdlib_demo.py --out demo-out

Real text that every machine has, so nothing is downloaded. Whole files are held out; the last line says how
many bits the model needs for a byte of them (8 is knowing nothing). The number of training steps follows from
the speed of this machine, so that the demo takes about as long everywhere. `make demo` sets everything up and
runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sysconfig
import threading
import time
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import mamba_fast as mf
from mamba_fast.data import TokenData, load_data
from mamba_fast.metrics import read_log
from mamba_fast.plot import plot_losses
from mamba_fast.tokenizer import ByteTokenizer

# Seconds, set-up included, after which everything should be over, and what of them is kept for measuring,
# sampling and drawing. Training is planned for a part of what is left, between these limits, so that it is
# finished even where the machine becomes slower after its speed was measured.
WHOLE_DEMO = 270.0
AFTERWARDS = 25.0
PART_PLANNED = 0.8
LEAST_TRAINING, MOST_TRAINING = 60.0, 150.0

HELD_OUT_ONE_IN = 20
PROMPTS = ("def main(", "import os, ", "class Node:\n    def __init__(self")
TEMPERATURE = 0.6


ROOT = Path(sysconfig.get_path("stdlib"))


def standard_library() -> list[Path]:
    """The .py files of the running Python's standard library, without its tests, sorted by path."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    files = [p for p in ROOT.rglob("*.py") if left_out.isdisjoint(p.relative_to(ROOT).parts)]
    return sorted(p for p in files if p.stat().st_size > 0)


def held_out(path: Path) -> bool:
    """Whether a file is kept for validation: decided by its name alone, so that it is the same everywhere."""
    digest = hashlib.sha256(path.relative_to(ROOT).as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def read(files: list[Path], tokenizer: ByteTokenizer) -> tuple[TokenData, TokenData]:
    """Training and validation data, by whole files; files in other encodings than UTF-8 are left out."""
    training = load_data([p for p in files if not held_out(p)], tokenizer, skip_undecodable=True)
    validation = load_data([p for p in files if held_out(p)], tokenizer, skip_undecodable=True)
    return training, validation


def seconds_per_step(config: mf.MambaConfig, training: TokenData, recipe: mf.TrainConfig) -> float:
    """How long a step of this recipe takes here, measured on a model that is thrown away."""
    model = mf.MambaLM(config)
    warm_up, trial = (recipe.replace(steps=steps, validation_fraction=0.0) for steps in (2, 10))
    mf.train(model, training, warm_up, progress=False)  # the first steps touch memory for the first time
    return mf.train(model, training, trial, progress=False).seconds / 10


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Stops a training that takes longer as Ctrl-C would: after its step, the model as it is then.

    The steps were counted out to fit; this is for a machine that becomes much slower meanwhile.
    """
    late = threading.Event()

    def stop() -> None:
        late.set()
        interrupt_main()

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        yield
    except KeyboardInterrupt:
        if not late.is_set():
            raise
        print("The machine became slower: training ends here.")
    finally:
        timer.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for the model and the picture"
    )
    parser.add_argument("--seconds", type=float, help="training time (default: what is left of a whole demo)")
    parser.add_argument(
        "--set-up-seconds", type=float, default=0.0, help="time that was spent before this script"
    )
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--n-layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--eval-windows", type=int, default=500)
    parser.add_argument("--sample-bytes", type=int, default=240)
    args = parser.parse_args()
    started = time.perf_counter() - args.set_up_seconds

    tokenizer = ByteTokenizer()
    files = standard_library()
    training, validation = read(files, tokenizer)
    print(f"{len(files)} files of {ROOT}")
    print(f"{len(training):,} bytes to learn from, {len(validation):,} held out in whole files")

    config = mf.MambaConfig(tokenizer.vocab_size, args.d_model, args.n_layers)
    model = mf.MambaLM(config)
    print(f"{model.num_parameters():,} parameters; backend {model.backend.describe()}")
    recipe = mf.TrainConfig(
        batch_size=args.batch_size, seq_len=args.seq_len, lr=4e-3, beta2=0.99, weight_decay=0.1
    )
    per_step = seconds_per_step(config, training, recipe)
    left = WHOLE_DEMO - AFTERWARDS - (time.perf_counter() - started)
    seconds = args.seconds or min(max(PART_PLANNED * left, LEAST_TRAINING), MOST_TRAINING)
    steps = max(10, int(seconds / per_step))
    speed = args.batch_size * args.seq_len / per_step
    print(
        f"{per_step * 1000:.0f} ms a step, {speed:,.0f} bytes a second: {steps} steps, {seconds:.0f} seconds"
    )

    shutil.rmtree(args.out, ignore_errors=True)
    recipe = recipe.replace(
        steps=steps, warmup_steps=steps // 20, min_lr_ratio=0.05, log_every=max(1, steps // 100),
        eval_every=max(1, steps // 8), eval_windows=32,
    )  # fmt: skip
    with at_most(max(left, 1.2 * seconds)):
        mf.train(model, training, recipe, out=args.out, tokenizer=tokenizer, validation=validation)
    model.save(args.out)
    tokenizer.save(args.out)
    picture = args.out / "loss.png"
    plot_losses(args.out / "log.jsonl", picture)

    print(f"\n--- samples, temperature {TEMPERATURE} ---")
    for seed, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt)[np.newaxis]
        written = model.generate(
            ids, args.sample_bytes, temperature=TEMPERATURE, seed=seed, stop=[tokenizer.eos_id]
        )
        print(tokenizer.decode(written[0]) + "\n---")

    last = [record for record in read_log(args.out / "log.jsonl") if record["event"] == "train"][-1]
    result = mf.evaluate(
        model, validation, tokenizer=tokenizer, seq_len=args.seq_len, batch_size=args.batch_size,
        windows=args.eval_windows,
    )  # fmt: skip
    took = time.perf_counter() - started
    print(f"loss curve: {picture}; model: {args.out}, to write with: mamba-fast generate {args.out}")
    print(f"{last['step']} steps, {last['tokens']:,} bytes seen; everything took {took:.0f} seconds")
    print(f"validation {result['bits_per_byte']:.2f} bits per byte")


if __name__ == "__main__":
    main()
