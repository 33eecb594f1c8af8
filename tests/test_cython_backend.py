"""The CPU backend around its kernels: options, host arrays of every kind, views, casts, refusals."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import os
import pickle
import sys

import numpy as np
import pytest
from cython_support import bits, cython, normal

from mamba_fast import get_backend
from mamba_fast.backend import BackendUnavailableError
from mamba_fast.backends import cython as module
from mamba_fast.backends.cython import create_backend

# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, -2, 1.5, "4", True])
def test_a_thread_count_that_is_no_positive_integer_is_refused_by_value(threads):
    with pytest.raises(
        ValueError, match=f"threads must be an integer from 1 to 256 or None, got {threads!r}"
    ):
        create_backend(threads=threads)


@pytest.mark.parametrize(("value", "expected"), [("3", 3), (" 5 ", 5)])
def test_omp_num_threads_sets_the_default(monkeypatch, value, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert create_backend().threads == expected


@pytest.mark.parametrize("value", ["", "0", "-1", "many", "4,2", "²"])
def test_an_omp_num_threads_that_says_nothing_leaves_the_available_cpus(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    kernels = importlib.import_module("mamba_fast._threads")
    assert create_backend().threads == kernels.available_cpus()


def test_more_threads_than_the_pool_has_are_refused_or_from_the_environment_cut(monkeypatch):
    with pytest.raises(ValueError, match="from 1 to 256 or None, got 257"):
        create_backend(threads=257)
    monkeypatch.setenv("OMP_NUM_THREADS", "99999999999999")
    assert create_backend().threads == 256


def test_copies_and_pickles_are_backends_with_as_many_threads():
    backend = create_backend(threads=3)
    for copied in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert copied.threads == 3
        assert copied.add(np.ones(2, np.float32), np.ones(2, np.float32)).tolist() == [2, 2]


def test_tensors_are_made_where_numpy_raises_on_underflow():
    with np.errstate(all="raise"):
        assert create_backend().from_host(np.array([1e-320, 1e300]))[0] == 0


def test_an_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert create_backend(threads=2).threads == 2


MODULES = ["_cpu", "_threads", "_operands", "_scan", "_conv1d", "_pointwise", "_optim"]


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_extension_is_an_error_that_names_it_and_the_remedy(monkeypatch, name):
    monkeypatch.setenv("MAMBA_FAST_CPU", "baseline")
    monkeypatch.setitem(sys.modules, f"mamba_fast.{name}", None)
    with pytest.raises(BackendUnavailableError, match=rf"mamba_fast\.{name} .*reinstall mamba-fast"):
        get_backend("cython")


def import_again():
    """A second copy of the backend's module: reloading it would leave two classes of one name about."""
    spec = importlib.util.spec_from_file_location("a_second_cython_backend", module.__file__)
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    return second


def test_importing_the_backends_module_needs_no_extension(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, f"mamba_fast.{name}", None)
    assert import_again().CythonBackend.name == "cython"


def test_describe_tells_threads_and_numpy():
    assert create_backend(threads=1).describe().startswith("cython: 1 thread, ")
    assert create_backend(threads=7).describe().startswith("cython: 7 threads, ")
    assert "numpy" in create_backend(threads=1).describe()


# ---- host arrays ---------------------------------------------------------------------------------

VALUES = np.arange(60, dtype=np.float64).reshape(3, 4, 5) / 8.0 - 2.0


def read_only(a):
    b = a.copy()
    b.setflags(write=False)
    return b


def strided(a):
    b = np.zeros((6, 4, 15), a.dtype)
    b[::2, :, ::3] = a
    return b[::2, :, ::3]


def unaligned(a):
    raw = bytearray(a.nbytes + 1)
    b = np.frombuffer(raw, a.dtype, offset=1).reshape(a.shape)
    b[...] = a
    return b


def mapped(a, path):
    path = path / "array.bin"
    path.write_bytes(a.tobytes())
    return np.memmap(path, a.dtype, "r", shape=a.shape)


KINDS = {
    "read-only": lambda a, path: read_only(a.astype(np.float32)),
    "strided": lambda a, path: strided(a.astype(np.float32)),
    "reversed": lambda a, path: a.astype(np.float32)[:, ::-1].copy()[:, ::-1],
    "Fortran": lambda a, path: np.asfortranarray(a.astype(np.float32)),
    "float64": lambda a, path: a,
    "float16": lambda a, path: a.astype(np.float16),
    "big-endian": lambda a, path: a.astype(">f4"),
    "big-endian float64": lambda a, path: a.astype(">f8"),
    "memory-mapped": lambda a, path: mapped(a.astype(np.float32), path),
    "unaligned": lambda a, path: unaligned(a.astype(np.float32)),
    "list": lambda a, path: a.tolist(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copy", [True, False])
def test_host_arrays_of_every_kind_give_the_bits_of_a_contiguous_one(kind, copy, tmp_path):
    backend = cython()
    w = normal(np.random.default_rng(0), 5, 3)
    contiguous = VALUES.astype(np.float32)
    tensor = backend.from_host(KINDS[kind](VALUES, tmp_path), copy=copy)
    assert backend.dtype_of(tensor) == "f32"
    assert bits(tensor, *backend.conv1d(tensor, w, grad=False)[:2]) == bits(
        contiguous, *backend.conv1d(contiguous, w, grad=False)[:2]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_train_accept_tensors_that_share_read_only_memory(kind, tmp_path):
    backend = cython()
    x = backend.from_host(KINDS[kind](VALUES, tmp_path), copy=False)
    y, saved = backend.rms_norm(x, None, 1e-6)
    assert backend.rms_norm_backward(x, saved, None).shape == y.shape


def test_copy_false_shares_a_native_contiguous_array_and_copy_true_does_not():
    host = VALUES.astype(np.float32)
    assert np.shares_memory(cython().from_host(host, copy=False), host)
    assert not np.shares_memory(cython().from_host(host), host)


def test_a_copy_of_a_read_only_array_can_be_written():
    tensor = cython().from_host(read_only(VALUES.astype(np.float32)))
    cython().fill_(tensor, 2.0)
    assert (tensor == 2.0).all()


@pytest.mark.parametrize(("host", "expected"), [([True, False], [1, 0]), ([3.0, -4.0], [3, -4])])
def test_booleans_and_whole_numbers_become_int32(host, expected):
    tensor = cython().from_host(np.array(host), "i32")
    assert cython().dtype_of(tensor) == "i32"
    assert tensor.tolist() == expected


@pytest.mark.parametrize("value", [0.5, 2.0**31, np.nan, -(2**31) - 1])
def test_a_value_that_is_no_32_bit_integer_is_refused(value):
    with pytest.raises(ValueError, match="is not a 32-bit integer"):
        cython().from_host(np.array([1, value]), "i32")


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j]), np.array([None])])
def test_what_is_no_number_is_refused(array):
    with pytest.raises(ValueError, match="expected numbers"):
        cython().from_host(array)


def test_transfers_are_counted():
    backend = create_backend(threads=1)
    backend.to_host(backend.from_host(VALUES))
    assert backend.transfers == 2


# ---- views, reshapes, casts ----------------------------------------------------------------------


def test_reshape_refuses_to_split_the_columns_of_a_view():
    view = cython().view(np.zeros((4, 10), np.float32), -1, 0, 6)
    with pytest.raises(ValueError, match="reshape: a column view"):
        cython().reshape(view, (4, 2, 3))


def test_reshape_refuses_to_flatten_a_single_column():
    view = cython().view(np.zeros((4, 10), np.float32), -1, 0, 1)
    with pytest.raises(ValueError, match="reshape: a column view"):
        cython().reshape(view, (4,))


def test_bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity():
    x = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.39e38, 3.4e38, np.inf, np.nan, -0.0], np.float32)
    x = np.append(
        x, np.array([0x7F800001], np.uint32).view(np.float32)
    )  # a NaN whose upper half is infinity's
    back = cython().to_host(cython().cast(x, "bf16"))
    assert back[:4].tolist() == [
        1.0,
        1.0,
        1.0 + 2**-6,
        float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0]),
    ]
    assert np.isinf(back[4:6]).all()
    assert np.isnan(back[[6, 8]]).all()
    assert np.signbit(back[7])


def test_f16_overflows_to_infinity_without_a_warning():
    x = np.array([65519.996, 65520.0, 2.0**-25, np.nan], np.float32)
    half = cython().cast(x, "f16")
    assert half.view(np.uint16)[:3].tolist() == [0x7BFF, 0x7C00, 0x0000]
    assert np.isnan(half[3])


# ---- refusals ------------------------------------------------------------------------------------


def test_storage_types_must_be_cast_before_arithmetic():
    half = cython().cast(np.ones((2, 3), np.float32), "f16")
    with pytest.raises(TypeError, match="rms_norm: x is f16, expected f32: use cast"):
        cython().rms_norm(half, None, 1e-6)


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.ones((2, 3)), TypeError),
        (np.ones((2, 3), ">f4"), TypeError),
        (np.ones((3, 2), np.float32).T, ValueError),
        (np.ones((2, 6), np.float32)[:, ::2], ValueError),
        (unaligned(np.ones((2, 3), np.float32)), ValueError),
        (np.broadcast_to(np.ones(3, np.float32), (2, 3)), ValueError),
    ],
)
def test_arrays_that_are_no_tensors_are_refused_with_the_remedy(array, error):
    with pytest.raises(error, match="sum: x .*use from_host"):
        cython().sum(array)


def test_what_is_no_array_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="add: b is a Fake, not a tensor"):
        cython().add(np.ones((2, 3), np.float32), type("Fake", (), {"shape": (2, 3)})())


def test_a_storage_type_shares_nothing_with_the_host_and_keeps_special_values():
    host = np.array([[1.0, np.nan, np.inf], [-0.0, 65504.0, 1e-7]], np.float16)
    for dtype in ("f16", "bf16"):
        tensor = cython().from_host(host, dtype, copy=False)
        assert not np.shares_memory(tensor, host)
        back = cython().to_host(tensor)
        assert back.dtype == np.float32
        assert np.isnan(back[0, 1])
        assert np.signbit(back[1, 0])
    assert np.array_equal(cython().to_host(cython().from_host(host, "f16")), host, equal_nan=True)


def test_to_host_without_a_copy_shares_a_contiguous_tensor_and_leaves_it_writable():
    tensor = cython().zeros((3, 4))
    host = cython().to_host(tensor, copy=False)
    assert np.shares_memory(host, tensor)
    assert tensor.flags.writeable
    assert not np.shares_memory(cython().to_host(tensor), tensor)
    with pytest.raises(ValueError, match="read-only"):
        host[0, 0] = 1.0


def overlapping_calls():
    b, rng = cython(), np.random.default_rng(0)
    buffer = normal(rng, 4, 12)
    square = normal(rng, 4, 4)
    left, middle = b.view(buffer, -1, 0, 4), b.view(buffer, -1, 3, 7)
    _, linear = b.linear(left, square)
    _, norm = b.rms_norm(left, None, 1e-6)
    x3 = left.reshape(1, 4, 4)
    _, _, conv = b.conv1d(x3, square)
    return {
        "add": lambda: b.add(left, square, out=middle),
        "add itself": lambda: b.add(left, square, out=left),
        "add_": lambda: b.add_(left, middle),
        "copy_": lambda: b.copy_(middle, left),
        "linear": lambda: b.linear(left, square, out=middle),
        "linear_backward into x": lambda: b.linear_backward(square.copy(), linear, square, out=middle),
        "linear_backward, dw is w": lambda: b.linear_backward(left, linear, square, dw=square),
        "rms_norm_backward": lambda: b.rms_norm_backward(left, norm, None, out=left),
        "conv1d_backward": lambda: b.conv1d_backward(x3, conv, square, out=middle.reshape(1, 4, 4)),
        "adamw_": lambda: b.adamw_(
            [square], [square], [left], [left], lr=1.0, beta1=0.9, beta2=0.9, eps=1.0, weight_decay=[0.0],
            step=1, grad_norm=np.ones(1, np.float32), stats=np.zeros(4, np.float32),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("call", overlapping_calls())
def test_writing_into_what_is_read_is_refused(call):
    with pytest.raises(ValueError, match="overlaps"):
        overlapping_calls()[call]()


def test_two_outputs_may_not_overlap_each_other():
    backend, rng = cython(), np.random.default_rng(1)
    u, a, b = normal(rng, 1, 4, 3), normal(rng, 3, 2), normal(rng, 1, 4, 2)
    _, _, saved = backend.selective_scan(u, u, a, b, b)
    both = np.zeros((1, 4, 2), np.float32)
    with pytest.raises(ValueError, match=r"selective_scan_backward: d._out overlaps d._out"):
        backend.selective_scan_backward(u, saved, db_out=both, dc_out=both)


def test_neighbouring_columns_of_one_buffer_do_not_overlap():
    backend, rng = cython(), np.random.default_rng(2)
    width, states = 3, 2
    u, delta, dy = (normal(rng, 2, 5, width) for _ in range(3))
    a, b, c = -np.exp(normal(rng, width, states)), normal(rng, 2, 5, states), normal(rng, 2, 5, states)
    _, _, saved = backend.selective_scan(u, delta, a, b, c, z=dy)
    expected = backend.selective_scan_backward(dy, saved)
    buffer = np.full((2, 5, 3 * width + 2 * states), np.nan, np.float32)
    edges = np.cumsum([0, width, width, width, states, states])
    parts = [backend.view(buffer, -1, int(i), int(j)) for i, j in itertools.pairwise(edges)]
    actual = backend.selective_scan_backward(
        dy, saved, du_out=parts[0], ddelta_out=parts[1], dz_out=parts[2], db_out=parts[3], dc_out=parts[4]
    )
    assert bits(*actual) == bits(*expected)
    assert np.isfinite(buffer).all()


def spans_of_one_buffer():
    """Pairs of column views and flat pieces of one buffer, with whether they share an element."""
    buffer = np.zeros((4, 12), np.float32)
    views = [
        buffer[r0:r1, c0:c1]
        for r0, r1 in ((0, 4), (1, 3), (2, 3))
        for c0, c1 in ((0, 3), (2, 7), (7, 12), (0, 12))
    ]
    views += [buffer.reshape(-1)[start:stop] for start, stop in ((0, 5), (12, 24), (45, 48))]
    views += [view.reshape(2, -1, view.shape[-1]) for view in views[:4]]
    return list(itertools.product(views, repeat=2))


@pytest.mark.parametrize("slow", [False, True])
def test_an_overlap_is_found_where_two_tensors_share_an_element_and_nowhere_else(monkeypatch, slow):
    backend = create_backend(threads=1)
    if slow:
        monkeypatch.setattr(backend, "_operands", type("Never", (), {"clear": lambda *args: False}))
    for dst, src in spans_of_one_buffer():
        expected = np.shares_memory(dst, src)
        for writes, reads in (({"dst": dst}, {"src": src}), ({"dst": dst, "other": src}, {})):
            if expected:
                with pytest.raises(ValueError, match="op: .* overlaps .* in memory"):
                    backend._check("op", writes, reads)
            else:
                backend._check("op", writes, reads)
        backend._check("op", {}, {"dst": dst, "src": src})


def test_the_quick_look_settles_what_training_does():
    clear = create_backend(threads=1)._operands.clear
    buffer = np.zeros((2, 5, 12), np.float32)
    columns = [buffer[..., :4], buffer[..., 4:8], buffer[..., 8:]]
    flat = [np.zeros(7, np.float32) for _ in range(300)]
    ids = np.zeros((2, 5), np.int32)
    assert clear(columns, [*flat, None], [ids, None])
    assert clear([*flat, None], [], [])
    assert not clear([*flat, flat[150]], [], [])
    assert not clear([ids], [], [])
    assert not clear([], [ids], [])
    assert not clear([], [], [flat[0]])


def test_adamw_of_many_tensors_names_the_two_that_overlap():
    many = [[np.zeros(4, np.float32) for _ in range(200)] for _ in range(4)]
    many[2][7] = many[0][190]
    with pytest.raises(
        ValueError, match=r"adamw_: (m\[7\] overlaps params\[190\]|params\[190\] overlaps m\[7\])"
    ):
        cython().adamw_(
            *many, lr=1.0, beta1=0.9, beta2=0.9, eps=1.0, weight_decay=[0.0] * 200, step=1,
            grad_norm=np.ones(1, np.float32), stats=np.zeros(4, np.float32),
        )  # fmt: skip


def test_writing_into_read_only_memory_is_refused():
    out = read_only(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="add: out is read-only"):
        cython().add(np.ones(3, np.float32), np.ones(3, np.float32), out=out)


BACKWARD = {
    "linear_backward": lambda b, t, saved: b.linear_backward(t, saved, t),
    "rms_norm_backward": lambda b, t, saved: b.rms_norm_backward(t, saved, None),
    "decay_backward": lambda b, t, saved: b.decay_backward(t, saved, d_a_log=t.copy()),
    "embedding_backward": lambda b, t, saved: b.embedding_backward(t, saved, d_table=t.copy()),
    "conv1d_backward": lambda b, t, saved: b.conv1d_backward(t, saved, t),
    "selective_scan_backward": lambda b, t, saved: b.selective_scan_backward(t, saved),
}


@pytest.mark.parametrize("op", BACKWARD)
def test_a_backward_op_without_saved_values_says_how_to_get_them(op):
    with pytest.raises(ValueError, match=f"{op}: saved is None: run the forward op with grad=True"):
        BACKWARD[op](cython(), np.ones((2, 2), np.float32), None)


@pytest.mark.parametrize("op", BACKWARD)
def test_a_backward_op_refuses_what_another_op_saved(op):
    with pytest.raises(TypeError, match=f"{op}: saved is a dict"):
        BACKWARD[op](cython(), np.ones((2, 2), np.float32), {})


def test_the_environment_is_not_read_at_import(monkeypatch):
    # It is read by create_backend, so that a program can set it after importing the package.
    class Forbidden(dict):
        def get(self, name, default=None):
            raise AssertionError(f"{name} was read")

        __getitem__ = get

    monkeypatch.setattr(os, "environ", Forbidden())
    import_again()


@pytest.mark.parametrize("shape", [(5000,), (33, 7, 129), (3, 5)])
def test_large_tensors_start_at_a_cache_line_and_are_like_any_other(shape):
    backend = create_backend()
    for tensor in (
        backend.empty(shape),
        backend.zeros(shape),
        backend.add(backend.zeros(shape), backend.zeros(shape)),
    ):
        assert tensor.shape == shape
        assert tensor.flags.c_contiguous
        assert tensor.flags.writeable
        if tensor.nbytes >= 1 << 14:
            assert tensor.__array_interface__["data"][0] % 64 == 0
    assert not backend.zeros(shape).any()
