"""The JSON-lines log."""

from __future__ import annotations

import errno
import json
import math
import os

import pytest

from mamba_fast.metrics import MetricsLog, read_log


def test_every_record_is_one_line_of_json_that_is_there_at_once(tmp_path):
    with MetricsLog(tmp_path / "log.jsonl") as log:
        for step in (1, 2):
            log.write("train", step, loss=step / 3)
            lines = (tmp_path / "log.jsonl").read_text().splitlines()
            assert json.loads(lines[-1]) == {"event": "train", "step": step, "loss": step / 3}
            assert len(lines) == step


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_written_as_null(tmp_path, value):
    with MetricsLog(tmp_path / "log.jsonl") as log:
        log.write("train", 1, loss=value)
    assert read_log(tmp_path / "log.jsonl") == [{"event": "train", "step": 1, "loss": None}]


def test_a_new_log_replaces_an_old_one(tmp_path):
    for loss in (1.0, 2.0):
        with MetricsLog(tmp_path / "log.jsonl") as log:
            log.write("train", 1, loss=loss)
    assert [record["loss"] for record in read_log(tmp_path / "log.jsonl")] == [2.0]


def test_a_resumed_log_keeps_the_records_up_to_its_step_and_goes_on(tmp_path):
    with MetricsLog(tmp_path / "log.jsonl") as log:
        for step in range(1, 6):
            log.write("train", step, loss=0.1)
    with MetricsLog(tmp_path / "log.jsonl", resumed_step=3) as log:
        log.write("train", 4, loss=0.2)
    assert [(r["step"], r["loss"]) for r in read_log(tmp_path / "log.jsonl")] == [
        (1, 0.1), (2, 0.1), (3, 0.1), (4, 0.2)
    ]  # fmt: skip


def test_a_line_cut_short_by_a_crash_is_removed_on_resuming(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "train", "step": 1, "loss": 0.5}\n{"event": "train", "st')
    with MetricsLog(path, resumed_step=7) as log:
        log.write("train", 8, loss=0.1)
    assert [record["step"] for record in read_log(path)] == [1, 8]


def test_resuming_without_a_log_begins_one(tmp_path):
    with MetricsLog(tmp_path / "log.jsonl", resumed_step=7) as log:
        log.write("train", 8, loss=0.1)
    assert [record["step"] for record in read_log(tmp_path / "log.jsonl")] == [8]


@pytest.mark.parametrize(
    "line",
    [
        "hello", "[1]", '{"event": "train"}', '{"step": 3}', '{"event": "train", "step": "x"}',
        pytest.param("[" * 100_000, id="deep"), pytest.param("1" * 5000, id="digits"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named_with_its_number(tmp_path, line):
    (tmp_path / "log.jsonl").write_text('{"event": "train", "step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is not a record"):
        read_log(tmp_path / "log.jsonl")


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no training log .*log\.jsonl"):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_full_disk_names_the_log_and_is_reported_once(tmp_path):
    path = tmp_path / "log.jsonl"
    log = MetricsLog(path)
    log.write("train", 1, loss=0.5)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file.fileno())
    os.close(full)
    with pytest.raises(OSError, match=r"^could not write .*log\.jsonl: No space left") as caught:
        log.write("train", 2, loss=0.5)
    assert caught.value.errno == errno.ENOSPC
    log.close()
    assert [record["step"] for record in read_log(path)] == [1]
