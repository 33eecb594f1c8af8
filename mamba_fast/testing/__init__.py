"""For authors of backends: the conformance suite, its tolerances and a sealed backend.

`BackendConformance` needs pytest and is imported on first use, so that `tolerances` and `loopback`
can be used without it:

    from mamba_fast.testing import BackendConformance

    class TestMine(BackendConformance):
        backend_name = "mine"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mamba_fast.testing.conformance import BackendConformance

__all__ = ["BackendConformance"]


def __getattr__(name: str) -> Any:
    if name != "BackendConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from mamba_fast.testing.conformance import BackendConformance
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ModuleNotFoundError(
            "mamba_fast.testing.BackendConformance needs pytest: pip install 'mamba-fast[test]'",
            name="pytest",
        ) from error
    return BackendConformance
