"""Conformance of the selective scan: values, SPEC 2's accuracy, restarts, lengths, pieces and steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Backend
from mamba_fast.testing.cases import ACCEPTANCE_CASES, SCAN_CASES, AcceptanceCase, Arrays, ScanCase, inputs
from mamba_fast.testing.conformance_base import Checks, case_names, doubled, pieces
from mamba_fast.testing.runs import LAYOUTS, Arena, no_transfers, reference, run_acceptance, run_scan

__all__ = ["ScanChecks"]

_BY_NAME = {case.name: case for case in SCAN_CASES}
_FULL = _BY_NAME["everything"]
_WIDE = _BY_NAME["width_65_states_17"]
_PIECES = (
    replace(_FULL, name="in_pieces", lengths=False),
    replace(_FULL, name="in_pieces_euler", lengths=False, discretization="euler"),
)
_STEP = replace(_FULL, name="in_steps", lengths=False, seq_start=False)
_STEPS = (
    _STEP,
    replace(_STEP, name="in_steps_euler", discretization="euler"),
    replace(_STEP, name="in_steps_no_softplus", delta_softplus=False),
    replace(_STEP, name="in_steps_no_options", d=False, z=False, delta_bias=False),
    replace(_STEP, name="in_steps_width_65", width=65, states=16, length=3),
)
_ACCUMULATED = ("d_a", "d_d", "d_delta_bias")
_STEP_ARGUMENTS = ("u", "delta", "a", "b", "c", "d", "z", "delta_bias")

# SPEC 9's case by hand: u = [1, 1], delta = [0, 0], A_log = 0, b = c = [1, 1], D = 0, loss = sum(y), so
# that Delta = ln 2 and A = -1. With abar = 1/2, zoh has g = 1/2 and the loss is g (2 + abar).
_LN2 = math.log(2.0)
_BY_HAND = {
    "zoh": {
        "y": [0.5, 0.75],
        "du": [0.75, 0.5],
        "ddelta": [0.375, 0.125],
        "d_a_log": [-(1.25 - _LN2)],
        "db": [0.75, 0.5],
        "dc": [0.5, 0.75],
        "d_d": [2.0],
        "d_initial_state": [0.75],
    },
    "euler": {
        "y": [_LN2, 1.5 * _LN2],
        "du": [1.5 * _LN2, _LN2],
        "ddelta": [0.75, 0.5 - _LN2 / 4.0],
        "d_a_log": [-_LN2 * _LN2 / 2.0],
        "db": [1.5 * _LN2, _LN2],
        "dc": [_LN2, 1.5 * _LN2],
        "d_d": [2.0],
        "d_initial_state": [0.75],
    },
}


def _sequence(backend: Backend, values: Any) -> Any:
    """A tensor (1, L, 1)."""
    return backend.from_host(np.array(values, dtype=np.float32).reshape(1, -1, 1))


class ScanChecks(Checks):
    """`selective_scan`, `selective_scan_backward`, `selective_scan_step`."""

    @pytest.mark.parametrize("case", SCAN_CASES, ids=case_names)
    def test_selective_scan_matches_the_oracle(self, backend: Backend, case: ScanCase) -> None:
        self.assert_matches(run_scan(backend, case), reference(run_scan, case))

    @pytest.mark.parametrize("case", ACCEPTANCE_CASES, ids=case_names)
    def test_selective_scan_keeps_its_accuracy_for_every_size_of_delta(
        self, backend: Backend, case: AcceptanceCase
    ) -> None:
        self.assert_matches(run_acceptance(backend, case), reference(run_acceptance, case))

    @pytest.mark.parametrize("discretization", ["zoh", "euler"])
    def test_selective_scan_gives_the_values_worked_out_by_hand(
        self, backend: Backend, discretization: str
    ) -> None:
        a, saved_a = backend.decay(backend.zeros((1, 1)))
        ones, zeros = _sequence(backend, [1, 1]), _sequence(backend, [0, 0])
        d_a, d_a_log, d_d = backend.zeros((1, 1)), backend.zeros((1, 1)), backend.zeros((1,))
        y, _, saved = backend.selective_scan(
            ones, zeros, a, ones, ones, backend.zeros((1,)), discretization=discretization
        )
        grads = backend.selective_scan_backward(ones, saved, d_a=d_a, d_d=d_d, need_d_initial_state=True)
        backend.decay_backward(d_a, saved_a, d_a_log=d_a_log)
        tensors = {"y": y, **grads._asdict(), "d_a_log": d_a_log, "d_d": d_d}
        expected = _BY_HAND[discretization]
        self.assert_matches({n: backend.to_host(tensors[n]).ravel() for n in expected}, expected)

    @pytest.mark.parametrize(
        ("discretization", "delta", "y"),
        [("zoh", 1000.0, 1.0), ("euler", 1000.0, 1000.0), ("zoh", -1000.0, 0.0), ("euler", -1000.0, 0.0)],
    )
    def test_selective_scan_survives_extreme_delta(
        self, backend: Backend, discretization: str, delta: float, y: float
    ) -> None:
        ones, steps = _sequence(backend, [1, 1]), _sequence(backend, [delta, delta])
        actual, _, saved = backend.selective_scan(
            ones, steps, backend.from_host([[-1.0]]), ones, ones, discretization=discretization
        )
        grads = backend.selective_scan_backward(ones, saved, d_a=backend.zeros((1, 1)))
        self.assert_matches({"y": backend.to_host(actual).ravel()}, {"y": [y, y]})
        for tensor in (grads.du, grads.ddelta, grads.db, grads.dc):
            assert np.isfinite(backend.to_host(tensor)).all()

    @pytest.mark.parametrize("case", [_FULL, _BY_NAME["everything_euler"], _WIDE], ids=case_names)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_selective_scan_writes_inside_its_views_only(
        self, backend: Backend, case: ScanCase, layout: str
    ) -> None:
        self.assert_matches(run_scan(backend, case, layout, out="given"), reference(run_scan, case))

    @pytest.mark.parametrize("case", [_FULL, _WIDE], ids=case_names)
    def test_selective_scan_gradients_accumulate(self, backend: Backend, case: ScanCase) -> None:
        expected = doubled(reference(run_scan, case), *_ACCUMULATED)
        self.assert_matches(run_scan(backend, case, times=2), expected)

    def test_selective_scan_with_frozen_parameters_gives_the_same_gradients(self, backend: Backend) -> None:
        self.assert_matches(run_scan(backend, _FULL, frozen=True), reference(run_scan, _FULL, frozen=True))

    def test_selective_scan_without_grad_saves_nothing_and_gives_the_same_output(
        self, backend: Backend
    ) -> None:
        case = _BY_NAME["nothing_optional"]
        t = {name: backend.from_host(array) for name, array in inputs(case).items()}
        y, final_state, saved = backend.selective_scan(t["u"], t["delta"], t["a"], t["b"], t["c"], grad=False)
        assert saved is None
        actual = {"y": backend.to_host(y), "final_state": backend.to_host(final_state)}
        self.assert_matches(actual, {name: reference(run_scan, case)[name] for name in actual})

    @pytest.mark.parametrize("case", [_FULL, _WIDE, _BY_NAME["long"]], ids=case_names)
    def test_two_runs_of_selective_scan_give_the_same_bits(self, backend: Backend, case: ScanCase) -> None:
        self.assert_same_bits(run_scan(backend, case), run_scan(backend, case))

    # ---- restarts and lengths -----------------------------------------------------------------

    @pytest.mark.parametrize("discretization", ["zoh", "euler"])
    def test_nothing_before_a_restart_reaches_the_scan_after_it(
        self, backend: Backend, discretization: str
    ) -> None:
        host, restart = inputs(_BY_NAME["nothing_optional"]), 2
        spoilt = {name: host[name].copy() for name in ("u", "delta", "b")}
        for array in spoilt.values():
            array[:, :restart] = np.nan
        starts = np.zeros(host["u"].shape[:2], dtype=np.int32)
        starts[:, restart] = 1
        state = np.full((host["u"].shape[0], *host["a"].shape), np.nan)
        a = backend.from_host(host["a"])

        def run(values: Arrays, **options: Any) -> Arrays:
            t = {name: backend.from_host(array) for name, array in values.items()}
            y, final_state, saved = backend.selective_scan(
                t["u"], t["delta"], a, t["b"], t["c"], discretization=discretization, **options
            )
            grads = backend.selective_scan_backward(t["dy"], saved)
            tensors = {"y": y, "du": grads.du, "ddelta": grads.ddelta, "db": grads.db, "dc": grads.dc}
            read = {name: backend.to_host(tensor)[:, -kept:] for name, tensor in tensors.items()}
            return {**read, "final_state": backend.to_host(final_state)}

        kept = host["u"].shape[1] - restart
        sequences = {name: host[name] for name in ("u", "delta", "b", "c", "dy")}
        actual = run(
            {**sequences, **spoilt},
            initial_state=backend.from_host(state),
            seq_start=backend.from_host(starts, "i32"),
        )
        self.assert_matches(actual, run({name: array[:, restart:] for name, array in sequences.items()}))

    def test_a_restart_at_the_beginning_of_the_scan_discards_the_initial_state(
        self, backend: Backend
    ) -> None:
        host = inputs(_PIECES[0])
        t = {name: backend.from_host(host[name]) for name in ("u", "delta", "a", "b", "c", "dy")}
        starts = np.zeros_like(host["seq_start"])
        starts[:, 0] = 1
        _, _, saved = backend.selective_scan(
            t["u"],
            t["delta"],
            t["a"],
            t["b"],
            t["c"],
            initial_state=backend.from_host(host["initial_state"]),
            seq_start=backend.from_host(starts, "i32"),
        )
        grads = backend.selective_scan_backward(t["dy"], saved, need_d_initial_state=True)
        assert not backend.to_host(grads.d_initial_state).any()

    def test_positions_beyond_a_rows_length_change_nothing_in_the_scan(self, backend: Backend) -> None:
        host = inputs(_FULL)
        beyond = np.arange(_FULL.length) >= host["lengths"][:, None]
        spoilt = {name: host[name].copy() for name in ("u", "delta", "b", "c", "z", "dy")}
        for array in spoilt.values():
            array[beyond] = np.nan
        results = []
        for values in (host, {**host, **spoilt}):
            t = {n: backend.from_host(a, "i32" if a.dtype.kind == "i" else "f32") for n, a in values.items()}
            sums = {f"d_{name}": backend.zeros(host[name].shape) for name in ("a", "d", "delta_bias")}
            y, final_state, saved = backend.selective_scan(
                *(t[name] for name in _STEP_ARGUMENTS), lengths=t["lengths"]
            )
            grads = backend.selective_scan_backward(t["dy"], saved, need_d_initial_state=True, **sums)
            named = {"y": y, "final_state": final_state, **grads._asdict(), **sums}
            results.append({name: backend.to_host(tensor) for name, tensor in named.items()})
        for name in ("y", "du", "ddelta", "db", "dc", "dz"):
            assert not results[1][name][beyond].any(), f"{name} beyond the lengths is not 0"
        self.assert_matches(results[1], results[0])

    # ---- pieces and steps ---------------------------------------------------------------------

    @pytest.mark.parametrize("case", _PIECES, ids=case_names)
    def test_the_scan_in_pieces_equals_the_scan_of_the_whole_and_so_do_its_gradients(
        self, backend: Backend, case: ScanCase
    ) -> None:
        host = inputs(case)
        parts = pieces(case.length, 1, 2, 5)
        long = [
            {name: backend.from_host(host[name][:, part]) for name in ("u", "delta", "b", "c", "z", "dy")}
            for part in parts
        ]
        starts = [backend.from_host(host["seq_start"][:, part], "i32") for part in parts]
        fixed = {name: backend.from_host(host[name]) for name in ("a", "d", "delta_bias")}
        sums = {f"d_{name}": backend.zeros(host[name].shape) for name in fixed}
        state = backend.from_host(host["initial_state"])
        d_state: Any = backend.from_host(host["d_final_state"])
        ys: list[Any] = []
        saved: list[Any] = []
        grads: list[Any] = []
        with no_transfers(backend):
            for piece, start in zip(long, starts, strict=True):
                arguments = {**piece, **fixed}
                y, state, kept = backend.selective_scan(
                    *(arguments[name] for name in _STEP_ARGUMENTS),
                    discretization=case.discretization,
                    initial_state=state,
                    seq_start=start,
                )
                ys.append(y)
                saved.append(kept)
            for piece, kept in zip(reversed(long), reversed(saved), strict=True):
                gradient = backend.selective_scan_backward(
                    piece["dy"], kept, d_final_state=d_state, need_d_initial_state=True, **sums
                )
                d_state = gradient.d_initial_state
                grads.insert(0, gradient)
        actual = {
            name: np.concatenate([backend.to_host(getattr(g, name)) for g in grads], axis=1)
            for name in ("du", "ddelta", "db", "dc", "dz")
        }
        actual |= {name: backend.to_host(tensor) for name, tensor in sums.items()}
        actual["y"] = np.concatenate([backend.to_host(y) for y in ys], axis=1)
        actual["final_state"] = backend.to_host(state)
        actual["d_initial_state"] = backend.to_host(d_state)
        self.assert_matches(actual, reference(run_scan, case))

    @pytest.mark.parametrize("case", _STEPS, ids=case_names)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_scan_step_by_step_equals_the_scan_of_the_whole(
        self, backend: Backend, case: ScanCase, layout: str
    ) -> None:
        host = inputs(case)
        arena = Arena(backend, layout)
        fixed = {name: arena.read(host[name], name) for name in ("a", "d", "delta_bias") if name in host}
        state = arena.write(host["initial_state"], "state")
        steps = [
            {n: arena.read(host[n][:, t], n) for n in ("u", "delta", "b", "c", "z") if n in host}
            for t in range(case.length)
        ]
        # Every other step writes to memory that is there.
        outs = [
            arena.write(np.ones_like(host["u"][:, t]), "out") if t % 2 else None for t in range(case.length)
        ]
        with no_transfers(backend):
            ys = [
                backend.selective_scan_step(
                    *((step | fixed).get(name) for name in _STEP_ARGUMENTS),
                    state,
                    delta_softplus=case.delta_softplus,
                    discretization=case.discretization,
                    out=out,
                )
                for step, out in zip(steps, outs, strict=True)
            ]
        actual = {
            "y": np.stack(
                [backend.to_host(y if out is None else out) for y, out in zip(ys, outs, strict=True)], axis=1
            ),
            "final_state": backend.to_host(state),
        }
        arena.check()
        self.assert_matches(actual, {name: reference(run_scan, case)[name] for name in actual})
