"""Compiles the generated C for other systems. Usage: python tools/check_cross.py [TARGET ...]

Run by `make check-cross`. It finds code that only one compiler, processor or C library takes; nothing is
linked or run. The compiler is clang with the headers of each system's C library, from the package ziglang.
CPython's headers are those of the interpreter that runs this, in the stable ABI; Windows gets a pyconfig.h
with its own sizes. The last target is free-threaded CPython: from 3.13 on the headers hold both
builds, and the code outside the stable ABI is compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
STABLE_ABI = "-DPy_LIMITED_API=0x030B0000"
FREE_THREADED = "free-threaded"
TARGETS = (
    "aarch64-linux-gnu.2.28",
    "aarch64-linux-musl",
    "x86_64-linux-musl",
    "aarch64-macos",
    "x86_64-macos",
    "x86_64-windows-gnu",
    FREE_THREADED,
)
# The flags of setup.py.
FLAGS = ("-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")

# What CPython's headers read of the pyconfig.h that its Windows build has; `long` has 32 bits there.
WINDOWS_CONFIG = """
#define MS_WINDOWS
#define MS_WIN64
#define NT_THREADS
#define HAVE_DECLSPEC_DLL
#define HAVE_SSIZE_T 1
#define HAVE_STDINT_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_WCHAR_H 1
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
"""


def generated(scratch: Path) -> list[Path]:
    """The C of the baseline modules, made by setup.py from a copy of the sources."""
    copy = scratch / "copy"
    shutil.copytree(ROOT / "mamba_fast", copy / "mamba_fast", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    shutil.copy(ROOT / "setup.py", copy)
    environment = {**os.environ, "MAMBA_FAST_NO_VARIANTS": "1"}
    words = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", "lib"]
    subprocess.run(words, cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=True)
    return sorted(copy.glob("build/cython/mamba_fast/*.c"))


def headers(target: str, scratch: Path) -> Path:
    here = Path(sysconfig.get_path("include"))
    if "windows" not in target:
        return here
    folder = scratch / "windows"
    shutil.copytree(here, folder, dirs_exist_ok=True)
    (folder / "pyconfig.h").write_text(WINDOWS_CONFIG, encoding="ascii")
    return folder


def compile_all(target: str, sources: list[Path], scratch: Path) -> int:
    """The number of modules that compile; what the compiler says of others goes to stderr."""
    chosen = ["-DPy_GIL_DISABLED=1"] if target == FREE_THREADED else ["-target", target, STABLE_ABI]
    include = [f"-I{ROOT / 'mamba_fast'}", f"-I{headers(target, scratch)}"]
    done = 0
    for source in sources:
        words = [sys.executable, "-m", "ziglang", "cc", *chosen, *FLAGS, *include, "-c", str(source)]
        done += subprocess.run([*words, "-o", str(scratch / "out.o")], check=False).returncode == 0
    return done


def main(targets: list[str]) -> None:
    failed = False
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        sources = generated(scratch)
        if not sources:
            sys.exit("setup.py generated no C")
        for target in targets:
            if target == FREE_THREADED and sys.version_info < (3, 13):
                print(f"{target}: not tried, this is Python {sys.version.split()[0]} and it needs 3.13")
                continue
            done = compile_all(target, sources, scratch)
            failed |= done < len(sources)
            print(f"{target}: {done} of {len(sources)} modules compile", flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
