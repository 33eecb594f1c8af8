"""Every row of the table runs, at sizes that measure nothing; the table says what was not measured."""

from __future__ import annotations

import json

import own
import pytest
import table
from harness import Cell, Row
from rows import GROUPS, Bench, Sizes, measure


@pytest.fixture
def bench():
    return Bench(Sizes.make(quick=True), own.default_backend(2), say=lambda line: None)


@pytest.mark.parametrize("group", GROUPS)
def test_every_row_is_measured_or_says_why_not(bench, group):
    rows = measure(bench, [group])
    for row in rows:
        assert row.missing or row.cells, row.key
        assert all(cell.ratio > 0 for cell in row.cells), row
    if not any(row.cells for row in rows):
        pytest.skip("; ".join(row.missing for row in rows))


@pytest.fixture
def in_quick_mode(monkeypatch, tmp_path):
    """Run the command with quick sizes, its baselines in a folder of the test's own."""
    monkeypatch.setenv("BENCH_QUICK", "1")
    monkeypatch.setattr(table, "BASELINES", tmp_path / "baselines")

    def run(*arguments):
        return table.main(["--only", "linear", "--threads", "1", "--out", str(tmp_path), *arguments])

    return run


def test_the_command_writes_the_table_and_the_results(in_quick_mode, tmp_path, capsys):
    assert in_quick_mode() == 0
    assert "| linear in L | time(64)/time(16) | ≤ 4.40 |" in capsys.readouterr().out
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "These numbers mean nothing" in text
    assert "| linear in L |" in text
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["ratios"]["linear"]["ratio"] > 0
    assert found["limits"]["sgemm_gflops_1"] > 0


@pytest.mark.parametrize(("kept", "code"), [(1e6, 0), (1e-6, 1)])
def test_comparing_fails_where_a_ratio_got_worse(in_quick_mode, tmp_path, capsys, kept, code):
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({"ratios": {"linear": {"ratio": kept, "higher_is_better": False}}}))
    assert in_quick_mode("--compare", str(path)) == code
    assert ("WORSE linear" in capsys.readouterr().out) == bool(code)


def test_comparing_nothing_fails(in_quick_mode, tmp_path):
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({"ratios": {"other": {"ratio": 1.0, "higher_is_better": False}}}))
    assert in_quick_mode("--compare", str(path)) == 1


def test_without_a_baseline_comparing_says_how_to_make_one(in_quick_mode):
    with pytest.raises(SystemExit, match="no baseline for this machine.*save-baseline"):
        in_quick_mode("--compare")


def test_quick_numbers_are_not_kept_as_a_baseline(in_quick_mode, tmp_path):
    with pytest.raises(SystemExit, match="measures nothing"):
        in_quick_mode("--save-baseline")
    assert not (tmp_path / "baselines").exists()


def test_a_row_that_was_not_measured_is_in_the_table_with_its_reason():
    row = Row("x", "scan", "a peer", 2.0, 4.0, True, missing="it is not installed")
    text = table.main_table([row])
    assert "| scan | a peer | ≥ 2.0× | 4.0× | not measured |" in text
    assert "not measured: it is not installed" in text


def test_a_row_shows_its_worst_shape_and_what_it_reached():
    cells = [Cell("(1,2,3)", 9.0, 8.0), Cell("(4,5,6)", 3.0, 2.5)]
    row = Row("x", "scan", "a peer", 2.0, 4.0, True, cells=cells)
    assert "| 3.0× at (4,5,6) | 2.5× | must |" in table.main_table([row])


def test_a_kernel_clock_counts_kernels_and_puts_them_back():
    backend = own.default_backend(1)
    real = backend._pointwise
    clock = own.KernelClock(backend)
    x = backend.zeros((64,))
    with clock.on():
        backend.add(x, x)
        backend.sum(x)
    backend.add(x, x)
    assert backend._pointwise is real
    assert clock.calls == 3  # sum is two calls
    assert clock.seconds > 0
