"""The wgpu backend of mamba_fast, registered under the name "wgpu"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mamba_fast_wgpu.backend import WgpuBackend

__all__ = ["create_backend"]


def create_backend(
    *,
    adapter: str | None = None,
    subgroups: bool | None = None,
    force_limits: Mapping[str, int] | None = None,
) -> WgpuBackend:
    """The factory behind `get_backend("wgpu")`.

    Parameters
    ----------
    adapter
        part of the summary of the adapter to use, as `mamba-fast info` lists them, in any case. None: the
        environment variable MAMBA_FAST_WGPU_ADAPTER, else the best one, discrete before integrated before
        software
    subgroups
        False: do without subgroup operations, which makes some kernels slower. None: use them where the
        adapter has them
    force_limits
        smaller limits than the adapter's, by the names of `mamba_fast_wgpu.device.Limits`: for tests

    Raises
    ------
    BackendUnavailableError
        there is no usable adapter; the message lists those that were found and the remedy
    ValueError
        a limit that there is not, or one above the adapter's
    """
    # These import wgpu and load its native library.
    from mamba_fast_wgpu.backend import WgpuBackend
    from mamba_fast_wgpu.core import engine

    options = {"adapter": adapter, "force_limits": force_limits, "subgroups": subgroups}
    return WgpuBackend(engine(**options), options)
