"""What the benchmarks share: backends by name and thread count, and inputs of the sizes that people train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import own
import pytest
import threadpoolctl

from mamba_fast.backend import Backend
from mamba_fast.registry import get_backend, list_backends


class Runner(NamedTuple):
    """A backend to time, and its label."""

    label: str
    name: str
    threads: int | None


def runners() -> list[Runner]:
    """The CPU kernels on one thread and on all, and every plugin that is faster than they are here. Not the
    oracle, and no GPU played by the CPU."""
    found = [Runner("cython-1", "cython", 1), Runner("cython-all", "cython", None)]
    others = [r.name for r in list_backends() if r.available and r.name not in ("cython", "oracle")]
    plugins = [name for name in others if get_backend(name).preferred_to_cpu]
    return found + [Runner(name, name, None) for name in plugins]


@pytest.fixture(params=runners(), ids=lambda runner: runner.label)
def backend(request) -> Iterator[Backend]:
    """The backend under test; with one thread, products that are numpy's run on one thread too."""
    runner: Runner = request.param
    options = {} if runner.threads is None else {"threads": runner.threads}
    with threadpoolctl.threadpool_limits(limits=runner.threads):
        yield get_backend(runner.name, **options)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture
def timed(benchmark, backend):
    """timed(group, function, setup=..., **extra): time one op until its result is there.

    setup() -> (args, kwargs) makes fresh operands for an op that uses them up; it is not timed.
    """

    def timed(group: str, function, setup=None, **extra):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            backend.synchronize()
            return result

        benchmark.group = group
        benchmark.extra_info.update(extra, backend=backend.describe())
        return benchmark.pedantic(call, setup=setup, rounds=20, warmup_rounds=3)

    return timed


# ---- rates beside the machine's limits ---------------------------------------------------------

RATES = {"state_updates": ("G state updates/s", 1e9), "bytes": ("GB/s", 1e9), "tokens": ("tokens/s", 1.0)}


def pytest_terminal_summary(terminalreporter, config):
    """After timed benchmarks: what each did in a second, beside what the machine can do."""
    session = getattr(config, "_benchmarksession", None)
    timed = (
        [] if session is None or session.disabled else [b for b in session.benchmarks if b and b.extra_info]
    )
    if not timed:
        return
    threads = own.default_backend(None).threads
    limits = own.limits(threads, quick=False)
    write = terminalreporter.write_line
    terminalreporter.section("rates, from medians")
    write("the machine: " + ", ".join(f"{name} {value:.1f}" for name, value in limits.items()))
    for bench in timed:
        seconds, info = bench.stats.median, bench.extra_info
        parts = [
            f"{info[key] / seconds / unit:.4g} {what}" for key, (what, unit) in RATES.items() if key in info
        ]
        if "multiplications" in info:
            parts.append(f"{2 * info['multiplications'] / seconds / 1e9:.4g} GFLOP/s")
        if parts:
            count = 1 if "cython-1" in bench.name else threads
            share = info.get("bytes", 0) / seconds / 1e9 / limits[f"copy_gbs_{count}"]
            note = f" ({share:.0%} of the copy's traffic)" if "bytes" in info else ""
            write(f"{bench.group or bench.name} [{bench.name}]: {', '.join(parts)}{note}")
