"""What the benchmarks share: backends by name and thread count, and inputs of the sizes that people train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
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
    """The CPU kernels on one thread and on all, and every plugin that works here. Not the oracle."""
    found = [Runner("cython-1", "cython", 1), Runner("cython-all", "cython", None)]
    plugins = [r.name for r in list_backends() if r.available and r.name not in ("cython", "oracle")]
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
