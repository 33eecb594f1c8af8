"""Which variant of the kernels is loaded, and that every variant this machine has is right."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from mamba_fast import _cpu
from mamba_fast.backend import BackendUnavailableError
from mamba_fast.backends._dispatch import load_kernels, runnable_variants
from mamba_fast.functional import selective_scan_vjp
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance

VARIANTS = runnable_variants()


def test_the_fastest_variant_that_runs_here_is_chosen(monkeypatch):
    monkeypatch.delenv("MAMBA_FAST_CPU", raising=False)
    assert load_kernels().variant == VARIANTS[-1]
    assert get_backend("cython").variant == VARIANTS[-1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_environment_forces_a_variant_and_describe_names_it(monkeypatch, variant):
    monkeypatch.setenv("MAMBA_FAST_CPU", variant)
    backend = get_backend("cython")
    assert backend.variant == variant
    assert f", {variant}," in backend.describe()
    suffix = "" if variant == "baseline" else f"_{variant}"
    assert load_kernels().scan.__name__ == f"mamba_fast._scan{suffix}"


@pytest.mark.parametrize("name", ["v2", "native", "V4 "])
def test_a_variant_that_cannot_run_is_an_error_that_names_those_that_can(monkeypatch, name):
    monkeypatch.setenv("MAMBA_FAST_CPU", name)
    with pytest.raises(BackendUnavailableError, match=f"MAMBA_FAST_CPU={name.strip()} .*baseline"):
        get_backend("cython")


@pytest.mark.skipif(len(VARIANTS) < 2, reason="this machine runs the baseline only")
def test_a_variant_that_should_load_and_does_not_is_an_error(monkeypatch):
    monkeypatch.delenv("MAMBA_FAST_CPU", raising=False)
    monkeypatch.setitem(sys.modules, f"mamba_fast._scan_{VARIANTS[-1]}", None)
    with pytest.raises(BackendUnavailableError, match=f"_scan_{VARIANTS[-1]}"):
        get_backend("cython")


def test_a_build_holds_at_least_the_baseline():
    assert _cpu.built_variants()[0] == "baseline"
    assert _cpu.supported_variants()[0] == "baseline"


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees_with_the_oracle(monkeypatch, variant, discretization):
    monkeypatch.setenv("MAMBA_FAST_CPU", variant)
    rng = np.random.default_rng(5)
    batch, length, width, states = 2, 37, 71, 5
    inputs = [
        rng.standard_normal((batch, length, width)),
        rng.standard_normal((batch, length, width)) - 3,
        np.log(rng.uniform(0.01, 20, (width, states))),
        rng.standard_normal((batch, length, states)),
        rng.standard_normal((batch, length, states)),
    ]
    dy = rng.standard_normal((batch, length, width)).astype(np.float32)
    results = {}
    for backend in (get_backend("cython"), get_backend("oracle")):
        arrays = [x.astype(np.float32) for x in inputs]
        y, backprop = selective_scan_vjp(
            *arrays, z=arrays[0], discretization=discretization, seq_start=None, backend=backend
        )
        results[backend.name] = {"y": y, **backprop(dy)}
    for name, expected in results["oracle"].items():
        kind = "output" if name == "y" else "gradient"
        error = relative_l2(results["cython"][name], expected)
        assert error <= tolerance("cython", kind), (name, error)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@pytest.mark.parametrize(
    "name", ["_cpu", "_threads", "_operands", "_scan", "_conv1d", "_pointwise", "_optim"]
)
def test_the_modules_that_run_on_every_processor_hold_no_avx(name):
    module = __import__(f"mamba_fast.{name}", fromlist=["x"])
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", module.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "ret" in listing  # it is a listing of code
    assert "%ymm" not in listing
    assert "%zmm" not in listing
