"""The command where its standard streams are closed or full, and Ctrl-C before it has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from cli_support import ROOT

from mamba_fast._cli import generate as generate_command
from mamba_fast.cli import main

pytestmark = pytest.mark.usefixtures("plain_environment")

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")


def shell(words, redirections):
    """The command with the shell's redirections: exit code, stdout, stderr."""
    line = f'exec "$@" {redirections}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "mamba_fast", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    # A graphics driver that a plugin asks may have remarks of its own.
    own = [line for line in done.stderr.splitlines(keepends=True) if "XDG_RUNTIME_DIR" not in line]
    return done.returncode, done.stdout, "".join(own)


# ---- streams ------------------------------------------------------------------------------------------


@POSIX
@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error_where_nothing_has_to_go_through_it(redirections):
    code, out, err = shell(["info"], redirections)
    assert (code, err) == (0, "")
    assert ("mamba-fast" in out) == (">&-" not in redirections.replace("2>&-", ""))


@POSIX
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["info", "--help"], []])
def test_nothing_that_is_printed_early_needs_a_stream(words):
    assert shell(words, "<&- >&- 2>&-") == (0 if words else 2, "", "")


@POSIX
def test_a_prompt_from_a_closed_stdin_is_one_line(trained):
    code, out, err = shell(["generate", trained, "--prompt-file", "-"], "<&-")
    assert (code, out) == (2, "")
    assert err == (
        "mamba-fast generate: error: --prompt-file - reads the prompt from stdin, which is closed\n"
    )


@POSIX
def test_bad_input_with_a_closed_stderr_is_told_to_nobody_and_not_to_stdout():
    assert shell(["info", "nowhere"], "2>&-") == (2, "", "")


@POSIX
def test_a_file_does_not_get_the_number_of_a_closed_stream(trained, tmp_path, text_file):
    """A library that writes to stderr by its number would write into the log."""
    out = tmp_path / "m"
    words = ["train", "--data", text_file, "--out", str(out), "--steps", "1", "--d-model", "8"]
    code, _, _ = shell([*words, "--n-layers", "1", "--backend", "cython"], "<&- >&- 2>&-")
    assert code == 0
    assert (out / "log.jsonl").read_text().startswith('{"event"')


@POSIX
@FULL
@pytest.mark.parametrize("words", [["info"], ["--help"], ["--version"]])
def test_a_full_disk_behind_stdout_is_one_line(words):
    code, _, err = shell(words, ">/dev/full")
    assert code == 2
    assert err.endswith("error: standard output: No space left on device\n")
    assert err.count("\n") == 1


def test_the_streams_are_as_they_were_afterwards(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["--version"]) == 0
    assert (sys.stdin, sys.stdout, sys.stderr) == (None, None, None)


# ---- Ctrl-C -------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv = ["mamba-fast", "eval", "nowhere", "--data", "x"]
{start}
"""
STARTS = {
    "script": "from mamba_fast.cli import main\nsys.exit(main())",
    "module": "import runpy; runpy.run_module('mamba_fast', run_name='__main__')",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "module", ["mamba_fast._cli", "argparse", "mamba_fast._cli.train", "mamba_fast.config", "numpy"]
)
def test_ctrl_c_while_modules_are_loaded_ends_with_130_and_one_line(start, module):
    code = INTERRUPTED.format(module=module, start=STARTS[start])
    # -S: as little as possible is loaded already, by site or an editable installation.
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(ROOT), *site_packages()]!r}\n{code}"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith(": stopped\n")


def site_packages():
    return [path for path in sys.path if path.endswith("site-packages")]


def test_loading_the_entry_point_loads_next_to_nothing():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules); "
        "import mamba_fast.cli; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[0] for name in done.stdout.split()} <= {
        "__future__", "importlib", "mamba_fast", "types", "warnings"
    }  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_that_a_compiled_module_turns_into_an_import_error_is_still_ctrl_c(cli, monkeypatch):
    def run(args):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt as stop:
            raise ImportError("numpy._core.multiarray failed to import") from stop

    monkeypatch.setattr(generate_command, "run", run)
    assert cli("generate", "m") == (130, "", "mamba-fast generate: stopped\n")
