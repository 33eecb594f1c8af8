"""What can go wrong on a device, as typed errors. All are `mamba_fast.backend.BackendError`s."""

from __future__ import annotations

from mamba_fast.backend import BackendError

__all__ = ["DeviceLostError", "DeviceOutOfMemoryError", "ShaderError", "WgpuError"]


class WgpuError(BackendError):
    """The graphics API refused a call; a mistake of this package unless a subclass says otherwise."""


class DeviceOutOfMemoryError(WgpuError, MemoryError):
    """A buffer does not fit into the device's memory."""


class DeviceLostError(WgpuError):
    """The driver gave the device up: a crash, a watchdog or a change of drivers. Its tensors are gone."""


class ShaderError(WgpuError):
    """A kernel does not compile on this driver."""
