"""`mamba-fast generate`: text as the model makes it, prompts, stops, streams, bad input."""

from __future__ import annotations

import io
import shutil
import sys

import numpy as np
import pytest
from cli_support import program

import mamba_fast
from mamba_fast._cli.generate import TextUntil
from mamba_fast.tokenizer import ByteTokenizer

pytestmark = pytest.mark.usefixtures("plain_environment")


def test_greedy_text_is_what_the_model_generates(cli, trained):
    code, out, err = cli(
        "generate",
        trained,
        "--prompt",
        "the quick",
        "-n",
        "20",
        "--temperature",
        "0",
        "--backend",
        "cython",
        "--quiet",
    )
    tokenizer = ByteTokenizer()
    ids = mamba_fast.load_model(trained).generate(tokenizer.encode("the quick"), 20, temperature=0)
    assert (code, err) == (0, "")
    assert out == tokenizer.decode(ids[0]) + "\n"


def test_sampled_text_is_what_the_model_generates_with_the_same_seed(cli, trained):
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1, "seed": 5}
    flags = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    _, out, _ = cli(
        "generate", trained, "--prompt", "the", "-n", "30", *flags, "--backend", "cython", "--ignore-eos"
    )
    tokenizer = ByteTokenizer()
    ids = mamba_fast.load_model(trained).generate(tokenizer.encode("the"), 30, vocab_limit=258, **options)
    assert out == tokenizer.decode(ids[0]) + "\n"


def test_a_prompt_comes_from_a_file_or_stdin(cli, trained, tmp_path, monkeypatch):
    words = ("-n", "5", "--temperature", "0", "--backend", "cython", "--quiet")
    expected = cli("generate", trained, "--prompt", "the läzy", *words)
    (tmp_path / "p.txt").write_text("the läzy", encoding="utf-8")
    assert cli("generate", trained, "--prompt-file", tmp_path / "p.txt", *words) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the läzy".encode())))
    assert cli("generate", trained, "--prompt-file", "-", *words) == expected


def test_without_a_prompt_a_document_begins(cli, trained):
    code, out, _ = cli(
        "generate", trained, "-n", "4", "--temperature", "0", "--backend", "cython", "--ignore-eos"
    )
    ids = mamba_fast.load_model(trained).generate([ByteTokenizer.eos_id], 4, temperature=0)
    assert code == 0
    assert out == ByteTokenizer().decode(ids[0]) + "\n"


def test_the_prompt_can_be_left_out(cli, trained):
    words = (
        "generate",
        trained,
        "--prompt",
        "the quick",
        "-n",
        "8",
        "--temperature",
        "0",
        "--backend",
        "cython",
    )
    assert "the quick" + cli(*words, "--no-echo")[1] == cli(*words)[1]


def test_text_ends_before_a_stop(cli, trained):
    words = (
        "generate",
        trained,
        "--prompt",
        "the quick",
        "-n",
        "60",
        "--temperature",
        "0",
        "--backend",
        "cython",
    )
    whole = cli(*words)[1]
    stop = whole[20:24]
    out = cli(*words, "--stop", "never seen", "--stop", stop)[1]
    assert out == whole[: whole.index(stop, len("the quick"))] + "\n"


def test_samples_have_seeds_of_their_own(cli, trained):
    words = ("generate", trained, "--prompt", "the", "-n", "12", "--backend", "cython", "--quiet")
    _, out, _ = cli(*words, "--samples", "2", "--seed", "3")
    for seed in (3, 4):
        assert f"seed {seed} ---\n{cli(*words, '--seed', seed)[1]}" in out


@pytest.mark.parametrize(
    "pieces", [["ab", "cEND", "x"], ["abcE", "N", "Dx"], ["abc", "END"], list("abcENDEND")]
)
def test_a_stop_is_found_however_the_text_is_cut(pieces):
    until = TextUntil(["END", "STOP"])
    assert "".join(until.push(p) for p in pieces) + until.flush() == "abc"


def test_what_looked_like_a_stop_and_was_none_is_not_lost():
    until = TextUntil(["END"])
    assert [until.push(p) for p in ["aE", "N", "x", "EN"]] == ["a", "", "ENx", ""]
    assert until.flush() == "EN"


def test_a_terminal_that_lacks_characters_gets_question_marks(trained):
    process = program(
        "generate", trained, "--prompt", "naïve 日本", "-n", "2", "--backend", "cython", "--quiet",
        env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.startswith(b"na?ve ??")
    assert err == b""


def test_a_reader_that_goes_away_ends_it_quietly(trained):
    process = program("generate", trained, "-n", "1000000", "--ignore-eos", "--backend", "cython", "--quiet")
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 141
    assert err == b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "no model folder nowhere"),
        (("TEXT",), "is a file: give the folder of the model"),
        (("EMPTY",), "holds no tokenizer"),
        (("MODEL", "--prompt", "a", "--prompt-file", "b"), "not allowed with"),
        (("MODEL", "--prompt-file", "nowhere.txt"), "nowhere.txt: No such file"),
        (("MODEL", "--prompt-file", "LATIN"), "is not UTF-8 (byte 1)"),
        (("MODEL", "--prompt", "a\udc80"), "which has no UTF-8 form"),
        (("MODEL", "--temperature", "-1"), "temperature must be 0"),
        (("MODEL", "--top-p", "0"), "--top-p must be in (0, 1], got 0.0"),
        (("MODEL", "--top-k", "-3"), "--top-k must be at least 0, got -3"),
        (("MODEL", "--repetition-penalty", "0"), "--repetition-penalty must be above 0"),
        (("MODEL", "--max-new-tokens", "-1"), "--max-new-tokens must be at least 0, got -1"),
        (("MODEL", "--seed", "-1"), "seed must be at least 0, got -1"),
        (("MODEL", "--stop", ""), "--stop must not be empty"),
        (("MODEL", "--samples", "0"), "argument --samples: must be at least 1, got 0"),
        (("BROKEN",), "truncated or not a safetensors file"),
    ],
)
def test_bad_generating_input_is_one_line(fails, trained, text_file, tmp_path, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"n\xefve")
    shutil.copytree(trained, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    places = {
        "MODEL": trained, "TEXT": text_file, "EMPTY": tmp_path / "empty", "LATIN": tmp_path / "latin.txt",
        "BROKEN": tmp_path / "broken",
    }  # fmt: skip
    line = fails("generate", *(places.get(word, word) for word in words), "--backend", "cython")
    assert message in line


def test_a_model_that_diverged_is_one_line(fails, trained, monkeypatch):
    monkeypatch.setattr(
        mamba_fast.MambaLM, "prefill", lambda self, ids, state, **_: (np.full((1, 258), np.nan), state)
    )
    assert "diverged" in fails("generate", trained, "--no-echo", "--quiet", "--backend", "cython")
