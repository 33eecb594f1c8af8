"""The demo, with a model and a time that are next to nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "stdlib_demo.py"
TINY = (
    "--seconds", "0.5", "--d-model", "16", "--n-layers", "1", "--batch-size", "2", "--seq-len", "32",
    "--eval-windows", "4", "--sample-bytes", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[list[str], Path]:
    """Lines that the demo printed, and the folder that it made."""
    out = tmp_path_factory.mktemp("demo") / "out"
    # From the checkout, where the package is found whether it is installed or not.
    run = f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    code = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); {run}"
    command = [sys.executable, "-c", code, "--out", str(out), *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), out


def test_the_demo_ends_with_its_bits_per_byte(demo):
    lines, _ = demo
    match = re.fullmatch(r"validation (\d+\.\d\d) bits per byte", lines[-1])
    assert match
    # A model of this size has learnt hardly anything; but 8 is knowing nothing, and 0 would be a leak.
    assert 2.0 < float(match[1]) < 8.1


def test_the_demo_prints_samples_that_begin_with_their_prompts(demo):
    lines, _ = demo
    printed = "\n".join(lines)
    for prompt in ("def main(", "import os, ", "class Node:\n    def __init__(self"):
        assert prompt in printed
    assert "--- samples, temperature 0.6 ---" in lines


def test_the_demo_leaves_a_model_and_a_picture(demo):
    _, out = demo
    assert (out / "model.safetensors").exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_holds_out_whole_files_and_the_same_ones_each_time(demo, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import stdlib_demo

    files = stdlib_demo.standard_library()
    kept = [path for path in files if stdlib_demo.held_out(path)]
    assert len(files) / 40 < len(kept) < len(files) / 10
    assert kept == [path for path in reversed(files) if stdlib_demo.held_out(path)][::-1]
    assert not [path for path in files if {"site-packages", "test"} & set(path.parts)]
