"""The oracle keeps its own contract: the conformance suite on the backend that others are compared with."""

from mamba_fast.testing import BackendConformance


class TestOracle(BackendConformance):
    backend_name = "oracle"
    unsupported = {  # noqa: RUF012 - the suite declares it
        "writing_over_what_is_read_is_an_error": "the oracle reads all operands before it writes the first, "
        "so that an overlap cannot spoil its results, and it does not look for one",
    }
