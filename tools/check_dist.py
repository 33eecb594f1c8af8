"""Checks what an sdist and wheels contain. Usage: python tools/check_dist.py dist/

Run by .ci/run and `make wheels` on the sdist and on the wheel that was built from it, and by the workflow
that builds all wheels on what it would upload. Exits with one line for each fault.
"""

from __future__ import annotations

import fnmatch
import re
import sys
import tarfile
import zipfile
from pathlib import Path

MAX_WHEEL_BYTES = 5_000_000
PACKAGE = Path(__file__).parent.parent / "mamba_fast"
ENDINGS = ("*.pyx", "*.pxi", "*.pxd", "*.h")
SOURCES = sorted(path.name for ending in ENDINGS for path in PACKAGE.glob(ending))
MODULES = sorted(path.stem for path in PACKAGE.glob("*.pyx"))

SDIST_MUST_HAVE = (
    *(f"mamba_fast/{name}" for name in SOURCES),
    "mamba_fast/py.typed",
    "mamba_fast/backends/cython.py",
    "mamba_fast/testing/conformance.py",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "tests/test_registry.py",
    "tests/data/golden/model_strong.npz",
    "bench/test_bench_ops.py",
    "examples/stdlib_demo.py",
    "docs/backends.md",
)
SDIST_MUST_NOT_HAVE = ("*.c", "*.so", "*.pyd", "*.pyc", "build/*", "gpu_plugin/*", ".venv/*", "demo-out/*")

WHEEL_MUST_HAVE = (
    *(f"mamba_fast/{name}.*" for name in MODULES),
    "mamba_fast/py.typed",
    "mamba_fast/backends/cython.py",
    "mamba_fast/testing/conformance.py",
    "mamba_fast-*.dist-info/entry_points.txt",
    "mamba_fast-*.dist-info/licenses/LICENSE",
)
WHEEL_MUST_NOT_HAVE = ("*.pyx", "*.pxi", "*.pxd", "*.h", "*.c", "tests/*", "bench/*", "examples/*")


def faults(names: list[str], must_have: tuple[str, ...], must_not_have: tuple[str, ...]) -> list[str]:
    lacking = [f"lacks {pattern}" for pattern in must_have if not fnmatch.filter(names, pattern)]
    surplus = [f"contains {name}" for pattern in must_not_have for name in fnmatch.filter(names, pattern)]
    return lacking + surplus


def check_sdist(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        # Every name begins with the folder NAME-VERSION/.
        names = [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]
    return faults(names, SDIST_MUST_HAVE, SDIST_MUST_NOT_HAVE)


def check_wheel(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        found = faults(archive.namelist(), WHEEL_MUST_HAVE, WHEEL_MUST_NOT_HAVE)
    size = path.stat().st_size
    if size > MAX_WHEEL_BYTES:
        found.append(f"is {size:,} bytes large, more than {MAX_WHEEL_BYTES:,}")
    # The stable ABI, or a free-threaded CPython, which has none before 3.15.
    if not re.search(r"-cp311-abi3-|-(cp3\d+)-\1t-", path.name):
        found.append("is tagged neither cp311-abi3 nor for a free-threaded CPython")
    return found


def main(folder: str) -> None:
    sdists, wheels = sorted(Path(folder).glob("*.tar.gz")), sorted(Path(folder).glob("*.whl"))
    if len(sdists) != 1 or not wheels:
        sys.exit(f"expected one sdist and wheels in {folder}, found {len(sdists)} and {len(wheels)}")
    found = [f"{sdists[0].name} {fault}" for fault in check_sdist(sdists[0])]
    for wheel in wheels:
        found += [f"{wheel.name} {fault}" for fault in check_wheel(wheel)]
    if found:
        sys.exit("\n".join(found))
    print(f"{' and '.join(path.name for path in (*sdists, *wheels))}: contents as they should be")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
