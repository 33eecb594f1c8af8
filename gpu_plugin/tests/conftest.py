"""What the plugin's tests share."""

from __future__ import annotations

import pytest

from mamba_fast_wgpu import device


@pytest.fixture(scope="session")
def usable_adapter() -> str:
    """The summary of the adapter that the backend takes here; the test is skipped where there is none."""
    if not any(adapter.usable for adapter in device.adapters()):
        pytest.skip(
            "no Vulkan, Metal or Direct3D 12 adapter (Debian: apt install libvulkan1 mesa-vulkan-drivers)"
        )
    return device.choose().summary
