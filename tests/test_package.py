"""The package as it is built, installed and imported: flags, versions, a copy without compiled kernels."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import mamba_fast

PACKAGE = Path(mamba_fast.__file__).parent
ROOT = PACKAGE.parent
KERNELS = (
    "_cpu",
    "_cyutility",
    "_threads",
    "_operands",
    "_scan",
    "_conv1d",
    "_pointwise",
    "_optim",
    "_vecmath",
)

in_checkout = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a checkout (setup.py)")
on_x86_64_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("objdump") is None,
    reason="reads x86-64 code with objdump (binutils)",
)


def run(code: str, folder: Path) -> str:
    """Output of a program whose mamba_fast is the one in folder, an installed one notwithstanding."""
    # -S leaves out the .pth files, and with them the finder of an editable install, which would fill in
    # the modules that are missing here.
    paths = [str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory) -> Path:
    """A folder with a copy of the package that has no compiled extension."""
    folder = tmp_path_factory.mktemp("uncompiled")
    compiled = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(PACKAGE, folder / "mamba_fast", ignore=compiled)
    return folder


def test_the_package_without_its_extension_imports(uncompiled):
    where = run("import mamba_fast; print(mamba_fast.__file__)", uncompiled).strip()
    assert Path(where).is_relative_to(uncompiled)


def test_the_oracle_runs_without_the_extension(uncompiled):
    code = """
from mamba_fast.registry import get_backend
backend = get_backend("oracle")
print(backend.to_host(backend.add(backend.from_host([1.0]), backend.from_host([2.0])))[0])
"""
    assert float(run(code, uncompiled)) == 3.0


def test_the_cython_backend_without_its_extension_is_one_line_with_the_remedy(uncompiled):
    code = """
from mamba_fast.backend import BackendUnavailableError
from mamba_fast.registry import get_backend
try:
    get_backend("cython")
except BackendUnavailableError as error:
    print(error)
"""
    message = run(code, uncompiled).strip()
    assert "\n" not in message
    assert "mamba_fast._" in message, "the missing extension is named"
    assert "install" in message or "build" in message, "the remedy is named"


def test_auto_without_the_extension_names_what_is_missing(uncompiled):
    code = """
from mamba_fast.backend import BackendUnavailableError
from mamba_fast.registry import get_backend
try:
    get_backend("auto")
except BackendUnavailableError as error:
    print(error)
"""
    assert "the compiled module mamba_fast._" in run(code, uncompiled)


def test_the_list_of_backends_without_the_extension_says_that_cython_cannot_run(uncompiled):
    code = "import mamba_fast; print({r.name: r.available for r in mamba_fast.list_backends()})"
    assert "'cython': False, 'oracle': True" in run(code, uncompiled)


def test_every_kernel_is_compiled():
    for name in KERNELS:
        assert [p for p in PACKAGE.glob(f"{name}.*") if p.suffix in {".so", ".pyd"}], f"{name} is not built"


def test_subnormal_numbers_survive_the_kernels():
    # Fast-math code, linked in anywhere, would set the processor to flush them for the whole process.
    tiny = np.float32(1e-40)
    for name in KERNELS:
        importlib.import_module(f"mamba_fast.{name}")
    backend = mamba_fast.get_backend("cython")
    total = backend.to_host(backend.add(backend.from_host([tiny]), backend.from_host([tiny])))
    assert total[0] == tiny * np.float32(2) != 0
    assert np.float32(2e-38) * np.float32(0.25) != 0


@in_checkout
def test_no_build_file_asks_for_flags_that_must_not_ship():
    for path in (ROOT / "setup.py", ROOT / "pyproject.toml", *PACKAGE.glob("*.pyx")):
        code = "\n".join(line.split("#")[0] for line in path.read_text(encoding="utf-8").splitlines())
        for flag in ("native", "fast-math", "Ofast", "finite-math", "unsafe-math"):
            assert flag not in code, f"{path.name} has {flag}"


def project_version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@in_checkout
def test_the_installed_version_is_the_one_in_pyproject():
    assert metadata.version("mamba-fast") == project_version() == mamba_fast.__version__


@in_checkout
def test_the_changelog_speaks_of_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[({re.escape(project_version())}|Unreleased)\]", text, re.MULTILINE)


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_every_public_name_can_be_had():
    for name in mamba_fast.__all__:
        assert getattr(mamba_fast, name) is not None


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        mamba_fast.no_such_thing  # noqa: B018


@on_x86_64_linux
def test_no_kernel_needs_more_than_baseline_x86_64():
    # SIGILL on an older machine otherwise. Dispatched variants, when there are any, are files of their own.
    for name in KERNELS:
        (path,) = PACKAGE.glob(f"{name}.*so")
        done = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True)
        wide = re.findall(r"%[yz]mm\d+", done.stdout)
        assert not wide, f"{path.name} uses {sorted(set(wide))[:4]}"


def preflight(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "preflight.py")]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@in_checkout
def test_preflight_finds_nothing_missing_where_the_kernels_were_built():
    assert preflight().returncode == 0


@in_checkout
def test_preflight_names_a_compiler_that_is_not_there():
    done = preflight(CC="no-such-compiler -O2")
    assert done.returncode == 1
    assert "no-such-compiler is not on PATH" in done.stderr


@in_checkout
def test_building_without_a_compiler_is_one_line_with_the_remedy():
    run = subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=ROOT,
        env={**os.environ, "CC": "no-such-compiler"},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "'no-such-compiler' is not on PATH: install one" in run.stderr
    assert "Traceback" not in run.stderr
