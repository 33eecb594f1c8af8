"""The plugin's registration and its typed errors. Adapters are whatever the machine has, or none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mamba_fast.backend import BackendUnavailableError
from mamba_fast.registry import get_backend, list_backends
from mamba_fast_wgpu import device


def run(code: str, **environment: str) -> str:
    """Output of a program in a fresh interpreter, whose wgpu reads the environment given here."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_DRIVER = {"VK_ICD_FILENAMES": "/nonexistent", "VK_DRIVER_FILES": "/nonexistent"}

REQUEST = """
import mamba_fast.registry as registry
from mamba_fast.backend import BackendUnavailableError
try:
    registry.get_backend("wgpu")
except BackendUnavailableError as error:
    print(error)
"""

vulkan = pytest.mark.skipif(
    not any(a.usable for a in device.adapters()),
    reason="no Vulkan, Metal or Direct3D 12 adapter (Debian: apt install libvulkan1 mesa-vulkan-drivers)",
)
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="hides the driver by variables of Linux's Vulkan loader"
)


def test_the_registry_knows_the_plugin_by_its_distribution():
    row = next(r for r in list_backends() if r.name == "wgpu")
    assert row.distribution == "mamba-fast-wgpu"
    assert row.version == "0.1.0"


@linux
def test_without_a_driver_the_error_lists_the_adapters_and_the_remedy():
    message = run(REQUEST, **NO_DRIVER)
    assert "no usable adapter" in message
    assert "Adapters found:" in message
    assert "libvulkan1 mesa-vulkan-drivers" in message


@linux
def test_an_adapter_reached_through_opengl_alone_is_not_called_usable():
    message = run(REQUEST, **NO_DRIVER)
    found = message.split("Adapters found: ")[1].split(". Remedy")[0]
    assert found == "none" or all(a.endswith("via OpenGL, not usable") for a in found.split("; "))


@linux
def test_without_a_driver_auto_takes_the_cpu_kernels():
    code = "from mamba_fast.registry import get_backend; print(get_backend('auto').name)"
    assert run(code, **NO_DRIVER).strip() == "cython"


def test_auto_takes_the_cpu_kernels_unless_there_is_a_real_gpu():
    gpu = any(a.usable and not a.software for a in device.adapters())
    assert get_backend("auto").name == ("wgpu" if gpu else "cython")


def test_an_adapter_name_that_does_not_exist_is_an_error_with_the_list():
    message = run(REQUEST, MAMBA_FAST_WGPU_ADAPTER="no such adapter")
    assert "none matches MAMBA_FAST_WGPU_ADAPTER='no such adapter'" in message
    assert "Adapters found:" in message
    with pytest.raises(BackendUnavailableError, match="none matches adapter='no such adapter'"):
        get_backend("wgpu", adapter="no such adapter")


@vulkan
def test_the_backend_names_its_adapter_and_the_adapter_can_be_asked_for():
    chosen = device.choose()
    assert chosen in device.adapters()
    for backend in (get_backend("wgpu"), get_backend("wgpu", adapter=chosen.name.upper())):
        assert backend.device.adapter == chosen
        assert backend.describe().startswith(f"wgpu: {chosen.summary}, ")


@vulkan
def test_the_environment_chooses_the_adapter_too():
    code = "from mamba_fast.registry import get_backend; print(get_backend('wgpu').device.adapter.name)"
    name = device.choose().name
    assert run(code, MAMBA_FAST_WGPU_ADAPTER=name[:6]).strip() == name


@vulkan
def test_a_software_adapter_says_that_it_is_slow_and_is_not_preferred():
    backend = get_backend("wgpu")
    assert ("slow" in backend.describe()) == backend.device.adapter.software
    assert backend.preferred_to_cpu != backend.device.adapter.software


def test_an_option_is_refused_by_name():
    with pytest.raises(TypeError, match="'wgpu' has no option 'power'"):
        get_backend("wgpu", power=9000)


@pytest.mark.parametrize("platform", ["linux", "win32", "darwin", "freebsd13"])
def test_every_platform_has_a_remedy(platform):
    assert "needed" in device.remedy(platform) or "install" in device.remedy(platform)


def test_a_software_adapter_is_told_from_a_real_one():
    assert device.Adapter("llvmpipe", "CPU", "Vulkan").software
    assert not device.Adapter("a card", "DiscreteGPU", "Vulkan").software


def test_importing_the_core_or_the_plugin_does_not_import_wgpu():
    code = "import mamba_fast, mamba_fast_wgpu, sys; print('wgpu' in sys.modules)"
    assert run(code).strip() == "False"
