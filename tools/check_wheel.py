"""Uses the wheel in clean environments. Usage: python tools/check_wheel.py dist/ [PYTHON ...]

Run by `make check-wheels` on what `make wheels` made. For every CPython from 3.11 on that this machine has
(or those given), once with the oldest numpy that mamba-fast allows and that has a wheel for it, once with
the newest: a fresh environment with the wheel, tools/smoke_test.py with nothing else on PATH, and the quick
tests of what depends on the interpreter or on numpy (TESTS), from an sdist unpacked without the package's
sources. Last comes a wheel made of the sdist with MAMBA_FAST_NO_VARIANTS=1, which must hold the baseline
alone, and work.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from build_wheel import build_wheel, only

# What `mamba-fast` asks for, or the first version with a wheel where that is newer. The newest where a
# CPython is not in the list.
OLDEST_NUMPY = {(3, 11): "1.26.0", (3, 12): "1.26.0", (3, 13): "2.1.0", (3, 14): "2.3.2"}
NEWEST = "newest"
IDENTITY = "import sys; print(*sys.version_info[:3], sys.implementation.name, sys.base_prefix, sep='|')"
# The compiled modules, in every variant that the machine runs, and what reads or writes numpy's arrays.
TESTS = (
    "test_conformance_cython.py",
    "test_cython_*.py",
    "test_checkpoint.py",
    "test_dispatch.py",
    "test_functional*.py",
    "test_generate.py",
    "test_model_golden.py",
    "test_package.py",
    "test_resume.py",
    "test_vecmath.py",
)
TEST_PACKAGES = ("pytest>=8", "pytest-benchmark>=5", "hypothesis>=6")


def interpreters() -> list[tuple[tuple[int, ...], str]]:
    """(version, path) of each CPython from 3.11 on that is on PATH, under pyenv, or in the usual folders."""
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    folders += [str(folder) for folder in sorted(pyenv.glob("*/bin"))]
    found = {}
    for folder in folders:
        for path in sorted(Path(folder).glob("python3*")):
            if not re.fullmatch(r"python3(\.\d+)?t?(\.exe)?", path.name):
                continue
            # pyenv's shims stand for an interpreter that is found in its own folder, or for none.
            done = subprocess.run([path, "-I", "-c", IDENTITY], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                continue
            major, minor, micro, name, prefix = done.stdout.strip().split("|")
            version = (int(major), int(minor), int(micro))
            if name == "cpython" and version >= (3, 11):
                found.setdefault((version, prefix), str(path))
    return [(version, path) for (version, _), path in sorted(found.items())]


def run(words: list[str | Path], **options) -> str:
    """Output of a command; a failing one ends the program with the end of what it said."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{said}")
    return done.stdout


def try_wheel(wheel: Path, python: str, numpy: str, tests: Path, scratch: Path, check: str = "") -> str:
    """One line on how the wheel did with this interpreter and this numpy."""
    started = time.monotonic()
    venv = scratch / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    run([python, "-m", "venv", venv])
    inside = venv / ("Scripts" if sys.platform == "win32" else "bin")
    program = inside / "python"
    wanted = "numpy" if numpy == NEWEST else f"numpy=={numpy}"
    pip = [program, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    # No source may be compiled instead of a wheel.
    run([*pip, "--only-binary", ":all:", wheel, wanted, *TEST_PACKAGES])
    # Away from every checkout, and without a compiler.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MAMBA_FAST_"))}
    shutil.copy(Path(__file__).with_name("smoke_test.py"), scratch)
    run([program, "-I", "smoke_test.py"], cwd=scratch, env={**clean, "PATH": str(inside)})
    if check:
        run([program, "-I", "-c", check], cwd=scratch, env=clean)
    told = "import numpy, mamba_fast; print(numpy.__version__, mamba_fast.__file__)"
    version, where = run([program, "-I", "-c", told]).split(maxsplit=1)
    if not Path(where.strip()).is_relative_to(venv):
        sys.exit(f"the tests would run {where.strip()}, not the wheel")
    # -P: the folder of the tests' configuration must not come before the installed package.
    files = [path for pattern in TESTS for path in sorted((tests / "tests").glob(pattern))]
    words = [program, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
    outcome = run(words, cwd=tests, env=clean).strip().splitlines()[-1]
    return f"numpy {version:<7} smoke test passed; {outcome} (all in {time.monotonic() - started:.0f} s)"


def main(folder: Path, pythons: list[str]) -> None:
    # A shell's background jobs ignore Ctrl-C; their children would too, and with them the tests of it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sdist, wheel = only(folder, "*.tar.gz"), only(folder, "*.whl")
    found = interpreters()
    if pythons:
        found = []
        for python in pythons:
            version = run([python, "-I", "-c", IDENTITY]).split("|")[:3]
            found.append((tuple(int(part) for part in version), python))
    if not found:
        sys.exit("no CPython from 3.11 on was found")
    print(f"{wheel.name}")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name).resolve()
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch / "sdist", filter="data")
        tests = only(scratch / "sdist", "*")
        shutil.rmtree(tests / "mamba_fast")
        for version, python in found:
            oldest = OLDEST_NUMPY.get(version[:2], NEWEST)
            for numpy in dict.fromkeys((oldest, NEWEST)):
                outcome = try_wheel(wheel, python, numpy, tests, scratch)
                print(f"  {python} {'.'.join(map(str, version))}: {outcome}", flush=True)

        python = found[-1][1]
        os.environ["MAMBA_FAST_NO_VARIANTS"] = "1"
        plain = build_wheel(sdist, scratch / "plain", sys.executable)
        check = "from mamba_fast._cpu import built_variants as b; assert b() == ('baseline',), b()"
        print(f"{plain.name} built with MAMBA_FAST_NO_VARIANTS=1: {plain.stat().st_size:,} bytes")
        print(f"  {python}: {try_wheel(plain, python, NEWEST, tests, scratch, check)}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
