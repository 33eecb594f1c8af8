"""The backend itself: the families of ops put together, and how it presents itself."""

from __future__ import annotations

from typing import Any

from mamba_fast_wgpu.core import Engine, engine
from mamba_fast_wgpu.device import adapters_in_detail
from mamba_fast_wgpu.ops_conv import ConvOps
from mamba_fast_wgpu.ops_matrix import MatrixOps
from mamba_fast_wgpu.ops_memory import MemoryOps
from mamba_fast_wgpu.ops_scan import ScanOps
from mamba_fast_wgpu.ops_training import TrainingOps

__all__ = ["WgpuBackend"]


def _create_with(options: dict[str, Any]) -> WgpuBackend:
    return WgpuBackend(engine(**options), options)


class WgpuBackend(MemoryOps, MatrixOps, ConvOps, ScanOps, TrainingOps):
    """The ops are described in `mamba_fast.backend`; tensors are `WgpuTensor`s.

    Instances made with the same options share a device and its memory, so their tensors may be mixed.
    """

    name = "wgpu"
    api_version = (1, 0)

    def __init__(self, engine: Engine, options: dict[str, Any] | None = None) -> None:
        super().__init__(engine)
        self.options = options or {}
        """What `create_backend` was called with."""
        self.preferred_to_cpu = not engine.device.adapter.software

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or an unpickled backend takes the engine of its own process for these options.
        return _create_with, (self.options,)

    @property
    def live_tensors_bytes(self) -> int:
        """Bytes of the buffers that tensors hold at present."""
        return self.engine.pool.live_bytes

    def describe(self) -> str:
        device = self.device
        lanes = f"subgroups of {device.subgroup_size}" if device.subgroup_size else "no subgroup operations"
        slow = "; a software adapter: slow, use the cython backend" if device.adapter.software else ""
        return f"wgpu: {device.adapter.summary}, {lanes}{slow}"

    def details(self) -> list[str]:
        lines = []
        for adapter, limits, features in adapters_in_detail():
            if adapter.usable:
                extra = ", ".join(features) or "no extra features"
                lines.append(
                    f"adapter {adapter.summary}, {adapter.driver}: {limits.storage_buffers} buffers a "
                    f"kernel, bindings of {limits.binding_bytes >> 20} MiB, {limits.invocations} threads "
                    f"and {limits.workgroup_bytes >> 10} KiB a workgroup, {extra}"
                )
            else:
                lines.append(f"adapter {adapter.summary}: not usable, Vulkan, Metal or Direct3D 12 is needed")
        return lines
