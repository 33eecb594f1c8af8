"""Finding an adapter. The only module that imports wgpu."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import wgpu

from mamba_fast.backend import BackendUnavailableError

__all__ = ["Adapter", "adapters", "remedy", "request_adapter"]

# What compute shaders of this size run on. wgpu's OpenGL path lacks the storage buffers that the
# kernels bind, so an adapter reached only through OpenGL is listed but not used.
USABLE_APIS = ("Vulkan", "Metal", "D3D12")

_REMEDIES = {
    "linux": (
        "install a Vulkan driver and its loader (Debian, Ubuntu: apt install libvulkan1 mesa-vulkan-drivers; "
        "NVIDIA: the proprietary driver brings its own), and check with vulkaninfo; in a container, pass the "
        "device through or use the software driver of mesa-vulkan-drivers"
    ),
    "win32": "update the graphics driver from its vendor: Direct3D 12 or Vulkan is needed",
    "darwin": "Metal is needed: macOS 10.15 or newer on a machine with a GPU",
}


@dataclass(frozen=True)
class Adapter:
    """One way to reach one device."""

    name: str
    kind: str
    """ "DiscreteGPU", "IntegratedGPU", "CPU" (software) or "Unknown"."""
    api: str
    """ "Vulkan", "Metal", "D3D12" or "OpenGL"."""

    @property
    def usable(self) -> bool:
        return self.api in USABLE_APIS

    @property
    def software(self) -> bool:
        """Whether the CPU plays the GPU: good for tests, slower than the CPU kernels."""
        return self.kind == "CPU"

    @property
    def summary(self) -> str:
        return f"{self.name} ({self.kind}) via {self.api}"


def _adapter(handle: wgpu.GPUAdapter) -> Adapter:
    info = handle.info
    return Adapter(info["device"], info["adapter_type"], info["backend_type"])


def adapters() -> list[Adapter]:
    """Every adapter of the machine, usable or not, in wgpu's order."""
    return [_adapter(handle) for handle in wgpu.gpu.enumerate_adapters_sync()]


def remedy(platform: str = sys.platform) -> str:
    """What to do on this operating system when no adapter is usable."""
    return _REMEDIES.get(platform, "install a driver for Vulkan")


def request_adapter() -> Adapter:
    """The adapter to use: wgpu's own choice for speed.

    wgpu reads `WGPU_BACKEND_TYPE` (e.g. "Vulkan") and `WGPUPY_WGPU_ADAPTER_NAME` (part of a name)
    from the environment, which is how a user with several GPUs chooses.

    Raises
    ------
    BackendUnavailableError
        no adapter is usable; the message lists those found and the remedy
    """
    try:
        adapter = _adapter(wgpu.gpu.request_adapter_sync(power_preference="high-performance"))
    except (RuntimeError, ValueError) as error:  # none at all, or none of the name or API asked for
        raise _unavailable(" ".join(str(error).split())) from error
    if not adapter.usable:
        raise _unavailable(f"the adapter chosen by wgpu is reached through {adapter.api}")
    return adapter


def _unavailable(reason: str) -> BackendUnavailableError:
    found = "; ".join(a.summary + ("" if a.usable else ", not usable") for a in adapters()) or "none"
    return BackendUnavailableError(
        f"backend 'wgpu' has no usable adapter ({reason}). Adapters found: {found}. Remedy: {remedy()}; "
        'or use backend="cython"'
    )
