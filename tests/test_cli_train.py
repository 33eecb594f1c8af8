"""`mamba-fast train`: runs, resuming, tokenizers, data, bad input."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_support import QUICK, SMALL, TEXT, program

import mamba_fast
from mamba_fast._cli.options import in_flags
from mamba_fast.tokenizer import train_bpe

pytestmark = pytest.mark.usefixtures("plain_environment")


def test_training_saves_a_model_with_its_tokenizer(trained):
    for name in ("config.json", "model.safetensors", "mamba_fast_tokenizer.json", "log.jsonl", "checkpoints"):
        assert (Path(trained) / name).exists()
    loaded = mamba_fast.load_model(trained)
    assert (loaded.config.d_model, loaded.config.n_layers, loaded.config.vocab_size) == (16, 1, 258)


def test_training_says_what_it_did(cli, text_file, tmp_path):
    code, out, err = cli("train", "--data", text_file, "--out", tmp_path / "m", *SMALL, *QUICK)
    assert (code, err) == (0, "")
    assert "3 steps, 384 tokens" in out
    assert "validation loss" in out
    assert f"model saved in {tmp_path / 'm'}" in out


def test_training_shows_progress_on_stderr(cli, text_file, tmp_path):
    options = [word for word in QUICK if word != "--quiet"]
    code, _, err = cli("train", "--data", text_file, "--out", tmp_path / "m", *SMALL, *options)
    assert code == 0
    for word in ("parameters", "2,701 tokens in 1 documents", "cython", "3/3", "tokens/s"):
        assert word in err


def test_progress_in_a_file_is_a_few_pictures_of_the_bar(cli, text_file, tmp_path):
    words = ("--steps", "60", "--log-every", "1", "--backend", "cython")
    code, _, err = cli("train", "--data", text_file, "--out", tmp_path / "m", *SMALL, *words)
    assert code == 0
    assert "60/60" in err
    assert err.count("\rtrain:") < 20


def test_flags_reach_the_configuration_of_the_run(cli, text_file, tmp_path):
    code, _, err = cli(
        "train", "--data", text_file, "--out", tmp_path / "m", *SMALL, *QUICK, "--lr", "3e-3", "--no-shuffle",
        "--grad-accumulation", "2", "--dt-rank", "3", "--discretization", "euler", "--no-tie-embeddings",
    )  # fmt: skip
    assert code == 0, err
    model = mamba_fast.load_model(tmp_path / "m").config
    assert (model.dt_rank, model.discretization, model.tie_embeddings) == (3, "euler", False)
    run = json.loads((tmp_path / "m/checkpoints/step-00000003/trainer.json").read_text())["config"]
    assert (run["lr"], run["shuffle"], run["grad_accumulation"], run["steps"]) == (3e-3, False, 2, 3)


def test_resuming_goes_on_and_ends_where_a_straight_run_does(cli, text_file, tmp_path):
    start = ("train", "--data", text_file, *SMALL, "--schedule", "constant", "--backend", "cython", "--quiet")
    assert cli(*start, "--out", tmp_path / "straight", "--steps", "6")[0] == 0
    assert cli(*start, "--out", tmp_path / "halves", "--steps", "3")[0] == 0
    # Only what is needed is repeated: the run's own settings are in its checkpoint.
    again = ("train", "--data", text_file, "--out", tmp_path / "halves", "--backend", "cython", "--quiet")
    code, out, err = cli(*again, "--resume", "--steps", "6")
    assert code == 0, err
    assert "6 steps" in out
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("straight", "halves")]
    assert weights[0] == weights[1]


def test_a_finished_run_is_not_overwritten(fails, trained, text_file):
    before = (Path(trained) / "model.safetensors").read_bytes()
    line = fails("train", "--data", text_file, "--out", trained, *QUICK)
    assert "holds a training run already" in line
    assert "go on with it by --resume" in line
    assert (Path(trained) / "model.safetensors").read_bytes() == before


def test_resuming_a_finished_run_says_so(cli, trained, text_file, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    code, out, _ = cli("train", "--data", text_file, "--out", copy, "--resume", "--quiet")
    assert code == 0
    assert out.startswith("already finished: 40 steps, ")
    assert "tokens/s" not in out


@pytest.mark.parametrize("command", [("generate",), ("info",), ("eval", "--data", "TEXT")])
def test_a_run_that_is_not_finished_is_told_from_a_model(cli, trained, text_file, tmp_path, command):
    run = tmp_path / "run"
    shutil.copytree(Path(trained) / "checkpoints", run / "checkpoints")
    name, *options = (text_file if word == "TEXT" else word for word in command)
    code, _, err = cli(name, run, *options)
    newest = run / "checkpoints" / "step-00000040"
    assert code == 2
    assert err == (
        f"mamba-fast {name}: error: the training in {run} is not finished; its newest checkpoint is "
        f"{newest}: go on with it by --resume, or give that folder\n"
    )
    assert cli(name, newest, *options, "--backend", "cython")[0] == 0


def test_resuming_with_other_settings_is_refused(fails, trained, text_file):
    resume = ("train", "--data", text_file, "--out", trained, "--resume", "--backend", "cython", "--quiet")
    assert "--lr 0.01 (now 0.5)" in fails(*resume, "--lr", "0.5")
    assert "--d-model 32 contradicts" in fails(*resume, "--d-model", "32")
    assert "vocabulary" in fails(*resume, "--tokenizer", "bpe:300")
    assert "does not go with --init-from" in fails(*resume, "--init-from", trained)


def test_resuming_nothing_is_refused(fails, text_file, tmp_path):
    assert "nothing to resume" in fails("train", "--data", text_file, "--out", tmp_path, "--resume")


def test_resuming_from_a_damaged_checkpoint_is_refused(fails, trained, text_file, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (next((copy / "checkpoints").iterdir()) / "trainer.json").write_text("{")
    assert "trainer.json is damaged" in fails("train", "--data", text_file, "--out", copy, "--resume")


def test_training_starts_from_another_model(cli, trained, text_file, tmp_path):
    code, _, err = cli(
        "train", "--data", text_file, "--out", tmp_path / "m", "--init-from", trained, *QUICK, "--lr", "0",
        "--seq-len", "32",
    )  # fmt: skip
    assert code == 0, err
    old, new = mamba_fast.load_model(trained).parameters(), mamba_fast.load_model(tmp_path / "m").parameters()
    for name in old:
        assert np.array_equal(old[name], new[name])


def test_the_shape_of_an_existing_model_cannot_be_chosen(fails, trained, text_file, tmp_path):
    words = ("train", "--data", text_file, "--out", tmp_path / "m", "--init-from", trained)
    assert "--n-layers is for a new model" in fails(*words, "--n-layers", "3")
    assert "no model folder" in fails(*words[:-1], tmp_path / "nowhere")


def test_a_vocabulary_is_learnt_from_the_data(cli, text_file, tmp_path):
    code, _, err = cli(
        "train", "--data", text_file, "--out", tmp_path / "m", *SMALL, *QUICK, "--tokenizer", "bpe:300"
    )
    assert code == 0, err
    tokenizer = mamba_fast.load_tokenizer(tmp_path / "m")
    assert len(tokenizer.encode("the quick brown fox")) < 10
    assert mamba_fast.load_model(tmp_path / "m").config.vocab_size == tokenizer.vocab_size <= 300
    assert cli("eval", tmp_path / "m", "--data", text_file, "--quiet", "--backend", "cython")[0] == 0


def test_a_tokenizer_file_is_used_and_saved_with_the_model(cli, text_file, tmp_path):
    train_bpe([TEXT], 290, progress=False).save(tmp_path / "tok")
    file = tmp_path / "tok" / "tokenizer.json"
    code, _, err = cli(
        "train", "--data", text_file, "--out", tmp_path / "m", *SMALL, *QUICK, "--tokenizer", file,
        "--eos-token", "<|pad|>",
    )  # fmt: skip
    assert code == 0, err
    assert mamba_fast.load_tokenizer(tmp_path / "m").eos_token == "<|pad|>"


def test_token_files_need_no_tokenizer(cli, fails, tmp_path):
    ids = np.tile(np.arange(20, dtype="<u2"), 60)
    ids.tofile(tmp_path / "ids.bin")
    words = ("train", "--data", tmp_path / "ids.bin", "--out", tmp_path / "m", *SMALL, *QUICK)
    assert "token files need --vocab-size" in fails(*words)
    code, _, err = cli(*(word for word in words if word != "--quiet"), "--vocab-size", "20")
    assert code == 0
    assert "no tokenizer is saved with this model: `mamba-fast generate` needs one" in err
    code, out, _ = cli(
        "eval", tmp_path / "m", "--data", tmp_path / "ids.bin", "--quiet", "--backend", "cython"
    )
    assert code == 0
    assert "unknown" in out
    assert "no tokenizer" in fails("generate", tmp_path / "m", "--backend", "cython")
    assert cli(*words, "--resume", "--steps", "4")[0] == 0


def test_a_folder_is_read_by_its_glob_and_jsonl_by_its_field(cli, tmp_path):
    (tmp_path / "data/sub").mkdir(parents=True)
    (tmp_path / "data/sub/a.txt").write_text(TEXT)
    (tmp_path / "data/b.bad").write_bytes(b"\xff\xfe")
    (tmp_path / "c.jsonl").write_text(json.dumps({"body": TEXT}) + "\n" + json.dumps({"body": "x"}) + "\n")
    code, _, err = cli(
        "train", "--data", tmp_path / "data", tmp_path / "c.jsonl", "--glob", "**/*.txt",
        "--text-field", "body", "--out", tmp_path / "m", *SMALL, "--steps", "1", "--backend", "cython",
    )  # fmt: skip
    assert code == 0, err
    assert "in 3 documents" in err


def test_progress_can_be_measured_on_other_data(cli, text_file, tmp_path):
    (tmp_path / "other.txt").write_text("zq" * 200)
    code, out, err = cli(
        "train",
        "--data",
        text_file,
        "--validation",
        tmp_path / "other.txt",
        "--out",
        tmp_path / "m",
        *SMALL,
        *QUICK,
    )
    assert code == 0, err
    assert "validation loss" in out
    log = [json.loads(line) for line in (tmp_path / "m/log.jsonl").read_text().splitlines()]
    assert [r["tokens"] for r in log if r["event"] == "validation"] == [400]


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_or_sigterm_while_training_saves_and_tells_by_its_code(text_file, tmp_path, number, code):
    out = tmp_path / "m"
    process = program(
        "train", "--data", text_file, "--out", out, *SMALL, "--steps", "1000000", "--backend", "cython",
        "--checkpoint-every", "5", "--log-every", "1",
    )  # fmt: skip
    try:
        # The bar is drawn once before the first step, and again when steps are taken.
        seen = b""
        while b"loss" not in seen:
            byte = process.stderr.read(1)
            assert byte, seen
            seen += byte
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, err
    last = err.decode().strip().splitlines()[-1]
    assert last.startswith("mamba-fast train: stopped after step")
    assert "--resume" in last
    assert b"Traceback" not in err
    assert list((out / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "nowhere"), "no file or folder nowhere"),
        (("--lr", "fast"), "argument --lr: expected a number, got 'fast'"),
        (("--steps", "1.5"), "argument --steps: expected an integer, got '1.5'"),
        (("--lr", "-1"), "--lr must be in"),
        (("--batch-size", "0"), "--batch-size must be at least 1, got 0"),
        (("--d-model", "0"), "--d-model must be at least 1, got 0"),
        (("--dt-rank", "much"), "--dt-rank must be an integer or 'auto', got 'much'"),
        (("--schedule", "linear"), "--schedule must be one of"),
        (("--vocab-size", "100"), "the tokenizer has 258 ids"),
        (("--seq-len", "100000"), "fewer than one window"),
        (("--tokenizer", "nowhere.json"), "no tokenizer 'nowhere.json': --tokenizer takes bytes, bpe:SIZE"),
        (("--tokenizer", "TEXT"), "is not a Hugging Face tokenizer.json"),
        (("--tokenizer", "bpe:many"), "bpe:SIZE needs a number"),
        (("--tokenizer", "bpe:100"), "--tokenizer bpe:SIZE: SIZE must be an integer in [258,"),
        (("--tokenizer", "bpe:2147483648"), "in [258, 1048576], got 2147483648"),
        (("--tokenizer", "bpe:1" + "0" * 23), "in [258, 1048576], got 1000"),
        (("--tokenizer", "bpe:1" + "0" * 5000), "bpe:SIZE needs a number"),
        (("--tokenizer", ""), "argument --tokenizer: must not be empty"),
        (("--init-from", ""), "argument --init-from: must not be empty"),
        (("--validation", "TEXT", ""), "argument --validation: must not be empty"),
        (("--data", ""), "argument --data: must not be empty"),
        (("--out", ""), "argument --out: must not be empty"),
        (("--dt-rank", "²"), "--dt-rank must be an integer or 'auto', got '²'"),
        (("--lr", "1" + "0" * 400), "--lr must be a finite number, got inf"),
        (("--glob", "../*", "--validation", "FOLDER"), "--glob '../*' is not a pattern inside a folder"),
        (("--eos-token", "x"), "--eos-token is for a tokenizer.json"),
        (("--glob", "*.nope", "--validation", "FOLDER"), "matches the --glob"),
        (("--backend", "abacus"), "no backend named 'abacus'"),
        (("--threads", "0"), "argument --threads: must be at least 1, got 0"),
        (("--threads", "two"), "argument --threads: expected an integer"),
        (("--banana", "1"), "unrecognized arguments: --banana 1 (try mamba-fast train --help)"),
        (("--learning-rate", "1"), "--learning-rate 1; did you mean --lr?"),
        (("--batchsize", "1"), "--batchsize 1; did you mean --batch-size?"),
        (("--seq-len", "2000000"), "window of --seq-len 2000000: give more data or a smaller --seq-len\n"),
    ],
)  # fmt: skip
def test_bad_training_input_is_one_line(fails, text_file, tmp_path, words, message):
    places = {"TEXT": text_file, "FOLDER": str(tmp_path)}
    start = ("--data", text_file, "--out", tmp_path / "m", "--backend", "cython", "--quiet")
    assert message in fails("train", *start, *(places.get(word, word) for word in words))
    assert not (tmp_path / "m" / "model.safetensors").exists()


def test_a_backend_that_is_not_there_is_known_before_data_is_read(fails, trained, tmp_path):
    for words in (("train", "--out", tmp_path / "m"), ("eval", trained)):
        line = fails(*words, "--data", "nowhere", "--backend", "abacus", "--quiet")
        assert "no backend named 'abacus'" in line


def test_options_are_named_as_they_are_given_here(fails, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ok \xff\xfe")
    line = fails("train", "--data", tmp_path / "a.txt", "--out", tmp_path / "m", *SMALL, *QUICK)
    assert "a narrower --glob, or --skip-undecodable" in line


def test_a_message_of_the_library_speaks_of_flags():
    flags = [
        "--seq-len",
        "--packed",
        "--no-packed",
        "--lr",
        "--wsla",
        "--steps",
        "--out",
        "--resume",
        "--eos-token",
        "--backend",
    ]
    for message, expected in (
        ("seq_len=9: give a smaller seq_len (--seq-len)", "--seq-len 9: give a smaller --seq-len"),
        ("two tokens (packed=False takes all)", "two tokens (--no-packed takes all)"),
        ("wsla=True and resume=True", "--wsla and --resume"),
        ('or use backend="cython"', 'or use --backend "cython"'),
        ("a smaller lr (now 1) after 5 steps", "a smaller --lr (now 1) after 5 steps"),
        ("name one with eos_token=; there are none", "name one with --eos-token; there are none"),
        ("steps must be at least 1", "--steps must be at least 1"),
        ("my/seq_len.txt, 'seq_len' and d/lr/x", "my/seq_len.txt, 'seq_len' and d/lr/x"),
        ("it is without an out folder", "it is without an out folder"),
    ):
        assert in_flags(message, flags) == expected


def test_training_needs_data_and_a_folder(fails):
    assert "--data" in fails("train", "--out", "m")
    assert "--out" in fails("train", "--data", "a.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt", b"ok \xff\xfe", "is not UTF-8"),
        ("a.jsonl", b'{"text": 5}\n', "line 1"),
        ("a.jsonl", b"not json\n", "line 1"),
        ("a.txt", b"short", "fewer than one window"),
    ],
)
def test_bad_data_is_one_line_that_names_the_file(fails, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    line = fails("train", "--data", tmp_path / name, "--out", tmp_path / "m", *SMALL, *QUICK)
    assert message in line
