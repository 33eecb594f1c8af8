"""Builds the sdist and, from it, this machine's wheel, and audits it: python tools/build_wheel.py dist/

Run by `make wheels`. The folder is emptied first. On Linux the wheel gets the manylinux or musllinux tag
that its symbols allow (auditwheel); a stable-ABI wheel is checked for symbols that CPython 3.11 does not
promise (abi3audit). What the folder then holds is what would be uploaded, and tools/check_dist.py looks into
it. Nothing is shared with the checkout: pip unpacks the sdist and builds in an environment of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*words: str | Path) -> str:
    """Output of a command; a failing one ends the program with what it said."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def only(folder: Path, pattern: str) -> Path:
    """The one file in folder that matches."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"expected one {pattern} in {folder}, found {len(found)}")
    return found[0]


def build_sdist(folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT)
    return only(folder, "*.tar.gz")


def build_wheel(sdist: Path, folder: Path, python: str = sys.executable) -> Path:
    """The wheel that pip makes of the sdist, as a user without a fitting wheel would get it."""
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, sdist)
    return only(folder, "*.whl")


def audit(wheel: Path, folder: Path) -> Path:
    """Put the wheel into folder under the tag that it deserves, and say what was found."""
    if sys.platform == "linux":
        print(" ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split()))
        # Nothing but libc is linked, so that only the tag changes.
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, wheel)
        repaired = only(folder, "*.whl")
    else:
        repaired = Path(shutil.copy(wheel, folder))
    if "-abi3-" in repaired.name:
        run(sys.executable, "-m", "abi3audit", "--strict", repaired)
        print(f"abi3audit --strict: {repaired.name} keeps to the stable ABI")
    return repaired


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sdist = build_sdist(folder)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = audit(build_wheel(sdist, Path(scratch)), folder)
    for path in (sdist, wheel):
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    print(run(sys.executable, ROOT / "tools" / "check_dist.py", folder).strip())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
