"""Times the wgpu backend on a GPU; run by hand, with torch beside it where it is installed:

    python bench/gpu.py

Each figure is the median of five runs of several calls, the queue emptied at the end of each, after a
warm-up of 0.4 s (idle clocks are far below the working ones).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import mamba_fast as mf
from mamba_fast.optim import AdamW

MATRICES = [(2048, 2048, 2048), (4096, 3072, 768), (8192, 3072, 768), (8192, 768, 1536)]
SCANS = [(8, 2048, 1536), (16, 512, 2048), (1, 8192, 1536)]
STATES = 16


def milliseconds(call: Callable[[], object], wait: Callable[[], object], runs: int = 5) -> float:
    end = time.perf_counter() + 0.4
    while time.perf_counter() < end:
        call()
        wait()
    start = time.perf_counter()
    call()
    wait()
    calls = max(1, min(10, int(1.0 / max(time.perf_counter() - start, 1e-4))))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times) * 1e3


def matrices(backend, tensor) -> None:
    try:
        import torch
    except ImportError:
        torch = None
    print("M x N x K, x @ w.T: ms, torch float32 (no tf32), ratio; forward, dx and dw together")
    for m, n, k in MATRICES:
        x, w, dy = tensor(m, k), tensor(n, k), tensor(m, n)
        y, dx, dw = backend.empty((m, n)), backend.empty((m, k)), backend.zeros((n, k))

        def both(x=x, w=w, dy=dy, y=y, dx=dx, dw=dw):
            _, saved = backend.linear(x, w, out=y)
            backend.linear_backward(dy, saved, w, dw=dw, out=dx)

        ours = milliseconds(
            lambda x=x, w=w, y=y: backend.linear(x, w, out=y, grad=False), backend.synchronize
        )
        line = f"{m} x {n} x {k}: {ours:.3f}"
        if torch is not None and torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = False
            a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
            theirs = milliseconds(lambda a=a, b=b: a @ b.T, torch.cuda.synchronize)
            line += f", {theirs:.3f}, {theirs / ours:.2f}"
        print(f"{line}; {milliseconds(both, backend.synchronize):.3f}", flush=True)


def scans(backend, tensor) -> None:
    print("scan B x L x E, N = 16, softplus and D: ms forward, backward")
    for shape in SCANS:
        batch, length, width = shape
        u, delta, dy = tensor(*shape), tensor(*shape), tensor(*shape)
        b, c = tensor(batch, length, STATES), tensor(batch, length, STATES)
        d, bias = tensor(width), tensor(width)
        a = backend.from_host(-np.tile(np.arange(1, STATES + 1, dtype=np.float32), (width, 1)))
        sums = {
            "d_a": backend.zeros(a.shape),
            "d_d": backend.zeros(d.shape),
            "d_delta_bias": backend.zeros(d.shape),
        }
        for mode in ("euler", "zoh"):
            inputs = (u, delta, a, b, c, d, None, bias)

            def forward(inputs=inputs, mode=mode):
                backend.selective_scan(*inputs, discretization=mode, grad=False)

            def both(inputs=inputs, mode=mode, dy=dy, sums=sums):
                _, _, saved = backend.selective_scan(*inputs, discretization=mode)
                backend.selective_scan_backward(dy, saved, **sums)

            first, whole = (milliseconds(call, backend.synchronize) for call in (forward, both))
            print(f"{batch} x {length} x {width} {mode}: {first:.3f}, {whole - first:.3f}", flush=True)


def streams(backend, tensor) -> None:
    rows, width, elements = 16384, 1536, 64_000_000
    x, out, w, taps = tensor(rows, width), backend.empty((rows, width)), tensor(width), tensor(width, 4)
    x3, out3 = (backend.reshape(t, (8, rows // 8, width)) for t in (x, out))
    p, g, m, v = (backend.zeros((elements,)) for _ in range(4))
    norm, stats = backend.global_norm([g]), backend.zeros((4,))

    def adamw():
        backend.adamw_(
            [p], [g], [m], [v], lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=[0.01], step=1,
            grad_norm=norm, max_grad_norm=1.0, stats=stats,
        )  # fmt: skip

    twice = 2 * 4 * rows * width
    for name, call, moved in (
        ("copy", lambda: backend.copy_(out, x), twice),
        ("rms_norm", lambda: backend.rms_norm(x, w, 1e-6, grad=False, out=out), twice),
        ("conv1d", lambda: backend.conv1d(x3, taps, w, grad=False, out=out3), twice),
        ("adamw", adamw, 7 * 4 * elements),
    ):
        print(f"{name}: {moved / milliseconds(call, backend.synchronize) / 1e6:.0f} GB/s", flush=True)


def step(backend) -> None:
    model = mf.MambaLM(mf.MambaConfig(50280, 768, 24), backend=backend)
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 50280, (2, 8, 1024))
    optimizer = AdamW(
        backend,
        model.store,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_delta=0.0,
    )
    recording = []

    def train_once():
        start = time.perf_counter()
        model.store.grads.zero()
        model.accumulate_gradients(ids, targets, scale=1 / ids.size)
        optimizer.step(1e-4)
        recording.append(time.perf_counter() - start)

    whole = milliseconds(train_once, backend.synchronize)
    recorded = statistics.median(recording) * 1e3
    print(
        f"training step, d 768, 24 layers, V 50280, B 8, L 1024: {whole:.0f} ms, recording {recorded:.0f} ms"
    )


def main() -> None:
    backend = mf.get_backend("wgpu")
    print(backend.describe(), flush=True)
    rng = np.random.default_rng(0)

    def tensor(*shape):
        return backend.from_host(rng.standard_normal(shape, dtype=np.float32))

    matrices(backend, tensor)
    scans(backend, tensor)
    streams(backend, tensor)
    step(backend)


if __name__ == "__main__":
    main()
