"""Finding backends: built-in ones by name, others through the entry-point group `mamba_fast.backends`.

A distribution adds a backend by naming a factory in its metadata; nothing is imported until that
backend is asked for:

    [project.entry-points."mamba_fast.backends"]
    cuda = "mamba_fast_cuda:create_backend"

`create_backend(**options)` returns a `mamba_fast.backend.Backend`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from mamba_fast.backend import (
    API_VERSION,
    Backend,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
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
    details: tuple[str, ...] = ()
    """`Backend.details()`."""


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
    TypeError
        an option that the backend does not have
    BackendNotFoundError
        no backend of that name is installed
    BackendLoadError
        it is installed but cannot be imported, or its factory fails, or it was written for a
        version of the contract that does not fit, or two distributions claim the name
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
    return [_row(name) for name in [*_BUILT_IN, *_plugin_names()]]


def _row(name: str) -> BackendInfo:
    distribution, version = _provenance(name)
    try:
        backend = _create(name, {})
        return BackendInfo(name, distribution, version, True, backend.describe(), tuple(backend.details()))
    except BackendError as error:
        detail = str(error)
    except Exception as error:  # a plugin's describe() can fail in any way; the list goes on
        detail = f"{type(error).__name__}: {error}"
    return BackendInfo(name, distribution, version, False, detail)


def _entry_points() -> Iterable[metadata.EntryPoint]:
    # Read afresh each time: it is cheap, and a cached list goes stale when something is installed.
    try:
        return metadata.entry_points(group=GROUP)
    except Exception as error:  # one distribution's damaged metadata must not take the CPU kernels away
        _log.warning("no plugins: the entry points of the installed distributions cannot be read: %s", error)
        return ()


def _plugin_names() -> list[str]:
    return sorted({e.name for e in _entry_points()} - _BUILT_IN.keys())


def _claims(name: str) -> list[metadata.EntryPoint]:
    return [e for e in _entry_points() if e.name == name]


def _distribution(entry_point: metadata.EntryPoint) -> str:
    """The distribution that an entry point comes from; its target where the metadata lacks a name."""
    return (entry_point.dist and entry_point.dist.name) or entry_point.value


def _distributions(entry_points: Iterable[metadata.EntryPoint]) -> str:
    return " and ".join(sorted({_distribution(e) for e in entry_points}))


def _provenance(name: str) -> tuple[str, str]:
    """Distribution and version that a backend comes from, for people."""
    names = ["mamba-fast"] if name in _BUILT_IN else sorted({_distribution(e) for e in _claims(name)})
    return ", ".join(names), ", ".join(map(_version, names))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return "unknown"


def _installed() -> str:
    return ", ".join([*_BUILT_IN, *_plugin_names()])


def _create(name: str, options: dict[str, Any]) -> Backend:
    target, origin = _find(name)
    factory = _load(name, target, origin)
    _check_options(name, factory, options)
    try:
        backend = factory(**options)
    except BackendError:
        raise
    except Exception as error:  # a plugin's factory can fail in any way
        if options and isinstance(error, TypeError | ValueError):
            raise  # about the value of an option: the caller's to mend
        raise BackendLoadError(
            f"backend {name!r} from distribution {origin} could not start: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(backend, Backend):
        raise BackendLoadError(
            f"backend {name!r} from distribution {origin}: {target} returned {type(backend).__name__}, "
            "not a mamba_fast.backend.Backend"
        )
    version = backend.api_version
    if not _fits(version):
        raise BackendLoadError(
            f"backend {name!r} from distribution {origin} is for backend API {version}, "
            f"this mamba_fast has {API_VERSION}: upgrade the older of the two"
        )
    return backend


def _fits(version: object) -> bool:
    """Whether a backend written for this version of the contract can run here."""
    # Nothing is promised between provisional versions, so they have to be the same.
    compared = 1 if API_VERSION[0] else 2
    return isinstance(version, tuple) and version[:compared] == API_VERSION[:compared]


def _find(name: str) -> tuple[str, str]:
    """Target ("module:attribute") and distribution of a backend, without importing anything."""
    claims = _claims(name)
    if name in _BUILT_IN:
        if claims:
            raise BackendLoadError(
                f"distribution {_distributions(claims)} registers the name {name!r} of a built-in backend: "
                "uninstall it"
            )
        return _BUILT_IN[name], "mamba-fast"
    if not claims:
        hint = f"; install it with: {_KNOWN[name]}" if name in _KNOWN else ""
        raise BackendNotFoundError(f"no backend named {name!r}; installed are {_installed()}{hint}")
    if len({(_distribution(e), e.value) for e in claims}) > 1:
        raise BackendLoadError(
            f"backend name {name!r} is claimed by {_distributions(claims)}: uninstall all but one"
        )
    return claims[0].value, _distribution(claims[0])


def _load(name: str, target: str, origin: str) -> Callable[..., Any]:
    try:
        factory: Callable[..., Any] = metadata.EntryPoint(name, target, GROUP).load()
    except BackendError:
        raise
    except Exception as error:  # a broken plugin can fail in any way; it must not look like ours
        raise BackendLoadError(
            f"backend {name!r} from distribution {origin} could not be imported: "
            f"{type(error).__name__}: {error}; reinstall {origin}"
        ) from error
    return factory


def _check_options(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    """TypeError naming the first option that the factory does not take."""
    if not options:
        return
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in known:
            raise TypeError(
                f"backend {name!r} has no option {option!r}; its options: {', '.join(known) or 'none'}"
            )


def _choose() -> Backend:
    """The backend that "auto" stands for: a plugin that says it is faster here, else the CPU kernels.

    Never the oracle: it is thousands of times slower, and nobody who let the package choose means it. What
    keeps the CPU kernels from running is therefore the caller's error.
    """
    for name in _plugin_names():
        try:
            backend = _create(name, {})
        except BackendError as error:
            _log.info("auto: %s passed over: %s", name, error)
            continue
        if backend.preferred_to_cpu:
            break
        _log.info("auto: %s passed over: not faster than the CPU kernels here", name)
    else:
        name, backend = "cython", _create("cython", {})
    _log.info("auto: using %s (%s)", name, backend.describe())
    return backend
