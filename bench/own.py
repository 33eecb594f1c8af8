"""What this project runs in the table, and what the machine can do at best."""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import threadpoolctl
from harness import interleave

from mamba_fast import MambaConfig, MambaLM
from mamba_fast.backend import Backend
from mamba_fast.backends.cython import CythonBackend
from mamba_fast.optim import AdamW
from mamba_fast.registry import get_backend

__all__ = ["KernelClock", "limits", "machine", "scan", "training_step"]


# ---- what is timed ----------------------------------------------------------------------------


def scan(backend: Backend, arrays: dict[str, np.ndarray], discretization: str) -> Callable[[], object]:
    """One forward and backward pass of the scan op on `peers.scan_arrays`, from A_log to its gradient.

    As in training: inputs are on the backend, gradients of parameters are added to tensors that exist.
    """
    t = {name: backend.from_host(value) for name, value in arrays.items()}
    d_a, d_a_log = backend.zeros(t["A_log"].shape), backend.zeros(t["A_log"].shape)
    d_d, d_bias = backend.zeros(t["D"].shape), backend.zeros(t["D"].shape)

    def call() -> object:
        a, saved_decay = backend.decay(t["A_log"])
        y, _, saved = backend.selective_scan(
            t["u"], t["delta"], a, t["B"], t["C"], t["D"], t["z"], t["delta_bias"],
            discretization=discretization,
        )  # fmt: skip
        gradients = backend.selective_scan_backward(t["dy"], saved, d_a=d_a, d_d=d_d, d_delta_bias=d_bias)
        backend.decay_backward(d_a, saved_decay, d_a_log=d_a_log)
        backend.synchronize()
        return y, gradients

    return call


def scan_bytes(batch: int, length: int, width: int) -> int:
    """The least memory traffic of `scan`: what each pass reads and writes once.

    Forward reads u, delta, z and writes y; backward reads these and dy and writes three gradients.
    """
    return (4 + 4 + 3) * 4 * batch * length * width


def forward_backward(
    backend: Backend, config: MambaConfig, ids: np.ndarray, targets: np.ndarray, seed: int | None = 0
) -> Callable[[], object]:
    """Forward and backward of the mean loss, without an optimizer, into the model's gradients."""
    model = MambaLM(config, backend, seed=seed)
    scale = 1.0 / int((targets != -100).sum())

    def call() -> object:
        total = model.accumulate_gradients(ids, targets, scale=scale)
        backend.synchronize()
        return total

    return call


def training_step(
    backend: Backend, config: MambaConfig, ids: np.ndarray, targets: np.ndarray, lr: float = 0.0
) -> Callable[[], object]:
    """Forward, backward and AdamW."""
    model = MambaLM(config, backend)
    optimizer = AdamW(backend, model.store)
    scale = 1.0 / targets.size

    def call() -> object:
        model.store.grads.zero()
        total = model.accumulate_gradients(ids, targets, scale=scale)
        optimizer.step(lr)
        backend.synchronize()
        return total

    return call


def product_flop(config: MambaConfig, tokens: int) -> int:
    """Floating-point operations of the matrix products of forward and backward: two for each weight and
    token forward, four backward."""
    d, e = config.d_model, config.d_inner
    assert isinstance(e, int)
    assert isinstance(config.dt_rank, int)
    selection = config.dt_rank + 2 * config.d_state
    block = d * 2 * e + e * selection + config.dt_rank * e + e * d
    return 6 * tokens * (config.n_layers * block + config.vocab_size * d)


class KernelClock:
    """Seconds inside the compiled kernels of a CPU backend, so that the rest can be told apart.

    The rest is Python, the checks of operands and the allocation of results. While the clock is on, each
    call of a kernel is timed; `seconds` has the sum, less what reading the clock itself costs.
    """

    MODULES = ("_scan", "_conv1d", "_pointwise", "_optim", "_gemm")

    def __init__(self, backend: CythonBackend) -> None:
        self._backend = backend
        self.seconds, self.calls = 0.0, 0
        reads = sorted(-(time.perf_counter() - time.perf_counter()) for _ in range(1000))
        self._read = reads[len(reads) // 2]

    @contextmanager
    def on(self) -> Iterator[None]:
        real = {name: getattr(self._backend, name) for name in self.MODULES}
        self.seconds, self.calls = 0.0, 0
        for name, module in real.items():
            setattr(self._backend, name, _TimedModule(module, self))
        try:
            yield
        finally:
            for name, module in real.items():
                setattr(self._backend, name, module)

    def add(self, seconds: float) -> None:
        self.seconds += seconds - self._read
        self.calls += 1


class _TimedModule:
    """A module whose functions report to a `KernelClock` how long they took."""

    def __init__(self, module: Any, clock: KernelClock) -> None:
        self._module, self._clock = module, clock

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        if not callable(function):
            return function
        add = self._clock.add

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            add(time.perf_counter() - start)
            return result

        setattr(self, name, timed)
        return timed


@contextmanager
def forced_variant(name: str) -> Iterator[None]:
    """Backends that are made in here have the kernels of that variant."""
    before = os.environ.get("MAMBA_FAST_CPU")
    os.environ["MAMBA_FAST_CPU"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["MAMBA_FAST_CPU"]
        else:
            os.environ["MAMBA_FAST_CPU"] = before


def initial_parameters(config: MambaConfig) -> dict[str, np.ndarray]:
    """The weights that a model of this configuration starts from."""
    return MambaLM(config).parameters()


# ---- the machine ------------------------------------------------------------------------------


def library_threads(count: int) -> threadpoolctl.threadpool_limits:
    """A context in which numpy's own products use that many threads."""
    return threadpoolctl.threadpool_limits(count, user_api="blas")


def product(size: int) -> Callable[[], object]:
    """A square matrix product of numpy's library, `2 * size**3` floating-point operations."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, size, size), dtype=np.float32)
    out = np.empty_like(a)
    return lambda: np.matmul(a, b, out=out)


def copy(nbytes: int, threads: int) -> Callable[[], object]:
    """A copy by that many threads at once: `2 * nbytes` of memory traffic."""
    source = np.ones(nbytes // 4, dtype=np.float32)
    target = np.zeros_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))

    def call() -> None:
        # numpy lets other threads run while it copies.
        workers = [threading.Thread(target=np.copyto, args=part) for part in parts[1:]]
        for worker in workers:
            worker.start()
        np.copyto(*parts[0])
        for worker in workers:
            worker.join()

    return call


def limits(threads: int, *, quick: bool) -> dict[str, float]:
    """What this machine reaches: sgemm in GFLOP/s and copying in GB/s, on one thread and on `threads`."""
    size, nbytes = (128, 1 << 20) if quick else (2048, 1 << 28)
    budget = 0.0 if quick else 3.0
    found = {}
    for count in sorted({1, threads}):
        with library_threads(count):
            t = interleave({"sgemm": product(size), "copy": copy(nbytes, count)}, budget=budget)
        found[f"sgemm_gflops_{count}"] = 2 * size**3 / t["sgemm"].median / 1e9
        found[f"copy_gbs_{count}"] = 2 * nbytes / t["copy"].median / 1e9
    return found


def machine(backend: Backend) -> dict[str, str]:
    """Where the numbers hold; "name" is also that of the baseline's file."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model
            )
    except OSError:
        pass  # not Linux
    threads, variant = getattr(backend, "threads", 0), getattr(backend, "variant", "")
    name = re.sub(r"[^a-z0-9]+", "-", f"{model} {threads} threads {variant}".lower()).strip("-")
    return {
        "name": name, "processor": model, "backend": backend.describe(), "numpy": np.__version__,
        "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip


def default_backend(threads: int | None) -> CythonBackend:
    backend = get_backend("cython") if threads is None else get_backend("cython", threads=threads)
    assert isinstance(backend, CythonBackend)
    return backend
