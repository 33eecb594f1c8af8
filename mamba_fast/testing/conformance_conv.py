"""Conformance of the causal convolution: values, restarts, lengths, states, pieces and steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Backend
from mamba_fast.testing.cases import CONV_CASES, ConvCase, inputs
from mamba_fast.testing.conformance_base import Checks, case_names, doubled, pieces
from mamba_fast.testing.runs import LAYOUTS, Arena, no_transfers, reference, run_conv

__all__ = ["ConvChecks"]

_BY_NAME = {case.name: case for case in CONV_CASES}
_FULL = _BY_NAME["everything"]
_ONE_TAP = _BY_NAME["one_tap_masked"]
_UNPADDED = replace(_FULL, name="in_pieces", lengths=False)
_STEPS = (
    replace(_FULL, name="in_steps", lengths=False, seq_start=False),
    replace(_FULL, name="in_steps_no_activation", lengths=False, seq_start=False, activation=None),
    replace(_FULL, name="in_steps_no_bias", lengths=False, seq_start=False, bias=False, width=65),
    _BY_NAME["one_tap"],
)


class ConvChecks(Checks):
    """`conv1d`, `conv1d_backward`, `conv1d_step`."""

    @pytest.mark.parametrize("case", CONV_CASES, ids=case_names)
    def test_conv1d_matches_the_oracle(self, backend: Backend, case: ConvCase) -> None:
        self.assert_matches(run_conv(backend, case), reference(run_conv, case))

    @pytest.mark.parametrize("case", [_FULL, _ONE_TAP, _BY_NAME["width_65"]], ids=case_names)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_conv1d_writes_inside_its_views_only(self, backend: Backend, case: ConvCase, layout: str) -> None:
        self.assert_matches(run_conv(backend, case, layout, out="given"), reference(run_conv, case))

    @pytest.mark.parametrize("case", [_FULL, _BY_NAME["width_65"]], ids=case_names)
    def test_conv1d_gradients_accumulate(self, backend: Backend, case: ConvCase) -> None:
        expected = doubled(reference(run_conv, case), "dw", "dbias")
        self.assert_matches(run_conv(backend, case, times=2), expected)

    def test_conv1d_with_frozen_parameters_gives_the_same_dx(self, backend: Backend) -> None:
        self.assert_matches(run_conv(backend, _FULL, frozen=True), reference(run_conv, _FULL, frozen=True))

    def test_conv1d_without_grad_saves_nothing_and_gives_the_same_output(self, backend: Backend) -> None:
        case = _BY_NAME["width_65"]
        t = {name: backend.from_host(array) for name, array in inputs(case).items()}
        y, final_state, saved = backend.conv1d(t["x"], t["w"], t["bias"], grad=False)
        assert saved is None
        actual = {"y": backend.to_host(y), "final_state": backend.to_host(final_state)}
        self.assert_matches(actual, {name: reference(run_conv, case)[name] for name in actual})

    @pytest.mark.parametrize("case", [_FULL, _BY_NAME["width_65"]], ids=case_names)
    def test_two_runs_of_conv1d_give_the_same_bits(self, backend: Backend, case: ConvCase) -> None:
        self.assert_same_bits(run_conv(backend, case), run_conv(backend, case))

    def test_tap_k_of_conv1d_looks_k_steps_back(self, backend: Backend) -> None:
        x = np.array([[[1.0], [10.0], [100.0]]])
        y, final_state, _ = backend.conv1d(
            backend.from_host(x),
            backend.from_host([[2.0, 3.0]]),
            backend.from_host([0.5]),
            initial_state=backend.from_host([[[7.0]]]),
            activation=None,
            grad=False,
        )
        assert backend.to_host(y).ravel().tolist() == [23.5, 23.5, 230.5]
        assert backend.to_host(final_state).ravel().tolist() == [100.0]

    # ---- restarts and lengths -----------------------------------------------------------------

    def test_nothing_before_a_restart_reaches_conv1d_after_it(self, backend: Backend) -> None:
        host, restart = inputs(_BY_NAME["width_65"]), 2
        spoilt = host["x"].copy()
        spoilt[:, :restart] = np.nan
        starts = np.zeros(spoilt.shape[:2], dtype=np.int32)
        starts[:, restart] = 1
        state = np.full((spoilt.shape[0], 2, spoilt.shape[2]), np.nan)
        y, final_state, _ = backend.conv1d(
            backend.from_host(spoilt),
            backend.from_host(host["w"]),
            initial_state=backend.from_host(state),
            seq_start=backend.from_host(starts, "i32"),
            grad=False,
        )
        alone, alone_state, _ = backend.conv1d(
            backend.from_host(host["x"][:, restart:]), backend.from_host(host["w"]), grad=False
        )
        self.assert_matches(
            {"y": backend.to_host(y)[:, restart:], "final_state": backend.to_host(final_state)},
            {"y": backend.to_host(alone), "final_state": backend.to_host(alone_state)},
        )

    def test_a_restart_at_the_beginning_of_conv1d_discards_the_initial_state(self, backend: Backend) -> None:
        host = inputs(_UNPADDED)
        starts = np.zeros_like(host["seq_start"])
        starts[:, 0] = 1
        t = {n: backend.from_host(host[n]) for n in ("x", "w", "dy", "initial_state")}
        _, _, saved = backend.conv1d(
            t["x"], t["w"], initial_state=t["initial_state"], seq_start=backend.from_host(starts, "i32")
        )
        _, d_initial = backend.conv1d_backward(t["dy"], saved, t["w"], need_d_initial_state=True)
        assert not backend.to_host(d_initial).any()

    def test_positions_beyond_a_rows_length_change_nothing_in_conv1d(self, backend: Backend) -> None:
        host = inputs(_FULL)
        beyond = np.arange(_FULL.length) >= host["lengths"][:, None]
        spoilt = {name: host[name].copy() for name in ("x", "dy")}
        for array in spoilt.values():
            array[beyond] = np.nan
        results = []
        for values in (host, {**host, **spoilt}):
            t = {n: backend.from_host(a, "i32" if a.dtype.kind == "i" else "f32") for n, a in values.items()}
            dw, dbias = backend.zeros(host["w"].shape), backend.zeros(host["bias"].shape)
            y, final_state, saved = backend.conv1d(
                t["x"], t["w"], t["bias"], initial_state=t["initial_state"], lengths=t["lengths"]
            )
            dx, _ = backend.conv1d_backward(t["dy"], saved, t["w"], dw=dw, dbias=dbias)
            named = {"y": y, "final_state": final_state, "dx": dx, "dw": dw, "dbias": dbias}
            results.append({name: backend.to_host(tensor) for name, tensor in named.items()})
        assert not results[1]["y"][beyond].any()
        assert not results[1]["dx"][beyond].any()
        self.assert_matches(results[1], results[0])

    # ---- pieces and steps ---------------------------------------------------------------------

    def test_conv1d_in_pieces_equals_conv1d_of_the_whole_and_so_do_its_gradients(
        self, backend: Backend
    ) -> None:
        case, host = _UNPADDED, inputs(_UNPADDED)
        w, bias = backend.from_host(host["w"]), backend.from_host(host["bias"])
        dw, dbias = backend.zeros(host["w"].shape), backend.zeros(host["bias"].shape)
        state = backend.from_host(host["initial_state"])
        d_state = backend.from_host(host["d_final_state"])
        parts = pieces(case.length, 1, 2, 5)
        whole_x = [backend.from_host(host["x"][:, part]) for part in parts]
        whole_dy = [backend.from_host(host["dy"][:, part]) for part in parts]
        starts = [backend.from_host(host["seq_start"][:, part], "i32") for part in parts]
        ys: list[Any] = []
        saved: list[Any] = []
        dxs: list[Any] = []
        with no_transfers(backend):
            for x, start in zip(whole_x, starts, strict=True):
                y, state, kept = backend.conv1d(x, w, bias, initial_state=state, seq_start=start)
                ys.append(y)
                saved.append(kept)
            for dy, kept in zip(reversed(whole_dy), reversed(saved), strict=True):
                dx, d_state = backend.conv1d_backward(
                    dy, kept, w, dw=dw, dbias=dbias, d_final_state=d_state, need_d_initial_state=True
                )
                dxs.insert(0, dx)
        actual = {
            "y": np.concatenate([backend.to_host(y) for y in ys], axis=1),
            "final_state": backend.to_host(state),
            "dx": np.concatenate([backend.to_host(dx) for dx in dxs], axis=1),
            "d_initial_state": backend.to_host(d_state),
            "dw": backend.to_host(dw),
            "dbias": backend.to_host(dbias),
        }
        self.assert_matches(actual, reference(run_conv, case))

    @pytest.mark.parametrize("case", _STEPS, ids=case_names)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_conv1d_step_by_step_equals_conv1d_of_the_whole(
        self, backend: Backend, case: ConvCase, layout: str
    ) -> None:
        host = inputs(case)
        arena = Arena(backend, layout)
        w = arena.read(host["w"], "w")
        bias = arena.read(host["bias"], "bias") if case.bias else None
        state = arena.write(host["initial_state"], "state")
        xs = [arena.read(host["x"][:, t], "x") for t in range(case.length)]
        # Every other step writes to memory that is there.
        outs = [
            arena.write(np.ones_like(host["x"][:, t]), "out") if t % 2 else None for t in range(case.length)
        ]
        with no_transfers(backend):
            ys = [
                backend.conv1d_step(x, state, w, bias, activation=case.activation, out=y)
                for x, y in zip(xs, outs, strict=True)
            ]
        actual = {
            "y": np.stack(
                [backend.to_host(y if out is None else out) for y, out in zip(ys, outs, strict=True)], axis=1
            ),
            "final_state": backend.to_host(state),
        }
        arena.check()
        self.assert_matches(actual, {name: reference(run_conv, case)[name] for name in actual})
