"""The command line: help, eval, info, and one clear line for whatever is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from cli_support import QUICK, ROOT, SMALL, program

import mamba_fast
from mamba_fast._cli import generate as generate_command
from mamba_fast._cli import train as train_command
from mamba_fast.config import MambaConfig, TrainConfig
from mamba_fast.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("plain_environment")


# ---- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["train"], ["generate"], ["eval"], ["info"]])
def test_help_explains_and_gives_examples(cli, command):
    code, out, err = cli(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: mamba-fast")
    assert out.count("mamba-fast") > 2
    assert out.isascii(), "it must print on any terminal"
    if command:
        for option in ("--backend", "--threads", "--debug", "examples:"):
            assert option in out


def test_every_setting_of_the_configurations_has_a_flag_with_help():
    assert set(train_command.TRAIN_HELP) == {f.name for f in dataclasses.fields(TrainConfig)}
    assert set(train_command.MODEL_HELP) == {f.name for f in dataclasses.fields(MambaConfig)}


def test_defaults_are_shown(cli):
    _, out, _ = cli("train", "--help")
    words = " ".join(out.split())
    assert "learning rate; small models like 1e-3 to 3e-3 (default: 0.0001)" in words
    assert "width of the model (default: 128)" in words
    assert "take the windows in random order (default: yes)" in words


def test_building_the_command_line_imports_nothing_heavy():
    code = "import mamba_fast.cli as cli; cli.build_parser(); import sys; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_version_is_printed(cli):
    assert cli("--version") == (0, f"mamba-fast {mamba_fast.__version__}\n", "")


def test_the_module_runs_as_a_program(trained):
    process = program("generate", trained, "--prompt", "the", "-n", "3", "--backend", "cython")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.startswith(b"the")
    assert b"3 tokens in" in err


# ---- eval ------------------------------------------------------------------------------------------


def test_eval_prints_what_evaluate_measures(cli, trained, text_file):
    words = (
        "eval",
        trained,
        "--data",
        text_file,
        "--seq-len",
        "64",
        "--windows",
        "5",
        "--backend",
        "cython",
        "--quiet",
    )
    code, out, err = cli(*words, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    expected = mamba_fast.evaluate(
        mamba_fast.load_model(trained),
        text_file,
        tokenizer=ByteTokenizer(),
        seq_len=64,
        windows=5,
        progress=False,
    )
    for key in ("loss", "perplexity", "bits_per_byte", "top1", "top5", "tokens", "windows", "bytes"):
        assert found[key] == expected[key], key
    _, out, _ = cli(*words)
    for name in ("loss", "perplexity", "bits per byte", "top-1", "top-5", "tokens/s"):
        assert name in out
    assert f"{expected['bits_per_byte']:.4f}" in out


def test_eval_shows_progress_on_stderr(cli, trained, text_file):
    code, _, err = cli("eval", trained, "--data", text_file, "--windows", "3", "--backend", "cython")
    assert code == 0
    assert "3/3" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("MODEL",), "--data"),
        (("nowhere", "--data", "TEXT"), "no model folder nowhere"),
        (("MODEL", "--data", "nowhere"), "no file or folder nowhere"),
        (("MODEL", "--data", "TEXT", "--seq-len", "0"), "argument --seq-len: must be at least 1, got 0"),
        (("MODEL", "--data", "TEXT", "--windows", "-2"), "argument --windows: must be at least 1, got -2"),
    ],
)
def test_bad_measuring_input_is_one_line(fails, trained, text_file, words, message):
    places = {"MODEL": trained, "TEXT": text_file}
    assert message in fails("eval", *(places.get(w, w) for w in words), "--backend", "cython", "--quiet")


# ---- info ------------------------------------------------------------------------------------------


def test_info_lists_the_backends_and_versions(cli):
    code, out, _ = cli("info")
    assert code == 0
    for word in ("mamba-fast", "python", "numpy", "BLAS", "cython", "oracle", "threads"):
        assert word in out


def test_info_as_json_can_be_read(cli, trained):
    code, out, _ = cli("info", trained, "--json")
    report = json.loads(out)
    assert code == 0
    assert {row["name"] for row in report["backends"]} >= {"cython", "oracle"}
    assert report["model"]["config"]["d_model"] == 16
    assert report["model"]["parameters"] == mamba_fast.load_model(trained).num_parameters()


def test_info_describes_a_model(cli, trained):
    code, out, _ = cli("info", trained)
    assert code == 0
    assert "ByteTokenizer" in out
    assert f"{mamba_fast.load_model(trained).num_parameters():,}" in out


def test_info_works_when_no_backend_does(cli, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("out of order")

    monkeypatch.setattr("mamba_fast.registry.list_backends", broken)
    monkeypatch.setattr("mamba_fast.registry.get_backend", broken)
    code, out, err = cli("info")
    assert (code, err) == (0, "")
    assert "RuntimeError: out of order" in out


def test_info_works_without_numpy():
    code = (
        "import sys; sys.modules['numpy'] = None; import mamba_fast.cli as cli; sys.exit(cli.main(['info']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "import of numpy halted" in done.stdout


def test_info_about_a_damaged_model_reports_and_fails(cli, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    code, out, err = cli("info", tmp_path)
    assert code == 2
    assert "backends" in out
    assert "not a safetensors file" in err


def test_info_about_a_backend_that_is_not_there_reports_and_fails(cli):
    code, out, err = cli("info", "--backend", "abacus")
    assert code == 2
    assert "backends" in out
    assert "no backend named 'abacus'" in err


def test_info_about_no_model_is_one_line(fails):
    assert "no model folder" in fails("info", "nowhere")


def test_an_empty_path_is_not_the_current_folder(fails, trained, text_file, monkeypatch):
    monkeypatch.chdir(trained)
    for words in (
        ("info", ""), ("generate", ""), ("eval", "", "--data", text_file), ("eval", trained, "--data", ""),
        ("generate", trained, "--prompt-file", ""),
    ):  # fmt: skip
        assert "must not be empty" in fails(*words)


def test_a_window_longer_than_the_text_is_the_whole_text(cli, trained, text_file):
    words = ("eval", trained, "--data", text_file, "--backend", "cython", "--quiet", "--json")
    code, out, _ = cli(*words, "--seq-len", "1000000000")
    assert code == 0
    assert json.loads(out)["windows"] == 1


# ---- all commands ----------------------------------------------------------------------------------


def test_no_command_is_one_line(fails):
    assert "train, generate, eval or info" in fails()


def test_an_unknown_command_is_one_line(fails):
    assert "trian" in fails("trian")


def test_a_shortened_option_is_not_guessed(fails):
    assert "--thr" in fails("info", "--thr", "1")


def test_the_backend_comes_from_the_environment(cli, fails, trained, monkeypatch):
    words = ("generate", trained, "--prompt", "a", "-n", "1")
    monkeypatch.setenv("MAMBA_FAST_BACKEND", "oracle")
    assert "oracle" in cli(*words)[2]
    assert "cython" in cli(*words, "--backend", "cython")[2]
    monkeypatch.setenv("MAMBA_FAST_BACKEND", "abacus")
    assert "MAMBA_FAST_BACKEND in the environment is 'abacus': no backend named 'abacus'" in fails(*words)
    assert "MAMBA_FAST_BACKEND" not in fails(*words, "--backend", "sundial")


def test_the_library_does_not_read_the_environment(trained, monkeypatch):
    monkeypatch.setenv("MAMBA_FAST_BACKEND", "abacus")
    assert mamba_fast.load_model(trained).backend.name == "cython"


def test_threads_reach_the_backend(cli, fails, trained):
    words = ("generate", trained, "--prompt", "a", "-n", "1")
    assert "1 thread" in cli(*words, "--backend", "cython", "--threads", "1")[2]
    assert "--threads does not go with the backend 'oracle'" in fails(
        *words, "--backend", "oracle", "--threads", "2"
    )


def test_auto_takes_threads_for_what_it_chooses(cli, trained, monkeypatch):
    monkeypatch.setattr("mamba_fast.registry._plugin_names", list)
    assert "1 thread" in cli("generate", trained, "-n", "1", "--threads", "1")[2]


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_debug_shows_the_traceback(cli, monkeypatch, how):
    flags = ["--debug"] if how == "flag" else []
    if how == "environment":
        monkeypatch.setenv("MAMBA_FAST_DEBUG", "1")
    code, _, err = cli("generate", "nowhere", *flags)
    assert code == 2
    assert "Traceback" in err
    assert err.strip().splitlines()[-1].startswith("mamba-fast generate: error: no model folder")


def replace_run(monkeypatch, error):
    def run(args):
        raise error

    monkeypatch.setattr(generate_command, "run", run)


def test_ctrl_c_ends_with_130(cli, monkeypatch):
    replace_run(monkeypatch, KeyboardInterrupt())
    assert cli("generate", "m") == (130, "", "mamba-fast generate: stopped\n")


def test_a_fault_of_the_program_is_told_from_bad_input(cli, monkeypatch):
    replace_run(monkeypatch, KeyError("x"))
    code, _, err = cli("generate", "m")
    assert code == 1
    assert (
        err
        == "mamba-fast generate: internal error: KeyError: 'x' (please report it, with what --debug shows)\n"
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory: use a smaller --batch-size"),
        (OSError(28, "No space left on device", "/some/file"), "/some/file: No space left on device"),
        (ModuleNotFoundError("needs tokenizers:\n  pip install it"), "needs tokenizers: pip install it"),
        (ValueError("two\nlines"), "two lines"),
    ],
)
def test_what_the_machine_lacks_is_one_line(fails, monkeypatch, error, message):
    replace_run(monkeypatch, error)
    assert message in fails("generate", "m")


def test_training_that_diverges_is_one_line(fails, text_file, tmp_path, monkeypatch):
    training = sys.modules["mamba_fast.train"]

    def diverge(*args, **options):
        raise training.TrainingDivergedError("the gradients were not finite")

    monkeypatch.setattr(training, "train", diverge)
    line = fails("train", "--data", text_file, "--out", tmp_path / "m", *SMALL, *QUICK)
    assert "the gradients were not finite" in line
