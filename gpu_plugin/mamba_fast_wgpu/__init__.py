"""The wgpu backend of mamba_fast, registered under the name "wgpu".

This version finds the machine's adapters and says what is missing; it has no kernels yet, so every
request for the backend ends in a `BackendUnavailableError` that names the remedy.
"""

from __future__ import annotations

from typing import NoReturn

from mamba_fast.backend import BackendUnavailableError

__all__ = ["create_backend"]


def create_backend() -> NoReturn:
    """The factory behind `get_backend("wgpu")`.

    Raises
    ------
    BackendUnavailableError
        Always, in this version. Without a usable adapter the message lists the adapters that were
        found and how to get a driver on this operating system; with one it says that the kernels
        are yet to come.
    """
    from mamba_fast_wgpu.device import request_adapter  # imports wgpu and loads its native library

    adapter = request_adapter()
    raise BackendUnavailableError(
        f"backend 'wgpu' found the adapter {adapter.summary}, but this version of mamba-fast-wgpu only finds "
        'adapters and has no kernels: use backend="cython"'
    )
