"""Finding, loading and listing backends: plugins are real distributions written to a folder on sys.path."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from mamba_fast import registry
from mamba_fast.backend import (
    API_VERSION,
    Backend,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
)
from mamba_fast.registry import get_backend, list_backends

WORKING = f"""
from mamba_fast.backend import Backend

class Fake(Backend):
    name = "fake"
    api_version = {API_VERSION}
    preferred_to_cpu = False

    def describe(self):
        return "fake, made for a test"

Fake.__abstractmethods__ = frozenset()  # no op is ever run here

def create_backend(*, size=1):
    if size < 1:
        raise ValueError(f"size must be at least 1, got {{size}}")
    backend = Fake()
    backend.size = size
    return backend
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(distribution, module source, name=...): a distribution that registers one backend."""
    count = 0
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, source: str, name: str = "fake", target: str | None = None) -> str:
        nonlocal count
        count += 1
        module = f"mamba_fast_test_plugin_{tmp_path.name.replace('-', '_')}_{count}"
        (tmp_path / f"{module}.py").write_text(source)
        info = Path(tmp_path / f"{distribution.replace('-', '_')}-3.2.1.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 3.2.1\n")
        target = target or f"{module}:create_backend"
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {target}\n")
        # Tells importlib that the folder changed; its clock may be too coarse to see it.
        monkeypatch.syspath_prepend(str(tmp_path))
        return module

    yield install
    for module in [m for m in sys.modules if m.startswith("mamba_fast_test_plugin_")]:
        del sys.modules[module]


def row(name: str) -> registry.BackendInfo:
    return next(r for r in list_backends() if r.name == name)


def test_a_backend_object_is_returned_as_it_is():
    backend = get_backend("oracle")
    assert get_backend(backend) is backend


def test_options_cannot_be_given_with_a_backend_object():
    with pytest.raises(TypeError, match="'threads'.*exists already"):
        get_backend(get_backend("oracle"), threads=2)


def test_something_that_is_neither_a_name_nor_a_backend_is_refused_by_type():
    with pytest.raises(TypeError, match="got int"):
        get_backend(3)  # type: ignore[arg-type]


def test_an_unknown_name_is_an_error_that_lists_what_is_installed():
    with pytest.raises(BackendNotFoundError, match="'tpu'; installed are cython, oracle"):
        get_backend("tpu")


def test_a_known_plugin_that_is_not_installed_comes_with_its_install_line(monkeypatch):
    monkeypatch.setattr(registry, "_entry_points", lambda: ())
    with pytest.raises(BackendNotFoundError, match="install it with: pip install mamba-fast-wgpu"):
        get_backend("wgpu")


def test_a_plugin_is_found_by_its_entry_point(install):
    install("mamba-fast-fake", WORKING)
    backend = get_backend("fake")
    assert isinstance(backend, Backend)
    assert backend.describe() == "fake, made for a test"


def test_nothing_of_a_plugin_is_imported_until_it_is_asked_for(install):
    module = install("mamba-fast-fake", WORKING)
    get_backend("oracle")
    assert module not in sys.modules


def test_options_reach_the_factory(install):
    install("mamba-fast-fake", WORKING)
    assert get_backend("fake", size=7).size == 7


def test_an_option_that_a_backend_lacks_is_named_with_those_it_has(install):
    install("mamba-fast-fake", WORKING)
    with pytest.raises(TypeError, match="'fake' has no option 'colour'; its options: size"):
        get_backend("fake", colour="red")


def test_a_bad_value_of_an_option_stays_the_factorys_own_error(install):
    install("mamba-fast-fake", WORKING)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        get_backend("fake", size=0)


def test_auto_takes_no_options():
    with pytest.raises(TypeError, match="'auto' does not know"):
        get_backend("auto", threads=2)


def test_a_plugin_that_cannot_be_imported_names_its_distribution_and_keeps_the_cause(install):
    install("mamba-fast-broken", "import a_module_that_is_not_there\n")
    with pytest.raises(BackendLoadError, match="mamba-fast-broken could not be imported") as caught:
        get_backend("fake")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_plugin_whose_factory_is_missing_is_a_load_error(install):
    install("mamba-fast-broken", "")
    with pytest.raises(BackendLoadError, match="create_backend"):
        get_backend("fake")


def test_a_malformed_target_is_a_load_error(install):
    install("mamba-fast-broken", WORKING, target="not a target!")
    with pytest.raises(BackendLoadError, match="mamba-fast-broken"):
        get_backend("fake")


def test_a_factory_that_raises_anything_is_a_load_error_with_the_cause(install):
    install("mamba-fast-broken", "def create_backend(): raise ZeroDivisionError('of all things')\n")
    with pytest.raises(BackendLoadError, match="could not start: ZeroDivisionError: of all things") as caught:
        get_backend("fake")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_factory_that_says_unavailable_is_heard_word_for_word(install):
    source = "from mamba_fast.backend import BackendUnavailableError\n"
    install("mamba-fast-sad", source + "def create_backend(): raise BackendUnavailableError('no adapter')\n")
    with pytest.raises(BackendUnavailableError, match="^no adapter$"):
        get_backend("fake")


def test_a_factory_that_returns_something_else_is_a_load_error(install):
    install("mamba-fast-broken", "def create_backend(): return 42\n")
    with pytest.raises(BackendLoadError, match="returned int, not a mamba_fast.backend.Backend"):
        get_backend("fake")


def test_another_major_version_of_the_contract_is_refused_with_both_versions(install):
    other = (API_VERSION[0] + 1, 4)
    install("mamba-fast-fake", WORKING.replace(str(API_VERSION), str(other)))
    expected = f"is for backend API {other}, this mamba_fast has {API_VERSION}"
    with pytest.raises(BackendLoadError, match=re.escape(expected)):
        get_backend("fake")


def test_a_version_of_the_wrong_type_is_a_load_error(install):
    install("mamba-fast-fake", WORKING.replace(f"api_version = {API_VERSION}", "api_version = None"))
    with pytest.raises(BackendLoadError, match="API None"):
        get_backend("fake")


def test_another_minor_version_is_refused_as_long_as_the_contract_is_provisional(install, monkeypatch):
    install("mamba-fast-fake", WORKING.replace(str(API_VERSION), "(0, 99)"))
    monkeypatch.setattr(registry, "API_VERSION", (0, 1))
    with pytest.raises(BackendLoadError, match=re.escape("is for backend API (0, 99)")):
        get_backend("fake")


def test_another_minor_version_is_accepted_once_the_contract_is_not_provisional(install, monkeypatch):
    install("mamba-fast-fake", WORKING.replace(str(API_VERSION), "(1, 99)"))
    monkeypatch.setattr(registry, "API_VERSION", (1, 0))
    assert get_backend("fake").api_version == (1, 99)


def test_a_backend_without_optional_ops_has_no_capabilities():
    assert get_backend("oracle").capabilities == frozenset()


def test_two_distributions_that_claim_one_name_are_both_named(install):
    install("mamba-fast-one", WORKING)
    install("mamba-fast-two", WORKING)
    with pytest.raises(BackendLoadError, match="claimed by mamba-fast-one and mamba-fast-two"):
        get_backend("fake")


def test_two_distributions_that_share_even_the_target_are_a_conflict(install):
    module = install("mamba-fast-one", WORKING)
    install("mamba-fast-two", WORKING, target=f"{module}:create_backend")
    with pytest.raises(BackendLoadError, match="mamba-fast-one and mamba-fast-two"):
        get_backend("fake")


def test_a_plugin_may_not_take_a_built_in_name(install):
    install("mamba-fast-thief", WORKING, name="oracle")
    with pytest.raises(BackendLoadError, match="mamba-fast-thief registers the name 'oracle'"):
        get_backend("oracle")


def test_a_plugin_installed_while_the_program_runs_is_found(install):
    with pytest.raises(BackendNotFoundError):
        get_backend("fake")
    install("mamba-fast-fake", WORKING)
    assert get_backend("fake").name == "fake"


def test_auto_takes_the_cpu_kernels_and_says_so(caplog):
    caplog.set_level(logging.INFO, "mamba_fast")
    assert get_backend("auto").name == "cython"
    assert "auto: using cython" in caplog.text


def test_auto_prefers_a_plugin_that_says_it_is_faster(install, caplog):
    install("mamba-fast-fake", WORKING.replace("preferred_to_cpu = False", "preferred_to_cpu = True"))
    caplog.set_level(logging.INFO, "mamba_fast")
    assert get_backend("auto").name == "fake"
    assert "auto: using fake (fake, made for a test)" in caplog.text


def test_auto_passes_over_a_plugin_that_does_not_say_so(install, caplog):
    install("mamba-fast-fake", WORKING)
    caplog.set_level(logging.INFO, "mamba_fast")
    assert get_backend("auto").name == "cython"
    assert "auto: fake passed over" in caplog.text


def test_auto_passes_over_a_plugin_that_breaks(install, caplog):
    install("mamba-fast-broken", "def create_backend(): raise ZeroDivisionError('of all things')\n")
    caplog.set_level(logging.INFO, "mamba_fast")
    assert get_backend("auto").name == "cython"
    assert "of all things" in caplog.text


def test_auto_never_takes_the_oracle_but_says_what_keeps_the_kernels_from_running(monkeypatch):
    monkeypatch.setitem(registry._BUILT_IN, "cython", "mamba_fast.a_module_that_is_not_there:create_backend")
    with pytest.raises(BackendLoadError, match="a_module_that_is_not_there"):
        get_backend("auto")


def test_auto_with_a_variant_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setenv("MAMBA_FAST_CPU", "avx2")
    with pytest.raises(BackendUnavailableError, match="MAMBA_FAST_CPU=avx2 cannot run here"):
        get_backend("auto")


def test_the_list_has_the_built_in_backends_first_and_working():
    rows = list_backends()
    assert [r.name for r in rows[:2]] == ["cython", "oracle"]
    assert all(r.available and r.distribution == "mamba-fast" for r in rows[:2])


def test_the_list_shows_a_plugin_with_its_distribution_and_version(install):
    install("mamba-fast-fake", WORKING)
    expected = registry.BackendInfo("fake", "mamba-fast-fake", "3.2.1", True, "fake, made for a test")
    assert row("fake") == expected


@pytest.mark.parametrize(
    "source",
    [
        "import a_module_that_is_not_there",
        "def create_backend(): raise ZeroDivisionError('of all things')",
        "def create_backend(): return None",
        WORKING.replace('return "fake, made for a test"', "raise OSError('device lost')"),
        WORKING.replace(f"api_version = {API_VERSION}", "api_version = None"),
    ],
    ids=["import", "factory", "wrong type", "describe", "version"],
)
def test_the_list_survives_a_plugin_that_breaks(install, source):
    install("mamba-fast-broken", source)
    broken = row("fake")
    assert not broken.available
    assert broken.detail
    assert row("cython").available


def test_the_list_shows_both_claimants_of_one_name(install):
    install("mamba-fast-one", WORKING)
    install("mamba-fast-two", WORKING)
    assert row("fake").distribution == "mamba-fast-one, mamba-fast-two"
    assert not row("fake").available


def test_damaged_metadata_of_another_distribution_leaves_the_built_in_backends(tmp_path, monkeypatch, caplog):
    info = tmp_path / "damaged-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\nnot an entry point\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert get_backend("oracle").name == "oracle"
    assert "cannot be read" in caplog.text


def test_every_error_is_a_backend_error():
    for error in (BackendNotFoundError, BackendLoadError, BackendUnavailableError):
        assert issubclass(error, BackendError)
