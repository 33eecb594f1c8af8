"""The timing itself, on a clock that the test turns."""

from __future__ import annotations

import pytest
from harness import PAUSE, Cell, Row, interleave, regressions


class Clock:
    """Time passes only while a candidate runs; `log` has the order of the calls."""

    def __init__(self):
        self.now, self.log, self.paused = 0.0, [], 0.0

    def candidate(self, name, *seconds):
        """Takes seconds[i] on its i-th call, the last of them ever after."""
        left = list(seconds)

        def call():
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call

    def sleep(self, seconds):
        self.paused += seconds

    def interleave(self, candidates, **options):
        return interleave(candidates, clock=lambda: self.now, sleep=self.sleep, **options)


@pytest.fixture
def clock():
    return Clock()


def test_candidates_take_turns(clock):
    both = {"a": clock.candidate("a", 0.5), "b": clock.candidate("b", 0.25)}
    clock.interleave(both, budget=0, min_rounds=3)
    assert clock.log == ["a", "b"] * 4  # the first pair warms up
    assert clock.paused == pytest.approx(8 * PAUSE)


def test_the_first_call_of_a_short_candidate_is_not_a_sample(clock):
    timing = clock.interleave({"a": clock.candidate("a", 0.9, 0.5)}, budget=0, min_rounds=3)["a"]
    assert timing.samples == pytest.approx((0.5, 0.5, 0.5))


def test_the_first_call_of_a_long_candidate_is_a_sample(clock):
    both = {"long": clock.candidate("long", 3.0, 2.0), "short": clock.candidate("short", 0.5)}
    timings = clock.interleave(both, budget=0, min_rounds=3)
    assert timings["long"].samples == pytest.approx((3.0, 2.0, 2.0))
    assert len(timings["short"].samples) == 3


def test_one_slow_spell_does_not_move_the_median(clock):
    timing = clock.interleave({"a": clock.candidate("a", 0.5, 0.5, 9.0, 0.5)}, budget=0, min_rounds=3)["a"]
    assert timing.median == pytest.approx(0.5)
    assert timing.spread == pytest.approx(17.0)


def test_a_short_candidate_runs_often_in_a_turn(clock):
    timing = clock.interleave({"a": clock.candidate("a", 0.001)}, budget=0, min_rounds=2)["a"]
    assert len(clock.log) == 1 + 2 * 20
    assert timing.samples == pytest.approx((0.001, 0.001))


@pytest.mark.parametrize(("budget", "rounds"), [(0.0, 3), (5.0, 7), (1000.0, 15)])
def test_the_budget_decides_the_rounds_within_bounds(clock, budget, rounds):
    timing = clock.interleave({"a": clock.candidate("a", 0.6)}, budget=budget)["a"]
    assert len(timing.samples) == rounds


def test_nothing_to_time_is_an_error():
    with pytest.raises(ValueError, match="nothing to time"):
        interleave({}, budget=1.0)


def row(higher, *ratios):
    cells = [Cell(str(i), ratio) for i, ratio in enumerate(ratios)]
    return Row(
        "r", "what", "against", must=2.0, aim=4.0 if higher else 1.0, higher_is_better=higher, cells=cells
    )


@pytest.mark.parametrize(
    ("higher", "ratios", "verdict"),
    [
        (True, (9.0, 4.0), "aim"),
        (True, (9.0, 3.0), "must"),
        (True, (9.0, 1.0), "missed"),
        (False, (0.5, 1.0), "aim"),
        (False, (0.5, 2.0), "must"),
        (False, (0.5, 3.0), "missed"),
        (True, (), "-"),
    ],
)
def test_the_worst_cell_decides_the_verdict(higher, ratios, verdict):
    assert row(higher, *ratios).verdict == verdict


def test_a_ratio_with_zoh_is_kept_beside_that_with_euler():
    one = row(True)
    one.cells = [Cell("8x256", 5.0, zoh=4.0)]
    assert {name: kept["ratio"] for name, kept in one.ratios().items()} == {
        "r/8x256": 5.0,
        "r/8x256/zoh": 4.0,
    }


def kept(ratio, higher):
    return {"a": {"ratio": ratio, "higher_is_better": higher}}


@pytest.mark.parametrize(
    ("was", "now", "higher", "fails"),
    [
        (10.0, 8.4, True, False),
        (10.0, 8.2, True, True),
        (10.0, 90.0, True, False),
        (1.0, 1.19, False, False),
        (1.0, 1.21, False, True),
        (1.0, 0.1, False, False),
    ],
)
def test_a_ratio_that_is_a_fifth_worse_is_a_regression(was, now, higher, fails):
    worse, absent = regressions(kept(now, higher), kept(was, higher))
    assert bool(worse) == fails
    assert absent == []


def test_what_was_not_measured_is_named_and_not_failed():
    assert regressions({}, kept(1.0, True)) == ([], ["a"])
