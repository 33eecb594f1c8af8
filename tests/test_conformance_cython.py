"""The CPU backend against the oracle."""

from mamba_fast.testing import BackendConformance


class TestCython(BackendConformance):
    backend_name = "cython"
