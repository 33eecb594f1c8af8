"""The command with this backend, end to end."""

from __future__ import annotations

import json

import pytest

from mamba_fast.cli import main
from mamba_fast_wgpu import device


@pytest.fixture
def trained(usable_adapter, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 60, encoding="utf-8")
    model = tmp_path / "model"
    status = main(
        ["train", "--data", str(text), "--out", str(model), "--backend", "wgpu", "--steps", "3",
         "--seq-len", "16", "--batch-size", "2", "--d-model", "8", "--n-layers", "1", "--quiet"]
    )  # fmt: skip
    assert status in (0, None)
    return model


def test_a_model_is_trained_and_writes_text(trained, capsys):
    capsys.readouterr()
    status = main(
        ["generate", str(trained), "--backend", "wgpu", "--prompt", "the", "--max-new-tokens", "5", "--quiet"]
    )
    assert status in (0, None)
    assert capsys.readouterr().out


def test_info_lists_every_adapter_with_limits_and_features(usable_adapter, capsys):
    main(["info", "--json"])
    rows = json.loads(capsys.readouterr().out)["backends"]
    lines = next(row for row in rows if row["name"] == "wgpu")["details"]
    assert len(lines) == len(device.adapters())
    assert any("MiB" in line and "threads" in line for line in lines)


def test_the_adapter_is_chosen_on_the_command_line(usable_adapter, capsys):
    name = device.choose().name
    main(["info", "--adapter", name[:5].lower()])
    assert f"asked for   wgpu: {name}" in capsys.readouterr().out


def test_an_adapter_that_is_not_there_is_an_error_with_the_list(usable_adapter, capsys):
    assert main(["info", "--adapter", "no such card"]) not in (0, None)
    assert "none matches --adapter 'no such card'" in capsys.readouterr().err


def test_an_adapter_for_the_cpu_kernels_is_refused(capsys):
    assert main(["info", "--backend", "cython", "--adapter", "x"]) not in (0, None)
    assert "--adapter does not go with the backend 'cython'" in capsys.readouterr().err
