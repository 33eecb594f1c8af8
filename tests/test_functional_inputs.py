"""The functional API: which arrays it takes, and how it refuses the others."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from functional_cases import conv_inputs, scan_inputs

from mamba_fast import functional
from mamba_fast.backend import BackendNotFoundError
from mamba_fast.functional import (
    causal_conv1d,
    causal_conv1d_vjp,
    rms_norm,
    selective_scan,
    selective_scan_vjp,
)


def unaligned(a):
    raw = bytearray(1 + a.nbytes)
    moved = np.frombuffer(memoryview(raw)[1:], a.dtype).reshape(a.shape)
    moved[...] = a
    return moved


def read_only(a):
    a = a.copy()
    a.setflags(write=False)
    return a


FORMS = {
    "float64": lambda a: a.astype(np.float64),
    "big-endian": lambda a: a.astype(">f4"),
    "fortran": np.asfortranarray,
    "every-second": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "strided-last": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "read-only": read_only,
    "unaligned": unaligned,
    "lists": lambda a: a.tolist(),
}


def float32(arguments):
    return {name: a.astype(np.float32) for name, a in arguments.items()}


@pytest.mark.parametrize("backend", ["oracle", "cython"])
@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_array_gives_the_bits_of_a_contiguous_copy(backend, form):
    convert = FORMS[form]
    cases = [
        (selective_scan_vjp, float32(scan_inputs()), (2, 6, 3)),
        (causal_conv1d_vjp, float32(conv_inputs()), (2, 6, 3)),
    ]
    for vjp, arguments, shape in cases:
        dy = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
        y, backprop = vjp(**arguments, backend=backend)
        expected = backprop(dy)
        converted = {name: convert(a) for name, a in arguments.items()}
        other_y, other_backprop = vjp(**converted, backend=backend)
        assert np.array_equal(other_y, y)
        gradients = other_backprop(convert(dy))
        assert all(np.array_equal(g, expected[name]) for name, g in gradients.items())


def test_half_precision_is_taken_at_its_value():
    half = {name: a.astype(np.float16) for name, a in scan_inputs().items()}
    assert np.array_equal(selective_scan(**half), selective_scan(**float32(half)))


def test_memory_mapped_files_are_taken(tmp_path):
    x = conv_inputs()["x"].astype(np.float32)
    x.tofile(tmp_path / "x.bin")
    mapped = np.memmap(tmp_path / "x.bin", np.float32, mode="r", shape=x.shape)
    w = np.ones((3, 2))
    assert np.array_equal(causal_conv1d(mapped, w), causal_conv1d(x, w))


def test_integers_are_numbers():
    assert np.array_equal(rms_norm([[1, 2]], [1, 1]), rms_norm([[1.0, 2.0]], [1.0, 1.0]))


@pytest.mark.parametrize("backend", ["oracle", "cython"])
def test_inputs_are_never_written_to(backend):
    arguments = float32(scan_inputs())
    copies = {name: a.copy() for name, a in arguments.items()}
    dy = np.ones((2, 6, 3), np.float32)
    _, backprop = selective_scan_vjp(**arguments, backend=backend)
    backprop(dy)
    assert all(np.array_equal(a, copies[name]) for name, a in arguments.items())
    assert (dy == 1).all()


def test_one_array_may_serve_as_several_arguments():
    a = scan_inputs()
    same = selective_scan(a["u"], a["delta"], a["A_log"], a["B"], a["B"], z=a["u"])
    copies = selective_scan(a["u"], a["delta"], a["A_log"], a["B"], a["B"].copy(), z=a["u"].copy())
    assert np.array_equal(same, copies)


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"u": np.ones((6, 3))}, r"u has shape \(6, 3\), expected \(B, L, D\) with no empty axis"),
        ({"u": np.ones((0, 6, 3))}, r"u has shape \(0, 6, 3\), expected \(B, L, D\) with no empty axis"),
        ({"delta": np.ones((2, 6, 4))}, r"delta has shape \(2, 6, 4\), expected \(2, 6, 3\) = \(B, L, D\)"),
        ({"A_log": np.ones((2, 2))}, r"A_log has shape \(2, 2\), expected \(3, 2\) = \(D, N\)"),
        ({"A_log": np.ones(3)}, r"A_log has shape \(3,\), expected \(D, N\)"),
        ({"B": np.ones((2, 2, 6))}, r"B has shape \(2, 2, 6\), expected \(2, 6, 2\) = \(B, L, N\)"),
        ({"C": np.ones((2, 6, 1))}, r"C has shape \(2, 6, 1\), expected \(2, 6, 2\) = \(B, L, N\)"),
        ({"D": np.ones(2)}, r"D has shape \(2,\), expected \(3,\) = \(D,\)"),
        ({"z": np.ones((2, 6))}, r"z has shape \(2, 6\), expected \(2, 6, 3\)"),
        ({"delta_bias": 1.0}, r"delta_bias has shape \(\), expected \(3,\)"),
        ({"initial_state": np.ones((2, 2, 3))}, r"initial_state .*, expected \(2, 3, 2\) = \(B, D, N\)"),
        ({"seq_start": np.zeros((2, 5), bool)}, r"seq_start has shape \(2, 5\), expected \(2, 6\)"),
        ({"seq_start": np.zeros((2, 6))}, "seq_start must be bool or integer"),
        ({"lengths": [0, 6]}, r"lengths\[0\] is 0, expected a value in \[1, 6\]"),
        ({"lengths": [6, 7]}, r"lengths\[1\] is 7, expected a value in \[1, 6\]"),
        ({"lengths": [6]}, r"lengths has shape \(1,\), expected \(2,\)"),
        ({"discretization": "bilinear"}, "discretization must be 'zoh' or 'euler', got 'bilinear'"),
        ({"u": np.ones((2, 6, 3), complex)}, "u must be an array of real numbers, got dtype complex128"),
        ({"u": np.ones((2, 6, 3), bool)}, "u must be an array of real numbers, got dtype bool"),
        ({"D": ["a", "b", "c"]}, "D must be an array of real numbers, got dtype <U1"),
        ({"z": None, "u": [[[1.0], [2.0, 3.0]]]}, "u must be a rectangular array"),
    ],
)
@pytest.mark.parametrize("function", [selective_scan, selective_scan_vjp])
def test_a_wrong_argument_of_the_scan_is_named(function, changes, message):
    with pytest.raises(ValueError, match=message):
        function(**{**scan_inputs(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones((6, 3))}, r"x has shape \(6, 3\), expected \(B, L, D\)"),
        ({"w": np.ones((4, 3))}, r"w has shape \(4, 3\), expected \(3, 3\) = \(D, K\)"),
        ({"w": np.ones((3, 0))}, r"w has shape \(3, 0\), expected \(D, K\) with no empty axis"),
        ({"bias": np.ones(4)}, r"bias has shape \(4,\), expected \(3,\)"),
        ({"initial_state": np.ones((2, 4, 3))}, r"initial_state .* expected \(2, 3, 3\) = \(B, K-1, D\)"),
        ({"activation": "relu"}, "activation must be 'silu' or None, got 'relu'"),
        ({"lengths": [1, 0]}, r"lengths\[1\] is 0"),
    ],
)
@pytest.mark.parametrize("function", [causal_conv1d, causal_conv1d_vjp])
def test_a_wrong_argument_of_the_convolution_is_named(function, changes, message):
    with pytest.raises(ValueError, match=message):
        function(**{**conv_inputs(), **changes})


@pytest.mark.parametrize(
    ("x", "w", "eps", "message"),
    [
        (np.ones((2, 3)), np.ones(2), 1e-6, r"w has shape \(2,\), expected \(3,\)"),
        (3.0, None, 1e-6, r"x has shape \(\), expected \(..., D\) with no empty axis"),
        (np.ones((2, 0)), None, 1e-6, r"x has shape \(2, 0\)"),
        (np.ones((2, 3)), None, 0.0, "eps must be a finite number above 0, got 0.0"),
        (np.ones((2, 3)), None, float("nan"), "eps must be a finite number above 0, got nan"),
        (np.ones((2, 3)), None, "small", "eps must be a finite number above 0, got 'small'"),
    ],
)
def test_a_wrong_argument_of_the_norm_is_named(x, w, eps, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(x, w, eps)


def test_wrong_gradients_are_named():
    _, backprop = selective_scan_vjp(**scan_inputs())
    with pytest.raises(ValueError, match=r"dy has shape \(2, 6\), expected \(2, 6, 3\)"):
        backprop(np.ones((2, 6)))
    with pytest.raises(ValueError, match=r"d_final_state has shape \(3, 2\), expected \(2, 3, 2\)"):
        backprop(np.ones((2, 6, 3)), np.ones((3, 2)))
    assert "u" in backprop(np.ones((2, 6, 3)))  # a refused call uses nothing up


def test_an_unknown_backend_is_named():
    with pytest.raises(BackendNotFoundError, match="'cuda9'"):
        selective_scan(**scan_inputs(), backend="cuda9")


def test_a_backend_of_another_type_is_refused():
    with pytest.raises(TypeError, match="backend must be a name or a Backend object, got int"):
        selective_scan(**scan_inputs(), backend=3)


def test_a_named_backend_is_made_once():
    assert functional._resolve("cython") is functional._resolve("cython")


def test_a_named_backend_keeps_the_environment_of_its_first_call_as_documented(monkeypatch):
    functional._named.cache_clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert functional._resolve("cython").threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert functional._resolve("cython").threads == 1
    assert "OMP_NUM_THREADS" in functional.__doc__
    functional._named.cache_clear()


@pytest.mark.parametrize("name", [n for n in functional.__all__ if n[0].islower()])
def test_every_function_is_annotated_and_documented(name):
    function = getattr(functional, name)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    assert function.__doc__


@pytest.mark.parametrize("name", ["selective_scan", "causal_conv1d", "rms_norm"])
def test_a_vjp_takes_exactly_what_its_function_takes(name):
    function, vjp = getattr(functional, name), getattr(functional, f"{name}_vjp")
    assert inspect.signature(function).parameters == inspect.signature(vjp).parameters
