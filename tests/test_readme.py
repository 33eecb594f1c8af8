"""The examples in README.md and docs/backends.md run as they are printed, with smaller numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mamba_fast.cli import build_parser, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BACKENDS = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

# What makes the printed examples quick. Each must occur, so that the table follows the text.
SMALLER = {
    "d_model=128, n_layers=4": "d_model=16, n_layers=1",
    "steps=150, batch_size=16": "steps=3, batch_size=2",
    "warmup_steps=15": "warmup_steps=1",
    "max_new_tokens=200": "max_new_tokens=5",
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
    """A working directory with the folders that the examples name."""
    for folder in ("my_texts", "other_texts"):
        (tmp_path / folder).mkdir()
        for i in range(4):
            (tmp_path / folder / f"{i}.txt").write_text(f"Once upon a time, {i}. " * 60, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_number_that_is_made_smaller_stands_in_the_readme():
    for printed in SMALLER:
        assert README.count(printed) == 1, printed


def test_the_examples_of_the_readme_run_one_after_the_other_in_one_directory(texts, capsys):
    (texts / "letters").mkdir()
    (texts / "letters" / "a.txt").write_text("Dear reader, once upon a time. " * 60, encoding="utf-8")
    for section in README.split("\n## "):
        for command in commands(section):
            run_command(shlex.split(command, comments=True)[1:])
        for number, code in enumerate(blocks(section, "python")):
            for printed, smaller in SMALLER.items():
                code = code.replace(printed, smaller)
            capsys.readouterr()
            title = section.split("\n")[0]
            exec(compile(code, f"README.md, {title}, python block {number}", "exec"), {"__name__": "readme"})
            assert capsys.readouterr().out
    for folder in ("my_model", "my_letters", "my_python_model"):
        assert (texts / folder / "model.safetensors").exists()


def run_command(words: list[str]) -> None:
    """A command of the readme with a small model and few steps: what is printed comes first."""
    small = {
        "train": ["--steps", "2", "--backend", "cython"],
        "generate": ["--max-new-tokens", "5", "--backend", "cython"],
        "eval": ["--backend", "cython"],
        "info": [],
    }[words[0]]
    if words[0] == "train" and "--init-from" not in words and "--resume" not in words:
        small += ["--d-model", "16", "--n-layers", "1"]
    assert main([*words, *small, "--quiet"]) == 0, words


def commands(text: str) -> list[str]:
    """The mamba-fast commands of the shell examples, with their comments."""
    lines = "".join(blocks(text, "sh")).splitlines()
    found = [line for line in lines if line.startswith("mamba-fast ")]
    return found + re.findall(r"`(mamba-fast train --data letters/[^`]*)`", text)


@pytest.mark.parametrize("command", commands(README))
def test_a_command_of_the_readme_is_understood(command):
    words = shlex.split(command, comments=True)
    assert build_parser().parse_args(words[1:]).command == words[1]


def test_the_targets_of_make_that_the_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z]+)\b", "".join(blocks(README, "sh"))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_extras_that_the_readme_names_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", README.split("Extras:")[1].split(".\n")[0])) - {"tokenizer"}
    for extra in named:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_readme_opens_with_the_two_commands():
    assert re.match(r"# mamba_fast\n\n```sh\nmake demo .*\nmake test .*\n```\n", README)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_python_examples_of_the_backends_page_run(capsys):
    listing, definition, proof = blocks(BACKENDS, "python")
    for code in (listing, definition, proof):
        exec(compile(code, "docs/backends.md", "exec"), {"__name__": "page"})
    assert "oracle" in capsys.readouterr().out
