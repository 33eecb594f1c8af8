"""The loss curve."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from mamba_fast.metrics import MetricsLog
from mamba_fast.plot import can_plot, plot_losses

pytest.importorskip("matplotlib", reason="needs the extra mamba-fast[plot]")


@pytest.fixture
def log(tmp_path):
    with MetricsLog(tmp_path / "log.jsonl") as log:
        for step in range(1, 6):
            log.write("train", step, loss=1.0 / step if step != 3 else float("nan"))
        log.write("validation", 5, validation_loss=0.3)
        log.write("warning", 5, message="something")
    return tmp_path / "log.jsonl"


def test_the_picture_is_a_png_of_a_readable_size(log, tmp_path):
    plot_losses(log, tmp_path / "loss.png")
    content = (tmp_path / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (960, 540)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "loss.png"]


def test_both_curves_are_drawn(log, tmp_path):
    plot_losses(log, tmp_path / "both.png")
    text = log.read_text()
    log.write_text("".join(line + "\n" for line in text.splitlines() if "validation" not in line))
    plot_losses(log, tmp_path / "training.png")
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "training.png").read_bytes()


def test_a_log_without_losses_is_refused(tmp_path):
    with MetricsLog(tmp_path / "log.jsonl") as log:
        log.write("train", 1, loss=float("nan"))
    with pytest.raises(ValueError, match="has no losses to draw yet"):
        plot_losses(tmp_path / "log.jsonl", tmp_path / "loss.png")


def test_an_existing_picture_survives_a_failure(log, tmp_path, monkeypatch):
    (tmp_path / "loss.png").write_bytes(b"old")

    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"could not write .*loss\.png: no space left"):
        plot_losses(log, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.jsonl", "loss.png"]


def test_drawing_leaves_pyplot_alone(log, tmp_path):
    code = f"""
import sys
from mamba_fast.plot import plot_losses
plot_losses({str(log)!r}, {str(tmp_path / "loss.png")!r})
print("matplotlib.pyplot" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_matplotlib_the_error_names_the_extra(log, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install mamba-fast\[plot\]"):
        plot_losses(log, tmp_path / "loss.png")


def test_an_installed_matplotlib_is_found():
    assert can_plot()
