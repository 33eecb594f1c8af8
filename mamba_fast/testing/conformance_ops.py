"""Conformance of elementwise ops, matrix products, normalisation, embedding and loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Backend
from mamba_fast.testing.cases import (
    CONV_CASES,
    EMBEDDING_CASES,
    LINEAR_CASES,
    LOSS_CASES,
    NORM_CASES,
    SCAN_CASES,
    Arrays,
    EmbeddingCase,
    LinearCase,
    LossCase,
    NormCase,
    inputs,
)
from mamba_fast.testing.conformance_base import Checks, case_names, doubled
from mamba_fast.testing.runs import (
    Arena,
    no_transfers,
    oracle,
    reference,
    run_conv,
    run_embedding,
    run_linear,
    run_loss,
    run_norm,
    run_scan,
)

__all__ = ["OpChecks"]

_in_views = pytest.mark.parametrize("layout", ["columns", "slab"])


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class OpChecks(Checks):
    """`add` to `rms_norm_backward`, and `cross_entropy_`."""

    # ---- elementwise and sums -----------------------------------------------------------------

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    @pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
    def test_add_gives_the_sum(self, backend: Backend, layout: str, given: bool) -> None:
        a, b = _normal(3, 5, 7), _normal(3, 5, 7, seed=1)
        arena = Arena(backend, layout)
        out = arena.write(np.ones_like(a)) if given else None
        y = backend.add(arena.read(a), arena.read(b), out)
        self.assert_matches({"y": backend.to_host(y if out is None else out)}, {"y": a.astype(float) + b})
        arena.check()

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    def test_add_in_place_updates_the_destination_only(self, backend: Backend, layout: str) -> None:
        a, b = _normal(3, 65), _normal(3, 65, seed=1)
        arena = Arena(backend, layout)
        dst = arena.write(a)
        backend.add_(dst, arena.read(b))
        self.assert_matches({"y": backend.to_host(dst)}, {"y": a.astype(float) + b})
        arena.check()

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    @pytest.mark.parametrize("factor", [0.3, -2.0, 0.0, 1.0])
    def test_scale_multiplies_the_destination_only(
        self, backend: Backend, layout: str, factor: float
    ) -> None:
        x = _normal(3, 5, 65)
        arena = Arena(backend, layout)
        dst = arena.write(x)
        with no_transfers(backend):
            backend.scale_(dst, factor)
        self.assert_matches({"y": backend.to_host(dst)}, {"y": factor * x.astype(float)})
        arena.check()

    @pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 65), (10007,)], ids=str)
    @pytest.mark.parametrize("layout", ["contiguous", "columns"])
    def test_sum_adds_every_element_once(self, backend: Backend, shape: tuple[int, ...], layout: str) -> None:
        x = np.abs(_normal(*shape)) + 0.1  # positive: no cancellation can excuse or hide an error
        arena = Arena(backend, layout)
        total = backend.sum(arena.read(x))
        assert tuple(total.shape) == (1,)
        self.assert_matches({"y": backend.to_host(total)}, {"y": [math.fsum(x.ravel().tolist())]})
        arena.check()

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    def test_decay_and_its_gradient_match_the_oracle(self, backend: Backend, layout: str) -> None:
        a_log = 4.0 * _normal(13, 5)
        results = []
        for engine in (backend, oracle()):
            arena = Arena(engine, layout)
            d_a_log = arena.write(np.zeros_like(a_log))
            a, saved = engine.decay(arena.read(a_log))
            engine.decay_backward(arena.read(_normal(13, 5, seed=1)), saved, d_a_log=d_a_log)
            results.append({"y": engine.to_host(a), "d_a_log": engine.to_host(d_a_log)})
            arena.check()
        self.assert_matches(*results)

    def test_decay_clamps_its_exponent_to_minus_10_and_5(self, backend: Backend) -> None:
        a_log = np.array([[-1e9, -10.0, 5.0, 1e9, 0.0]], dtype=np.float32)
        a, _ = backend.decay(backend.from_host(a_log), grad=False)
        ends = [-math.exp(-10.0), -math.exp(-10.0), -math.exp(5.0), -math.exp(5.0), -1.0]
        self.assert_matches({"y": backend.to_host(a)}, {"y": [ends]})

    def test_decay_passes_no_gradient_at_the_clamp_or_outside(self, backend: Backend) -> None:
        a_log = np.array([[-11.0, -10.0, 5.0, 6.0, 0.0]], dtype=np.float32)
        _, saved = backend.decay(backend.from_host(a_log))
        start = np.array([[1.5, 2.5, 3.5, 4.5, 0.0]], dtype=np.float32)
        d_a_log = backend.from_host(start)
        backend.decay_backward(backend.from_host(np.ones_like(a_log)), saved, d_a_log=d_a_log)
        assert backend.to_host(d_a_log)[0, :4].tolist() == start[0, :4].tolist()
        self.assert_matches({"d_a_log": backend.to_host(d_a_log)[0, 4:]}, {"d_a_log": [-1.0]})

    # ---- matrix products ----------------------------------------------------------------------

    @pytest.mark.parametrize("case", LINEAR_CASES, ids=case_names)
    def test_linear_matches_the_oracle(self, backend: Backend, case: LinearCase) -> None:
        self.assert_matches(run_linear(backend, case), reference(run_linear, case))

    @pytest.mark.parametrize("case", LINEAR_CASES[2:5], ids=case_names)
    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    @pytest.mark.parametrize("out", ["given", "added"])
    def test_linear_writes_or_adds_into_out_and_nowhere_else(
        self, backend: Backend, case: LinearCase, layout: str, out: str
    ) -> None:
        actual = run_linear(backend, case, layout, out=out)
        self.assert_matches(actual, reference(run_linear, case, out=out))

    @pytest.mark.parametrize("case", LINEAR_CASES[2:4], ids=case_names)
    def test_linear_gradients_accumulate(self, backend: Backend, case: LinearCase) -> None:
        actual = run_linear(backend, case, times=2)
        self.assert_matches(actual, doubled(reference(run_linear, case), "dw", "dbias"))

    def test_linear_without_parameter_gradients_gives_the_same_dx(self, backend: Backend) -> None:
        actual = run_linear(backend, LINEAR_CASES[2], frozen=True)
        self.assert_matches(actual, reference(run_linear, LINEAR_CASES[2], frozen=True))

    @pytest.mark.parametrize("wanted", ["dw", "dbias"])
    def test_linear_gives_one_parameter_gradient_alone(self, backend: Backend, wanted: str) -> None:
        case = LINEAR_CASES[2]
        host = inputs(case)
        x, w = backend.from_host(host["x"]), backend.from_host(host["w"])
        _, saved = backend.linear(x, w, alpha=case.alpha)
        gradient = backend.zeros(host["w" if wanted == "dw" else "bias"].shape)
        backend.linear_backward(
            backend.from_host(host["dy"]),
            saved,
            w,
            alpha=case.alpha,
            **{wanted: gradient},
        )
        expected = reference(run_linear, case)[wanted]
        self.assert_matches({wanted: backend.to_host(gradient)}, {wanted: expected})

    def test_linear_backward_returns_nothing_when_dx_is_not_needed(self, backend: Backend) -> None:
        case = LINEAR_CASES[2]
        host = inputs(case)
        t = {name: backend.from_host(array) for name, array in host.items()}
        dw, dbias = backend.zeros(host["w"].shape), backend.zeros(host["bias"].shape)
        _, saved = backend.linear(t["x"], t["w"], t["bias"], alpha=case.alpha)
        dx = backend.linear_backward(
            t["dy"], saved, t["w"], dw=dw, dbias=dbias, alpha=case.alpha, need_dx=False
        )
        assert dx is None
        expected = reference(run_linear, case)
        self.assert_matches(
            {"dw": backend.to_host(dw), "dbias": backend.to_host(dbias)},
            {name: expected[name] for name in ("dw", "dbias")},
        )

    # ---- normalisation ------------------------------------------------------------------------

    @pytest.mark.parametrize("case", NORM_CASES, ids=case_names)
    def test_rms_norm_matches_the_oracle(self, backend: Backend, case: NormCase) -> None:
        self.assert_matches(run_norm(backend, case), reference(run_norm, case))

    @pytest.mark.parametrize("case", NORM_CASES[1:3], ids=case_names)
    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    @pytest.mark.parametrize("out", ["given", "added"])
    def test_rms_norm_writes_or_adds_into_out_and_nowhere_else(
        self, backend: Backend, case: NormCase, layout: str, out: str
    ) -> None:
        self.assert_matches(run_norm(backend, case, layout, out=out), reference(run_norm, case, out=out))

    def test_rms_norm_gradients_accumulate(self, backend: Backend) -> None:
        actual = run_norm(backend, NORM_CASES[1], times=2)
        self.assert_matches(actual, doubled(reference(run_norm, NORM_CASES[1]), "dw"))

    def test_rms_norm_with_a_frozen_weight_gives_the_same_dx(self, backend: Backend) -> None:
        actual = run_norm(backend, NORM_CASES[1], frozen=True)
        self.assert_matches(actual, reference(run_norm, NORM_CASES[1], frozen=True))

    # ---- embedding ----------------------------------------------------------------------------

    @pytest.mark.parametrize("case", EMBEDDING_CASES, ids=case_names)
    def test_embedding_matches_the_oracle(self, backend: Backend, case: EmbeddingCase) -> None:
        self.assert_matches(run_embedding(backend, case), reference(run_embedding, case))

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    def test_embedding_writes_inside_its_views_only(self, backend: Backend, layout: str) -> None:
        actual = run_embedding(backend, EMBEDDING_CASES[1], layout, out="given")
        self.assert_matches(actual, reference(run_embedding, EMBEDDING_CASES[1]))

    def test_embedding_gradients_accumulate(self, backend: Backend) -> None:
        actual = run_embedding(backend, EMBEDDING_CASES[2], times=2)
        self.assert_matches(actual, doubled(reference(run_embedding, EMBEDDING_CASES[2]), "d_table"))

    def test_embedding_rows_are_copied_bit_for_bit(self, backend: Backend) -> None:
        host = inputs(EMBEDDING_CASES[1])
        y = run_embedding(backend, EMBEDDING_CASES[1])["y"]
        assert np.array_equal(y, host["table"][host["ids"]])

    # ---- loss ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("case", LOSS_CASES, ids=case_names)
    def test_cross_entropy_matches_the_oracle(self, backend: Backend, case: LossCase) -> None:
        self.assert_matches(run_loss(backend, case), reference(run_loss, case))

    @_in_views
    def test_cross_entropy_writes_inside_its_view_only(self, backend: Backend, layout: str) -> None:
        self.assert_matches(run_loss(backend, LOSS_CASES[2], layout), reference(run_loss, LOSS_CASES[2]))

    def test_cross_entropy_without_grad_gives_the_same_losses(self, backend: Backend) -> None:
        actual = run_loss(backend, LOSS_CASES[2], grad=False)
        self.assert_matches(actual, reference(run_loss, LOSS_CASES[2], grad=False))

    def test_cross_entropy_ignores_the_index_it_is_told_to(self, backend: Backend) -> None:
        logits = backend.from_host(_normal(3, 5))
        targets = backend.from_host(np.array([4, 2, 4], dtype=np.int32), "i32")
        losses = backend.to_host(backend.cross_entropy_(logits, targets, ignore_index=4))
        assert losses[0] == 0.0
        assert losses[2] == 0.0
        assert losses[1] > 0.0
        assert not backend.to_host(logits)[[0, 2]].any()

    # ---- all of them --------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("run", "case"),
        [
            (run_linear, LINEAR_CASES[2]),
            (run_norm, NORM_CASES[1]),
            (run_embedding, EMBEDDING_CASES[1]),
            (run_conv, next(case for case in CONV_CASES if case.name == "everything")),
            (run_scan, next(case for case in SCAN_CASES if case.name == "everything")),
        ],
        ids=["linear", "rms_norm", "embedding", "conv1d", "selective_scan"],
    )
    def test_outputs_may_be_changed_before_the_backward_op_runs(
        self, backend: Backend, run: Any, case: Any
    ) -> None:
        def gradients(results: Arrays) -> Arrays:
            return {name: value for name, value in results.items() if name not in ("y", "final_state")}

        self.assert_matches(gradients(run(backend, case, spoil=True)), gradients(reference(run, case)))

    @pytest.mark.parametrize(
        ("run", "case"),
        [
            (run_linear, LINEAR_CASES[4]),
            (run_norm, NORM_CASES[7]),
            (run_embedding, EMBEDDING_CASES[2]),
            (run_loss, LOSS_CASES[7]),
        ],
        ids=["linear", "rms_norm", "embedding", "cross_entropy"],
    )
    def test_two_runs_of_an_op_give_the_same_bits(self, backend: Backend, run: Any, case: Any) -> None:
        self.assert_same_bits(run(backend, case), run(backend, case))
