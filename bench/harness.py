"""Timing that holds on a noisy machine, and ratios that are kept between runs.

What is compared runs in turns, A B A B ..., so that a slow spell of the machine meets all candidates alike,
and the median of each is taken. Absolute times do not travel between machines or days; the ratios of such
medians do, and they alone are kept as a baseline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Cell", "Row", "Timing", "interleave", "regressions"]

SLOT = 0.02
"""Seconds that a turn lasts at least: shorter candidates run several times in it."""

KEEP_FIRST = 1.0
"""A first call of this many seconds or more is a measurement; a shorter one only warms up."""

PAUSE = 0.01
"""Seconds between turns. Thread pools spin for a while after their last task; the next candidate should not
share the cores with another's."""


@dataclass(frozen=True)
class Timing:
    """Seconds a call took, one number for each turn."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.samples) - min(self.samples)) / self.median


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    budget: float,
    min_rounds: int = 3,
    max_rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Timing]:
    """Time candidates in turns.

    Parameters
    ----------
    candidates
        what to call, by name; the order is that of the turns
    budget
        seconds that all of it may take, which decides the number of rounds
    min_rounds, max_rounds
        bounds on that number. The lower one holds whatever the budget is.
    clock, sleep
        for tests

    Returns
    -------
    a `Timing` for each name, with one sample a round: the mean over the calls of that turn
    """
    if not candidates:
        raise ValueError("interleave: there is nothing to time")
    if not 1 <= min_rounds <= max_rounds:
        raise ValueError(f"interleave: rounds from {min_rounds} to {max_rounds}, expected 1 <= min <= max")

    def turn(name: str, calls: int) -> float:
        call = candidates[name]
        start = clock()
        for _ in range(calls):
            call()
        seconds = (clock() - start) / calls
        sleep(PAUSE)
        return seconds

    first = {name: turn(name, 1) for name in candidates}
    calls = {name: max(1, min(1000, round(SLOT / max(s, 1e-9)))) for name, s in first.items()}
    one_round = sum(calls[name] * first[name] + PAUSE for name in candidates)
    rounds = max(min_rounds, min(max_rounds, int((budget - sum(first.values())) / one_round)))
    samples = {name: [s] if s >= KEEP_FIRST else [] for name, s in first.items()}
    for i in range(rounds):
        for name in candidates:
            if len(samples[name]) <= i:
                samples[name].append(turn(name, calls[name]))
    return {name: Timing(tuple(values)) for name, values in samples.items()}


@dataclass
class Cell:
    """One measured ratio of a row."""

    label: str
    """What distinguishes it from the row's others, such as a shape."""
    ratio: float
    zoh: float | None = None
    """The same with exact ZOH, where `ratio` is with Euler."""


@dataclass
class Row:
    """One line of the table: a ratio, what it has to reach, and what it did."""

    key: str
    what: str
    against: str
    must: float
    aim: float
    higher_is_better: bool
    form: str = "{:.1f}×"
    """How a number of this row is written."""
    cells: list[Cell] = field(default_factory=list)
    missing: str = ""
    """Why there is no measurement."""

    @property
    def worst(self) -> Cell | None:
        if not self.cells:
            return None
        return (min if self.higher_is_better else max)(self.cells, key=lambda cell: cell.ratio)

    @property
    def verdict(self) -> str:
        """ "aim", "must" or "missed": what the worst cell reaches; "-" where nothing was measured."""
        if self.worst is None:
            return "-"
        sign = 1 if self.higher_is_better else -1
        reached = sign * self.worst.ratio
        return "aim" if reached >= sign * self.aim else "must" if reached >= sign * self.must else "missed"

    def ratios(self) -> dict[str, dict[str, object]]:
        """The row's numbers by name, as a baseline keeps them."""
        kept: dict[str, dict[str, object]] = {}
        for cell in self.cells:
            name = f"{self.key}/{cell.label}" if cell.label else self.key
            kept[name] = {"ratio": cell.ratio, "higher_is_better": self.higher_is_better}
            if cell.zoh is not None:
                kept[f"{name}/zoh"] = {"ratio": cell.zoh, "higher_is_better": self.higher_is_better}
        return kept


def regressions(
    current: Mapping[str, Mapping], baseline: Mapping[str, Mapping], tolerance: float = 0.2
) -> tuple[list[str], list[str]]:
    """Compare ratios as `Row.ratios` gives them.

    Returns
    -------
    worse
        a sentence for each ratio that is worse than the baseline's by more than `tolerance`
    absent
        names in the baseline that were not measured this time
    """
    worse = []
    for name, kept in baseline.items():
        if name not in current:
            continue
        was, now = kept["ratio"], current[name]["ratio"]
        loss = was / now - 1 if kept["higher_is_better"] else now / was - 1
        if loss > tolerance:
            worse.append(f"{name}: {now:.3g} against {was:.3g} in the baseline, {loss:.0%} worse")
    return worse, [name for name in baseline if name not in current]
