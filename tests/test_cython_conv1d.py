"""The convolution kernels against the oracle, over shapes and options drawn at random."""

import numpy as np
import pytest
from cython_support import assert_close, bits, columns, cython, normal

from mamba_fast.backends.oracle import create_backend as create_oracle


def draw(seed: int) -> dict:
    """Arguments of one call. Lengths, restarts and states are there in half of the cases each; widths lie on
    both sides of a tile, taps on both sides of four and of the length."""
    rng = np.random.default_rng(seed)
    batch, length = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 9, 17, 70]))
    width = int(rng.choice([1, 3, 8, 17, 127, 128, 129])) if length < 20 else int(rng.choice([1, 5, 18]))
    taps = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 11]))

    def maybe(value):
        return value if rng.random() < 0.5 else None

    return {
        "x": normal(rng, batch, length, width),
        "w": normal(rng, width, taps),
        "bias": maybe(normal(rng, width)),
        "initial_state": maybe(normal(rng, batch, taps - 1, width)),
        "seq_start": maybe((rng.random((batch, length)) < 0.2).astype(np.int32)),
        "lengths": maybe(rng.integers(1, length + 1, batch).astype(np.int32)),
        "dy": normal(rng, batch, length, width),
        "d_final_state": maybe(normal(rng, batch, taps - 1, width)),
        "activation": maybe("silu"),
    }


def run(backend, case: dict, place) -> dict[str, np.ndarray]:
    t = {
        name: backend.from_host(value, "i32")
        if value.dtype == np.int32
        else (place(value) if value.size else backend.from_host(value))
        for name, value in case.items()
        if isinstance(value, np.ndarray)
    }
    y, final_state, saved = backend.conv1d(
        t["x"],
        t["w"],
        t.get("bias"),
        initial_state=t.get("initial_state"),
        seq_start=t.get("seq_start"),
        lengths=t.get("lengths"),
        activation=case["activation"],
    )
    dw, dbias = backend.zeros(case["w"].shape), backend.zeros(case["w"].shape[:1])
    dx, d_initial_state = backend.conv1d_backward(
        t["dy"],
        saved,
        t["w"],
        dw=dw,
        dbias=dbias,
        d_final_state=t.get("d_final_state"),
        need_d_initial_state=True,
    )
    results = {
        "y": y,
        "final_state": final_state,
        "dx": dx,
        "dw": dw,
        "dbias": dbias,
        "d_initial_state": d_initial_state,
    }
    return {name: backend.to_host(value) for name, value in results.items()}


@pytest.mark.parametrize("seed", range(60))
def test_outputs_and_gradients_match_the_oracle(seed):
    case = draw(seed)
    oracle = create_oracle()
    expected = run(oracle, case, oracle.from_host)
    actual = run(cython(), case, cython().from_host)
    for name, value in expected.items():
        assert_close(actual[name], value, "output" if name in ("y", "final_state") else "gradient")


@pytest.mark.parametrize("seed", range(12))
def test_column_views_give_the_bits_of_contiguous_tensors(seed):
    case = draw(seed)
    contiguous = run(cython(), case, cython().from_host)
    views = run(cython(), case, lambda value: columns(cython(), value))
    assert bits(*views.values()) == bits(*contiguous.values())


@pytest.mark.parametrize(("taps", "activation"), [(1, "silu"), (2, None), (4, "silu"), (6, "silu")])
def test_single_steps_give_the_bits_of_the_sequence(taps, activation):
    rng = np.random.default_rng(taps)
    backend, width = cython(), 131
    x, w = normal(rng, 2, 9, width), normal(rng, width, taps)
    bias, state = normal(rng, width), normal(rng, 2, taps - 1, width)
    y, final_state, _ = backend.conv1d(
        x, w, bias, initial_state=state.copy(), activation=activation, grad=False
    )
    steps = [backend.conv1d_step(x[:, t].copy(), state, w, bias, activation=activation) for t in range(9)]
    assert bits(np.stack(steps, axis=1), state) == bits(y, final_state)


def test_a_long_sum_over_time_keeps_its_digits():
    # 40,000 equal terms: a float32 running sum would be off by 1e-4 here.
    backend, length = cython(), 40_000
    x = np.full((1, length, 2), 0.1, np.float32)
    w, dbias, dw = np.ones((2, 1), np.float32), np.zeros(2, np.float32), np.zeros((2, 1), np.float32)
    _, _, saved = backend.conv1d(x, w, activation=None)
    backend.conv1d_backward(x, saved, w, dw=dw, dbias=dbias)
    tenth = float(np.float32(0.1))
    assert_close(dbias, np.full(2, length * tenth), "output")
    assert_close(dw, np.full((2, 1), length * tenth * tenth), "output")


def test_nan_reaches_the_positions_that_see_it_and_no_other():
    backend = cython()
    x, w = np.ones((1, 8, 3), np.float32), np.ones((3, 3), np.float32)
    x[0, 2, 1] = np.nan
    y, _, _ = backend.conv1d(x, w, grad=False)
    expected = np.zeros((1, 8, 3), bool)
    expected[0, 2:5, 1] = True
    assert np.array_equal(np.isnan(y), expected)


def test_what_lies_beyond_a_rows_length_is_never_read():
    backend, rng = cython(), np.random.default_rng(0)
    x, dy, w = normal(rng, 1, 6, 3), normal(rng, 1, 6, 3), normal(rng, 3, 4)
    x[0, 4:], dy[0, 4:] = np.nan, np.nan
    dw = np.zeros_like(w)
    y, final_state, saved = backend.conv1d(x, w, lengths=np.array([4], np.int32))
    dx, _ = backend.conv1d_backward(dy, saved, w, dw=dw)
    assert not y[0, 4:].any()
    assert not dx[0, 4:].any()
    assert all(np.isfinite(a).all() for a in (y, final_state, dx, dw))


@pytest.mark.parametrize("length", [0, 7, -1])
def test_a_length_outside_the_sequence_is_an_error_that_names_it(length):
    x, w = np.ones((2, 6, 3), np.float32), np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match=rf"conv1d: lengths\[1\] is {length}, expected 1 to 6"):
        cython().conv1d(x, w, lengths=np.array([6, length], np.int32))
