"""Two trainings do not share a folder, and a dead one does not keep it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mamba_fast.run_lock as module
from mamba_fast.backend import Tensor
from mamba_fast.config import MambaConfig, TrainConfig
from mamba_fast.model import MambaLM
from mamba_fast.run_lock import LOCK_FILE, locked
from mamba_fast.train import train

CONFIG = MambaConfig(vocab_size=24, d_model=4, n_layers=1, d_state=2, d_conv=2)
IDS = (np.arange(100) * 5 + 3) % 24
RUN = TrainConfig(steps=3, batch_size=2, seq_len=8, validation_fraction=0.0)


def test_a_folder_is_held_once_and_free_again_afterwards(tmp_path):
    with locked(tmp_path):
        with (
            pytest.raises(FileExistsError, match=f"another training is writing .*process {os.getpid()} on"),
            locked(tmp_path),
        ):
            raise AssertionError("held twice")
        assert (tmp_path / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        pass


def test_a_folder_that_was_made_for_nothing_is_taken_away(tmp_path):
    with locked(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
    with locked(tmp_path / "new"):
        (tmp_path / "new" / "model").touch()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["model"]


def test_another_process_that_holds_the_folder_is_named_and_its_death_frees_it(tmp_path):
    code = """
import sys
from pathlib import Path
from mamba_fast.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline().strip() == b"held"
        with pytest.raises(FileExistsError, match=f"process {process.pid} on"), locked(tmp_path):
            raise AssertionError("held twice")
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / LOCK_FILE).exists()  # the dead process could not remove it
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK_FILE).read_text()


def test_a_lock_file_that_is_removed_while_it_is_being_locked_is_not_the_one_that_counts(
    tmp_path, monkeypatch
):
    real, removed = module._lock, []

    def late(descriptor: int) -> None:
        if not removed:  # its holder ends between our opening and our locking
            removed.append(descriptor)
            (tmp_path / LOCK_FILE).unlink()
        real(descriptor)

    monkeypatch.setattr(module, "_lock", late)
    with locked(tmp_path), pytest.raises(FileExistsError, match="another training"), locked(tmp_path):
        raise AssertionError("held twice")


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def unable(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module, "_lock", unable)
    with locked(tmp_path):
        assert "cannot be locked against a second training: [Errno" in caplog.text


class Meanwhile(MambaLM):
    """Starts a second training into the same folder during the first one's second step."""

    calls = 0
    out: Path
    options: dict[str, Any]

    def accumulate_gradients(self, *args: Any, **options: Any) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            with pytest.raises(FileExistsError, match="another training is writing into"):
                train(MambaLM(CONFIG), IDS, RUN, out=self.out, progress=False, **self.options)
        return super().accumulate_gradients(*args, **options)


@pytest.mark.parametrize("options", [{}, {"resume": True}], ids=["fresh", "resumed"])
def test_a_second_training_into_a_folder_is_refused_and_the_first_goes_on(tmp_path, options):
    train(MambaLM(CONFIG), IDS, RUN.replace(steps=1), out=tmp_path / "whole", progress=False)
    model = Meanwhile(CONFIG)
    model.out, model.options = tmp_path / "run", options
    if options:
        train(MambaLM(CONFIG), IDS, RUN.replace(steps=1), out=model.out, progress=False)
        result = train(model, IDS, RUN, out=model.out, progress=False, resume=True)
    else:
        result = train(model, IDS, RUN, out=model.out, progress=False)
    assert model.calls >= 2
    assert result.steps == 3
    assert LOCK_FILE not in {p.name for p in model.out.iterdir()}
