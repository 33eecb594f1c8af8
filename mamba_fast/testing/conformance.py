"""`BackendConformance`: what a backend must pass to be one.

Subclass it in a test file and name the backend; pytest does the rest:

    from mamba_fast.testing import BackendConformance

    class TestWgpu(BackendConformance):
        backend_name = "wgpu"
        options = {}
        unsupported = {"cast[bf16]": "no bf16 storage yet"}

The checks are spread over one module for each family of ops:

* `conformance_contract`: names, signatures, errors for wrong shapes and for overlapping operands;
* `conformance_memory`: transfers, allocation, views, copies, casts;
* `conformance_ops`: sums, matrix products, normalisation, embedding, loss;
* `conformance_conv`, `conformance_scan`: the two sequence ops, among them SPEC 2's accuracy;
* `conformance_optimizer`: the norm and AdamW with its guard, clipping and trust region;
* `conformance_model`: whole models, a training step, a loss curve, decoding.

Values are compared with the oracle's, tensor by tensor, by relative L2 (`tolerances`); inputs are in
`cases`; `runs` makes the same calls on the backend and on the oracle.
"""

from __future__ import annotations

from mamba_fast.testing.conformance_base import covers
from mamba_fast.testing.conformance_contract import ContractChecks
from mamba_fast.testing.conformance_conv import ConvChecks
from mamba_fast.testing.conformance_memory import MemoryChecks
from mamba_fast.testing.conformance_model import ModelChecks
from mamba_fast.testing.conformance_ops import OpChecks
from mamba_fast.testing.conformance_optimizer import OptimizerChecks
from mamba_fast.testing.conformance_scan import ScanChecks

__all__ = ["BackendConformance"]


class BackendConformance(
    ContractChecks, MemoryChecks, OpChecks, ConvChecks, ScanChecks, OptimizerChecks, ModelChecks
):
    """Every check. Set `backend_name`, and `options` or `make_backend` where the backend needs them."""

    def test_every_unsupported_entry_names_a_test(self) -> None:
        names = [name.removeprefix("test_") for name in dir(type(self)) if name.startswith("test_")]
        words = {entry: entry.partition("[")[0] for entry in self.unsupported}
        unknown = [entry for entry in words if not any(covers(words[entry], name) for name in names)]
        assert not unknown, f"unsupported names no test of the suite: {unknown}"
