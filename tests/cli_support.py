"""What the tests of the command line share besides their fixtures, which are in conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mamba_fast

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
SMALL = ("--d-model", "16", "--n-layers", "1", "--d-state", "4", "--seq-len", "32", "--batch-size", "4")
QUICK = ("--steps", "3", "--backend", "cython", "--quiet")
ROOT = Path(mamba_fast.__file__).parents[1]


def program(*words, **options):
    """The command in a process of its own, finding this mamba_fast."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "mamba_fast", *map(str, words)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
