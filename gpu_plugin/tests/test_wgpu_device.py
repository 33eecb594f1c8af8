"""Limits, subgroups and typed errors of the device, and how kernels are put together."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from mamba_fast.backend import BackendError
from mamba_fast.registry import get_backend
from mamba_fast.testing.tolerances import relative_l2, tolerance
from mamba_fast_wgpu import device, pipelines
from mamba_fast_wgpu.core import Engine
from mamba_fast_wgpu.device import open_device
from mamba_fast_wgpu.errors import DeviceLostError, DeviceOutOfMemoryError, ShaderError, WgpuError


@pytest.fixture(scope="module")
def wgpu(usable_adapter):
    return get_backend("wgpu")


# ---- limits and subgroups ----------------------------------------------------------------------


def test_forced_limits_hold_on_the_device_itself(usable_adapter):
    opened = open_device(force_limits={"storage_buffers": 8, "workgroup_bytes": 16384, "invocations": 256})
    assert opened.limits.storage_buffers == 8
    assert opened.handle.limits["max-storage-buffers-per-shader-stage"] == 8
    assert opened.handle.limits["max-compute-workgroup-storage-size"] == 16384
    assert opened.handle.limits["max-compute-invocations-per-workgroup"] == 256


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"buffers": 8}, "force_limits has no 'buffers'; it has storage_buffers"),
        ({"storage_buffers": 0}, "storage_buffers is 0, expected 1 to"),
        ({"workgroups": 10**9}, "workgroups is 1000000000, expected 1 to"),
    ],
)
def test_an_impossible_limit_is_an_error_that_names_it(usable_adapter, limits, message):
    with pytest.raises(ValueError, match=message):
        get_backend("wgpu", force_limits=limits)


def test_the_probed_subgroups_are_a_power_of_two_or_absent(wgpu):
    size = wgpu.device.subgroup_size
    assert size == 0 or (4 <= size <= 128 and size & (size - 1) == 0)


def test_subgroups_can_be_switched_off(usable_adapter):
    backend = get_backend("wgpu", subgroups=False)
    assert backend.device.subgroup_size == 0
    assert "no subgroup operations" in backend.describe()


def test_a_dispatch_beyond_the_limit_of_a_dimension_is_spread_over_two(usable_adapter):
    # With 3 workgroups a dimension, 7 need a grid of 3 by 3.
    backend = get_backend("wgpu", force_limits={"workgroups": 3})
    host = np.arange(7 * 256 - 5, dtype=np.float32)
    assert np.array_equal(
        backend.to_host(backend.add(backend.from_host(host), backend.from_host(host))), 2 * host
    )


# ---- the kernel for large products, which software adapters do without --------------------------


@pytest.mark.slow  # a software adapter compiles it for seconds, once for each way of transposing
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(130, 132, 72), (65, 68, 20), (256, 128, 1040)],
    ids=["tails", "less_than_a_tile", "slices_of_k"],
)
def test_large_products_match_float64(wgpu, monkeypatch, rows, outputs, inputs):
    monkeypatch.setattr(wgpu, "wide_products", True)
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s) for s in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    # Columns of wider tensors, which begin at a multiple of four elements.
    tensors = [
        wgpu.view(wgpu.from_host(np.pad(a, ((0, 0), (4, 8)))), -1, 4, 4 + a.shape[1]) for a in (x, w, dy)
    ]
    dw, dx = wgpu.from_host(w), wgpu.from_host(x)
    y, saved = wgpu.linear(tensors[0], tensors[1], alpha=0.5)
    wgpu.linear_backward(tensors[2], saved, tensors[1], dw=dw, alpha=0.5, out=dx, accumulate=True)
    assert relative_l2(wgpu.to_host(y), 0.5 * x @ w.T) <= tolerance("wgpu", "output")
    assert relative_l2(wgpu.to_host(dx), x + 0.5 * dy @ w) <= tolerance("wgpu", "gradient")
    assert relative_l2(wgpu.to_host(dw), w + 0.5 * dy.T @ x) <= tolerance("wgpu", "gradient")


def test_a_device_of_the_smallest_limits_does_without_the_kernel_for_large_products(usable_adapter):
    assert not get_backend("wgpu", force_limits={"workgroup_bytes": 16 << 10}).wide_products


def test_a_copied_or_pickled_backend_is_one_of_the_same_device(usable_adapter):
    backend = get_backend("wgpu", subgroups=False)
    for twin in (copy.copy(backend), copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert twin.engine is backend.engine


# ---- errors ------------------------------------------------------------------------------------


def test_an_allocation_that_cannot_succeed_is_a_typed_error(wgpu):
    with pytest.raises(ValueError, match=r"takes 4000000000000 bytes; this device allows"):
        wgpu.zeros((10**6, 10**6))


def test_a_lost_device_is_a_typed_error_that_says_what_to_do(usable_adapter):
    engine = Engine(open_device())
    block = engine.pool.take(16)
    engine.device.handle.destroy()
    for call in (lambda: engine.encoder.read(block, 0, 16), lambda: engine.pool.take(1 << 20)):
        with pytest.raises(DeviceLostError, match="device was lost.* start again from the last checkpoint"):
            call()


@pytest.mark.parametrize(
    ("error", "typed", "message"),
    [
        (
            device.wgpu.GPUOutOfMemoryError("no"),
            DeviceOutOfMemoryError,
            "making x: .*out of memory; use a smaller",
        ),
        (device.wgpu.GPUValidationError("Not enough memory left."), DeviceOutOfMemoryError, "out of memory"),
        (device.wgpu.GPUValidationError("Parent device is lost"), DeviceLostError, "the device was lost"),
        (device.wgpu.GPUValidationError("nonsense"), WgpuError, "making x: nonsense"),
    ],
    ids=["memory", "memory_in_words", "lost", "other"],
)
def test_errors_of_the_api_become_typed_ones(error, typed, message):
    with pytest.raises(typed, match=message) as caught, device.translated("making x"):
        raise error
    assert type(caught.value) is typed
    assert isinstance(caught.value, BackendError)


def test_memory_that_is_pooled_is_given_back_before_an_allocation_fails(usable_adapter, monkeypatch):
    engine = Engine(open_device())
    engine.pool.take(1000)  # returns to the pool at once
    real, calls = engine.device.storage_buffer, []

    def full_at_first(size):
        calls.append(size)
        if len(calls) == 1:
            raise DeviceOutOfMemoryError("full")
        return real(size)

    monkeypatch.setattr(engine.device, "storage_buffer", full_at_first)
    block = engine.pool.take(5000)
    assert block.size >= 5000
    assert engine.pool.pooled_bytes == 0


def test_a_kernel_that_does_not_compile_is_a_typed_error_that_names_kernel_and_adapter(wgpu):
    with pytest.raises(ShaderError, match="kernel broken does not compile on .*"):
        wgpu.device.pipeline("broken", "@compute fn main() { nonsense }", "main", [])


def test_a_tensor_of_another_backend_is_refused_by_name(wgpu):
    with pytest.raises(TypeError, match="add: b is a ndarray, not a tensor of this backend: use from_host"):
        wgpu.add(wgpu.zeros((3,)), np.zeros(3, np.float32))


def test_ids_where_numbers_are_expected_are_refused_by_name(wgpu):
    with pytest.raises(TypeError, match="add_: src is i32, expected f32"):
        wgpu.add_(wgpu.zeros((3,)), wgpu.zeros((3,), "i32"))


def test_a_backend_works_after_an_op_has_failed(wgpu):
    x = wgpu.from_host([1.0, 2.0])
    with pytest.raises(ValueError, match="shape"):
        wgpu.add(x, wgpu.zeros((3,)))
    assert wgpu.to_host(wgpu.add(x, x)).tolist() == [2.0, 4.0]


# ---- what is not finite ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_makes_its_rows_loss_nan_and_no_other(wgpu, value):
    host = np.zeros((3, 5), np.float32)
    host[1, 2] = value
    logits = wgpu.from_host(host)
    losses = wgpu.to_host(wgpu.cross_entropy_(logits, wgpu.from_host([0, 1, 2], "i32")))
    assert np.isnan(losses).tolist() == [False, True, False]
    assert np.isnan(wgpu.to_host(logits)).all(axis=1).tolist() == [False, True, False]


def test_a_logit_of_minus_infinity_counts_for_nothing(wgpu):
    host = np.array([[0.0, -np.inf, 0.0]], np.float32)
    losses = wgpu.to_host(wgpu.cross_entropy_(wgpu.from_host(host), wgpu.from_host([0], "i32")))
    assert np.allclose(losses, np.log(2.0), rtol=1e-6)


# ---- putting kernels together ------------------------------------------------------------------


def test_every_shader_is_package_data_with_a_comment_on_what_it_does():
    from importlib import resources

    files = [f for f in resources.files("mamba_fast_wgpu").joinpath("shaders").iterdir() if f.name[0] != "."]
    assert len(files) > 10
    for file in files:
        assert file.name.endswith(".wgsl")
        assert file.read_text("utf-8").startswith("//"), file.name


def test_overrides_become_constants_of_the_values_given(monkeypatch):
    code = "override A: u32 = 4u;\noverride B: bool = false;\noverride C: f32 = 1.0;\n"
    monkeypatch.setattr(pipelines, "read_shader", lambda name: "" if name == "common" else code)
    text = pipelines.assemble("x", {"A": 7, "B": True})
    assert text.split("\n")[1:4] == ["const A: u32 = 7u;", "const B: bool = true;", "const C: f32 = 1.0;"]


def test_conditional_lines_are_kept_by_their_constant(monkeypatch):
    code = "//#if WIDE\nwide\n//#else\nnarrow\n//#endif\n//#if !WIDE\nagain\n//#endif\n"
    monkeypatch.setattr(pipelines, "read_shader", lambda name: "" if name == "common" else code)
    assert pipelines.assemble("x", {"WIDE": True}).split() == ["wide"]
    assert pipelines.assemble("x", {}).split() == ["narrow", "again"]


def test_lines_are_repeated_with_their_number(monkeypatch):
    code = "//#repeat i 3\nvar c${i} = ${i}u;\n//#endrepeat\nend\n"
    monkeypatch.setattr(pipelines, "read_shader", lambda name: "" if name == "common" else code)
    words = [line for line in pipelines.assemble("x", {}).split("\n") if line]
    assert words == ["var c0 = 0u;", "var c1 = 1u;", "var c2 = 2u;", "end"]


def test_an_entry_point_binds_what_it_and_its_callees_use():
    code = """
    @group(0) @binding(0) var<storage, read> x: array<f32>;
    @group(0) @binding(1) var<storage, read> y: array<f32>;
    @group(0) @binding(2) var<storage, read_write> z: array<f32>;
    struct S { y: f32 }
    fn helper(i: u32) -> f32 { return x[i]; }
    fn one(s: S) { z[0] = helper(1u) + s.y; }
    fn two() { let x = 1.0; z[0] = y[0] + x; }
    """
    assert [name for _, _, name in pipelines.bindings_of(code, "one")] == ["x", "z"]
    assert [name for _, _, name in pipelines.bindings_of(code, "two")] == ["y", "z"]
