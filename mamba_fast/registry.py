"""Finding backends: built-in ones by name, others through the entry-point group `mamba_fast.backends`.

A distribution adds a backend by naming a factory in its metadata; nothing is imported until that
backend is asked for:

    [project.entry-points."mamba_fast.backends"]
    cuda = "mamba_fast_cuda:create_backend"

`create_backend(**options)` returns a `mamba_fast.backend.Backend`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from mamba_fast.backend import (
    API_VERSION,
    Backend,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
)

__all__ = ["GROUP", "BackendInfo", "get_backend", "list_backends"]

GROUP = "mamba_fast.backends"

# Named as strings: nothing else in the package may name a module of `backends`.
_BUILT_IN = {
    "cython": "mamba_fast.backends.cython:create_backend",
    "oracle": "mamba_fast.backends.oracle:create_backend",
}

# How to get a backend that is known but not installed.
_KNOWN = {"wgpu": "pip install mamba-fast-wgpu (from a checkout: pip install ./gpu_plugin)"}

_log = logging.getLogger("mamba_fast")


@dataclass(frozen=True)
class BackendInfo:
    """One row of `list_backends()`."""

    name: str
    distribution: str
    version: str
    available: bool
    detail: str
    """`Backend.describe()`, or why it cannot run."""


def get_backend(backend: str | Backend, **options: Any) -> Backend:
    """A backend by name, or the backend itself if an object is given.

    Parameters
    ----------
    backend
        "cython", "oracle", "wgpu", the name of any installed plugin, "auto", or a `Backend`.
        "auto" takes the fastest that works: a plugin on a real GPU before the CPU kernels; the
        choice is logged (logger `mamba_fast`, level INFO) and `describe()` names it.
    options
        passed to the backend's factory, e.g. `threads=2` for "cython". None may be given with an
        object or with "auto".

    Raises
    ------
    BackendNotFoundError
        no backend of that name is installed
    BackendLoadError
        it is installed but cannot be imported, or was written for another major API version, or two
        distributions claim the name
    BackendUnavailableError
        it imports but cannot run here
    """
    if isinstance(backend, Backend):
        if options:
            raise TypeError(f"options {sorted(options)} cannot be applied to a backend that exists already")
        return backend
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name or a Backend object, got {type(backend).__name__}")
    if backend == "auto":
        if options:
            raise TypeError(
                f"options {sorted(options)} need a named backend: 'auto' does not know which one they are for"
            )
        return _choose()
    return _create(backend, options)


def list_backends() -> list[BackendInfo]:
    """Every backend that is installed, working or not. Never raises."""
    rows = []
    for name in [*_BUILT_IN, *sorted({e.name for e in _entry_points()} - _BUILT_IN.keys())]:
        distribution, version = _origin(name)
        try:
            detail, available = _create(name, {}).describe(), True
        except BackendError as error:
            detail, available = str(error), False
        rows.append(BackendInfo(name, distribution, version, available, detail))
    return rows


def _entry_points() -> Iterable[metadata.EntryPoint]:
    return metadata.entry_points(group=GROUP)


def _origin(name: str) -> tuple[str, str]:
    """Distribution and version that a backend comes from."""
    if name in _BUILT_IN:
        return "mamba-fast", _version("mamba-fast")
    dists = sorted({e.dist.name for e in _entry_points() if e.name == name and e.dist is not None})
    return ", ".join(dists), ", ".join(_version(d) for d in dists)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def _installed() -> str:
    return ", ".join(sorted({*_BUILT_IN, *(e.name for e in _entry_points())}))


def _create(name: str, options: dict[str, Any]) -> Backend:
    found = [e for e in _entry_points() if e.name == name]
    if name in _BUILT_IN:
        if found:
            raise BackendLoadError(
                f"distribution {_origin_of(found)} registers the name {name!r} of a built-in backend: uninstall it"
            )
        target, origin = _BUILT_IN[name], "mamba-fast"
    elif not found:
        hint = f"; install it with: {_KNOWN[name]}" if name in _KNOWN else ""
        raise BackendNotFoundError(f"no backend named {name!r}; installed are {_installed()}{hint}")
    elif len({e.value for e in found} | {e.dist.name for e in found if e.dist}) > 2:
        raise BackendLoadError(f"backend name {name!r} is claimed by {_origin_of(found)}: uninstall all but one")
    else:
        target, origin = found[0].value, _origin_of(found)
    backend = _load(name, target, origin)(**options)
    if not isinstance(backend, Backend):
        raise BackendLoadError(
            f"backend {name!r} from {origin}: {target} returned {type(backend).__name__}, not a mamba_fast.backend.Backend"
        )
    if backend.api_version[0] != API_VERSION[0]:
        raise BackendLoadError(
            f"backend {name!r} from {origin} is for backend API {backend.api_version[0]}.x, this mamba_fast has "
            f"{API_VERSION[0]}.{API_VERSION[1]}: upgrade the older of the two"
        )
    return backend


def _origin_of(entry_points: Iterable[metadata.EntryPoint]) -> str:
    return " and ".join(sorted({e.dist.name if e.dist else e.value for e in entry_points}))


def _load(name: str, target: str, origin: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except BackendError:
        raise
    except Exception as error:  # a broken plugin can fail in any way; it must not look like ours
        raise BackendLoadError(
            f"backend {name!r} from distribution {origin} could not be imported: {type(error).__name__}: {error}; "
            f"reinstall {origin}"
        ) from error


def _choose() -> Backend:
    """The backend that "auto" stands for."""
    # A plugin says itself whether it beats the CPU kernels here: a software adapter does not.
    for name in sorted({e.name for e in _entry_points()} - _BUILT_IN.keys()):
        try:
            backend = _create(name, {})
        except BackendError as error:
            _log.info("auto: %s passed over: %s", name, error)
            continue
        if getattr(backend, "preferred_to_cpu", False):
            _log.info("auto: using %s (%s)", name, backend.describe())
            return backend
    backend = None
    for name in _BUILT_IN:
        try:
            backend = _create(name, {})
        except BackendUnavailableError as error:
            _log.info("auto: %s passed over: %s", name, error)
            continue
        _log.info("auto: using %s (%s)", name, backend.describe())
        return backend
    raise BackendUnavailableError(f"no backend works here; installed are {_installed()}")
