"""The functional API: values and gradients."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from functional_cases import conv_inputs, scan_inputs
from model_cases import GOLDEN

from mamba_fast.functional import (
    causal_conv1d,
    causal_conv1d_vjp,
    rms_norm,
    rms_norm_vjp,
    selective_scan,
    selective_scan_vjp,
)
from mamba_fast.registry import get_backend
from mamba_fast.testing.loopback import create_backend as create_loopback
from mamba_fast.testing.tolerances import relative_l2, tolerance

SCANS = ("scan_euler_packed", "scan_euler_state", "scan_zoh_packed", "scan_zoh_state", "scan_zoh_tiny_dt")
CONVS = ("conv_packed", "conv_short", "conv_state")
BACKENDS = ("oracle", "cython")

backends = pytest.mark.parametrize("backend", BACKENDS)


def assert_outputs(backend, actual, expected):
    assert relative_l2(actual, expected) <= tolerance(backend, "output")


def assert_gradients(backend, actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_l2(actual[name], value) <= tolerance(backend, "gradient"), name


# ---- golden data ------------------------------------------------------------------------------


def scan_arguments(data):
    names = ("u", "delta", "A_log", "B", "C", "D", "z", "delta_bias", "initial_state", "seq_start")
    return {name: data[name] for name in names} | {"discretization": str(data["mode"])}


def conv_arguments(data):
    return {name: data[name] for name in ("x", "w", "bias", "initial_state", "seq_start")}


GOLDEN_CASES = [
    *[(name, selective_scan, selective_scan_vjp, scan_arguments) for name in SCANS],
    *[(name, causal_conv1d, causal_conv1d_vjp, conv_arguments) for name in CONVS],
]
golden = pytest.mark.parametrize(
    ("name", "op", "vjp", "arguments"), GOLDEN_CASES, ids=[case[0] for case in GOLDEN_CASES]
)


@backends
@golden
def test_an_op_reproduces_its_golden_outputs(backend, name, op, vjp, arguments):
    data = np.load(GOLDEN / f"{name}.npz")
    y, final_state = op(**arguments(data), return_final_state=True, backend=backend)
    assert_outputs(backend, y, data["y"])
    assert_outputs(backend, final_state, data["final_state"])
    assert np.array_equal(op(**arguments(data), backend=backend), y)


@backends
@golden
def test_a_vjp_reproduces_its_golden_gradients(backend, name, op, vjp, arguments):
    data = np.load(GOLDEN / f"{name}.npz")
    (y, final_state), backprop = vjp(**arguments(data), return_final_state=True, backend=backend)
    assert_outputs(backend, y, data["y"])
    assert_outputs(backend, final_state, data["final_state"])
    gradients = backprop(data["dy"], data["d_final_state"])
    assert_gradients(backend, gradients, {k[2:]: data[k] for k in data.files if k.startswith("g.")})


@golden
def test_zeroing_any_one_golden_gradient_would_be_noticed(name, op, vjp, arguments):
    data = np.load(GOLDEN / f"{name}.npz")
    expected = {k[2:]: data[k] for k in data.files if k.startswith("g.")}
    for dead in expected:
        if not expected[dead].any():
            continue  # an initial state that a restart discards has gradient 0
        broken = {n: np.zeros_like(g) if n == dead else g for n, g in expected.items()}
        with pytest.raises(AssertionError, match=dead):
            assert_gradients("cython", broken, expected)


# ---- by hand (SPEC 9) -------------------------------------------------------------------------

LN2 = math.log(2.0)
HAND = {"u": [1, 1], "delta": [0, 0], "A_log": 0, "B": [1, 1], "C": [1, 1]}
EULER = "euler"


def by_hand(**changes):
    """Arguments of the two-step scan with one channel and one state."""
    values = {**HAND, **changes}
    arguments = {k: np.reshape(values[k], (1, 2, 1)).astype(float) for k in ("u", "delta", "B", "C")}
    return {**arguments, "A_log": [[float(values["A_log"])]], "D": [0.0]}


@backends
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.75]),
        ({"discretization": EULER}, [LN2, 1.5 * LN2]),
        ({"seq_start": [[False, True]]}, [0.5, 0.5]),
    ],
    ids=["zoh", "euler", "restart"],
)
def test_the_scan_has_the_outputs_worked_out_by_hand(backend, options, expected):
    y = selective_scan(**by_hand(), **options, backend=backend)
    assert y.ravel() == pytest.approx(expected, rel=1e-6)


@backends
@pytest.mark.parametrize(
    ("delta", "mode", "expected"),
    [(1000, "zoh", [1, 1]), (1000, EULER, [1000, 1000]), (-1000, "zoh", [0, 0]), (-1000, EULER, [0, 0])],
)
def test_extreme_step_sizes_neither_overflow_nor_underflow(backend, delta, mode, expected):
    y = selective_scan(**by_hand(delta=[delta] * 2), discretization=mode, backend=backend)
    assert y.ravel() == pytest.approx(expected, rel=1e-6)


@backends
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "zoh",
            {
                "u": [0.75, 0.5],
                "delta": [0.375, 0.125],
                "A_log": [-0.5568528],
                "B": [0.75, 0.5],
                "C": [0.5, 0.75],
                "D": [2.0],
                "delta_bias": [0.5],
                "initial_state": [0.75],
            },
        ),
        (
            EULER,
            {
                "u": [1.5 * LN2, LN2],
                "delta": [0.75, 0.3267132],
                "A_log": [-0.2402265],
                "B": [1.5 * LN2, LN2],
                "C": [LN2, 1.5 * LN2],
                "D": [2.0],
                "delta_bias": [1.0767132],
                "initial_state": [0.75],
            },
        ),
    ],
)
def test_the_scan_has_the_gradients_worked_out_by_hand(backend, mode, expected):
    _, backprop = selective_scan_vjp(
        **by_hand(), delta_bias=[0.0], initial_state=[[[0.0]]], discretization=mode, backend=backend
    )
    gradients = backprop(np.ones((1, 2, 1)))
    assert {n: g.ravel().tolist() for n, g in gradients.items()} == {
        n: pytest.approx(value, rel=1e-6) for n, value in expected.items()
    }


@backends
@pytest.mark.parametrize("a_log", [-10.0, -12.0, 5.0, 7.0])
def test_a_log_at_or_outside_its_clamp_has_gradient_zero(backend, a_log):
    _, backprop = selective_scan_vjp(**by_hand(a_log=0, A_log=a_log), backend=backend)
    assert backprop(np.ones((1, 2, 1)))["A_log"].tolist() == [[0.0]]


@backends
def test_the_skip_adds_d_times_u(backend):
    y = selective_scan(**{**by_hand(), "D": [3.0]}, backend=backend)
    assert y.ravel() == pytest.approx([3.5, 3.75], rel=1e-6)


@backends
def test_without_softplus_delta_is_taken_as_it_is(backend):
    raw = selective_scan(
        **by_hand(delta=[LN2 - 0.5] * 2), delta_bias=[0.5], delta_softplus=False, backend=backend
    )
    assert raw.ravel() == pytest.approx([0.5, 0.75], rel=1e-6)


@backends
def test_the_gate_multiplies_by_silu(backend):
    z = np.array([2.0, -1.0]).reshape(1, 2, 1)
    y = selective_scan(**by_hand(), z=z, backend=backend)
    silu = z.ravel() / (1 + np.exp(-z.ravel()))
    assert y.ravel() == pytest.approx(silu * [0.5, 0.75], rel=1e-6)


@backends
def test_the_convolution_looks_back_in_the_order_of_its_taps(backend):
    x = np.array([1.0, 10.0, 100.0]).reshape(1, 3, 1)
    options = {"activation": None, "backend": backend}
    y, state = causal_conv1d(x, [[2, 3, 5]], [7], **options, return_final_state=True)
    assert y.ravel().tolist() == [9, 30, 242]
    assert state.ravel().tolist() == [10, 100]
    before = [[[-1.0], [-2.0]]]
    y = causal_conv1d(x, [[2, 3, 5]], [7], initial_state=before, **options)
    assert y.ravel().tolist() == [9 - 6 - 5, 30 - 10, 242]


@backends
def test_the_convolution_applies_silu_unless_told_otherwise(backend):
    y = causal_conv1d([[[2.0]]], [[1.0]], backend=backend)
    assert y.item() == pytest.approx(2 / (1 + math.exp(-2)), rel=1e-6)


@backends
def test_rms_norm_has_the_value_worked_out_by_hand(backend):
    y = rms_norm([[3.0, -4.0]], [1.0, 2.0], 1.0, backend=backend)
    assert y.ravel() == pytest.approx([3 / math.sqrt(13.5), -8 / math.sqrt(13.5)], rel=1e-6)


# ---- finite differences -----------------------------------------------------------------------


def central_differences(function, arguments, name, at, step=1e-5):
    """d function / d arguments[name][at]."""
    values = []
    for sign in (1, -1):
        moved = arguments[name].copy()
        moved[at] += sign * step
        values.append(function(**{**arguments, name: moved}))
    return (values[0] - values[1]) / (2 * step)


def check_differences(vjp, op, arguments, gradients_of, weights, options):
    """Every gradient of the oracle against differences, at three elements each."""
    outputs, backprop = vjp(**arguments, **options)
    gradients = backprop(*weights)
    assert list(gradients) == gradients_of

    def objective(**moved):
        result = op(**moved, **options)
        results = result if isinstance(result, tuple) else (result,)
        return sum(float((w * r).sum()) for w, r in zip(weights, results, strict=True))

    rng = np.random.default_rng(0)
    for name in gradients_of:
        for _ in range(3):
            at = tuple(int(rng.integers(size)) for size in arguments[name].shape)
            difference = central_differences(objective, arguments, name, at)
            assert gradients[name][at] == pytest.approx(difference, rel=1e-6, abs=1e-8), f"{name}{at}"
    return outputs


RESTARTS = np.zeros((2, 6), bool)
RESTARTS[1, 2] = True


@pytest.mark.parametrize("mode", ["zoh", EULER])
@pytest.mark.parametrize(
    "masks", [{}, {"seq_start": RESTARTS}, {"lengths": [6, 3]}], ids=["plain", "restart", "short"]
)
def test_scan_gradients_equal_central_differences(mode, masks):
    arguments = scan_inputs()
    normal = np.random.default_rng(1).standard_normal
    options = {"discretization": mode, "backend": "oracle", "return_final_state": True, **masks}
    weights = (normal((2, 6, 3)), normal((2, 3, 2)))
    check_differences(selective_scan_vjp, selective_scan, arguments, list(arguments), weights, options)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(
    "masks", [{}, {"seq_start": RESTARTS}, {"lengths": [6, 3]}], ids=["plain", "restart", "short"]
)
def test_convolution_gradients_equal_central_differences(activation, masks):
    arguments = conv_inputs()
    normal = np.random.default_rng(1).standard_normal
    options = {"activation": activation, "backend": "oracle", "return_final_state": True, **masks}
    weights = (normal((2, 6, 3)), normal((2, 3, 3)))
    check_differences(causal_conv1d_vjp, causal_conv1d, arguments, list(arguments), weights, options)


def test_norm_gradients_equal_central_differences():
    normal = np.random.default_rng(1).standard_normal
    arguments = {"x": normal((2, 3, 4)), "w": normal(4)}
    options = {"eps": 0.1, "backend": "oracle"}
    check_differences(rms_norm_vjp, rms_norm, arguments, ["x", "w"], (normal((2, 3, 4)),), options)


# ---- gradients: which, how often, through what ------------------------------------------------


@backends
@pytest.mark.parametrize("optional", ["D", "z", "delta_bias", "initial_state"])
def test_the_scan_returns_gradients_of_the_arguments_that_were_given(backend, optional):
    arguments = scan_inputs()
    del arguments[optional]
    _, backprop = selective_scan_vjp(**arguments, backend=backend)
    assert list(backprop(np.ones((2, 6, 3)))) == list(arguments)


@backends
def test_the_convolution_and_the_norm_return_gradients_of_what_was_given(backend):
    _, backprop = causal_conv1d_vjp(np.ones((1, 3, 2)), np.ones((2, 4)), backend=backend)
    assert list(backprop(np.ones((1, 3, 2)))) == ["x", "w"]
    _, backprop = rms_norm_vjp(np.ones((1, 3)), None, backend=backend)
    assert list(backprop(np.ones((1, 3)))) == ["x"]


@pytest.mark.parametrize(
    ("vjp", "arguments", "shape"),
    [
        (selective_scan_vjp, scan_inputs(), (2, 6, 3)),
        (causal_conv1d_vjp, conv_inputs(), (2, 6, 3)),
        (partial(rms_norm_vjp, w=np.arange(3.0)), {"x": scan_inputs()["u"]}, (2, 6, 3)),
    ],
    ids=["scan", "conv", "norm"],
)
@backends
def test_backprop_may_be_called_again(backend, vjp, arguments, shape):
    _, backprop = vjp(**arguments, backend=backend)
    dy = np.random.default_rng(3).standard_normal(shape)
    first, other, again = backprop(dy), backprop(2 * dy), backprop(dy)
    assert any(not np.array_equal(g, other[name]) for name, g in first.items())
    assert all(np.array_equal(g, again[name]) for name, g in first.items())


@pytest.mark.parametrize(
    ("vjp", "arguments"),
    [
        (selective_scan_vjp, scan_inputs()),
        (causal_conv1d_vjp, conv_inputs()),
        (partial(rms_norm_vjp, w=np.arange(3.0)), {"x": scan_inputs()["u"]}),
    ],
    ids=["scan", "conv", "norm"],
)
def test_tensors_that_the_host_cannot_touch_give_the_same(vjp, arguments):
    dy = np.random.default_rng(3).standard_normal((2, 6, 3))
    (y, backprop), (expected_y, expected) = (
        vjp(**arguments, backend=backend) for backend in (create_loopback(), "oracle")
    )
    assert np.array_equal(y, expected_y)
    wanted = expected(dy)
    for _ in range(2):
        assert all(np.array_equal(g, wanted[name]) for name, g in backprop(dy).items())


@backends
def test_a_restart_at_the_first_step_discards_the_initial_state(backend):
    start = np.zeros((2, 6), int)
    start[:, 0] = 1
    arguments = scan_inputs()
    _, backprop = selective_scan_vjp(**arguments, seq_start=start, backend=backend)
    assert not backprop(np.ones((2, 6, 3)))["initial_state"].any()
    _, backprop = causal_conv1d_vjp(**conv_inputs(), seq_start=start, backend=backend)
    assert not backprop(np.ones((2, 6, 3)))["initial_state"].any()


@backends
@pytest.mark.parametrize(
    ("vjp", "arguments", "sequences"),
    [
        (selective_scan_vjp, scan_inputs(length=11), ("u", "delta", "B", "C", "z")),
        (causal_conv1d_vjp, conv_inputs(length=11), ("x",)),
    ],
    ids=["scan", "conv"],
)
def test_pieces_joined_by_their_states_give_values_and_gradients_of_the_whole(
    backend, vjp, arguments, sequences
):
    # Truncated backpropagation through time, not truncated: the state's gradient goes back through it.
    dy = np.random.default_rng(3).standard_normal((2, 11, 3))
    y, backprop = vjp(**arguments, backend=backend)
    expected = backprop(dy)
    outputs, calls, state = [], [], arguments["initial_state"]
    for part in (slice(0, 2), slice(2, 7), slice(7, 11)):
        piece = {name: a[:, part] if name in sequences else a for name, a in arguments.items()}
        (piece_y, state), piece_backprop = vjp(
            **{**piece, "initial_state": state}, return_final_state=True, backend=backend
        )
        outputs.append(piece_y)
        calls.append((part, piece_backprop))
    assert_outputs(backend, np.concatenate(outputs, axis=1), y)
    d_state, pieces = None, []
    for part, piece_backprop in reversed(calls):
        pieces.insert(0, piece_backprop(dy[:, part], d_state))
        d_state = pieces[0]["initial_state"]
    joined = {
        name: np.concatenate([p[name] for p in pieces], axis=1)
        if name in sequences
        else sum(p[name] for p in pieces)
        for name in arguments
    }
    joined["initial_state"] = d_state
    assert_gradients(backend, joined, expected)


@backends
def test_short_rows_equal_the_rows_alone(backend):
    arguments = scan_inputs()
    rows = ("u", "delta", "B", "C", "z")
    y, state = selective_scan(**arguments, lengths=[6, 4], return_final_state=True, backend=backend)
    assert not y[1, 4:].any()
    alone = {name: a[1:, :4] if name in rows else a for name, a in arguments.items()}
    alone["initial_state"] = arguments["initial_state"][1:]
    y1, state1 = selective_scan(**alone, return_final_state=True, backend=backend)
    assert_outputs(backend, y[1:, :4], y1)
    assert_outputs(backend, state[1:], state1)


@backends
@pytest.mark.parametrize("taps", [1, 2, 5, 9])
def test_a_convolution_is_as_long_as_its_input_whatever_its_taps(backend, taps):
    arguments = conv_inputs(length=3, taps=taps)
    y, state = causal_conv1d(**arguments, return_final_state=True, backend=backend)
    assert y.shape == (2, 3, 3)
    assert state.shape == (2, taps - 1, 3)
    window = np.concatenate([arguments["initial_state"], arguments["x"]], axis=1)
    taps_at = [arguments["w"][:, k] * window[:, taps - 1 - k : taps + 2 - k] for k in range(taps)]
    s = arguments["bias"] + sum(taps_at)
    assert_outputs(backend, y, s / (1 + np.exp(-s)))
    if taps > 1:
        assert_outputs(backend, state, window[:, 3:])


@backends
def test_a_single_tap_has_an_empty_state_with_an_empty_gradient(backend):
    _, backprop = causal_conv1d_vjp(**conv_inputs(taps=1), backend=backend)
    assert backprop(np.ones((2, 6, 3)))["initial_state"].shape == (2, 0, 3)


@backends
def test_the_norm_takes_any_number_of_leading_axes(backend):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    y = rms_norm(x, None, backend=backend)
    assert_outputs(backend, y, x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))
    assert_outputs(backend, rms_norm(x[0, 0, 0], None, backend=backend), y[0, 0, 0])


# ---- types ------------------------------------------------------------------------------------


def test_results_are_float32_and_those_of_the_oracle_float64():
    for backend, dtype in (("cython", np.float32), ("oracle", np.float64)):
        (y, state), backprop = selective_scan_vjp(**scan_inputs(), return_final_state=True, backend=backend)
        gradients = backprop(np.ones((2, 6, 3)), np.ones((2, 3, 2)))
        assert {a.dtype for a in (y, state, *gradients.values())} == {np.dtype(dtype)}


def test_a_backend_may_be_an_object():
    backend = get_backend("cython", threads=2)
    named = selective_scan(**scan_inputs(), backend="cython")
    assert np.array_equal(selective_scan(**scan_inputs(), backend=backend), named)
    assert backend.transfers > 0
