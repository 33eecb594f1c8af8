"""The shipped testing package: its measure, its table, and what it needs to be imported."""

import math
import subprocess
import sys

import numpy as np
import pytest

import mamba_fast.testing
from mamba_fast.testing.runs import Arena, no_transfers, oracle
from mamba_fast.testing.tolerances import TOLERANCES, relative_l2, tolerance

# ---- the measure ------------------------------------------------------------------------------


def test_relative_l2_is_the_norm_of_the_difference_over_the_norm_of_what_is_expected():
    assert relative_l2([3.0, 4.0], [3.0, 0.0]) == pytest.approx(4.0 / 3.0)
    assert relative_l2(np.ones((2, 3)), np.ones((2, 3))) == 0.0
    assert relative_l2(1.5, 1.0) == 0.5


def test_relative_l2_of_zeros_is_all_or_nothing():
    assert relative_l2([0.0, 0.0], [0.0, 0.0]) == 0.0
    assert relative_l2([0.0, 1e-300], [0.0, 0.0]) == math.inf
    assert relative_l2([0.0, 0.0], [0.0, 1e-300]) == 1.0


def test_relative_l2_of_a_tensor_without_elements_is_zero():
    assert relative_l2(np.zeros((2, 0, 3)), np.zeros((2, 0, 3))) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_relative_l2_never_lets_a_value_that_is_not_finite_pass(value):
    assert relative_l2([1.0, value], [1.0, value]) == math.inf
    assert relative_l2([1.0, value], [1.0, 2.0]) == math.inf
    assert relative_l2([1.0, 2.0], [1.0, value]) == math.inf


def test_relative_l2_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"actual has shape \(3,\), expected \(2, 3\)"):
        relative_l2(np.ones(3), np.ones((2, 3)))


@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e200, 1e300])
def test_relative_l2_keeps_its_digits_at_any_size(size):
    assert relative_l2([size, 1.5 * size], [size, size]) == pytest.approx(0.5 / math.sqrt(2.0))


# ---- the table --------------------------------------------------------------------------------


def test_the_table_is_that_of_the_specification():
    assert TOLERANCES["oracle"]["output"] == TOLERANCES["oracle"]["gradient"] == 1e-9
    assert (TOLERANCES["cython"]["output"], TOLERANCES["cython"]["gradient"]) == (2e-6, 1e-5)
    assert (TOLERANCES["wgpu"]["output"], TOLERANCES["wgpu"]["gradient"]) == (5e-6, 2e-5)
    for name in ("cython", "wgpu"):
        assert (TOLERANCES[name]["logits"], TOLERANCES[name]["model_gradient"]) == (1e-5, 1e-4)


def test_the_loopback_backend_is_held_to_the_oracles_numbers_and_an_unknown_one_to_the_looser_float32_row():
    for kind in TOLERANCES["oracle"]:
        assert tolerance("loopback", kind) == tolerance("oracle", kind)
        assert tolerance("somebody_elses", kind) == tolerance("wgpu", kind)


def test_an_unknown_kind_is_an_error_that_lists_the_kinds():
    with pytest.raises(ValueError, match="no tolerance of kind 'loss'; kinds are output, gradient"):
        tolerance("cython", "loss")


# ---- the helpers that prove what was left alone -----------------------------------------------


@pytest.mark.parametrize("layout", ["columns", "slab"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_arena_notices_a_change_beside_its_tensors(layout, kind):
    arena = Arena(oracle(), layout)
    tensor = getattr(arena, kind)(np.ones((2, 3), dtype=np.float32))
    arena.check()
    whole = tensor
    while whole.base is not None:
        whole = whole.base
    whole[..., 0] += 1.0
    with pytest.raises(AssertionError, match="has changed"):
        arena.check()


@pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
def test_an_arena_notices_a_change_of_what_is_only_read(layout):
    arena = Arena(oracle(), layout)
    read, written = (kind(np.ones((2, 3), dtype=np.float32)) for kind in (arena.read, arena.write))
    oracle().fill_(written, 5.0)
    arena.check()
    oracle().fill_(read, 1.0 + 2.0**-52)
    with pytest.raises(AssertionError, match="only read, has changed"):
        arena.check()


def test_a_hidden_transfer_is_noticed():
    with pytest.raises(AssertionError, match="1 hidden transfers"), no_transfers(oracle()):
        oracle().from_host([1.0])


# ---- importing --------------------------------------------------------------------------------


def _python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_suite_without_pytest_is_one_clear_error():
    result = _python(
        "import sys; sys.modules['pytest'] = None\n"
        "import mamba_fast.testing.tolerances, mamba_fast.testing.loopback\n"
        "from mamba_fast.testing import BackendConformance\n"
    )
    assert result.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: mamba_fast.testing.BackendConformance needs pytest: "
        "pip install 'mamba-fast[test]'"
    )


def test_the_package_and_the_helpers_of_testing_do_not_import_pytest():
    result = _python(
        "import sys, mamba_fast, mamba_fast.testing.tolerances, mamba_fast.testing.loopback\n"
        "sys.exit('pytest' in sys.modules)"
    )
    assert result.returncode == 0, result.stderr


def test_a_name_that_the_testing_package_lacks_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Conformance'"):
        mamba_fast.testing.Conformance  # noqa: B018
