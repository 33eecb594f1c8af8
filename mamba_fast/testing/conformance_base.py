"""What the parts of the conformance suite share: the backend under test and the comparison."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from mamba_fast.backend import Backend
from mamba_fast.registry import get_backend
from mamba_fast.testing.cases import Arrays
from mamba_fast.testing.tolerances import relative_l2, tolerance

__all__ = ["Checks", "case_names", "covers", "doubled", "pieces"]

# Results of a forward op; everything else that an op gives is a gradient.
_OUTPUTS = frozenset({"y", "final_state", "losses", "norm", "params", "m", "v"})


def case_names(case: Any) -> str:
    """A case's name in a test's id."""
    return case.name


def covers(entry: str, name: str) -> bool:
    """Whether an entry of `unsupported` is about the test of this name (without `test_`)."""
    words, bracket, parameters = entry.partition("[")
    test, _, test_parameters = name.partition("[")
    return f"{test}_".startswith(f"{words}_") and (not bracket or parameters == test_parameters)


def doubled(results: Arrays, *names: str) -> Arrays:
    """What a run that goes twice into the same accumulators, `names`, gives."""
    return {name: 2.0 * value if name in names else value for name, value in results.items()}


def pieces(length: int, *sizes: int) -> list[slice]:
    """[0, length) cut into pieces of these sizes and the rest."""
    ends = [*np.cumsum(sizes).tolist(), length]
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


class Checks:
    """Settings of a suite, and its fixture `backend`."""

    backend_name: ClassVar[str]
    """Name of the backend; it also chooses the row of the table of tolerances."""

    options: ClassVar[dict[str, Any]] = {}
    """Options of the backend's factory."""

    unsupported: ClassVar[dict[str, str]] = {}
    """What the backend cannot do yet, and why: the name of a test without `test_`, or the words that it
    begins with, and parameters in brackets where it is about those alone ("cast[bf16]"). Such a test is
    reported as an expected failure; once it passes, its entry is an error. The longest entry decides."""

    _made: ClassVar[Backend | None] = None

    def make_backend(self) -> Backend:
        """The backend under test; override to build it in another way. Called once per class."""
        return get_backend(self.backend_name, **self.options)

    @pytest.fixture
    def backend(self) -> Backend:
        cls = type(self)
        if cls.__dict__.get("_made") is None:
            cls._made = self.make_backend()
        made = cls._made
        assert made is not None
        return made

    @pytest.fixture(autouse=True)
    def _expect_failure_where_unsupported(self, request: pytest.FixtureRequest) -> None:
        name = request.node.name.removeprefix("test_")
        entries = [key for key in self.unsupported if covers(key, name)]
        if entries:
            reason = self.unsupported[max(entries, key=len)]
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def assert_matches(self, actual: Arrays, expected: Arrays) -> None:
        """Every tensor is within the tolerance of its kind; all that are not are named."""
        assert actual.keys() == expected.keys(), f"results {sorted(actual)}, expected {sorted(expected)}"
        wrong = []
        for name, value in expected.items():
            limit = tolerance(self.backend_name, "output" if name in _OUTPUTS else "gradient")
            error = relative_l2(actual[name], value)
            if not error <= limit:
                wrong.append(f"{name}: relative L2 error {error:.3g}, allowed {limit:.3g}")
        assert not wrong, "; ".join(wrong)

    def assert_same_bits(self, first: Arrays, second: Arrays) -> None:
        """Two runs gave the same bytes."""
        assert first.keys() == second.keys()
        differing = [name for name, value in first.items() if not _same_bits(value, second[name])]
        assert not differing, f"bits differ between two runs: {', '.join(differing)}"


def _same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()
