"""The picture of time against length: one scan, forward and backward, with every peer that is installed."""

from __future__ import annotations

from pathlib import Path

import own
import peers
from harness import interleave
from rows import STATES, Bench

__all__ = ["draw", "time_against_length"]

# From this many seconds on a peer is left out at longer lengths: the trend is clear by then.
TOO_LONG = 1.0


def time_against_length(bench: Bench) -> dict[str, dict[int, float]]:
    """Median seconds by candidate and length, at one row of the batch."""
    quick = bench.sizes.quick
    width, lengths = (24, (8, 16)) if quick else (512, (64, 128, 256, 512, 1024, 2048, 4096))
    names = [name for name in peers.SCANS if not bench.peer(name)]
    found: dict[str, dict[int, float]] = {}
    for length in lengths:
        arrays = peers.scan_arrays(1, length, width, STATES)
        candidates = {f"mamba-fast, {d}": own.scan(bench.backend, arrays, d) for d in ("euler", "zoh")}
        names = [name for name in names if found.get(name, {}).get(length // 2, 0.0) < TOO_LONG]
        candidates |= {name: peers.scan(name, arrays, bench.threads) for name in names}
        times = interleave(candidates, budget=0.0, min_rounds=bench.sizes.rounds)
        for name, timing in times.items():
            found.setdefault(name, {})[length] = timing.median
    bench.absolute.append({"what": f"scan (1,L,{width}) by length, all peers", "medians_by_length": found})
    return found


def draw(found: dict[str, dict[int, float]], path: Path, caption: str) -> None:
    """Write the picture; its kind follows from the name's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, by_length in found.items():
        ours = name.startswith("mamba-fast")
        axes.loglog(
            list(by_length), [1e3 * s for s in by_length.values()],
            marker="o", markersize=4, linewidth=2.5 if ours else 1.2, linestyle="-" if ours else "--",
            label=name,
        )  # fmt: skip
    lengths = sorted({length for by_length in found.values() for length in by_length})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("L")
    axes.set_ylabel("milliseconds, forward + backward")
    axes.set_title(caption, fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)
