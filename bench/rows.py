"""The rows of the table in docs/performance.md: what each one runs, and what it has to reach.

Each function of `GROUPS` measures the rows that belong together and returns them. Sizes come from `Sizes`;
with `BENCH_QUICK=1` in the environment they are tiny, which proves that everything runs and measures nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import own
import peers
from harness import Cell, Row, Timing, interleave

from mamba_fast import MambaConfig
from mamba_fast.backends._dispatch import runnable_variants
from mamba_fast.backends.cython import CythonBackend

__all__ = ["GROUPS", "Bench", "Sizes"]

STATES = 16

# Operations on the FMA pipe that a state element needs, forward and backward together; see the method's note.
FLOOR_OPERATIONS = 9 + 17

# OpenBLAS reaches about this share of the FMA pipe's peak in a large product.
SGEMM_OF_PEAK = 0.93


@dataclass(frozen=True)
class Sizes:
    """How large the measurements are and how long they may take."""

    quick: bool
    scans: tuple[tuple[int, int, int], ...]
    slow_scan: tuple[int, int, int]
    """For what takes minutes at the other sizes: transformers' default path and torch.compile."""
    base: tuple[int, int, int]
    odd: tuple[tuple[int, int], ...]
    """(N, D) that are compared with (16, D of `base`)."""
    lengths: tuple[int, int]
    model: MambaConfig
    model_length: int
    small: MambaConfig
    small_batch: tuple[int, int]
    tiny: MambaConfig
    tiny_batch: tuple[int, int]
    budget: float
    """Seconds for one comparison of short candidates; long ones take three rounds."""
    rounds: int

    @classmethod
    def make(cls, quick: bool) -> Sizes:
        if quick:
            return cls(
                quick=True, scans=((2, 9, 24), (1, 17, 40)), slow_scan=(1, 9, 24), base=(1, 16, 64),
                odd=((8, 64), (24, 50)), lengths=(16, 64), model=MambaConfig.hf(97, 32, 2), model_length=24,
                small=MambaConfig.hf(31, 16, 2), small_batch=(2, 12), tiny=MambaConfig.hf(31, 16, 2),
                tiny_batch=(1, 12), budget=0.0, rounds=1,
            )  # fmt: skip
        return cls(
            quick=False, scans=((8, 256, 512), (1, 512, 1536), (4, 1024, 1536), (1, 4096, 1536)),
            slow_scan=(1, 256, 512), base=(1, 512, 1536),
            odd=(
                (8, 1536), (12, 1536), (17, 1536), (32, 1536), (64, 1536), (100, 1536), (256, 1536),
                (16, 1000), (16, 1537), (24, 1483), (16, 200),
            ),
            lengths=(1024, 4096), model=MambaConfig.hf(50280, 768, 24), model_length=512,
            small=MambaConfig.hf(256, 128, 4), small_batch=(16, 256), tiny=MambaConfig.hf(256, 64, 2),
            tiny_batch=(1, 64), budget=8.0, rounds=3,
        )  # fmt: skip

    @classmethod
    def from_environment(cls) -> Sizes:
        return cls.make(os.environ.get("BENCH_QUICK", "") not in ("", "0"))


@dataclass
class Bench:
    """One run: its sizes, the backend under test, and what was found besides the rows."""

    sizes: Sizes
    backend: CythonBackend
    with_compile: bool = False
    say: Callable[[str], None] = print
    absolute: list[dict] = field(default_factory=list)
    """Medians in seconds, for the detailed tables."""
    checked: dict[str, float] = field(default_factory=dict)
    """Largest relative error of each peer's scan against ours."""
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        return self.backend.threads

    def timed(self, what: str, candidates: dict[str, Callable[[], object]], **extra) -> dict[str, Timing]:
        """Interleave candidates, and keep their medians under `what`."""
        times = interleave(candidates, budget=self.sizes.budget, min_rounds=self.sizes.rounds)
        self.absolute.append(
            {
                "what": what,
                "medians": {name: t.median for name, t in times.items()},
                "spreads": {name: t.spread for name, t in times.items()},
                "rounds": len(next(iter(times.values())).samples),
                **extra,
            }
        )
        self.say(f"  {what}: " + ", ".join(f"{name} {t.median * 1e3:.4g} ms" for name, t in times.items()))
        return times

    def peer(self, name: str) -> str:
        """ "" where that peer's scan is here and right, else why it is not here."""
        if name not in self.checked:
            try:
                self.checked[name] = peers.check_scan(name, self.threads)
            except peers.MissingPeerError as missing:
                return str(missing)
        return ""


def label(shape: tuple[int, ...]) -> str:
    return f"({','.join(map(str, shape))})"


def _one(t: dict[str, Timing], top: str, bottom: str) -> float:
    return t[top].median / t[bottom].median


# ---- the scan ---------------------------------------------------------------------------------


def scan_rows(bench: Bench) -> list[Row]:
    """The scan against the peers, and exact ZOH against Euler, at each shape in the same turns."""
    against = {
        "mambapy": Row("scan-mambapy", "scan forward + backward", "mambapy", 50, 100, True, "{:.0f}×"),
        "transformers, mambapy": Row(
            "scan-transformers", "same", "transformers `use_mambapy`", 80, 150, True, "{:.0f}×"
        ),
        "torch loop": Row("scan-torch", "same", "torch loop with unbound steps", 30, 50, True, "{:.0f}×"),
        "numpy loop": Row("scan-numpy", "same", "numpy loop (no target)", 1, 1, True, "{:.0f}×"),
    }
    zoh = Row("zoh", "exact ZOH", "Euler", 1.35, 1.15, False, "{:.2f}×")
    for name, row in against.items():
        row.missing = bench.peer(name)
    for shape in bench.sizes.scans:
        arrays = peers.scan_arrays(*shape, STATES)
        candidates = {
            "Euler": own.scan(bench.backend, arrays, "euler"),
            "ZOH": own.scan(bench.backend, arrays, "zoh"),
        }
        for name, row in against.items():
            if not row.missing:
                candidates[name] = peers.scan(name, arrays, bench.threads)
        t = bench.timed(
            f"scan {label(shape)}", candidates,
            state_updates=int(np.prod(shape)) * STATES, bytes=own.scan_bytes(*shape),
        )  # fmt: skip
        for name, row in against.items():
            if not row.missing:
                row.cells.append(Cell(label(shape), _one(t, name, "Euler"), _one(t, name, "ZOH")))
        zoh.cells.append(Cell(label(shape), _one(t, "ZOH", "Euler")))
    return [*against.values(), zoh]


def slow_scan_rows(bench: Bench) -> list[Row]:
    """Peers that are too slow for the sizes above: transformers' default; torch.compile on request."""
    shape = bench.sizes.slow_scan
    arrays = peers.scan_arrays(*shape, STATES)
    compiled = Row(
        "scan-compile", f"scan forward + backward, {label(shape)}", "torch.compile of that loop", 6, 10, True
    )
    default = Row(
        "scan-default", f"scan forward + backward, {label(shape)}", "transformers default (no target)", 1, 1,
        True, "{:.0f}×",
    )  # fmt: skip
    default.missing = bench.peer("transformers, default")
    compiled.missing = (
        bench.peer("torch loop")
        if bench.with_compile
        else "compiling takes minutes: asked for by --with-compile"
    )
    rows = {"torch.compile": compiled, "transformers, default": default}
    candidates = {
        "Euler": own.scan(bench.backend, arrays, "euler"),
        "ZOH": own.scan(bench.backend, arrays, "zoh"),
    }
    for name, row in rows.items():
        if not row.missing:
            candidates[name] = peers.scan(name, arrays, bench.threads)
            if name == "torch.compile":
                bench.say("  compiling the torch loop, which takes minutes ...")
                bench.checked[name] = peers.check_scan(name, bench.threads, arrays, candidates[name])
    t = bench.timed(f"slow peers' scan {label(shape)}", candidates)
    for name, row in rows.items():
        if not row.missing:
            row.cells.append(Cell(label(shape), _one(t, name, "Euler"), _one(t, name, "ZOH")))
    return list(rows.values())


def floor_rows(bench: Bench) -> list[Row]:
    """The scan on one thread against the arithmetic it needs, at the rate that sgemm reaches beside it."""
    row = Row(
        "scan-floor",
        "scan forward + backward, one thread",
        "own arithmetic floor",
        2.0,
        1.4,
        False,
        "{:.2f}×",
    )
    size = 64 if bench.sizes.quick else 1024
    one = own.default_backend(1)
    matrix = own.product(size)
    for shape in bench.sizes.scans[:2]:
        arrays = peers.scan_arrays(*shape, STATES)
        with own.library_threads(1):
            t = bench.timed(
                f"scan on one thread {label(shape)}",
                {
                    "Euler": own.scan(one, arrays, "euler"),
                    "ZOH": own.scan(one, arrays, "zoh"),
                    f"sgemm {size}": matrix,
                },
                state_updates=int(np.prod(shape)) * STATES,
            )
        per_second = size**3 / t[f"sgemm {size}"].median / SGEMM_OF_PEAK  # a multiply-add is one operation
        floor = FLOOR_OPERATIONS * int(np.prod(shape)) * STATES / per_second
        row.cells.append(Cell(label(shape), t["Euler"].median / floor, t["ZOH"].median / floor))
    return [row]


def odd_size_rows(bench: Bench) -> list[Row]:
    """Time per state element at other N and D, each in turns with the usual size."""
    row = Row(
        "odd", "any N in 8..256, D not a multiple of the tile", "time per state element at N = 16, D = 1536",
        1.5, 1.1, False, "{:.2f}×",
    )  # fmt: skip
    batch, length, width = bench.sizes.base

    def pair(states: int, channels: int) -> dict[str, Callable[[], object]]:
        arrays = peers.scan_arrays(batch, length, channels, states)
        return {d: own.scan(bench.backend, arrays, d) for d in ("euler", "zoh")}

    usual = pair(STATES, width)
    for states, channels in bench.sizes.odd:
        candidates = {f"usual {d}": call for d, call in usual.items()}
        candidates |= {f"this {d}": call for d, call in pair(states, channels).items()}
        shared = interleave(candidates, budget=bench.sizes.budget / 4, min_rounds=bench.sizes.rounds)
        share = (states * channels) / (STATES * width)
        euler, zoh = (_one(shared, f"this {d}", f"usual {d}") / share for d in ("euler", "zoh"))
        row.cells.append(Cell(f"N={states} D={channels}", euler, zoh))
    bench.say("  time per state element: " + ", ".join(f"{c.label} {c.ratio:.2f}" for c in row.cells))
    return [row]


def linear_rows(bench: Bench) -> list[Row]:
    """Four times the length should take four times as long."""
    short, long = bench.sizes.lengths
    width = bench.sizes.base[2]
    candidates = {
        f"{name} {length}": own.scan(bench.backend, peers.scan_arrays(1, length, width, STATES), name)
        for length in (short, long)
        for name in ("euler", "zoh")
    }
    t = bench.timed(f"scan (1,L,{width}) by length", candidates)
    euler, zoh = (_one(t, f"{name} {long}", f"{name} {short}") for name in ("euler", "zoh"))
    row = Row("linear", "linear in L", f"time({long})/time({short})", 4.4, 4.1, False, "{:.2f}")
    row.cells.append(Cell("", euler, zoh))
    return [row]


def variant_rows(bench: Bench) -> list[Row]:
    """The kernels for any x86-64 processor against those for AVX-512, in one process."""
    row = Row("baseline", "baseline SSE2 variant", "AVX-512 variant", 5.0, 3.5, False)
    if "v4" not in runnable_variants():
        row.missing = "this machine or build has no AVX-512 variant: " + ", ".join(runnable_variants())
        return [row]
    arrays = peers.scan_arrays(*bench.sizes.base, STATES)
    candidates = {}
    for variant in runnable_variants():
        with own.forced_variant(variant):
            backend = own.default_backend(bench.threads)
        assert backend.variant == variant
        for name in ("euler", "zoh"):
            candidates[f"{variant} {name}"] = own.scan(backend, arrays, name)
    t = bench.timed(f"scan {label(bench.sizes.base)} by variant", candidates)
    row.cells.append(Cell("", _one(t, "baseline euler", "v4 euler"), _one(t, "baseline zoh", "v4 zoh")))
    return [row]


# ---- whole models -----------------------------------------------------------------------------


def _shifted(ids: np.ndarray) -> np.ndarray:
    """The next token at each position, none at the last: what transformers makes of labels = ids."""
    return np.concatenate([ids[:, 1:], np.full((len(ids), 1), -100)], axis=1)


def _size(config: MambaConfig, batch: int, length: int) -> str:
    return f"d {config.d_model}, {config.n_layers} layers, V {config.vocab_size}, B {batch}, L {length}"


def model_rows(bench: Bench) -> list[Row]:
    """Forward and backward of a whole model against its matrix products' floor and against transformers."""
    config, length = bench.sizes.model, bench.sizes.model_length
    size = 64 if bench.sizes.quick else 2048
    what = f"forward + backward, {_size(config, 1, length)}"
    floor = Row("model-floor", what, "own GEMM floor", 1.25, 1.15, False, "{:.2f}×")
    other = Row("model-transformers", "same", "transformers `use_mambapy`", 6.5, 8, True)
    memory = Row(
        "model-memory",
        "its peak memory, as a share",
        "transformers `use_mambapy`",
        1 / 3.5,
        1 / 5,
        False,
        "{:.2f}",
    )

    ids = np.random.default_rng(1).integers(0, config.vocab_size, size=(1, length))
    candidates = {
        name: own.forward_backward(bench.backend, config.replace(discretization=name), ids, _shifted(ids))
        for name in ("euler", "zoh")
    }
    matrix = f"sgemm {size}"
    with own.library_threads(bench.threads):
        t = bench.timed(what, candidates | {matrix: own.product(size)}, tokens=length)
    seconds = own.product_flop(config, length) * t[matrix].median / (2 * size**3)
    floor.cells.append(Cell("", t["euler"].median / seconds, t["zoh"].median / seconds))

    other.missing = memory.missing = bench.peer("transformers, mambapy")
    if not other.missing:
        # Its weights are its own: time does not depend on them, and test_peers.py compares losses.
        model = peers.transformers_model(config, None, bench.threads)
        both = candidates | {"transformers": peers.transformers_step(model, ids)}
        t = bench.timed(f"{what} beside transformers", both, tokens=length)
        other.cells.append(Cell("", _one(t, "transformers", "euler"), _one(t, "transformers", "zoh")))
        del model, both
        _measure_memory(bench, memory)
    return [floor, other, memory]


def _measure_memory(bench: Bench, row: Row) -> None:
    """Peak resident memory, less that of the interpreter and libraries, each side in a process of its own."""
    if not Path("/proc/self/status").exists():
        row.missing = "peak memory is read from /proc, which only Linux has"
        return
    config = bench.sizes.model
    numbers = (config.vocab_size, config.d_model, config.n_layers, bench.sizes.model_length, bench.threads)
    peak = {}
    for side in ("own", "transformers"):
        command = [sys.executable, str(Path(__file__).with_name("memory_probe.py")), side, *map(str, numbers)]
        # The checkout that this process runs from, wherever it is installed.
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": paths}, check=True, capture_output=True, text=True
        )
        top, before = map(int, done.stdout.split())
        peak[side] = max(top - before, 1)
        bench.absolute.append({"what": f"peak memory, {side}", "bytes": top, "libraries": before})
        bench.say(f"  peak memory, {side}: {top / 1e9:.2f} GB, of it {before / 1e9:.2f} before the model")
    row.cells.append(Cell("", peak["own"] / peak["transformers"]))


def small_model_rows(bench: Bench) -> list[Row]:
    """Training steps of a small model against the same in torch with the fastest of the peers' scans."""
    config, (batch, length) = bench.sizes.small, bench.sizes.small_batch
    row = Row("small", f"training step, {_size(config, batch, length)}: tokens/s", "", 10, 30, True)
    arrays = peers.scan_arrays(batch, length, config.d_inner, STATES)
    found = {name: bench.peer(name) for name in ("torch loop", "mambapy", "transformers, mambapy")}
    scans = {name: peers.scan(name, arrays, bench.threads) for name, missing in found.items() if not missing}
    rng = np.random.default_rng(2)
    ids, targets = rng.integers(0, config.vocab_size, size=(2, batch, length))
    candidates: dict[str, Callable[[], object]] = {
        name: own.training_step(bench.backend, config.replace(discretization=name), ids, targets)
        for name in ("euler", "zoh")
    }
    best = ""
    if scans:
        t = interleave(scans, budget=0.0, min_rounds=bench.sizes.rounds)
        best = min(t, key=lambda name: t[name].median)
        initial = own.initial_parameters(config)
        step = peers.torch_model(config, initial, best, bench.threads)
        candidates["torch"] = lambda: step(ids, targets)
    row.against = f"the same model in torch with {best or 'the best of the peers’ scans'}"
    row.missing = "" if scans else found["torch loop"]
    t = bench.timed(row.what, candidates, tokens=ids.size)
    if scans:
        row.cells.append(Cell("", _one(t, "torch", "euler"), _one(t, "torch", "zoh")))
    return [row]


def overhead_rows(bench: Bench) -> list[Row]:
    """What a training step of a tiny model takes outside the kernels: Python, checks and allocation."""
    config, (batch, length) = bench.sizes.tiny, bench.sizes.tiny_batch
    row = Row(
        "overhead", f"Python and allocation of a step, {_size(config, batch, length)}", "its kernels' time",
        1.0, 0.3, False, "{:.2f}×",
    )  # fmt: skip
    ids, targets = np.random.default_rng(4).integers(0, config.vocab_size, size=(2, batch, length))
    found: dict[str, float] = {}
    for name in ("euler", "zoh"):
        step = own.training_step(bench.backend, config.replace(discretization=name), ids, targets)
        clock = own.KernelClock(bench.backend)
        inside: list[float] = []

        def clocked(step=step, clock=clock, inside=inside) -> None:
            with clock.on():
                step()
            inside.append(clock.seconds)

        # Whole steps are timed without the clock, which would slow them.
        t = interleave(
            {"step": step, "clocked": clocked}, budget=bench.sizes.budget / 4, min_rounds=bench.sizes.rounds
        )
        kernels = statistics.median(inside)
        found[name] = (t["step"].median - kernels) / kernels
        bench.say(
            f"  a step, {name}: {t['step'].median * 1e3:.3g} ms, {kernels * 1e3:.3g} ms of it in "
            f"{clock.calls} calls of kernels"
        )
        bench.absolute.append(
            {
                "what": f"tiny step, {name}",
                "medians": {"step": t["step"].median, "kernels": kernels},
                "calls": clock.calls,
            }
        )
    row.cells.append(Cell("", found["euler"], found["zoh"]))
    return [row]


GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "scan": scan_rows,
    "slow-scan": slow_scan_rows,
    "floor": floor_rows,
    "odd": odd_size_rows,
    "model": model_rows,
    "small": small_model_rows,
    "overhead": overhead_rows,
    "linear": linear_rows,
    "variants": variant_rows,
}


def measure(
    bench: Bench, only: list[str] | None = None, after: Callable[[list[Row]], object] = len
) -> list[Row]:
    """All rows, or those of some groups, in order. `after` gets the rows so far, after each group."""
    rows: list[Row] = []
    for name, group in GROUPS.items():
        if only and name not in only:
            continue
        bench.say(f"{name}: {(group.__doc__ or '').splitlines()[0]}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the peers' own
            rows += group(bench)
        after(rows)
    return rows
