"""The oracle reproduces every file of golden data, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composition import BLOCK_NAMES, block, run_block, run_model

from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance

GOLDEN = Path(__file__).parent / "data" / "golden"
BLOCKS = ("alog_clamped", "large_dt", "n16_l70", "odd_dims", "single_step", "tiny_b2_l7")
MODELS = ("model_small", "model_strong")
SCANS = ("scan_euler_packed", "scan_euler_state", "scan_zoh_packed", "scan_zoh_state", "scan_zoh_tiny_dt")
CONVS = ("conv_packed", "conv_short", "conv_state")

# The golden intermediate values are stored as float32: half a unit in the last place of each.
STORED_AS_FLOAT32 = 2.0**-24

oracle = get_backend("oracle")


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as data:
        return dict(data)


def weights(golden: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name[2:]: value for name, value in golden.items() if name.startswith("w.")}


def errors(
    found: dict[str, np.ndarray], golden: dict[str, np.ndarray], wanted: list[str]
) -> dict[str, float]:
    """Relative L2 error by name of all that exceeds the oracle's tolerance."""
    measured = {name: relative_l2(found[name], golden[name]) for name in wanted}
    limits = {name: tolerance("oracle", "gradient" if name.startswith("g.") else "output") for name in wanted}
    return {name: error for name, error in measured.items() if not error <= limits[name]}


def run_scan(golden: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    t = {name: oracle.from_host(value) for name, value in golden.items() if name != "mode"}
    a, decay_saved = oracle.decay(t["A_log"])
    y, final_state, saved = oracle.selective_scan(
        t["u"], t["delta"], a, t["B"], t["C"], t["D"], t["z"], t["delta_bias"],
        discretization=str(golden["mode"]),
        initial_state=t["initial_state"],
        seq_start=oracle.from_host(golden["seq_start"], "i32"),
    )  # fmt: skip
    d_a, d_a_log, d_d, d_delta_bias = (oracle.zeros(t[name].shape) for name in ("A_log", "A_log", "D", "D"))
    grads = oracle.selective_scan_backward(
        t["dy"], saved, d_final_state=t["d_final_state"], d_a=d_a, d_d=d_d, d_delta_bias=d_delta_bias,
        need_d_initial_state=True,
    )  # fmt: skip
    oracle.decay_backward(d_a, decay_saved, d_a_log=d_a_log)
    return {
        "y": y, "final_state": final_state, "g.u": grads.du, "g.delta": grads.ddelta, "g.B": grads.db,
        "g.C": grads.dc, "g.z": grads.dz, "g.initial_state": grads.d_initial_state, "g.A_log": d_a_log,
        "g.D": d_d, "g.delta_bias": d_delta_bias,
    }  # fmt: skip


def run_conv(golden: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    t = {name: oracle.from_host(value) for name, value in golden.items()}
    y, final_state, saved = oracle.conv1d(
        t["x"], t["w"], t["bias"], initial_state=t["initial_state"],
        seq_start=oracle.from_host(golden["seq_start"], "i32"),
    )  # fmt: skip
    dw, dbias = oracle.zeros(t["w"].shape), oracle.zeros(t["bias"].shape)
    dx, d_initial_state = oracle.conv1d_backward(
        t["dy"], saved, t["w"], dw=dw, dbias=dbias, d_final_state=t["d_final_state"],
        need_d_initial_state=True,
    )  # fmt: skip
    return {
        "y": y, "final_state": final_state, "g.x": dx, "g.w": dw, "g.bias": dbias,
        "g.initial_state": d_initial_state,
    }  # fmt: skip


def test_every_golden_file_is_tested():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == {*BLOCKS, *MODELS, *SCANS, *CONVS}


@pytest.mark.parametrize("name", SCANS)
def test_scan_reproduces_golden_outputs_and_gradients(name: str):
    golden = load(name)
    wanted = ["y", "final_state", *(key for key in golden if key.startswith("g."))]
    assert len(wanted) == 11
    assert errors(run_scan(golden), golden, wanted) == {}


@pytest.mark.parametrize("name", CONVS)
def test_convolution_reproduces_golden_outputs_and_gradients(name: str):
    golden = load(name)
    wanted = ["y", "final_state", *(key for key in golden if key.startswith("g."))]
    assert len(wanted) == 6
    assert errors(run_conv(golden), golden, wanted) == {}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_reproduces_golden_output_and_gradients(name: str):
    golden = load(name)
    found = run_block(oracle, weights(golden), golden["x"], golden["d_out"])
    assert errors(found, golden, ["output", "dx", *(f"g.{key}" for key in BLOCK_NAMES)]) == {}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_reproduces_golden_intermediate_values(name: str):
    golden = load(name)
    params: dict[str, Any] = {key: oracle.from_host(value) for key, value in weights(golden).items()}
    _, _, inside = block(oracle, params, oracle.from_host(golden["x"]))
    xin = oracle.view(inside["xz"], -1, 0, params["A_log"].shape[0])
    conv, _, _ = oracle.conv1d(xin, params["wConv"], params["bConv"], activation=None)
    scan_y, _, _ = oracle.selective_scan(*inside["scan_inputs"])
    found = {**inside, "convOut": conv, "scanY": scan_y}
    for key in ("normOut", "convOut", "u", "deltaFull", "scanY", "gated"):
        assert relative_l2(found[key], golden[f"cache.{key}"]) <= STORED_AS_FLOAT32, key


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "n16_l70"])
def test_states_step_by_step_are_the_golden_states(name: str):
    golden = load(name)
    params: dict[str, Any] = {key: oracle.from_host(value) for key, value in weights(golden).items()}
    _, _, inside = block(oracle, params, oracle.from_host(golden["x"]))
    u, delta, a, b, c, d = (oracle.to_host(tensor) for tensor in inside["scan_inputs"])
    state = oracle.zeros((u.shape[0], *a.shape))
    states = []
    for t in range(u.shape[1]):
        at_t = [oracle.from_host(value[:, t]) for value in (u, delta, b, c)]
        oracle.selective_scan_step(at_t[0], at_t[1], a, at_t[2], at_t[3], d, None, None, state)
        states.append(oracle.to_host(state))
    assert relative_l2(np.stack(states, axis=1), golden["cache.h"]) <= STORED_AS_FLOAT32


@pytest.mark.parametrize("name", MODELS)
def test_model_reproduces_golden_logits_loss_and_gradients(name: str):
    golden = load(name)
    found = run_model(oracle, weights(golden), golden["tokens"], golden["targets"])
    wanted = ["logits", "loss", *(f"g.{key}" for key in weights(golden))]
    assert errors(found, golden, wanted) == {}


@pytest.mark.parametrize("name", MODELS)
def test_zeroing_the_gradient_of_any_one_parameter_is_noticed(name: str):
    golden = load(name)
    found = {key: value for key, value in golden.items() if key.startswith("g.")}
    for key in found:
        assert list(errors({**found, key: np.zeros_like(found[key])}, golden, list(found))) == [key]
