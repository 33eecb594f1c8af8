"""The oracle's scalar functions, memory, small ops, loss and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from differences import slopes

from mamba_fast.backend import Backend
from mamba_fast.backends import _oracle_math as scalar
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance

oracle = get_backend("oracle")
GRADIENT = tolerance("oracle", "gradient")

# A few units in the last place of float64.
ROUNDING = 1e-15


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# ---- scalar functions -------------------------------------------------------------------------

POINTS = [
    sign * magnitude for sign in (1.0, -1.0)
    for magnitude in (1e-300, 1e-16, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.999, 1.0, 1.001, 3.0, 20.0, 300.0)
]  # fmt: skip


def naive(formula: Callable[[Decimal], Decimal], x: float) -> float:
    """A formula that cancels, in enough digits that it does not matter."""
    with localcontext(Context(prec=1000)):
        return float(formula(Decimal(x)))


@pytest.mark.parametrize("z", POINTS)
def test_phi_keeps_all_digits(z: float):
    expected = naive(lambda d: (d.exp() - 1) / d, z)
    assert scalar.phi(z) == pytest.approx(expected, rel=ROUNDING, abs=0.0)


@pytest.mark.parametrize("z", POINTS)
def test_the_derivative_of_phi_keeps_all_digits(z: float):
    expected = naive(lambda d: (d * d.exp() - d.exp() + 1) / (d * d), z)
    assert scalar.phi_prime(z) == pytest.approx(expected, rel=2 * ROUNDING, abs=0.0)


@pytest.mark.parametrize("x", POINTS)
def test_softplus_keeps_all_digits(x: float):
    expected = naive(lambda d: (1 + d.exp()).ln(), x)
    assert scalar.softplus(x) == pytest.approx(expected, rel=ROUNDING, abs=0.0)


@pytest.mark.parametrize("x", POINTS)
def test_silu_and_its_derivative_keep_all_digits(x: float):
    assert scalar.silu(x) == pytest.approx(naive(lambda d: d / (1 + (-d).exp()), x), rel=ROUNDING, abs=0.0)
    expected = naive(lambda d: (1 + (-d).exp() + d * (-d).exp()) / (1 + (-d).exp()) ** 2, x)
    assert scalar.silu_prime(x) == pytest.approx(expected, rel=2 * ROUNDING, abs=0.0)


def test_scalar_functions_at_zero():
    assert scalar.phi(0.0) == 1.0
    assert scalar.phi_prime(0.0) == 0.5
    assert scalar.softplus(0.0) == math.log(2.0)
    assert scalar.silu_prime(0.0) == 0.5


@pytest.mark.parametrize("x", [1e4, 1e300])
def test_scalar_functions_far_above_zero_take_their_limits(x: float):
    assert scalar.exp(x) == math.inf
    assert scalar.sigmoid(x) == 1.0
    assert scalar.silu(x) == x
    assert scalar.silu_prime(x) == 1.0
    assert scalar.softplus(x) == x
    assert scalar.phi(x) == math.inf
    assert scalar.phi_prime(x) == math.inf


@pytest.mark.parametrize("x", [-1e4, -1e300])
def test_scalar_functions_far_below_zero_take_their_limits(x: float):
    assert scalar.exp(x) == 0.0
    assert scalar.sigmoid(x) == 0.0
    assert scalar.silu(x) == 0.0
    assert scalar.silu_prime(x) == 0.0
    assert scalar.softplus(x) == 0.0
    assert scalar.phi(x) == -1.0 / x
    assert scalar.phi_prime(x) == pytest.approx((1.0 / x) ** 2, rel=ROUNDING, abs=0.0)


@pytest.mark.parametrize(
    "function", [scalar.exp, scalar.sigmoid, scalar.silu, scalar.silu_prime, scalar.softplus, scalar.phi,
                 scalar.phi_prime, scalar.round_f16, scalar.round_bf16]
)  # fmt: skip
def test_nan_stays_nan(function: Callable[[float], float]):
    assert math.isnan(function(math.nan))


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0 + 3.0 * 2.0**-11, 0x3C02), (65519.996, 0x7BFF), (65520.0, 0x7C00), (3e-8, 0x0001),
        (2.0**-24, 0x0001), (2.0**-25, 0x0000), (6e-5, 0x03EF), (0.001, 0x1419), (-65520.0, 0xFC00),
        (-0.0, 0x8000), (1e300, 0x7C00),
    ],
)  # fmt: skip
def test_half_precision_rounds_to_nearest_even(value: float, bits: int):
    half = oracle.cast(np.array([value]), "f16")
    assert half.view(np.uint16).tolist() == [bits]


def test_half_precision_rounds_as_numpy_does(rng: np.random.Generator):
    values = rng.standard_normal(4000) * 2.0 ** rng.uniform(-28, 15, 4000)
    assert oracle.cast(values, "f16").tobytes() == values.astype(np.float16).tobytes()


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80), (1.0 + 2.0**-8, 0x3F80), (1.0 + 3.0 * 2.0**-8, 0x3F82),
        (1.0 + 2.0**-8 + 2.0**-40, 0x3F81), (-2.5, 0xC020), (3.38e38, 0x7F7E),
        (3.4e38, 0x7F80), (-1e300, 0xFF80), (-0.0, 0x8000),
        (2.0**-133, 0x0001), (2.0**-134, 0x0000), (3.0 * 2.0**-134, 0x0002), (math.inf, 0x7F80),
        (math.nan, 0x7FC0),
    ],
)  # fmt: skip
def test_bfloat16_rounds_to_nearest_even(value: float, bits: int):
    assert oracle.cast(np.array([value]), "bf16").tolist() == [bits]


# ---- the object and its memory ----------------------------------------------------------------


def test_the_registry_gives_the_oracle():
    assert isinstance(oracle, Backend)
    assert oracle.name == "oracle"
    assert "float64" in oracle.describe()


def test_an_option_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="the oracle backend takes no options, got threads"):
        get_backend("oracle", threads=2)


def layouts(tmp_path: Path) -> dict[str, np.ndarray]:
    """The same twelve values in every form that a host array may come in."""
    plain = np.arange(12, dtype=np.float32).reshape(3, 4)
    read_only = plain.copy()
    read_only.flags.writeable = False
    mapped = np.memmap(tmp_path / "values.bin", np.float32, "w+", shape=(3, 4))
    mapped[...] = plain
    unaligned = np.frombuffer(b"x" + plain.tobytes(), np.float32, offset=1).reshape(3, 4)
    return {
        "plain": plain, "read-only": read_only, "memory-mapped": mapped, "unaligned": unaligned,
        "Fortran": np.asfortranarray(plain), "strided": np.repeat(plain, 2, axis=1)[:, ::2],
        "reversed": plain[:, ::-1].copy()[:, ::-1], "float64": plain.astype(np.float64),
        "float16": plain.astype(np.float16), "big-endian": plain.astype(">f4"),
        "int64": plain.astype(np.int64),
    }  # fmt: skip


@pytest.mark.parametrize("copy", [True, False])
def test_host_arrays_of_any_layout_give_the_same_tensor(tmp_path: Path, copy: bool):
    for name, array in layouts(tmp_path).items():
        tensor = oracle.from_host(array, copy=copy)
        assert oracle.dtype_of(tensor) == "f32", name
        assert tensor.flags.c_contiguous, name
        assert tensor.tolist() == np.arange(12.0).reshape(3, 4).tolist(), name


def test_lists_and_scalars_are_host_arrays():
    assert oracle.from_host([[1, 2], [3, 4]]).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert oracle.from_host(3.5).shape == ()


def test_from_host_copies_unless_told_otherwise():
    array = np.zeros(3)
    copied, shared = oracle.from_host(array), oracle.from_host(array, copy=False)
    array[0] = 1.0
    assert copied[0] == 0.0
    assert shared[0] == 1.0


def test_masks_become_zeros_and_ones():
    mask = oracle.from_host(np.array([[True, False]]), "i32")
    assert mask.dtype == np.int32
    assert mask.tolist() == [[1, 0]]


@pytest.mark.parametrize("value", [0.5, 2**31, -(2**31) - 1, math.nan, 1e30])
def test_what_is_not_a_32_bit_integer_is_refused_as_one(value: float):
    with pytest.raises(ValueError, match=r"from_host: .* is not a 32-bit integer"):
        oracle.from_host(np.array([1, value]), "i32")


@pytest.mark.parametrize("array", [["a"], [1j], [None]])
def test_from_host_refuses_what_is_not_numbers(array: list[Any]):
    with pytest.raises(ValueError, match="from_host: expected numbers"):
        oracle.from_host(array)


def test_from_host_refuses_unknown_types():
    with pytest.raises(ValueError, match="from_host: dtype must be one of f32, i32, f16, bf16, got 'f64'"):
        oracle.from_host([1.0], "f64")


def test_to_host_gives_a_fresh_contiguous_array():
    tensor = oracle.view(oracle.from_host(np.arange(12.0).reshape(3, 4)), -1, 1, 3)
    host = oracle.to_host(tensor)
    assert host.flags.c_contiguous
    assert host.dtype == np.float64
    host[...] = 0.0
    assert tensor.tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]


def test_transfers_are_counted():
    backend = get_backend("oracle")
    tensor = backend.from_host([1.0])
    backend.to_host(backend.add(tensor, tensor))
    assert backend.transfers == 2


@pytest.mark.parametrize("dtype", ["f32", "i32", "f16", "bf16"])
def test_new_tensors_have_their_type(dtype: str):
    assert oracle.dtype_of(oracle.zeros((2, 3), dtype)) == dtype
    assert oracle.dtype_of(oracle.empty((2, 0, 3), dtype)) == dtype


def test_reshape_is_the_same_memory():
    tensor = oracle.zeros((2, 6))
    oracle.fill_(oracle.reshape(tensor, (3, 4)), 2.0)
    assert (tensor == 2.0).all()


def test_the_leading_axes_of_a_column_view_can_be_merged_and_split():
    view = oracle.view(oracle.zeros((2, 3, 8)), -1, 2, 5)
    oracle.fill_(oracle.reshape(oracle.reshape(view, (6, 3)), (3, 2, 3)), 1.0)
    assert (view == 1.0).all()


@pytest.mark.parametrize("shape", [(18,), (2, 9), (5,), (-1,)])
def test_reshape_never_copies(shape: tuple[int, ...]):
    view = oracle.view(oracle.zeros((2, 3, 8)), -1, 2, 5)
    with pytest.raises(ValueError, match=r"reshape: .*\(2, 3, 3\) cannot become"):
        oracle.reshape(view, shape)


def test_views_are_of_the_first_or_last_axis():
    tensor = oracle.from_host(np.arange(24.0).reshape(2, 3, 4))
    assert oracle.view(tensor, 0, 1, 2).shape == (1, 3, 4)
    assert oracle.view(tensor, -1, 1, 3)[0, 0].tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="view: axis 1"):
        oracle.view(tensor, 1, 0, 1)
    with pytest.raises(ValueError, match=r"view: \[2, 5\)"):
        oracle.view(tensor, -1, 2, 5)


def test_copy_writes_into_a_column_view_and_nowhere_else():
    frame = oracle.zeros((2, 5))
    oracle.copy_(oracle.view(frame, -1, 1, 3), oracle.from_host([[1.0, 2.0], [3.0, 4.0]]))
    assert frame.tolist() == [[0.0, 1.0, 2.0, 0.0, 0.0], [0.0, 3.0, 4.0, 0.0, 0.0]]


def test_copy_refuses_another_type():
    with pytest.raises(TypeError, match="copy_: dst is f32 and src i32"):
        oracle.copy_(oracle.zeros((2,)), oracle.zeros((2,), "i32"))


def test_copy_refuses_another_shape():
    with pytest.raises(ValueError, match=r"copy_: .*\(3,\)"):
        oracle.copy_(oracle.zeros((2,)), oracle.zeros((3,)))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_fill_writes_the_rounded_value(dtype: str):
    tensor = oracle.zeros((3,), dtype)
    oracle.fill_(tensor, 0.1)
    expected = {"f32": 0.1, "f16": float(np.float16(0.1)), "bf16": 0.10009765625}[dtype]
    assert oracle.to_host(tensor).tolist() == [expected] * 3


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_casting_there_and_back_rounds_once(dtype: str, rng: np.random.Generator):
    values = oracle.from_host(rng.standard_normal((5, 7)))
    stored = oracle.cast(values, dtype)
    back = oracle.cast(stored, "f32")
    assert oracle.dtype_of(stored) == dtype
    assert oracle.dtype_of(back) == "f32"
    assert back.tolist() == oracle.to_host(stored).tolist()
    assert np.abs(back / values - 1.0).max() <= (2.0**-11 if dtype == "f16" else 2.0**-8)
    assert oracle.cast(back, dtype).tobytes() == stored.tobytes()


def test_integers_cannot_be_cast():
    with pytest.raises(ValueError, match="cast: from i32 to f32"):
        oracle.cast(oracle.zeros((2,), "i32"), "f32")


def test_arithmetic_on_stored_types_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="linear: x is f16, expected f32: use cast"):
        oracle.linear(oracle.zeros((2, 3), "f16"), oracle.zeros((4, 3)))


def test_a_host_array_of_another_type_is_not_a_tensor():
    with pytest.raises(TypeError, match="sum: x is a float32 array, expected f32: use from_host"):
        oracle.sum(np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="sum: x is a list, not a tensor of the oracle"):
        oracle.sum([1.0])


# ---- elementwise, sums and decay --------------------------------------------------------------


def test_add_and_its_in_place_form(rng: np.random.Generator):
    a, b = rng.standard_normal((2, 3, 4))
    frame = np.zeros((3, 6))
    assert oracle.add(a, b).tolist() == (a + b).tolist()
    out = oracle.view(frame, -1, 1, 5)
    assert oracle.add(a, b, out=out) is out
    oracle.add_(out, a)
    assert frame[:, 1:5].tolist() == (a + b + a).tolist()
    assert not frame[:, [0, 5]].any()


def test_sum_is_over_all_elements_and_has_one():
    assert oracle.sum(oracle.view(np.arange(12.0).reshape(3, 4), -1, 1, 3)).tolist() == [33.0]


def test_decay_is_minus_exp_of_the_clamped_logarithm():
    a_log = np.array([[-11.0, -10.0, 0.0, 1.0, 5.0, 6.0]])
    expected = [-math.exp(x) for x in (-10.0, -10.0, 0.0, 1.0, 5.0, 5.0)]
    assert oracle.decay(a_log)[0].tolist() == [pytest.approx(expected, rel=ROUNDING)]


def test_decay_gradient_is_exactly_zero_at_and_outside_the_clamp():
    a_log = np.array([[-11.0, -10.0, 0.0, 1.0, 5.0, 6.0]])
    _, saved = oracle.decay(a_log)
    d_a_log = np.full((1, 6), 3.0)
    oracle.decay_backward(np.ones((1, 6)), saved, d_a_log=d_a_log)
    assert d_a_log.tolist() == [[3.0, 3.0, 3.0 - 1.0, pytest.approx(3.0 - math.e), 3.0, 3.0]]


def test_decay_gradient_equals_differences(rng: np.random.Generator):
    a_log, g = rng.standard_normal((2, 3, 4))
    d_a_log = oracle.zeros((3, 4))
    oracle.decay_backward(g, oracle.decay(a_log)[1], d_a_log=d_a_log)
    expected = slopes(lambda: float((g * oracle.decay(a_log, grad=False)[0]).sum()), a_log)
    assert relative_l2(d_a_log, expected) <= GRADIENT


# ---- embedding, matrix products, normalisation ------------------------------------------------


def test_embedding_gradient_sums_repeated_ids():
    table = np.arange(8.0).reshape(4, 2)
    ids = np.array([[1, 3], [1, 1]], np.int32)
    y, saved = oracle.embedding(ids, table)
    assert y.tolist() == [[[2.0, 3.0], [6.0, 7.0]], [[2.0, 3.0], [2.0, 3.0]]]
    d_table = np.ones((4, 2))
    oracle.embedding_backward(
        np.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]), saved, d_table=d_table
    )
    assert d_table.tolist() == [[1.0, 1.0], [14.0, 17.0], [1.0, 1.0], [4.0, 5.0]]


@pytest.mark.parametrize("wrong", [-1, 4])
def test_embedding_refuses_an_id_outside_the_table(wrong: int):
    with pytest.raises(ValueError, match=f"embedding: id {wrong} is outside 0 to 3"):
        oracle.embedding(np.array([0, wrong], np.int32), np.zeros((4, 2)))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_linear_gradients_equal_differences(
    with_bias: bool, alpha: float, lead: tuple[int, ...], rng: np.random.Generator
):
    x, w, g = rng.standard_normal((*lead, 4)), rng.standard_normal((3, 4)), rng.standard_normal((*lead, 3))
    bias = rng.standard_normal(3) if with_bias else None
    y, saved = oracle.linear(x, w, bias, alpha=alpha)
    assert relative_l2(y, alpha * x @ w.T + (0.0 if bias is None else bias)) <= ROUNDING
    dw, dbias = oracle.zeros((3, 4)), oracle.zeros((3,))
    dx = oracle.linear_backward(g, saved, w, dw=dw, dbias=dbias if with_bias else None, alpha=alpha)

    def value() -> float:
        return float((g * oracle.linear(x, w, bias, alpha=alpha, grad=False)[0]).sum())

    assert relative_l2(dx, slopes(value, x)) <= GRADIENT
    assert relative_l2(dw, slopes(value, w)) <= GRADIENT
    if bias is not None:
        assert relative_l2(dbias, slopes(value, bias)) <= GRADIENT


def test_linear_writes_adds_and_leaves_the_rest_alone(rng: np.random.Generator):
    x, w, g = rng.standard_normal((5, 4)), rng.standard_normal((3, 4)), rng.standard_normal((5, 3))
    y, saved = oracle.linear(x, w)
    frame = np.ones((5, 6))
    out = oracle.view(frame, -1, 2, 5)
    assert oracle.linear(x, w, out=out)[0] is out
    assert out.tolist() == y.tolist()
    oracle.linear(x, w, out=out, accumulate=True)
    assert out.tolist() == (y + y).tolist()
    assert (frame[:, [0, 1, 5]] == 1.0).all()
    dx = oracle.linear_backward(g, saved, w)
    twice = dx.copy()
    assert oracle.linear_backward(g, saved, w, out=twice, accumulate=True) is twice
    assert twice.tolist() == (dx + dx).tolist()
    dw = np.ones((3, 4))
    assert oracle.linear_backward(g, saved, w, dw=dw, need_dx=False) is None
    assert relative_l2(dw, 1.0 + g.T @ x) <= ROUNDING


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("lead", [(5,), (2, 3)])
def test_rms_norm_gradients_equal_differences(
    with_weight: bool, lead: tuple[int, ...], rng: np.random.Generator
):
    x, g = rng.standard_normal((2, *lead, 4))
    w = rng.standard_normal(4) if with_weight else None
    _, saved = oracle.rms_norm(x, w, 0.1)
    dw = oracle.zeros((4,)) if with_weight else None
    dx = oracle.rms_norm_backward(g, saved, w, dw=dw)

    def value() -> float:
        return float((g * oracle.rms_norm(x, w, 0.1, grad=False)[0]).sum())

    assert relative_l2(dx, slopes(value, x)) <= GRADIENT
    if w is not None:
        assert relative_l2(dw, slopes(value, w)) <= GRADIENT


def test_rms_norm_by_hand():
    y, _ = oracle.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 12.5)
    assert y.tolist() == [[pytest.approx(0.6), pytest.approx(1.6)]]


def test_rms_norm_backward_adds_into_what_is_there(rng: np.random.Generator):
    x, g = rng.standard_normal((2, 3, 4))
    w = rng.standard_normal(4)
    _, saved = oracle.rms_norm(x, w, 1e-6)
    dw = oracle.zeros((4,))
    dx = oracle.rms_norm_backward(g, saved, w, dw=dw)
    out, again = g.copy(), dw.copy()
    oracle.rms_norm_backward(g, saved, w, dw=again, out=out, accumulate=True)
    assert out.tolist() == (g + dx).tolist()
    assert again.tolist() == (dw + dw).tolist()


def test_rms_norm_of_zeros_is_zero():
    y, saved = oracle.rms_norm(np.zeros((1, 3)), None, 1e-6)
    assert y.tolist() == [[0.0, 0.0, 0.0]]
    assert oracle.rms_norm_backward(np.ones((1, 3)), saved, None).tolist() == [[pytest.approx(1e3)] * 3]


def test_saved_values_of_another_op_are_refused():
    _, saved = oracle.rms_norm(np.ones((2, 3)), None, 1e-6)
    with pytest.raises(TypeError, match="linear_backward: saved is a NormSaved"):
        oracle.linear_backward(np.ones((2, 3)), saved, np.ones((3, 3)))


# ---- loss -------------------------------------------------------------------------------------


def test_cross_entropy_gradient_equals_differences(rng: np.random.Generator):
    logits = rng.standard_normal((4, 5))
    targets = np.array([2, -100, 0, 4], np.int32)
    found = logits.copy()
    losses = oracle.cross_entropy_(found, targets, scale=0.7)

    def value() -> float:
        return 0.7 * float(oracle.cross_entropy_(logits.copy(), targets, grad=False).sum())

    assert losses[1] == 0.0
    assert relative_l2(found, slopes(value, logits)) <= GRADIENT


def test_cross_entropy_of_equal_logits_is_the_logarithm_of_their_number():
    logits = np.full((1, 8), 3.0)
    assert oracle.cross_entropy_(logits, np.array([5], np.int32)).tolist() == [pytest.approx(math.log(8.0))]
    assert logits.tolist() == [[pytest.approx(-0.875 if i == 5 else 0.125) for i in range(8)]]


@pytest.mark.parametrize("ignored", [-100, 2, -7])
def test_ignored_targets_have_no_loss_and_no_gradient(ignored: int):
    logits = np.ones((2, 4))
    losses = oracle.cross_entropy_(logits, np.array([ignored, 1], np.int32), ignore_index=ignored)
    assert losses[0] == 0.0
    assert losses[1] > 1.0
    assert not logits[0].any()
    assert logits[1].any()


def test_cross_entropy_of_large_logits_does_not_overflow():
    logits = np.array([[1000.0, 0.0, -1000.0], [1000.0, 0.0, -1000.0]])
    assert oracle.cross_entropy_(logits, np.array([0, 2], np.int32)).tolist() == [0.0, 2000.0]
    assert logits.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, -1.0]]


def test_cross_entropy_of_a_sure_prediction_keeps_its_digits():
    logits = np.array([[50.0, 0.0]])
    losses = oracle.cross_entropy_(logits, np.array([0], np.int32))
    assert losses[0] == pytest.approx(math.exp(-50.0), rel=1e-12)
    assert logits[0].tolist() == pytest.approx([-math.exp(-50.0), math.exp(-50.0)], rel=1e-12)


@pytest.mark.parametrize("column", [0, 2])
def test_a_nan_logit_spoils_its_own_row_only(column: int):
    logits = np.zeros((2, 3))
    logits[0, column] = np.nan
    losses = oracle.cross_entropy_(logits, np.array([1, 1], np.int32))
    assert np.isnan(losses).tolist() == [True, False]
    assert np.isfinite(logits[1]).all()


@pytest.mark.parametrize("wrong", [3, -1])
def test_cross_entropy_refuses_a_target_outside_the_vocabulary(wrong: int):
    with pytest.raises(ValueError, match=f"cross_entropy_: target {wrong} is outside 0 to 2 and not -100"):
        oracle.cross_entropy_(np.zeros((1, 3)), np.array([wrong], np.int32))
