"""Which compiled kernels run: one of the variants of each, chosen by what the processor can do.

The same `.pyx` is compiled for several instruction sets (`setup.py`). The fastest variant that both
this build and this machine have is taken; the environment variable MAMBA_FAST_CPU forces one. A
variant that should load and does not is an error, never a silent step down to a slower one.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import NamedTuple

from mamba_fast.backend import BackendUnavailableError

__all__ = ["Kernels", "load_kernels", "runnable_variants"]


class Kernels(NamedTuple):
    """The compiled modules of one variant; the pool (`threads`), the matrix product on it (`gemm`)
    and the check of operands (`operands`) have only one."""

    variant: str
    threads: ModuleType
    gemm: ModuleType
    operands: ModuleType
    scan: ModuleType
    conv1d: ModuleType
    pointwise: ModuleType
    optim: ModuleType


def runnable_variants() -> tuple[str, ...]:
    """The variants that this build has and this machine runs, slowest first: of "baseline", "v3", "v4"."""
    cpu = _module("_cpu")
    return tuple(v for v in cpu.built_variants() if v in cpu.supported_variants())


def load_kernels() -> Kernels:
    """The kernels of the variant that MAMBA_FAST_CPU names, or of the fastest runnable one.

    Raises BackendUnavailableError where a module is missing or MAMBA_FAST_CPU names a variant that
    cannot run here.
    """
    runnable = runnable_variants()
    variant = os.environ.get("MAMBA_FAST_CPU", "").strip() or runnable[-1]
    if variant not in runnable:
        raise BackendUnavailableError(
            f"MAMBA_FAST_CPU={variant} cannot run here; this machine and build have {', '.join(runnable)}"
        )
    suffix = "" if variant == "baseline" else f"_{variant}"
    return Kernels(
        variant,
        _module("_threads"),
        _module("_gemm"),
        _module("_operands"),
        *(_module(f"{name}{suffix}") for name in ("_scan", "_conv1d", "_pointwise", "_optim")),
    )


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"mamba_fast.{name}")
    except ImportError as error:
        raise BackendUnavailableError(
            f"the compiled module mamba_fast.{name} cannot be imported ({error}); reinstall mamba-fast for "
            "this Python, or in a checkout run: python setup.py build_ext --inplace"
        ) from error
