"""Convolution and scan of the oracle: by hand, against differences, against the scalar oracle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scalar_oracle
from differences import slopes

from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance

Arrays = dict[str, np.ndarray]

oracle = get_backend("oracle")
OUTPUT = tolerance("oracle", "output")
GRADIENT = tolerance("oracle", "gradient")

SEQ_START = np.array([[0, 0, 1, 0, 1, 0], [1, 0, 0, 1, 1, 0]], dtype=np.int32)
LENGTHS = np.array([4, 6], dtype=np.int32)
MASKS: dict[str, dict[str, np.ndarray]] = {
    "no_mask": {},
    "seq_start": {"seq_start": SEQ_START},
    "lengths": {"lengths": LENGTHS},
    "both_masks": {"seq_start": SEQ_START, "lengths": LENGTHS},
}
BATCH, LENGTH = SEQ_START.shape


def scan(inputs: Arrays, **options: Any) -> tuple[Any, Any, Any]:
    return oracle.selective_scan(**inputs, **options)


def scan_gradients(inputs: Arrays, dy: np.ndarray, d_final: np.ndarray | None, **options: Any) -> Arrays:
    """Gradients by the name of the input, of those given."""
    _, _, saved = scan(inputs, **options)
    added = {name: oracle.zeros(inputs[name].shape) for name in ("a", "d", "delta_bias") if name in inputs}
    grads = oracle.selective_scan_backward(
        dy, saved, d_final_state=d_final, d_a=added["a"], d_d=added.get("d"),
        d_delta_bias=added.get("delta_bias"), need_d_initial_state="initial_state" in inputs,
    )  # fmt: skip
    returned = {
        "u": grads.du, "delta": grads.ddelta, "b": grads.db, "c": grads.dc, "z": grads.dz,
        "initial_state": grads.d_initial_state,
    }  # fmt: skip
    return {**added, **{name: value for name, value in returned.items() if value is not None}}


def conv_gradients(inputs: Arrays, dy: np.ndarray, d_final: np.ndarray | None, **options: Any) -> Arrays:
    _, _, saved = oracle.conv1d(**inputs, **options)
    added = {name: oracle.zeros(inputs[name].shape) for name in ("w", "bias") if name in inputs}
    dx, d_initial = oracle.conv1d_backward(
        dy, saved, inputs["w"], dw=added["w"], dbias=added.get("bias"), d_final_state=d_final,
        need_d_initial_state="initial_state" in inputs,
    )  # fmt: skip
    return {**added, "x": dx, **({} if d_initial is None else {"initial_state": d_initial})}


def scan_inputs(optional: tuple[str, ...] = (), *, length: int = LENGTH, seed: int = 0) -> Arrays:
    """Two rows, three channels, two states; one rate is 0 and one positive."""
    rng = np.random.default_rng(seed)
    width, states = 3, 2
    shapes = {
        "u": (BATCH, length, width), "delta": (BATCH, length, width), "b": (BATCH, length, states),
        "c": (BATCH, length, states), "d": (width,), "z": (BATCH, length, width), "delta_bias": (width,),
        "initial_state": (BATCH, width, states),
    }  # fmt: skip
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    values["a"] = np.array([[-0.7, 0.0], [0.5, -1.5], [-1e-4, -2.0]])
    return {name: values[name] for name in ("u", "delta", "a", "b", "c", *optional)}


def conv_inputs(
    optional: tuple[str, ...] = (), *, taps: int = 3, length: int = LENGTH, seed: int = 1
) -> Arrays:
    rng = np.random.default_rng(seed)
    width = 3
    shapes = {
        "x": (BATCH, length, width), "w": (width, taps), "bias": (width,),
        "initial_state": (BATCH, taps - 1, width),
    }  # fmt: skip
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: values[name] for name in ("x", "w", *optional)}


def cotangents(y: np.ndarray, final_state: np.ndarray, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(y.shape), rng.standard_normal(final_state.shape)


SCAN_OPTIONAL = ("d", "z", "delta_bias", "initial_state")
CONV_OPTIONAL = ("bias", "initial_state")


# ---- against differences ----------------------------------------------------------------------


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
@pytest.mark.parametrize("delta_softplus", [True, False], ids=["softplus", "linear"])
@pytest.mark.parametrize(
    ("masks", "optional"),
    [
        *((masks, optional) for masks in MASKS for optional in ((), SCAN_OPTIONAL)),
        *(("both_masks", (name,)) for name in SCAN_OPTIONAL),
    ],
)
def test_scan_gradients_equal_differences(
    discretization: str, delta_softplus: bool, masks: str, optional: tuple[str, ...]
):
    inputs = scan_inputs(optional)
    if not delta_softplus:  # a negative step makes the state grow, and differences of large values are coarse
        for name in {"delta", "delta_bias"} & inputs.keys():
            inputs[name] *= 0.3
    options = {"discretization": discretization, "delta_softplus": delta_softplus, **MASKS[masks]}
    dy, d_final = cotangents(*scan(inputs, **options)[:2])
    found = scan_gradients(inputs, dy, d_final, **options)

    def value() -> float:
        y, final_state, _ = scan(inputs, **options, grad=False)
        return float((dy * y).sum() + (d_final * final_state).sum())

    assert found.keys() == inputs.keys()
    for name, array in inputs.items():
        assert relative_l2(found[name], slopes(value, array)) <= GRADIENT, name


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("taps", [1, 2, 3, 8])
@pytest.mark.parametrize("optional", [(), CONV_OPTIONAL], ids=["required", "all"])
def test_convolution_gradients_equal_differences(
    activation: str | None, masks: str, taps: int, optional: tuple[str, ...]
):
    inputs = conv_inputs(optional, taps=taps)
    options = {"activation": activation, **MASKS[masks]}
    dy, d_final = cotangents(*oracle.conv1d(**inputs, **options)[:2])
    found = conv_gradients(inputs, dy, d_final, **options)

    def value() -> float:
        y, final_state, _ = oracle.conv1d(**inputs, **options, grad=False)
        return float((dy * y).sum() + (d_final * final_state).sum())

    assert found.keys() == inputs.keys()
    for name, array in inputs.items():
        assert relative_l2(found[name], slopes(value, array)) <= GRADIENT, name


# ---- against the scalar oracle ----------------------------------------------------------------


def lists(arrays: Arrays) -> dict[str, Any]:
    return {name: value.tolist() for name, value in arrays.items()}


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
@pytest.mark.parametrize(
    ("masks", "delta"),
    [*((masks, None) for masks in MASKS), *(("both_masks", delta) for delta in (-20.0, -3.0, 2.0, 30.0))],
)
def test_scan_equals_the_scalar_oracle_from_tiny_to_large_steps(
    discretization: str, masks: str, delta: float | None
):
    inputs = scan_inputs(SCAN_OPTIONAL)
    if delta is not None:
        inputs["delta"][...] = delta + 0.1 * inputs["delta"]
        inputs["a"] = -np.abs(inputs["a"]) * 3.0  # a rate above 0 overflows what float64 can hold
    options: dict[str, Any] = {"discretization": discretization}
    masked = {name: mask.tolist() for name, mask in MASKS[masks].items()}
    y, final_state, _ = scan(inputs, **options, **MASKS[masks])
    dy, d_final = cotangents(y, final_state)
    expected_y, expected_final = scalar_oracle.run(
        scalar_oracle.selective_scan, lists(inputs), **options, **masked
    )
    assert relative_l2(y, expected_y) <= OUTPUT
    assert relative_l2(final_state, expected_final) <= OUTPUT
    expected = scalar_oracle.gradients(
        scalar_oracle.selective_scan, lists(inputs), dy.tolist(), d_final.tolist(), **options, **masked
    )
    for name, gradient in scan_gradients(inputs, dy, d_final, **options, **MASKS[masks]).items():
        assert relative_l2(gradient, expected[name]) <= GRADIENT, name


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("taps", [1, 3, 8])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_equals_the_scalar_oracle(masks: str, taps: int, activation: str | None):
    inputs = conv_inputs(CONV_OPTIONAL, taps=taps)
    masked = {name: mask.tolist() for name, mask in MASKS[masks].items()}
    y, final_state, _ = oracle.conv1d(**inputs, activation=activation, **MASKS[masks])
    dy, d_final = cotangents(y, final_state)
    expected_y, expected_final = scalar_oracle.run(
        scalar_oracle.conv1d, lists(inputs), activation=activation, **masked
    )
    assert relative_l2(y, expected_y) <= OUTPUT
    assert relative_l2(final_state, np.reshape(expected_final, final_state.shape)) <= OUTPUT
    expected = scalar_oracle.gradients(
        scalar_oracle.conv1d, lists(inputs), dy.tolist(), d_final.tolist(), activation=activation, **masked
    )
    for name, gradient in conv_gradients(inputs, dy, d_final, activation=activation, **MASKS[masks]).items():
        assert relative_l2(gradient, np.reshape(expected[name], gradient.shape)) <= GRADIENT, name


# ---- by hand ----------------------------------------------------------------------------------

# Printed to seven digits in the specification.
SEVEN_DIGITS = 5.1e-8
LN2 = math.log(2.0)


def scan_by_hand(delta: float = 0.0, **options: Any) -> dict[str, list[float]]:
    """B = D = N = 1, L = 2, everything 1, A_log = 0, D_vec = 0, loss = the sum of y."""
    ones = np.ones((1, 2, 1))
    a, decay_saved = oracle.decay(np.zeros((1, 1)))
    inputs = {
        "u": ones, "delta": np.full((1, 2, 1), delta), "a": a, "b": ones, "c": ones, "d": np.zeros(1),
        "initial_state": np.zeros((1, 1, 1)),
    }  # fmt: skip
    y, _, _ = scan(inputs, **options)
    found = scan_gradients(inputs, ones, None, **options)
    d_a_log = oracle.zeros((1, 1))
    oracle.decay_backward(found["a"], decay_saved, d_a_log=d_a_log)
    return {"y": y.ravel().tolist(), "a_log": d_a_log.ravel().tolist()} | {
        name: value.ravel().tolist() for name, value in found.items()
    }


def test_zoh_scan_by_hand():
    found = scan_by_hand()
    assert found["y"] == pytest.approx([0.5, 0.75], rel=1e-14)
    assert found["u"] == pytest.approx([0.75, 0.5], rel=1e-14)
    assert found["delta"] == pytest.approx([0.375, 0.125], rel=1e-14)
    assert found["a_log"] == pytest.approx([-0.5568528], abs=SEVEN_DIGITS)
    assert found["b"] == pytest.approx([0.75, 0.5], rel=1e-14)
    assert found["c"] == pytest.approx([0.5, 0.75], rel=1e-14)
    assert found["d"] == [2.0]
    assert found["initial_state"] == pytest.approx([0.75], rel=1e-14)


def test_euler_scan_by_hand():
    found = scan_by_hand(discretization="euler")
    assert found["y"] == pytest.approx([LN2, 1.5 * LN2], rel=1e-14)
    assert found["u"] == pytest.approx([1.5 * LN2, LN2], rel=1e-14)
    assert found["b"] == pytest.approx([1.5 * LN2, LN2], rel=1e-14)
    assert found["delta"] == pytest.approx([0.75, 0.3267132], abs=SEVEN_DIGITS)
    assert found["a_log"] == pytest.approx([-0.2402265], abs=SEVEN_DIGITS)
    assert found["c"] == pytest.approx([LN2, 1.5 * LN2], rel=1e-14)


def test_restart_by_hand():
    assert scan_by_hand(seq_start=np.array([[0, 1]], np.int32))["y"] == pytest.approx([0.5, 0.5], rel=1e-14)


@pytest.mark.parametrize(("discretization", "expected"), [("zoh", 1.0), ("euler", 1000.0)])
def test_scan_with_delta_1000_by_hand(discretization: str, expected: float):
    assert scan_by_hand(1000.0, discretization=discretization)["y"] == [expected, expected]


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
def test_scan_with_delta_minus_1000_is_exactly_zero(discretization: str):
    found = scan_by_hand(-1000.0, discretization=discretization)
    assert found["y"] == [0.0, 0.0]
    assert found["delta"] == [0.0, 0.0]


def test_convolution_tap_k_looks_k_steps_back():
    x = np.array([1.0, 10.0, 100.0]).reshape(1, 3, 1)
    y, final_state, _ = oracle.conv1d(x, np.array([[2.0, 3.0]]), np.array([0.5]), activation=None)
    assert y.ravel().tolist() == [2.5, 23.5, 230.5]
    assert final_state.ravel().tolist() == [100.0]


def test_convolution_state_is_oldest_first():
    x = np.array([5.0, 6.0]).reshape(1, 2, 1)
    state = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    w = np.array([[1.0, 10.0, 100.0, 1000.0]])
    y, final_state, _ = oracle.conv1d(x, w, initial_state=state, activation=None)
    assert y.ravel().tolist() == [5.0 + 30.0 + 200.0 + 1000.0, 6.0 + 50.0 + 300.0 + 2000.0]
    assert final_state.ravel().tolist() == [3.0, 5.0, 6.0]


def test_convolution_state_before_a_restart_is_zero():
    x = np.array([5.0, 6.0, 7.0]).reshape(1, 3, 1)
    state = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    starts = np.array([[0, 0, 1]], np.int32)
    _, final_state, _ = oracle.conv1d(x, np.ones((1, 4)), initial_state=state, seq_start=starts)
    assert final_state.ravel().tolist() == [0.0, 0.0, 7.0]


# ---- lengths, restarts and pieces -------------------------------------------------------------


def rows_of(inputs: Arrays, row: int, part: slice) -> Arrays:
    """One row, some of its time: what has a batch axis is cut, parameters are kept."""
    cut = {}
    for name, value in inputs.items():
        if name in ("a", "d", "delta_bias", "w", "bias"):
            cut[name] = value
        elif name == "initial_state":
            cut[name] = value[row : row + 1]
        else:
            cut[name] = value[row : row + 1, part]
    return cut


@pytest.mark.parametrize("op", ["scan", "conv"])
def test_a_row_with_a_length_equals_the_row_cut_off(op: str):
    forward = scan if op == "scan" else lambda inputs, **options: oracle.conv1d(**inputs, **options)
    backward = scan_gradients if op == "scan" else conv_gradients
    inputs = scan_inputs(SCAN_OPTIONAL) if op == "scan" else conv_inputs(CONV_OPTIONAL)
    y, final_state, _ = forward(inputs, lengths=LENGTHS)
    dy, d_final = cotangents(y, final_state)
    found = backward(inputs, dy, d_final, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        alone = rows_of(inputs, row, slice(0, length))
        y_alone, final_alone, _ = forward(alone)
        assert np.array_equal(y[row, :length], y_alone[0])
        assert not y[row, length:].any()
        assert np.array_equal(final_state[row], final_alone[0])
        grads = backward(alone, dy[row : row + 1, :length], d_final[row : row + 1])
        for name in {"u", "delta", "b", "c", "z", "x"} & found.keys():
            assert np.array_equal(found[name][row, :length], grads[name][0]), name
            assert not found[name][row, length:].any(), name
        assert np.array_equal(found["initial_state"][row], grads["initial_state"][0])


@pytest.mark.parametrize("op", ["scan", "conv"])
def test_what_lies_beyond_a_length_is_never_looked_at(op: str):
    inputs = scan_inputs(SCAN_OPTIONAL) if op == "scan" else conv_inputs(CONV_OPTIONAL)
    forward = scan if op == "scan" else lambda inputs, **options: oracle.conv1d(**inputs, **options)
    backward = scan_gradients if op == "scan" else conv_gradients
    dy, d_final = cotangents(*forward(inputs, lengths=LENGTHS)[:2])
    for name in {"u", "delta", "b", "c", "z", "x"} & inputs.keys():
        inputs[name][0, LENGTHS[0] :] = np.nan
    dy[0, LENGTHS[0] :] = np.nan
    starts = np.zeros((BATCH, LENGTH), np.int32)
    starts[0, LENGTHS[0] :] = 1
    y, final_state, _ = forward(inputs, lengths=LENGTHS, seq_start=starts)
    assert np.isfinite(y).all()
    assert np.isfinite(final_state).all()
    assert final_state[0].any()
    found = backward(inputs, dy, d_final, lengths=LENGTHS, seq_start=starts)
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.parametrize("op", ["scan", "conv"])
def test_packed_documents_equal_documents_alone(op: str):
    length, bounds = 16, [0, 3, 8, 14, 16]
    inputs = scan_inputs(("d", "z", "delta_bias"), length=length) if op == "scan" else conv_inputs(
        ("bias",), taps=4, length=length
    )  # fmt: skip
    forward = scan if op == "scan" else lambda inputs, **options: oracle.conv1d(**inputs, **options)
    backward = scan_gradients if op == "scan" else conv_gradients
    starts = np.zeros((BATCH, length), np.int32)
    starts[:, bounds[:-1]] = 1
    y, final_state, _ = forward(inputs, seq_start=starts)
    dy, _ = cotangents(y, final_state)
    found = backward(inputs, dy, None, seq_start=starts)
    totals = {name: np.zeros_like(value) for name, value in found.items()}
    for row in range(BATCH):
        for begin, end in itertools.pairwise(bounds):
            alone = rows_of(inputs, row, slice(begin, end))
            assert np.array_equal(y[row, begin:end], forward(alone)[0][0])
            for name, value in backward(alone, dy[row : row + 1, begin:end], None).items():
                if name in ("a", "d", "delta_bias", "w", "bias"):
                    totals[name] += value
                else:
                    totals[name][row, begin:end] = value[0]
    for name, value in found.items():
        assert relative_l2(value, totals[name]) <= GRADIENT, name


@pytest.mark.parametrize("op", ["scan", "conv"])
def test_a_restart_at_the_first_position_discards_the_initial_state(op: str):
    inputs = scan_inputs(SCAN_OPTIONAL) if op == "scan" else conv_inputs(CONV_OPTIONAL)
    forward = scan if op == "scan" else lambda inputs, **options: oracle.conv1d(**inputs, **options)
    backward = scan_gradients if op == "scan" else conv_gradients
    starts = np.zeros((BATCH, LENGTH), np.int32)
    starts[:, 0] = 1
    inputs["initial_state"][...] = np.nan
    y, final_state, _ = forward(inputs, seq_start=starts)
    without = {name: value for name, value in inputs.items() if name != "initial_state"}
    assert np.array_equal(y, forward(without)[0])
    found = backward(inputs, *cotangents(y, final_state), seq_start=starts)
    assert not found["initial_state"].any()


@pytest.mark.parametrize("op", ["scan", "conv"])
def test_pieces_that_carry_states_equal_the_whole(op: str):
    length, bounds = 23, [0, 1, 3, 8, 23]
    if op == "scan":
        inputs = scan_inputs(SCAN_OPTIONAL, length=length)
        forward = scan
    else:
        inputs = conv_inputs(CONV_OPTIONAL, taps=4, length=length)
        forward = lambda inputs, **options: oracle.conv1d(**inputs, **options)  # noqa: E731
    y, final_state, _ = forward(inputs)
    state, pieces = inputs["initial_state"], []
    for begin, end in itertools.pairwise(bounds):
        cut = {name: value[:, begin:end] if value.ndim == 3 else value for name, value in inputs.items()}
        piece, state, _ = forward({**cut, "initial_state": state})
        pieces.append(piece)
    assert np.array_equal(np.concatenate(pieces, axis=1), y)
    assert np.array_equal(state, final_state)


def test_gradients_flow_through_the_carried_state():
    inputs = scan_inputs(SCAN_OPTIONAL, length=9)
    dy, d_final = cotangents(*scan(inputs)[:2])
    whole = scan_gradients(inputs, dy, d_final)
    first, second = (
        {n: v[:, part] if v.ndim == 3 and n != "initial_state" else v for n, v in inputs.items()}
        for part in (slice(0, 4), slice(4, 9))
    )
    second["initial_state"] = scan(first)[1]
    late = scan_gradients(second, dy[:, 4:], d_final)
    early = scan_gradients(first, dy[:, :4], late["initial_state"])
    assert relative_l2(early["initial_state"], whole["initial_state"]) <= GRADIENT
    assert relative_l2(early["a"] + late["a"], whole["a"]) <= GRADIENT
    assert relative_l2(early["u"], whole["u"][:, :4]) <= GRADIENT


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
def test_scan_step_by_step_equals_the_whole(discretization: str):
    inputs = scan_inputs(SCAN_OPTIONAL)
    y, final_state, _ = scan(inputs, discretization=discretization)
    state = inputs["initial_state"].copy()
    for t in range(LENGTH):
        u, delta, b, c, z = (inputs[name][:, t] for name in ("u", "delta", "b", "c", "z"))
        y_t = oracle.selective_scan_step(
            u, delta, inputs["a"], b, c, inputs["d"], z, inputs["delta_bias"], state,
            discretization=discretization,
        )  # fmt: skip
        assert np.array_equal(y_t, y[:, t])
    assert np.array_equal(state, final_state)


@pytest.mark.parametrize("taps", [1, 4])
def test_convolution_step_by_step_equals_the_whole(taps: int):
    inputs = conv_inputs(CONV_OPTIONAL, taps=taps)
    y, final_state, _ = oracle.conv1d(**inputs)
    state = inputs["initial_state"].copy()
    for t in range(LENGTH):
        y_t = oracle.conv1d_step(inputs["x"][:, t], state, inputs["w"], inputs["bias"])
        assert np.array_equal(y_t, y[:, t])
    assert np.array_equal(state, final_state)


def test_sequences_shorter_than_the_window_keep_the_older_state():
    inputs = conv_inputs(CONV_OPTIONAL, taps=5, length=2)
    _, final_state, _ = oracle.conv1d(**inputs)
    assert np.array_equal(final_state[:, :2], inputs["initial_state"][:, 2:])
    assert np.array_equal(final_state[:, 2:], inputs["x"])


# ---- what is written and what is refused ------------------------------------------------------


def test_scan_parameter_gradients_are_added():
    inputs = scan_inputs(SCAN_OPTIONAL)
    y, final_state, _ = scan(inputs)
    dy, _ = cotangents(y, final_state)
    once = scan_gradients(inputs, dy, None)
    added = {name: np.ones(inputs[name].shape) for name in ("a", "d", "delta_bias")}
    for _ in range(2):
        _, _, saved = scan(inputs)
        oracle.selective_scan_backward(
            dy, saved, d_a=added["a"], d_d=added["d"], d_delta_bias=added["delta_bias"]
        )
    for name, value in added.items():
        assert relative_l2(value, 1.0 + 2.0 * once[name]) <= GRADIENT, name


def test_scan_gradients_go_to_column_views_and_nowhere_else():
    inputs = scan_inputs(SCAN_OPTIONAL)
    y, final_state, saved = scan(inputs)
    dy, d_final = cotangents(y, final_state)
    expected = scan_gradients(inputs, dy, d_final)
    frames = {name: np.full((*inputs[name].shape[:2], 9), 7.0) for name in ("u", "delta", "b", "c", "z")}
    views = {name: oracle.view(frame, -1, 2, 2 + inputs[name].shape[2]) for name, frame in frames.items()}
    grads = oracle.selective_scan_backward(
        dy, saved, d_final_state=d_final, du_out=views["u"], ddelta_out=views["delta"], db_out=views["b"],
        dc_out=views["c"], dz_out=views["z"],
    )  # fmt: skip
    assert grads.du is views["u"]
    assert grads.d_initial_state is None
    for name, frame in frames.items():
        assert np.array_equal(views[name], expected[name]), name
        assert (frame[:, :, :2] == 7.0).all(), name
        assert (frame[:, :, 2 + inputs[name].shape[2] :] == 7.0).all(), name


def test_scan_without_a_gate_has_no_gate_gradient():
    inputs = scan_inputs()
    y, _, saved = scan(inputs)
    assert oracle.selective_scan_backward(np.ones_like(y), saved).dz is None


def test_convolution_gradient_goes_to_a_column_view_and_nowhere_else():
    inputs = conv_inputs(CONV_OPTIONAL)
    y, _, saved = oracle.conv1d(**inputs)
    frame = np.full((BATCH, LENGTH, 8), 7.0)
    out = oracle.view(frame, -1, 4, 7)
    dx, d_initial = oracle.conv1d_backward(np.ones_like(y), saved, inputs["w"], out=out)
    assert dx is out
    assert d_initial is None
    assert np.array_equal(out, conv_gradients(inputs, np.ones_like(y), None)["x"])
    assert (frame[:, :, :4] == 7.0).all()
    assert (frame[:, :, 7:] == 7.0).all()


def test_inputs_may_be_column_views():
    inputs = scan_inputs(SCAN_OPTIONAL)
    wide = {n: np.concatenate([v, v, v], axis=-1) for n, v in inputs.items() if v.ndim == 3}
    views = {n: oracle.view(w, -1, inputs[n].shape[-1], 2 * inputs[n].shape[-1]) for n, w in wide.items()}
    assert np.array_equal(scan({**inputs, **views})[0], scan(inputs)[0])


def test_backward_without_saved_values_is_an_error_that_says_why():
    y, _, saved = scan(scan_inputs(), grad=False)
    assert saved is None
    with pytest.raises(ValueError, match=r"selective_scan_backward: saved is None: .*grad=True"):
        oracle.selective_scan_backward(y, saved)


@pytest.mark.parametrize("length", [0, 7, -1])
@pytest.mark.parametrize("op", ["selective_scan", "conv1d"])
def test_a_length_outside_the_row_is_an_error_that_names_it(op: str, length: int):
    inputs = scan_inputs() if op == "selective_scan" else conv_inputs()
    with pytest.raises(ValueError, match=rf"{op}: lengths\[1\] is {length}, expected 1 to 6"):
        getattr(oracle, op)(**inputs, lengths=np.array([6, length], np.int32))


def test_a_wrong_shape_is_an_error_that_names_it():
    inputs = scan_inputs()
    inputs["b"] = inputs["b"][:, :-1]
    with pytest.raises(ValueError, match=r"selective_scan: b has shape \(2, 5, 2\), expected \(2, 6, 2\)"):
        scan(inputs)


def test_the_same_inputs_give_the_same_bits():
    inputs = scan_inputs(SCAN_OPTIONAL)
    dy, d_final = cotangents(*scan(inputs)[:2])
    first, second = (scan_gradients(inputs, dy, d_final) for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
