"""The convolution over more steps than one invocation walks: tiles meet without a seam."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mamba_fast.registry import get_backend
from mamba_fast.testing.cases import CONV_CASES, ConvCase, inputs
from mamba_fast.testing.runs import reference, run_conv
from mamba_fast.testing.tolerances import relative_l2, tolerance
from mamba_fast_wgpu import device, ops_conv
from mamba_fast_wgpu.ops_conv import TILE

pytestmark = pytest.mark.skipif(
    not any(a.usable for a in device.adapters()),
    reason="no Vulkan, Metal or Direct3D 12 adapter (Debian: apt install libvulkan1 mesa-vulkan-drivers)",
)

_FULL = {case.name: case for case in CONV_CASES}["everything"]
_LONG = replace(_FULL, name="long", length=2 * TILE + 21, width=67)
CASES = (
    _LONG,
    replace(_LONG, name="long_one_tap", taps=1),
    replace(_LONG, name="long_two_taps_no_masks", taps=2, seq_start=False, lengths=False),
    replace(_LONG, name="long_six_taps", taps=6, activation=None),
    replace(_LONG, name="whole_tiles", length=2 * TILE, lengths=False, d_final_state=False),
    replace(_LONG, name="whole_tile_and_one", length=TILE + 1, seq_start=False, lengths=False),
)


def compare(case: ConvCase) -> None:
    actual, expected = run_conv(get_backend("wgpu"), case), reference(run_conv, case)
    for name, value in expected.items():
        limit = tolerance("wgpu", "output" if name in ("y", "final_state") else "gradient")
        assert relative_l2(actual[name], value) <= limit, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_convolution_of_several_tiles_equals_the_oracle(case: ConvCase) -> None:
    compare(case)


def test_taps_may_reach_beyond_the_tile_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_conv, "TILE", 8)
    compare(replace(_FULL, name="more_taps_than_a_tile", taps=11, length=45))
    compare(
        replace(
            _FULL, name="more_taps_than_a_tile_no_masks", taps=11, length=45, seq_start=False, lengths=False
        )
    )


def test_restarts_at_the_seams_of_tiles_are_kept() -> None:
    for seed in range(20):  # a case whose restarts lie at a tile's first and at its last step
        case = replace(_LONG, name=f"seams_{seed}", batch=8, width=5, lengths=False)
        starts = inputs(case)["seq_start"]
        if starts[:, TILE].any() and starts[:, TILE - 1].any():
            compare(case)
            return
    pytest.fail("no seed gave restarts at the seams")
