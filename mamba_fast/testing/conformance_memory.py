"""Conformance of the memory ops: transfers, allocation, views, copies and casts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Backend
from mamba_fast.testing.conformance_base import Checks
from mamba_fast.testing.runs import Arena, no_transfers

__all__ = ["MemoryChecks"]

_GRID = (np.arange(24, dtype=np.float32) / 8.0 - 1.0).reshape(2, 3, 4)


def _unaligned(array: np.ndarray) -> np.ndarray:
    """The same values, starting one byte off."""
    raw = bytearray(1 + array.nbytes)
    moved = np.frombuffer(memoryview(raw)[1:], array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.setflags(write=False)
    return copy


# Arrays of other layouts, byte orders and types that hold the values of _GRID.
_HOST_FORMS: dict[str, Any] = {
    "read_only": _read_only,
    "fortran_order": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "reversed": lambda a: a[:, ::-1].copy()[:, ::-1],
    "float64": lambda a: a.astype(np.float64),
    "float16": lambda a: a.astype(np.float16),
    "big_endian": lambda a: a.astype(">f4"),
    "unaligned": _unaligned,
    "nested_lists": lambda a: a.tolist(),
}

# float32 values and the bits of the nearest half, ties to even (SPEC 9).
_HALF_BITS = {
    1.0 + 3.0 * 2.0**-11: 0x3C02,
    65519.996: 0x7BFF,
    65520.0: 0x7C00,
    3e-8: 0x0001,
    2.0**-24: 0x0001,
    2.0**-25: 0x0000,
    6e-5: 0x03EF,
    0.001: 0x1419,
    -0.001: 0x9419,
    -65520.0: 0xFC00,
    1e30: 0x7C00,
    0.0: 0x0000,
}

# The same for bfloat16, by hand: eight bits of precision, so halfway cases at odd multiples of 2^-8.
_BFLOAT_BITS = {
    1.0: 0x3F80,
    1.0 + 2.0**-8: 0x3F80,
    1.0 + 3.0 * 2.0**-8: 0x3F82,
    1.0 + 2.0**-8 + 2.0**-20: 0x3F81,
    3.1415927: 0x4049,
    -3.1415927: 0xC049,
    3.4e38: 0x7F80,
    -3.4e38: 0xFF80,
    1e30: 0x714A,
    0.0: 0x0000,
}


class MemoryChecks(Checks):
    """`from_host` to `synchronize`."""

    def test_values_come_back_from_the_backend_as_they_went_in(self, backend: Backend) -> None:
        back = backend.to_host(backend.from_host(_GRID))
        assert back.shape == _GRID.shape
        assert np.array_equal(back, _GRID)

    @pytest.mark.parametrize("form", _HOST_FORMS)
    def test_from_host_takes_any_layout_and_type_of_array(self, backend: Backend, form: str) -> None:
        host = _HOST_FORMS[form](_GRID)
        for copy in (True, False):
            assert np.array_equal(backend.to_host(backend.from_host(host, copy=copy)), _GRID)

    def test_from_host_turns_bools_and_int64_into_int32(self, backend: Backend) -> None:
        mask = np.array([[True, False, True]])
        tensor = backend.from_host(mask, "i32")
        assert backend.dtype_of(tensor) == "i32"
        assert backend.to_host(tensor).tolist() == [[1, 0, 1]]
        wide = np.array([-100, 0, 50_000], dtype=np.int64)
        back = backend.to_host(backend.from_host(wide, "i32"))
        assert back.dtype == np.int32
        assert back.tolist() == wide.tolist()

    def test_from_host_copies_so_that_later_changes_of_the_array_do_not_show(self, backend: Backend) -> None:
        host = _GRID.copy()
        tensor = backend.from_host(host)
        host[...] = 0.0
        assert np.array_equal(backend.to_host(tensor), _GRID)

    def test_to_host_gives_a_fresh_writable_contiguous_array(self, backend: Backend) -> None:
        tensor = backend.view(backend.from_host(_GRID), -1, 1, 3)
        first = backend.to_host(tensor)
        assert first.flags.writeable
        assert first.flags.c_contiguous
        first[...] = 99.0
        assert np.array_equal(backend.to_host(tensor), _GRID[..., 1:3])

    @pytest.mark.parametrize("dtype", ["f32", "i32", "f16", "bf16"])
    def test_to_host_without_a_copy_gives_the_same_values_read_only(
        self, backend: Backend, dtype: str
    ) -> None:
        start = backend.transfers
        tensor = backend.from_host(np.arange(24.0).reshape(2, 3, 4), dtype)
        for part in (tensor, backend.view(tensor, -1, 1, 3)):
            host = backend.to_host(part, copy=False)
            assert host.flags.c_contiguous
            assert not host.flags.writeable
            assert host.dtype == backend.to_host(part).dtype
            assert np.array_equal(host, backend.to_host(part))
        assert backend.transfers == start + 7

    def test_a_tensor_can_be_written_after_to_host_without_a_copy(self, backend: Backend) -> None:
        tensor = backend.from_host(_GRID)
        backend.to_host(tensor, copy=False)
        backend.fill_(tensor, 2.0)
        assert (backend.to_host(tensor) == 2.0).all()

    def test_transfers_counts_from_host_and_to_host_and_nothing_else(self, backend: Backend) -> None:
        start = backend.transfers
        tensor = backend.from_host(_GRID)
        assert backend.transfers == start + 1
        with no_transfers(backend):
            other = backend.zeros(_GRID.shape)
            backend.copy_(other, tensor)
            backend.fill_(backend.view(other, -1, 0, 1), 2.0)
            backend.cast(backend.reshape(other, (6, 4)), "f32")
            backend.synchronize()
        backend.to_host(other)
        assert backend.transfers == start + 2

    @pytest.mark.parametrize("dtype", ["f32", "i32"])
    def test_new_tensors_have_the_shape_and_dtype_asked_for(self, backend: Backend, dtype: str) -> None:
        for make in (backend.empty, backend.zeros):
            tensor = make((2, 3), dtype)
            assert tuple(tensor.shape) == (2, 3)
            assert backend.dtype_of(tensor) == dtype
        assert not backend.to_host(backend.zeros((2, 3), dtype)).any()

    def test_the_state_of_a_one_tap_convolution_is_a_tensor_without_elements(self, backend: Backend) -> None:
        shape = (2, 0, 3)
        for tensor in (backend.zeros(shape), backend.empty(shape), backend.from_host(np.zeros(shape))):
            assert tuple(tensor.shape) == shape
            assert backend.to_host(tensor).shape == shape
        backend.copy_(backend.zeros(shape), backend.zeros(shape))
        backend.fill_(backend.zeros(shape), 0.0)

    def test_reshape_and_view_share_the_memory(self, backend: Backend) -> None:
        base = backend.zeros((4, 6))
        columns = backend.view(base, -1, 2, 5)
        backend.fill_(backend.view(backend.reshape(columns, (2, 2, 3)), 0, 1, 2), 7.0)
        backend.fill_(backend.reshape(backend.view(base, 0, 0, 1), (6,)), 3.0)
        expected = np.zeros((4, 6))
        expected[2:, 2:5] = 7.0
        expected[0] = 3.0
        assert np.array_equal(backend.to_host(base), expected)

    def test_reshape_splits_and_merges_the_leading_axes_of_a_column_view(self, backend: Backend) -> None:
        columns = backend.view(backend.from_host(_GRID), -1, 1, 4)
        merged = backend.reshape(columns, (6, 3))
        assert np.array_equal(backend.to_host(merged), _GRID[..., 1:4].reshape(6, 3))
        split = backend.reshape(merged, (3, 1, 2, 3))
        assert np.array_equal(backend.to_host(split), _GRID[..., 1:4].reshape(3, 1, 2, 3))

    def test_reshape_refuses_what_would_need_a_copy(self, backend: Backend) -> None:
        columns = backend.view(backend.zeros((4, 6)), -1, 2, 5)
        with pytest.raises(ValueError, match="reshape"):
            backend.reshape(columns, (12,))

    def test_reshape_refuses_another_number_of_elements(self, backend: Backend) -> None:
        with pytest.raises(ValueError, match="reshape"):
            backend.reshape(backend.zeros((2, 3)), (7,))

    def test_a_view_of_a_view_starts_where_the_first_one_does(self, backend: Backend) -> None:
        inner = backend.view(backend.view(backend.from_host(_GRID), -1, 1, 4), -1, 1, 3)
        assert np.array_equal(backend.to_host(backend.view(inner, 0, 1, 2)), _GRID[1:2, :, 2:4])

    def test_view_takes_the_last_axis_by_its_number_too(self, backend: Backend) -> None:
        tensor = backend.from_host(_GRID)
        assert np.array_equal(backend.to_host(backend.view(tensor, 2, 1, 3)), _GRID[..., 1:3])

    @pytest.mark.parametrize(("axis", "start", "stop"), [(1, 0, 1), (0, 1, 1), (0, 0, 3), (-1, -1, 2)])
    def test_view_refuses_a_middle_axis_and_a_range_outside(
        self, backend: Backend, axis: int, start: int, stop: int
    ) -> None:
        with pytest.raises(ValueError, match="view"):
            backend.view(backend.zeros((2, 3, 4)), axis, start, stop)

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    def test_copy_writes_the_destination_only(self, backend: Backend, layout: str) -> None:
        arena = Arena(backend, layout)
        src, dst = arena.read(_GRID), arena.write(np.zeros_like(_GRID))
        backend.copy_(dst, src)
        assert np.array_equal(backend.to_host(dst), _GRID)
        arena.check()

    def test_copy_moves_ids_too(self, backend: Backend) -> None:
        ids = np.array([[5, -100, 7]], dtype=np.int32)
        dst = backend.zeros(ids.shape, "i32")
        backend.copy_(dst, backend.from_host(ids, "i32"))
        assert np.array_equal(backend.to_host(dst), ids)

    @pytest.mark.parametrize("layout", ["contiguous", "columns", "slab"])
    def test_fill_writes_the_view_only(self, backend: Backend, layout: str) -> None:
        arena = Arena(backend, layout)
        dst = arena.write(_GRID)
        backend.fill_(dst, -2.5)
        assert np.array_equal(backend.to_host(dst), np.full(_GRID.shape, -2.5))
        arena.check()

    @pytest.mark.parametrize("dtype", ["f16", "bf16"])
    def test_cast_rounds_to_nearest_ties_to_even(self, backend: Backend, dtype: str) -> None:
        table = _HALF_BITS if dtype == "f16" else _BFLOAT_BITS
        cast = backend.cast(backend.from_host(np.array(list(table), dtype=np.float32)), dtype)
        assert backend.dtype_of(cast) == dtype
        values = backend.to_host(backend.cast(cast, "f32")).astype(np.float32)
        if dtype == "f16":
            with np.errstate(over="ignore"):
                bits = values.astype(np.float16).view(np.uint16)
            expected = np.array(list(table.values()), dtype=np.uint16)
            exact = expected.view(np.float16).astype(np.float32)
        else:
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            expected = np.array(list(table.values()), dtype=np.uint16)
            exact = (expected.astype(np.uint32) << 16).view(np.float32)
        assert [hex(b) for b in bits] == [hex(e) for e in expected]
        assert np.array_equal(values, exact)

    @pytest.mark.parametrize("dtype", ["f16", "bf16"])
    @pytest.mark.parametrize("copy", [True, False])
    def test_from_host_to_a_storage_type_rounds_as_cast_does(
        self, backend: Backend, dtype: str, copy: bool
    ) -> None:
        table = _HALF_BITS if dtype == "f16" else _BFLOAT_BITS
        host = np.array([*table, np.nan, np.inf, -np.inf], dtype=np.float32).reshape(1, -1)
        tensor = backend.from_host(host, dtype, copy=copy)
        assert backend.dtype_of(tensor) == dtype
        cast = backend.cast(backend.from_host(host), dtype)
        assert np.array_equal(backend.to_host(tensor), backend.to_host(cast), equal_nan=True)

    @pytest.mark.parametrize("dtype", ["f16", "bf16"])
    def test_to_host_widens_a_storage_type(self, backend: Backend, dtype: str) -> None:
        back = backend.to_host(backend.from_host(_GRID, dtype))
        assert back.dtype == backend.to_host(backend.from_host(_GRID)).dtype
        assert np.array_equal(back, _GRID)

    def test_from_host_refuses_a_type_that_there_is_not(self, backend: Backend) -> None:
        with pytest.raises(ValueError, match="from_host: .*f64"):
            backend.from_host(_GRID, "f64")

    @pytest.mark.parametrize("dtype", ["f16", "bf16"])
    def test_cast_keeps_what_is_not_finite(self, backend: Backend, dtype: str) -> None:
        host = np.array([np.nan, np.inf, -np.inf, 1.0], dtype=np.float32)
        back = backend.to_host(backend.cast(backend.cast(backend.from_host(host), dtype), "f32"))
        assert np.array_equal(back, host, equal_nan=True)

    @pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
    def test_cast_of_a_column_view_gives_a_new_contiguous_tensor(self, backend: Backend, dtype: str) -> None:
        base = backend.from_host(_GRID)
        cast = backend.cast(backend.view(base, -1, 1, 3), dtype)
        backend.fill_(base, 0.0)
        flat = backend.reshape(cast, (12,))  # only a contiguous tensor can be flattened
        assert np.array_equal(backend.to_host(backend.cast(flat, "f32")), _GRID[..., 1:3].ravel())
