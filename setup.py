"""Extension modules only; everything else is in pyproject.toml.

MAMBA_FAST_NO_VARIANTS=1 leaves out the kernels for newer x86-64 processors, for a compiler that cannot
make them.
"""

import os
import platform
import shutil
import sys
import sysconfig
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

KERNELS = ["_scan", "_conv1d", "_pointwise", "_optim", "_vecmath"]

# The stable ABI of CPython 3.11 is the first that has typed memoryviews. Free-threaded builds have
# no stable ABI before 3.15.
LIMITED_API = "0x030B0000"
use_limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")

if sys.platform == "win32":
    compile_args = ["/O2"]
    variants = {"v3": ["/arch:AVX2"], "v4": ["/arch:AVX512"]}
else:
    # No -ffast-math and nothing of its kind: it would delete the NaN guard and flush subnormals for
    # the whole process. The three switches only say that nobody reads errno or the FPU's exception
    # flags, and allow a*b+c in one rounding; loops vectorise no worse for that.
    compile_args = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
    variants = {
        "v3": ["-march=x86-64-v3"],
        "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    }

# Each variant is a module of its own, so that no code for a newer processor runs where the dispatcher
# (backends/_dispatch.py) did not ask for it. macOS on x86-64 is left at the baseline: its wheels may run
# under emulation on arm64, where AVX is not to be had.
if (
    platform.machine().lower() not in ("x86_64", "amd64")
    or sys.platform == "darwin"
    or os.environ.get("MAMBA_FAST_NO_VARIANTS") == "1"
):
    variants = {}

# The code behind memoryviews, once for all modules instead of once in each: it is most of what there is
# to compile.
SHARED = "mamba_fast._cyutility"

# What a module is made of beside its .pyx: setuptools rebuilds what is older than any of these.
SOURCES = sorted(path for ending in ("pyx", "pxi", "pxd", "h") for path in glob(f"mamba_fast/*.{ending}"))

macros = [("Py_LIMITED_API", LIMITED_API)] if use_limited_api else []


def extension(name, extra_args=(), extra_macros=()):
    return Extension(
        f"mamba_fast.{name}",
        [f"mamba_fast/{name}.pyx"],
        depends=SOURCES,
        include_dirs=["mamba_fast"],
        define_macros=[*macros, *extra_macros],
        extra_compile_args=[*compile_args, *extra_args],
        py_limited_api=use_limited_api,
    )


extensions = [
    Extension(
        SHARED,
        ["mamba_fast/_cyutility.c"],
        define_macros=macros,
        extra_compile_args=compile_args,
        py_limited_api=use_limited_api,
    ),
    extension("_cpu", extra_macros=[("MAMBA_FAST_VARIANTS", str(int(bool(variants))))]),
    extension("_threads"),
    extension("_gemm"),
    extension("_operands"),
    *(extension(name) for name in KERNELS),
    *(extension(f"{name}_{variant}", args) for name in KERNELS for variant, args in variants.items()),
]

# What pip asks for before it builds, and the sdist, take the sources as they are.
WITHOUT_COMPILING = {"sdist", "egg_info", "dist_info", "clean", "--version", "--name"}
compiling = not WITHOUT_COMPILING.intersection(sys.argv)

if compiling and sys.platform != "win32":
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        sys.exit(
            f"error: building mamba-fast from source needs a C compiler, and {compiler!r} is not on PATH: "
            "install one (Debian, Ubuntu: apt install gcc python3-dev; macOS: xcode-select --install), "
            "set CC, or install a wheel"
        )

jobs = os.cpu_count() or 1
if compiling:
    extensions = cythonize(
        extensions,
        build_dir="build/cython",
        nthreads=jobs,
        shared_utility_qualified_name=SHARED,
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "freethreading_compatible": True,
        },
    )

setup(
    ext_modules=extensions,
    options={
        "build_ext": {"parallel": jobs},
        **({"bdist_wheel": {"py_limited_api": "cp311"}} if use_limited_api else {}),
    },
)
