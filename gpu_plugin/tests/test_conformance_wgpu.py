"""The wgpu backend against the oracle."""

from mamba_fast.testing import BackendConformance


class TestWgpu(BackendConformance):
    backend_name = "wgpu"
