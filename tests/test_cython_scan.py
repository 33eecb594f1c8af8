"""The scan of the CPU backend: what the conformance suite, with its small shapes, does not reach."""

import tracemalloc

import numpy as np
import pytest

from mamba_fast.backends._dispatch import runnable_variants
from mamba_fast.functional import selective_scan, selective_scan_vjp
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance


def inputs(rng, batch, length, width, states, **options):
    """Arguments of `selective_scan_vjp` and the gradients of its outputs."""
    f = np.float32
    given = {
        "u": rng.standard_normal((batch, length, width)),
        "delta": rng.standard_normal((batch, length, width)) - 2,
        "A_log": np.log(rng.uniform(0.01, 30, (width, states))),
        "B": rng.standard_normal((batch, length, states)),
        "C": rng.standard_normal((batch, length, states)),
        "D": rng.standard_normal(width),
        "z": rng.standard_normal((batch, length, width)),
        "delta_bias": rng.standard_normal(width),
        "initial_state": rng.standard_normal((batch, width, states)),
    }
    given = {name: x.astype(f) for name, x in given.items()}
    given["seq_start"] = rng.random((batch, length)) < 0.05
    given["lengths"] = rng.integers(1, length + 1, batch)
    dy = rng.standard_normal((batch, length, width)).astype(f)
    d_final = rng.standard_normal((batch, width, states)).astype(f)
    return {**given, **options}, dy, d_final


def run(backend, given, dy, d_final):
    given = dict(given)
    arguments = [given.pop(name) for name in ("u", "delta", "A_log", "B", "C", "D")]
    (y, final), backprop = selective_scan_vjp(*arguments, **given, return_final_state=True, backend=backend)
    return {"y": y, "final_state": final, **{f"d {k}": v for k, v in backprop(dy, d_final).items()}}


# Around the kernel's own widths: chunks of 32 steps, tiles of 64 channels, slabs of 64 to 256.
SHAPES = [(1, 31, 64, 2), (2, 32, 63, 1), (1, 33, 65, 3), (2, 65, 128, 2), (1, 97, 257, 2), (17, 3, 129, 4)]


@pytest.mark.parametrize("discretization", ["zoh", "euler"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_around_the_kernels_blocks_agree_with_the_oracle(shape, discretization):
    case = inputs(np.random.default_rng(sum(shape)), *shape, discretization=discretization)
    got, expected = run("cython", *case), run("oracle", *case)
    for name, value in expected.items():
        kind = "gradient" if name.startswith("d ") else "output"
        assert relative_l2(got[name], value) <= tolerance("cython", kind), name


@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("shape", [(1, 70, 520, 16), (3, 40, 300, 5)])
def test_the_bits_do_not_depend_on_the_number_of_threads(monkeypatch, variant, shape):
    monkeypatch.setenv("MAMBA_FAST_CPU", variant)
    case = inputs(np.random.default_rng(2), *shape)
    one = run(get_backend("cython", threads=1), *case)
    for threads in (2, 3, 16):
        many = run(get_backend("cython", threads=threads), *case)
        for name, value in one.items():
            assert value.tobytes() == many[name].tobytes(), (threads, name)


@pytest.mark.parametrize(("length", "width"), [(256, 64), (257, 5), (1000, 33)])
def test_what_is_kept_for_the_backward_pass_is_at_most_a_sixteenth_of_all_states(length, width):
    backend, states, batch = get_backend("cython"), 16, 2
    given, _, _ = inputs(np.random.default_rng(3), batch, length, width, states)
    t = {name: backend.from_host(given[name]) for name in ("u", "delta", "A_log", "B", "C", "D", "z")}
    a, _ = backend.decay(t["A_log"])
    tracemalloc.start()
    try:
        y, final, saved = backend.selective_scan(t["u"], t["delta"], a, t["B"], t["C"], t["D"], t["z"])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert saved is not None
    kept = held - y.nbytes - final.nbytes
    all_states = batch * length * width * states * 4
    assert kept <= all_states / 16 + 4096  # the small objects around the arrays


def test_a_run_without_gradients_keeps_nothing():
    backend = get_backend("cython")
    given, _, _ = inputs(np.random.default_rng(3), 1, 64, 8, 16)
    t = {name: backend.from_host(given[name]) for name in ("u", "delta", "A_log", "B", "C")}
    assert backend.selective_scan(t["u"], t["delta"], t["A_log"], t["B"], t["C"], grad=False)[2] is None


# An infinite delta is left out: the state then is its limit, -u B / A, which is finite.
@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n in ("u", "delta", "B", "C", "z") for v in (np.nan, np.inf) if n + str(v) != "deltainf"],
)
def test_what_is_not_finite_shows_in_the_output(name, value):
    given, dy, d_final = inputs(np.random.default_rng(4), 1, 40, 70, 3, seq_start=None, lengths=None)
    given[name][0, 20, -1] = value
    y = run("cython", given, dy, d_final)["y"]
    assert not np.isfinite(y[0, 20:]).all()
    assert np.isfinite(y[0, :20]).all()


def test_a_restart_after_nan_starts_clean():
    given, dy, d_final = inputs(np.random.default_rng(5), 1, 50, 6, 3, lengths=None)
    given["u"][0, 10] = np.nan
    given["seq_start"][:] = False
    given["seq_start"][0, 30] = True
    out = run("cython", given, dy, d_final)
    assert np.isnan(out["y"][0, 10:30]).any()
    assert np.isfinite(out["y"][0, 30:]).all()
    assert np.isfinite(out["final_state"]).all()


def test_strong_and_weak_decay_keep_their_digits_in_the_state():
    """exp(Delta A) from 1 - 1e-9 to 1e-30: what is left of the initial state has full relative accuracy."""
    width, length = 9, 6
    decay = np.logspace(-9, 1.06, width)
    given = {
        "u": np.zeros((1, length, width), np.float32),
        "delta": np.ones((1, length, width), np.float32),
        "A_log": np.log(decay)[:, None].astype(np.float32),
        "B": np.zeros((1, length, 1), np.float32),
        "C": np.ones((1, length, 1), np.float32),
    }
    for discretization in ("zoh", "euler"):
        y = selective_scan(
            *given.values(),
            delta_softplus=False,
            discretization=discretization,
            initial_state=np.ones((1, width, 1), np.float32),
        )
        rate = np.exp(np.clip(given["A_log"][:, 0].astype(np.float64), -10, 5))
        expected = np.exp(-rate * np.arange(1, length + 1)[:, None])
        # the product Delta A is itself rounded: its relative error, times |z|, is the result's
        allowed = 4e-7 + 2e-7 * rate * length
        assert (np.abs(y[0] / expected - 1) < allowed).all()


def test_many_steps_of_one_slow_decay_do_not_drift():
    """Rounding exp(z) itself would be off by the same amount every step: 3e-5 after 1000 of them here."""
    length = 4000
    u = np.ones((1, length, 1), np.float32)
    a_log = np.log(np.full((1, 1), 0.001, np.float32))
    y = selective_scan(u, u, a_log, u, u, delta_softplus=False, discretization="euler")
    z = -np.exp(a_log[0, 0].astype(np.float64))
    expected = np.expm1(z * np.arange(1, length + 1)) / np.expm1(z)
    assert np.abs(y[0, :, 0] / expected - 1).max() < 4e-6
