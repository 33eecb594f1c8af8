"""Fixtures that several files of tests use."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_support import SMALL, TEXT
from hypothesis import HealthCheck, settings

from mamba_fast.cli import main

# The same examples every time, and no verdict on how long one takes: machines that run tests are busy.
settings.register_profile(
    "project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("project")


@pytest.fixture
def plain_environment(monkeypatch):
    """None of the variables that the command line reads."""
    monkeypatch.delenv("MAMBA_FAST_BACKEND", raising=False)
    monkeypatch.delenv("MAMBA_FAST_DEBUG", raising=False)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def trained(text_file):
    """The folder of a small trained model. Tests only read it."""
    out = str(Path(text_file).parent / "model")
    options = ("--lr", "1e-2", "--steps", "40", "--backend", "cython", "--quiet")
    assert main(["train", "--data", text_file, "--out", out, *SMALL, *options]) == 0
    return out


@pytest.fixture
def cli(capsys):
    """Run a command: exit code, stdout, stderr."""

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def fails(cli):
    """Run a command that must fail as bad input does: the one line on stderr."""

    def run(*words):
        code, out, err = cli(*words)
        assert code == 2, err
        assert out == ""
        assert err.startswith("mamba-fast")
        assert err.endswith("\n")
        assert err.count("\n") == 1, err
        assert "error: " in err
        return err

    return run
