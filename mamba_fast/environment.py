"""What is installed and what runs here: the report that belongs in every question and bug report.

Everything is imported where it is asked, numpy included: the report is to be had when that fails.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, TextIO

__all__ = ["environment", "show_config"]

_PACKAGES = ("safetensors", "threadpoolctl", "tqdm", "tokenizers", "matplotlib", "mamba-fast-wgpu", "wgpu")
_VARIABLES = (
    "MAMBA_FAST_", "OMP_", "OPENBLAS_", "MKL_", "BLIS_", "VECLIB_", "WGPU_", "WGPUPY_", "VK_",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """The report as a dictionary of JSON types. Never raises: a part that cannot be found out holds
    the reason instead."""
    return {
        "mamba_fast": _attempt(
            lambda: {"version": _installed("mamba-fast"), "path": os.path.dirname(__file__)}
        ),
        "python": _attempt(
            lambda: f"{platform.python_version()} ({platform.python_implementation()}) {sys.executable}"
        ),
        "platform": _attempt(platform.platform),
        "cpus": _attempt(_cpus),
        "numpy": _attempt(_numpy),
        "packages": {name: _attempt(lambda name=name: _installed(name)) for name in _PACKAGES},
        "backends": _attempt(_backends),
        "auto": _attempt(_auto),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def show_config(file: TextIO | None = None) -> None:
    """Print versions, backends (with SIMD variant, threads and adapters), numpy's BLAS and the
    environment variables that matter, to `file` or standard output.

    A part that cannot be found out is reported as such. TypeError for a `file` that is no stream."""
    if file is not None and not hasattr(file, "write"):
        raise TypeError(f"file must be a text stream such as sys.stderr, got {file!r}")
    out = sys.stdout if file is None else file
    print(format_environment(environment()), file=out)


def format_environment(report: dict[str, Any]) -> str:
    """The report for people, as `show_config` prints it."""
    lines = []
    own = report["mamba_fast"]
    lines.append(
        f"mamba-fast  {own['version']}  ({own['path']})" if isinstance(own, dict) else f"mamba-fast  {own}"
    )
    lines.append(f"python      {report['python']}")
    lines.append(f"platform    {report['platform']}")
    cpus = report["cpus"]
    if isinstance(cpus, dict):
        cpus = f"{cpus['usable']} usable of {cpus['present']}"
    lines.append(f"cpus        {cpus}")
    numpy = report["numpy"]
    lines.append(
        f"numpy       {numpy['version']}, BLAS {numpy['blas']}"
        if isinstance(numpy, dict)
        else f"numpy  {numpy}"
    )
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    lines.append(f"packages    {packages}")
    lines.append("backends")
    if isinstance(report["backends"], list):
        for row in report["backends"]:
            state = "works" if row["available"] else "does not work"
            chosen = ", chosen by auto" if row["name"] == report["auto"] else ""
            origin = f"{row['distribution']} {row['version']}"
            lines.append(f"  {row['name']:<9} {state}{chosen}: {row['detail']} [{origin}]")
            lines.extend(f"  {'':<9} {line}" for line in row["details"])
    else:
        lines.append(f"  {report['backends']}")
    if report["auto"] not in [row["name"] for row in report["backends"] if isinstance(row, dict)]:
        lines.append(f"  auto      {report['auto']}")
    variables = " ".join(f"{k}={v}" for k, v in report["variables"].items())
    lines.append(f"variables   {variables or 'none'}")
    return "\n".join(lines)


def _attempt(find_out: Callable[[], Any]) -> Any:
    try:
        return find_out()
    except Exception as error:  # the report matters most where something is broken
        return f"not found out: {type(error).__name__}: {error}"


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpus() -> dict[str, int | None]:
    present = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else present
    return {"usable": usable, "present": present}


def _numpy() -> dict[str, str]:
    import numpy

    blas = _attempt(lambda: numpy.show_config(mode="dicts")["Build Dependencies"]["blas"])
    if isinstance(blas, dict):
        blas = f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
    return {"version": numpy.__version__, "blas": blas}


def _auto() -> str:
    from mamba_fast.registry import get_backend

    return get_backend("auto").name


def _backends() -> list[dict[str, Any]]:
    from mamba_fast.registry import list_backends

    return [
        {
            "name": row.name,
            "distribution": row.distribution,
            "version": row.version,
            "available": row.available,
            "detail": row.detail,
            "details": list(row.details),
        }
        for row in list_backends()
    ]
