"""The suite on tensors that refuse host access: what passes here uses the contract and nothing else."""

from mamba_fast.backend import Backend
from mamba_fast.testing import BackendConformance
from mamba_fast.testing.loopback import create_backend


class TestLoopback(BackendConformance):
    backend_name = "loopback"

    def make_backend(self) -> Backend:
        return create_backend()
