"""What `import mamba_fast` gives: names imported on use, functions that stay functions, the report."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import types
from pathlib import Path

import pytest

import mamba_fast
from mamba_fast import environment as environment_module
from mamba_fast import registry
from mamba_fast.environment import environment, format_environment


def python(code):
    """Run a program in a fresh interpreter that finds this mamba_fast; its output."""
    root = Path(mamba_fast.__file__).parents[1]
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_no_other_module_of_it_and_not_numpy():
    code = "import mamba_fast; print(*[m for m in sys.modules if m.startswith(('mamba_fast.', 'numpy'))])"
    assert python(code) == ""


@pytest.mark.parametrize("name", ["train", "generate", "evaluate"])
@pytest.mark.parametrize("first", ["attribute", "module"])
def test_a_function_that_shares_its_modules_name_stays_a_function(name, first):
    attribute, module = f"mamba_fast.{name}", f"import mamba_fast.{name}"
    before, after = (attribute, module) if first == "attribute" else (module, "None")
    code = f"import mamba_fast\n{before}\n{after}\nprint(type({attribute}).__name__, {attribute}.__module__)"
    assert python(code) == f"function mamba_fast.{name}"


def test_the_modules_of_those_functions_can_be_imported_from():
    code = "import mamba_fast as m; m.train; from mamba_fast.train import TrainResult as T; print(T.__name__)"
    assert python(code) == "TrainResult"


def test_functional_is_a_module():
    assert isinstance(mamba_fast.functional, types.ModuleType)


def test_dir_lists_names_that_were_not_used_yet():
    assert python("import mamba_fast; print(set(mamba_fast.__all__) <= set(dir(mamba_fast)))") == "True"


def test_type_checkers_see_every_public_name():
    tree = ast.parse(Path(mamba_fast.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = set()
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname == alias.name for alias in node.names), "`X as X` makes it a re-export"
            seen |= {alias.name for alias in node.names}
        elif isinstance(node, ast.AnnAssign):
            seen.add(node.target.id)
    assert seen == set(mamba_fast.__all__)


def test_a_private_name_is_not_invented():
    with pytest.raises(AttributeError, match="no attribute '_nothing'"):
        mamba_fast._nothing  # noqa: B018


# ---- the report ------------------------------------------------------------------------------------


def test_the_report_names_versions_backends_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("MAMBA_FAST_SOMETHING", "7")
    mamba_fast.show_config()
    text = capsys.readouterr().out
    for word in (
        "mamba-fast",
        "python",
        "platform",
        "cpus",
        "numpy",
        "BLAS",
        "safetensors",
        "MAMBA_FAST_SOMETHING=7",
    ):
        assert word in text
    for row in mamba_fast.list_backends():
        assert row.name in text
        assert row.detail in text


def test_the_report_goes_where_it_is_asked_to(capsys):
    file = io.StringIO()
    mamba_fast.show_config(file)
    assert "backends" in file.getvalue()
    assert capsys.readouterr().out == ""


def test_the_report_says_what_auto_chooses():
    report = environment()
    assert report["auto"] in [row["name"] for row in report["backends"]]
    assert "chosen by auto" in format_environment(report)


def test_the_report_survives_when_everything_it_asks_is_broken(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("out of order")

    for name in ("_numpy", "_cpus", "_installed"):
        monkeypatch.setattr(environment_module, name, broken)
    for name in ("list_backends", "get_backend"):
        monkeypatch.setattr(registry, name, broken)
    monkeypatch.setattr(environment_module.platform, "platform", broken)
    text = format_environment(environment())
    assert text.count("RuntimeError: out of order") >= 6


@pytest.mark.parametrize("file", ["report.txt", 5])
def test_the_report_goes_to_a_stream_only(file):
    with pytest.raises(TypeError, match=f"file must be a text stream such as sys.stderr, got {file!r}"):
        mamba_fast.show_config(file)
