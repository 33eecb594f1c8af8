"""Finding an adapter and opening its device. With `encoder.py` the only module that imports wgpu.

A `Device` is what the rest of the package knows of wgpu's device: its limits as plain numbers, whether
subgroup operations may be used and how wide the subgroups really are, and calls that make buffers,
pipelines and bind groups and turn wgpu's errors into those of `errors.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import wgpu

from mamba_fast.backend import BackendUnavailableError
from mamba_fast_wgpu.errors import DeviceLostError, DeviceOutOfMemoryError, ShaderError, WgpuError

__all__ = [
    "ADAPTER_VARIABLE",
    "Adapter",
    "Device",
    "Limits",
    "adapters",
    "adapters_in_detail",
    "choose",
    "open_device",
    "remedy",
]

ADAPTER_VARIABLE = "MAMBA_FAST_WGPU_ADAPTER"

# What compute shaders of this size run on. wgpu's OpenGL path lacks the storage buffers that the
# kernels bind, so an adapter reached only through OpenGL is listed but not used.
USABLE_APIS = ("Vulkan", "Metal", "D3D12")

# The best first; what is of an unknown kind may well be a virtual GPU.
_PREFERENCE = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", "CPU")

_REMEDIES = {
    "linux": (
        "install a Vulkan driver and its loader (Debian, Ubuntu: apt install libvulkan1 mesa-vulkan-drivers; "
        "NVIDIA: the proprietary driver brings its own), and check with vulkaninfo; in a container, pass the "
        "device through or use the software driver of mesa-vulkan-drivers"
    ),
    "win32": "update the graphics driver from its vendor: Direct3D 12 or Vulkan is needed",
    "darwin": "Metal is needed: macOS 10.15 or newer on a machine with a GPU",
}

_MAP_READ = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
_STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_UNIFORM = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
_COMPUTE = wgpu.ShaderStage.COMPUTE

SLOT_BYTES = 256
"""Size of a dispatch's parameters: the alignment that WebGPU guarantees for dynamic offsets."""


@dataclass(frozen=True)
class Limits:
    """What a device allows, or the smaller figures that a test forces."""

    storage_buffers: int
    """Storage buffers that one kernel may bind."""
    binding_bytes: int
    """Most bytes of a buffer that a kernel can bind."""
    buffer_bytes: int
    """Largest buffer; what is larger than a binding is worked on in parts."""
    workgroup_bytes: int
    """Workgroup memory of one kernel."""
    invocations: int
    """Threads of one workgroup."""
    workgroups: int
    """Workgroups of a dispatch, along one dimension."""


_LIMIT_NAMES = {
    "storage_buffers": "max-storage-buffers-per-shader-stage",
    "binding_bytes": "max-storage-buffer-binding-size",
    "buffer_bytes": "max-buffer-size",
    "workgroup_bytes": "max-compute-workgroup-storage-size",
    "invocations": "max-compute-invocations-per-workgroup",
    "workgroups": "max-compute-workgroups-per-dimension",
}

# More than this is of no use to any kernel, or cannot be addressed by 32-bit offsets of bytes.
_SANE = Limits(32, 2**31 - 4, 2**31 - 4, 48 * 1024, 1024, 65535)


@dataclass(frozen=True)
class Adapter:
    """One way to reach one device."""

    name: str
    kind: str
    """ "DiscreteGPU", "IntegratedGPU", "CPU" (software) or "Unknown"."""
    api: str
    """ "Vulkan", "Metal", "D3D12" or "OpenGL"."""
    driver: str = ""

    @property
    def usable(self) -> bool:
        return self.api in USABLE_APIS

    @property
    def software(self) -> bool:
        """Whether the CPU plays the GPU: good for tests, slower than the CPU kernels."""
        return self.kind == "CPU"

    @property
    def summary(self) -> str:
        return f"{self.name} ({self.kind}) via {self.api}"


def _adapter(handle: wgpu.GPUAdapter) -> Adapter:
    info = handle.info
    return Adapter(info["device"], info["adapter_type"], info["backend_type"], info.get("description", ""))


def _limits(table: Mapping[str, int]) -> Limits:
    return Limits(**{field: min(table[name], getattr(_SANE, field)) for field, name in _LIMIT_NAMES.items()})


def adapters() -> list[Adapter]:
    """Every adapter of the machine, usable or not, in wgpu's order."""
    return [_adapter(handle) for handle in wgpu.gpu.enumerate_adapters_sync()]


def adapters_in_detail() -> list[tuple[Adapter, Limits, list[str]]]:
    """Every adapter with its limits and the features that this package has a use for."""
    used = ("subgroup", "shader-f16", "timestamp-query")
    return [
        (_adapter(handle), _limits(handle.limits), [name for name in used if name in handle.features])
        for handle in wgpu.gpu.enumerate_adapters_sync()
    ]


def remedy(platform: str = sys.platform) -> str:
    """What to do on this operating system when no adapter is usable."""
    return _REMEDIES.get(platform, "install a driver for Vulkan")


def choose(name: str | None = None) -> Adapter:
    """The adapter to use. See `open_device`."""
    return _adapter(_choose(name))


def _choose(name: str | None) -> wgpu.GPUAdapter:
    source = "adapter"
    if name is None:
        name, source = os.environ.get(ADAPTER_VARIABLE, "").strip() or None, ADAPTER_VARIABLE
    handles = wgpu.gpu.enumerate_adapters_sync()
    usable = [handle for handle in handles if _adapter(handle).usable]
    if name is not None:
        wanted = [h for h in usable if name.lower() in _adapter(h).summary.lower()]
        if not wanted:
            raise _unavailable(f"none matches {source}={name!r}", handles)
        usable = wanted
    if not usable:
        raise _unavailable("none is reached through Vulkan, Metal or Direct3D 12", handles)

    def rank(handle: wgpu.GPUAdapter) -> int:
        kind = _adapter(handle).kind
        return _PREFERENCE.index(kind) if kind in _PREFERENCE else _PREFERENCE.index("Unknown")

    return min(usable, key=rank)


def _unavailable(reason: str, handles: Sequence[wgpu.GPUAdapter]) -> BackendUnavailableError:
    found = [_adapter(handle) for handle in handles]
    listed = "; ".join(a.summary + ("" if a.usable else ", not usable") for a in found) or "none"
    return BackendUnavailableError(
        f"backend 'wgpu' has no usable adapter ({reason}). Adapters found: {listed}. Remedy: {remedy()}; "
        'or use backend="cython"'
    )


@contextmanager
def translated(what: str) -> Iterator[None]:
    """wgpu's errors become this package's; `what` was being done."""
    try:
        yield
    except wgpu.GPUError as error:
        message = " ".join(str(error).split())
        if isinstance(error, wgpu.GPUOutOfMemoryError) or "not enough memory" in message.lower():
            raise DeviceOutOfMemoryError(
                f"{what}: the device is out of memory; use a smaller batch or seq_len, or activation "
                f"checkpointing ({message})"
            ) from error
        if "lost" in message.lower() or "device is destroyed" in message.lower():
            raise DeviceLostError(
                f"{what}: the device was lost, and its tensors with it; start again from the last "
                f"checkpoint ({message})"
            ) from error
        raise WgpuError(f"{what}: {message}") from error


class Device:
    """An open device."""

    def __init__(
        self, handle: wgpu.GPUDevice, adapter: Adapter, limits: Limits, *, subgroups: bool, f16: bool
    ) -> None:
        self.handle = handle
        self.adapter = adapter
        self.limits = limits
        self.f16 = f16
        """Whether kernels may use the type f16."""
        self.process = os.getpid()
        self.subgroup_size = 0
        """Lanes of a subgroup as probed; 0 where subgroup operations must not be used."""
        if subgroups:
            self.subgroup_size = _probe_subgroup_size(self)

    def check_process(self) -> None:
        if os.getpid() != self.process:
            raise WgpuError(
                "backend 'wgpu' was created before this process was forked, and a device does not survive "
                "that: start processes by spawning, or create the backend in the child"
            )

    # ---- what the rest of the package makes with it -------------------------------------------

    def storage_buffer(self, size: int) -> wgpu.GPUBuffer:
        with translated(f"allocating {size} bytes"):
            return self.handle.create_buffer(size=size, usage=_STORAGE)

    def uniform_buffer(self, size: int) -> wgpu.GPUBuffer:
        with translated(f"allocating {size} bytes"):
            return self.handle.create_buffer(size=size, usage=_UNIFORM)

    def read_buffer(self, size: int) -> wgpu.GPUBuffer:
        with translated(f"allocating {size} bytes"):
            return self.handle.create_buffer(size=size, usage=_MAP_READ)

    def storage_layout(self, access: str) -> wgpu.GPUBindGroupLayout:
        """A layout of storage buffers: one letter each, "r" read-only, "w" read and written."""
        kinds = {"r": "read-only-storage", "w": "storage"}
        entries = [
            {"binding": i, "visibility": _COMPUTE, "buffer": {"type": kinds[letter]}}
            for i, letter in enumerate(access)
        ]
        with translated("making a bind group layout"):
            return self.handle.create_bind_group_layout(entries=entries)

    def uniform_layout(self) -> wgpu.GPUBindGroupLayout:
        buffer = {"type": "uniform", "has_dynamic_offset": True, "min_binding_size": 0}
        with translated("making a bind group layout"):
            return self.handle.create_bind_group_layout(
                entries=[{"binding": 0, "visibility": _COMPUTE, "buffer": buffer}]
            )

    def bind_group(
        self, layout: wgpu.GPUBindGroupLayout, buffers: Sequence[tuple[wgpu.GPUBuffer, int, int]]
    ) -> wgpu.GPUBindGroup:
        """Buffers, each with the first byte and the number of bytes that are bound."""
        entries = [
            {"binding": i, "resource": {"buffer": buffer, "offset": start, "size": size}}
            for i, (buffer, start, size) in enumerate(buffers)
        ]
        with translated("making a bind group"):
            return self.handle.create_bind_group(layout=layout, entries=entries)

    def pipeline(
        self, label: str, code: str, entry: str, layouts: Sequence[wgpu.GPUBindGroupLayout]
    ) -> wgpu.GPUComputePipeline:
        try:
            module = self.handle.create_shader_module(label=label, code=code)
            layout = self.handle.create_pipeline_layout(bind_group_layouts=list(layouts))
            return self.handle.create_compute_pipeline(
                label=label, layout=layout, compute={"module": module, "entry_point": entry}
            )
        except (wgpu.GPUError, RuntimeError) as error:
            raise ShaderError(
                f"kernel {label} does not compile on {self.adapter.summary}: {error}"
            ) from error


_PROBE = """
@group(0) @binding(0) var<storage, read_write> size: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(subgroup_size) lanes: u32, @builtin(local_invocation_index) i: u32) {
    if (i == 0u) { size[0] = lanes; }
}
"""


def _probe_subgroup_size(device: Device) -> int:
    """The width of subgroups as a kernel sees it: what adapters report is a range. 0 if none is seen."""
    try:
        layout = device.storage_layout("w")
        pipeline = device.pipeline("subgroup probe", _PROBE, "main", [layout])
    except ShaderError:
        return 0
    buffer = device.storage_buffer(4)
    group = device.bind_group(layout, [(buffer, 0, 4)])
    encoder = device.handle.create_command_encoder()
    work = encoder.begin_compute_pass()
    work.set_pipeline(pipeline)
    work.set_bind_group(0, group)
    work.dispatch_workgroups(1)
    work.end()
    device.handle.queue.submit([encoder.finish()])
    lanes = int(device.handle.queue.read_buffer(buffer).cast("I")[0])
    buffer.destroy()
    return lanes if lanes >= 4 and lanes & (lanes - 1) == 0 else 0


def open_device(
    *,
    adapter: str | None = None,
    force_limits: Mapping[str, int] | None = None,
    subgroups: bool | None = None,
) -> Device:
    """A new device.

    Parameters
    ----------
    adapter
        part of an adapter's summary, such as its name or "Vulkan", in any case. None: the environment
        variable MAMBA_FAST_WGPU_ADAPTER, else the best: discrete before integrated before software
    force_limits
        smaller limits than the adapter's, by the names of `Limits`
    subgroups
        False: do without subgroup operations. None: use them where there are any

    Raises
    ------
    BackendUnavailableError
        no adapter is usable; the message lists those found and the remedy
    ValueError
        an unknown or impossible limit
    """
    handle = _choose(adapter)
    limits = _limits(handle.limits)
    forced = dict(force_limits or {})
    for name, value in forced.items():
        if name not in _LIMIT_NAMES:
            raise ValueError(f"force_limits has no {name!r}; it has {', '.join(_LIMIT_NAMES)}")
        if not 1 <= value <= getattr(limits, name):
            raise ValueError(
                f"force_limits: {name} is {value}, expected 1 to the adapter's {getattr(limits, name)}"
            )
    limits = replace(limits, **forced)
    required = {_LIMIT_NAMES[name]: value for name, value in asdict(limits).items()}
    features = [f for f in ("subgroup", "shader-f16", "timestamp-query") if f in handle.features]
    if subgroups is False and "subgroup" in features:
        features.remove("subgroup")
    try:
        device = handle.request_device_sync(
            label="mamba-fast", required_features=features, required_limits=required
        )
    except (wgpu.GPUError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"backend 'wgpu': the adapter {_adapter(handle).summary} gave no device: "
            f"{' '.join(str(error).split())}"
        ) from error
    return Device(
        device, _adapter(handle), limits, subgroups="subgroup" in features, f16="shader-f16" in features
    )
