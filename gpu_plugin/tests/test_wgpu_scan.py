"""The scan's ways of running: in pieces that fit a small device, in segments side by side, and for
subgroups of every width that a GPU may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mamba_fast.registry import get_backend
from mamba_fast.testing.cases import SCAN_CASES, ScanCase, inputs
from mamba_fast.testing.runs import reference, run_scan
from mamba_fast.testing.tolerances import relative_l2, tolerance
from mamba_fast_wgpu import device
from mamba_fast_wgpu.ops_scan import STEPS, plan

needs_adapter = pytest.mark.skipif(
    not any(a.usable for a in device.adapters()),
    reason="no Vulkan, Metal or Direct3D 12 adapter (Debian: apt install libvulkan1 mesa-vulkan-drivers)",
)

SMALL = {"binding_bytes": 1 << 16}
"""The smallest binding that the API allows to ask for."""

_FULL = replace({case.name: case for case in SCAN_CASES}["everything"], width=37, length=77)
ALL_STATES = replace(_FULL, name="sixteen_states", states=16)
EULER = replace(_FULL, name="thirteen_states_euler", states=13, discretization="euler", lengths=False)
FEW_STATES = replace(_FULL, name="five_states", states=5)
PLAIN = replace(
    _FULL, name="no_masks", states=16, seq_start=False, lengths=False, z=False, delta_softplus=False
)


def by_name(case: ScanCase) -> str:
    return case.name


def check(backend: Any, case: ScanCase) -> None:
    actual, expected = run_scan(backend, case), reference(run_scan, case)
    for name, value in expected.items():
        limit = tolerance("wgpu", "output" if name in ("y", "final_state") else "gradient")
        assert relative_l2(actual[name], value) <= limit, name


# ---- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1 << 16, 1 << 18, 1 << 20, 1 << 27])
@pytest.mark.parametrize(
    ("batch", "length", "width", "states"), [(1, 1, 1, 1), (5, 203, 65, 17), (3, 999, 48, 16)]
)
def test_pieces_cover_every_step_of_every_row_once(
    batch: int, length: int, width: int, states: int, largest: int
) -> None:
    seen = [
        (row, step)
        for cut in plan(batch, length, width, states, channels=32, largest=largest, most_rows=2)
        for row in range(cut.first_row, cut.first_row + cut.rows)
        for step in range(cut.first_step, cut.first_step + cut.steps)
    ]
    assert seen == [(row, step) for row in range(batch) for step in range(length)]


@pytest.mark.parametrize("largest", [1 << 18, 1 << 20])
def test_the_states_and_shares_of_a_piece_fit_into_a_binding(largest: int) -> None:
    width, states = 320, 16
    for cut in plan(4, 2000, width, states, channels=32, largest=largest, most_rows=65535):
        chunks = -(-cut.steps // STEPS)
        assert cut.rows * chunks * width * states * 4 <= largest
        carry = cut.rows * (2 * states + 4) * width
        assert (carry + width // 32 * cut.rows * cut.steps * 2 * states) * 4 <= largest


def test_a_scan_that_fits_is_not_cut() -> None:
    assert len(plan(8, 2048, 1536, 16, channels=32, largest=2**31 - 4, most_rows=65535)) == 1


@needs_adapter
@pytest.mark.parametrize("case", [ALL_STATES, EULER, FEW_STATES], ids=by_name)
def test_a_scan_in_pieces_equals_the_oracle(case: ScanCase) -> None:
    backend = get_backend("wgpu", force_limits=SMALL)
    assert len(backend._plan(case.batch, case.length, case.width, case.states)) > 1
    check(backend, case)


@needs_adapter
def test_a_long_row_is_cut_in_time() -> None:
    case = replace(ALL_STATES, name="one_long_row", batch=1, length=250)
    backend = get_backend("wgpu", force_limits=SMALL)
    cuts = backend._plan(case.batch, case.length, case.width, case.states)
    assert max(cut.first_step for cut in cuts) > 0
    check(backend, case)
    backend.forced_segments = 2
    check(backend, case)


# ---- segments and subgroups ---------------------------------------------------------------------


@needs_adapter
@pytest.mark.parametrize("case", [ALL_STATES, EULER, PLAIN], ids=by_name)
@pytest.mark.parametrize("segments", [2, 3, 5])
def test_segments_side_by_side_equal_the_oracle(case: ScanCase, segments: int) -> None:
    backend = get_backend("wgpu")
    if not backend.device.subgroup_size:
        backend.emulated_span = 32
    backend.forced_segments = segments
    assert backend._segments(case.batch, case.width, -(-case.length // STEPS), 8)[0] > 1
    check(backend, case)


@needs_adapter
@pytest.mark.parametrize("case", [ALL_STATES, EULER, PLAIN], ids=by_name)
@pytest.mark.parametrize("lanes", [8, 16, 32, 64])
def test_subgroups_of_any_width_give_the_oracles_values(case: ScanCase, lanes: int) -> None:
    backend = get_backend("wgpu")
    backend.emulated_span = lanes
    check(backend, case)


@needs_adapter
@pytest.mark.parametrize("segments", [0, 3])
def test_the_widths_of_subgroups_do_not_change_the_outputs_bits(segments: int) -> None:
    results = []
    for lanes in (8, 32):
        backend = get_backend("wgpu")
        backend.emulated_span, backend.forced_segments = lanes, segments
        results.append(run_scan(backend, ALL_STATES))
    for name in ("y", "final_state", "du", "ddelta", "dz", "d_a"):
        assert results[0][name].tobytes() == results[1][name].tobytes(), name


@needs_adapter
def test_segments_take_negative_steps() -> None:
    case = replace(PLAIN, name="negative_steps", width=9, delta_bias=False)
    host = inputs(case)
    results = []
    for backend in (get_backend("oracle"), get_backend("wgpu")):
        if backend.name == "wgpu":
            backend.emulated_span, backend.forced_segments = 32, 3
        t = {name: backend.from_host(array) for name, array in host.items() if array.dtype == np.float32}
        delta = backend.from_host(-0.2 * host["delta"])
        y, _, saved = backend.selective_scan(t["u"], delta, t["a"], t["b"], t["c"], delta_softplus=False)
        grads = backend.selective_scan_backward(t["dy"], saved)
        results.append([backend.to_host(tensor) for tensor in (y, grads.du, grads.ddelta)])
    for expected, actual in zip(*results, strict=True):
        assert relative_l2(actual, expected) <= tolerance("wgpu", "output")


@needs_adapter
def test_two_runs_in_segments_give_the_same_bits() -> None:
    backend = get_backend("wgpu")
    if not backend.device.subgroup_size:
        backend.emulated_span = 32
    backend.forced_segments = 3
    first, second = run_scan(backend, ALL_STATES), run_scan(backend, ALL_STATES)
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name
