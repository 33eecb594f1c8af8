"""Who may import whom. The table is the architecture: docs/architecture.md explains it.

What it protects: the model knows tensors and the backend's ops only. A layer that imported numpy or
named a backend would run on the CPU and nowhere else.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mamba_fast

PACKAGE = Path(mamba_fast.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up. A module may import from the layers below its own and, where the last column
# says so, from its own; and the third-party packages named for it.
CONTRACT = {"backend", "checks", "config"}
TENSORS = {"params", "layers", "mamba1", "lm", "state", "optim"}
HOST = {
    "init", "inputs", "sources", "data", "tokenizer", "checkpoint", "metrics", "plot", "interrupts",
    "run_lock",
}  # fmt: skip
USE = {"model", "functional", "train", "training_data", "training_state", "generate", "evaluate"}
TOP = {"cli", "_cli", "__init__", "__main__", "environment"}

ALLOWED: dict[str, set[str]] = {
    "backend": set(),
    "config": set(),
    "checks": {"backend"},
    "registry": {"backend"},
    **dict.fromkeys(TENSORS, CONTRACT | TENSORS),
    **dict.fromkeys(HOST, CONTRACT | TENSORS | HOST),
    **{name: CONTRACT | TENSORS | HOST | USE | {"registry"} for name in USE},
    **{name: CONTRACT | TENSORS | HOST | USE | TOP | {"registry"} for name in TOP},
}

THIRD_PARTY: dict[str, set[str]] = {
    "registry": set(),
    "config": set(),
    "checks": set(),
    **{name: set() for name in TENSORS},
    "checkpoint": {"numpy", "safetensors"},
    "tokenizer": {"numpy", "tokenizers", "tqdm"},
    "data": {"numpy", "tqdm"},
    "plot": {"numpy", "matplotlib"},
    **{name: {"numpy", "tqdm"} for name in ("train", "generate", "evaluate", "cli", "_cli")},
}

# Modules of `backends` and `testing` are named by folder.
FOLDERS = {"backends", "testing"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def place(path: Path) -> str:
    """The row of the table that holds for a file: its module or its folder."""
    return module_name(path).split(".")[0]


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names of what a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            for alias in node.names:
                # `from mamba_fast import layers` imports mamba_fast.layers
                yield f"{node.module}.{alias.name}" if node.module == "mamba_fast" else str(node.module)


def own(name: str) -> str | None:
    """The part after "mamba_fast.", or None for another package."""
    return name.removeprefix("mamba_fast.") if name.startswith("mamba_fast.") else None


def ids(path: Path) -> str:
    return module_name(path)


TABLE = [p for p in SOURCES if module_name(p).split(".")[0] not in FOLDERS]
BACKENDS = [p for p in SOURCES if module_name(p).startswith("backends.")]
TESTING = [p for p in SOURCES if module_name(p).startswith("testing.")]


@pytest.mark.parametrize("path", TABLE, ids=ids)
def test_a_module_imports_only_what_its_layer_may(path):
    name = place(path)
    assert name in ALLOWED, f"{name} has no place in the table of {Path(__file__).name}: give it one"
    inside = {own(i).split(".")[0] for i in imports(path) if own(i)}
    assert inside <= ALLOWED[name]


@pytest.mark.parametrize("path", TABLE, ids=ids)
def test_a_module_imports_only_the_third_party_packages_that_it_may(path):
    outside = {i.split(".")[0] for i in imports(path)} - {"mamba_fast"} - sys.stdlib_module_names
    assert outside <= THIRD_PARTY.get(place(path), {"numpy"})


@pytest.mark.parametrize("path", BACKENDS, ids=ids)
def test_a_backend_imports_the_contract_and_its_own_parts_alone(path):
    name = module_name(path)
    for inside in filter(None, map(own, imports(path))):
        first = inside.split(".")[0]
        kernel = first.startswith("_") and name != "backends.oracle"
        part = inside.startswith("backends._")
        assert first in {"backend", "checks"} or kernel or part, f"{name} imports {inside}"


@pytest.mark.parametrize("path", [p for p in BACKENDS if "oracle" in p.name], ids=ids)
def test_the_oracle_shares_no_code_with_the_fast_backends(path):
    for inside in filter(None, map(own, imports(path))):
        assert inside.split(".")[0] in {"backend", "checks"} or "oracle" in inside


@pytest.mark.parametrize("path", TESTING, ids=ids)
def test_the_conformance_suite_knows_no_backend_but_the_oracle(path):
    for inside in filter(None, map(own, imports(path))):
        assert not inside.startswith("backends") or inside == "backends.oracle"


@pytest.mark.parametrize("path", [p for p in SOURCES if p not in BACKENDS and p not in TESTING], ids=ids)
def test_only_the_registry_names_a_module_of_backends_and_only_as_a_string(path):
    assert not [i for i in imports(path) if i.startswith("mamba_fast.backends")]
    strings = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = [s for s in strings if s.startswith("mamba_fast.backends.")]
    assert bool(named) == (module_name(path) == "registry"), named


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.pyx")), ids=lambda p: p.name)
def test_a_kernel_module_imports_nothing_of_the_package_but_other_kernels(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:1] in (["import"], ["from"], ["cimport"]) and words[1].startswith("mamba_fast"):
            assert "cimport" in words, line
            assert words[1].split(".")[-1].startswith("_") or words[1] == "mamba_fast", line


def loaded_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after running code."""
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    heavy = {"torch", "triton", "jax", "wgpu", "matplotlib", "tokenizers", "huggingface_hub", "safetensors"}
    assert not loaded_after("import mamba_fast") & heavy


def test_a_forward_pass_on_the_cpu_imports_no_framework():
    code = """
from mamba_fast import MambaConfig, MambaLM
config = MambaConfig(vocab_size=24, d_model=8, n_layers=2, d_state=4, d_conv=3)
MambaLM(config).logits([[(i * 5 + 3) % 24 for i in range(16)]])
"""
    frameworks = {"torch", "triton", "jax", "cupy", "transformers", "wgpu", "matplotlib", "Cython"}
    assert not loaded_after(code) & frameworks
