"""What a person does first with an installed mamba-fast: info, train, generate, resume, evaluate.

Run by .ci/run with the wheel installed, away from the checkout and with no compiler on PATH. Uses the
command that the wheel installed, so that its entry point is tested too.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import mamba_fast

CHECKOUT_FILES = ("setup.py", "_scan.pyx")


def command(*words: str) -> str:
    """Output of `mamba-fast WORDS`; a failing command ends the test with what it said."""
    program = shutil.which("mamba-fast")
    assert program, "the wheel installed no command mamba-fast on PATH"
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise SystemExit(f"mamba-fast {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def main() -> None:
    package = Path(mamba_fast.__file__).parent
    assert "site-packages" in package.parts, f"mamba_fast comes from {package}, not from the wheel"
    assert not list(package.glob("*.pyx")), "the wheel has sources of kernels"
    assert (package / "py.typed").exists()
    for compiler in ("cc", "gcc", "clang"):
        assert shutil.which(compiler) is None, f"{compiler} is on PATH: the test would prove nothing"

    info = command("info")
    assert "cython" in info, info
    with tempfile.TemporaryDirectory() as folder:
        text, model = Path(folder, "text.txt"), str(Path(folder, "model"))
        text.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
        size = ("--d-model", "16", "--n-layers", "1", "--seq-len", "32", "--batch-size", "4")
        command("train", "--data", str(text), "--out", model, *size, "--steps", "20", "--quiet")
        written = command("generate", model, "--prompt", "the quick", "--max-new-tokens", "20")
        assert written.startswith("the quick"), written
        assert len(written) > len("the quick\n"), written
        assert "bits per byte" in command("eval", model, "--data", str(text)).lower()
        again = mamba_fast.load_model(model)
        again.save(Path(folder, "copy"))
        assert again.num_parameters() == mamba_fast.load_model(Path(folder, "copy")).num_parameters()
    print(f"mamba-fast {mamba_fast.__version__} from the wheel trains, writes, evaluates, saves and loads")


if __name__ == "__main__":
    main()
