"""The wgpu backend against the oracle: as it is here, within WebGPU's default limits, and without subgroups.

A software adapter allows far more than the smallest GPU does; what it does not enforce itself is forced.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from mamba_fast.testing import BackendConformance
from mamba_fast.testing.conformance_conv import ConvChecks
from mamba_fast.testing.conformance_model import ModelChecks
from mamba_fast.testing.conformance_ops import OpChecks
from mamba_fast.testing.conformance_optimizer import OptimizerChecks
from mamba_fast.testing.conformance_scan import ScanChecks
from mamba_fast_wgpu import device

pytestmark = pytest.mark.skipif(
    not any(a.usable for a in device.adapters()),
    reason="no Vulkan, Metal or Direct3D 12 adapter (Debian: apt install libvulkan1 mesa-vulkan-drivers)",
)

MINIMUM = {
    "storage_buffers": 8,
    "binding_bytes": 128 << 20,
    "workgroup_bytes": 16 << 10,
    "invocations": 256,
    "workgroups": 65535,
}
"""What every device with WebGPU has."""


class TestWgpu(BackendConformance):
    backend_name = "wgpu"


class TestWgpuWithinTheDefaultLimits(OpChecks, ConvChecks, ScanChecks, OptimizerChecks, ModelChecks):
    """What depends on limits: contract and memory ops do not."""

    backend_name = "wgpu"
    options: ClassVar = {"force_limits": MINIMUM}


class TestWgpuWithoutSubgroups(ScanChecks):
    """The scan alone has kernels that use them."""

    backend_name = "wgpu"
    options: ClassVar = {"subgroups": False}
