"""Extension modules only; everything else is in pyproject.toml."""

import sys
import sysconfig

from Cython.Build import cythonize
from setuptools import Extension, setup

MODULES = ["_threads", "_scan", "_conv1d", "_pointwise", "_optim"]

# The stable ABI of CPython 3.11 is the first that has typed memoryviews. Free-threaded builds have
# no stable ABI before 3.15.
LIMITED_API = "0x030B0000"
use_limited_api = not sysconfig.get_config_var("Py_GIL_DISABLED")

if sys.platform == "win32":
    compile_args = ["/O2"]
else:
    # No -ffast-math and nothing of its kind: it would delete the NaN guard and flush subnormals for
    # the whole process. The three switches only say that nobody reads errno or the FPU's exception
    # flags, and allow a*b+c in one rounding; loops vectorise no worse for that.
    compile_args = ["-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]

macros = [("Py_LIMITED_API", LIMITED_API)] if use_limited_api else []

extensions = [
    Extension(
        f"mamba_fast.{name}",
        [f"mamba_fast/{name}.pyx"],
        depends=["mamba_fast/_vecmath.h", "mamba_fast/_threads.pxd"],
        include_dirs=["mamba_fast"],
        define_macros=macros,
        extra_compile_args=compile_args,
        py_limited_api=use_limited_api,
    )
    for name in MODULES
]

setup(
    ext_modules=cythonize(
        extensions,
        build_dir="build/cython",
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "freethreading_compatible": True,
        },
    ),
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if use_limited_api else {},
)
