"""Inputs that every backend is tested on: small, odd, seeded, the same for all of them.

Values are made as float32 (ids and masks as int32), so that a float32 backend and the float64 oracle
start from exactly the same numbers. Arrays are read-only and made once per case.

The shapes are those at which kernels break: a single row, channel, state or step, fewer steps than
taps, odd widths, widths around a vector register or a workgroup (63, 64, 65), states around 16.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

__all__ = [
    "ACCEPTANCE_CASES",
    "CONV_CASES",
    "EMBEDDING_CASES",
    "LINEAR_CASES",
    "LOSS_CASES",
    "NORM_CASES",
    "SCAN_CASES",
    "AcceptanceCase",
    "ConvCase",
    "EmbeddingCase",
    "LinearCase",
    "LossCase",
    "NormCase",
    "ScanCase",
    "inputs",
]

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class LinearCase:
    """`linear`: x (*leading, inputs), w (outputs, inputs)."""

    name: str
    leading: tuple[int, ...]
    inputs: int
    outputs: int
    bias: bool = True
    alpha: float = 1.0

    def make(self, rng: np.random.Generator) -> Arrays:
        arrays = {
            "x": rng.standard_normal((*self.leading, self.inputs)),
            "w": rng.standard_normal((self.outputs, self.inputs)),
            "dy": rng.standard_normal((*self.leading, self.outputs)),
        }
        if self.bias:
            arrays["bias"] = rng.standard_normal(self.outputs)
        return arrays


@dataclass(frozen=True)
class NormCase:
    """`rms_norm`: x (*leading, width)."""

    name: str
    leading: tuple[int, ...]
    width: int
    weight: bool = True
    eps: float = 1e-6
    scale: float = 1.0
    """Size of x; at 1e-3 eps decides as much as x does."""

    def make(self, rng: np.random.Generator) -> Arrays:
        shape = (*self.leading, self.width)
        x = self.scale * rng.standard_normal(shape)
        x.reshape(-1, self.width)[0] = 0.0  # a row of zeros: only eps keeps it finite
        x.reshape(-1, self.width)[-1] += 0.5 * self.scale
        arrays = {"x": x, "dy": rng.standard_normal(shape)}
        if self.weight:
            arrays["w"] = 1.0 + 0.3 * rng.standard_normal(self.width)
        return arrays


@dataclass(frozen=True)
class EmbeddingCase:
    """`embedding`: ids (*leading) into a table (vocabulary, width)."""

    name: str
    leading: tuple[int, ...]
    vocabulary: int
    width: int

    def make(self, rng: np.random.Generator) -> Arrays:
        ids = rng.integers(0, self.vocabulary, self.leading, dtype=np.int32)
        ids.flat[0] = self.vocabulary - 1
        ids.flat[-1] = self.vocabulary - 1  # a repeated id wherever there are two positions
        return {
            "ids": ids,
            "table": rng.standard_normal((self.vocabulary, self.width)),
            "dy": rng.standard_normal((*self.leading, self.width)),
        }


@dataclass(frozen=True)
class LossCase:
    """`cross_entropy_`: logits (rows, vocabulary)."""

    name: str
    rows: int
    vocabulary: int
    scale: float = 1.0
    spread: float = 2.0
    """Standard deviation of the logits; at 1000 exp overflows unless the maximum is taken off first."""
    ignored: str = "some"
    """ "none", "some" or "all" targets are -100."""

    def make(self, rng: np.random.Generator) -> Arrays:
        logits = self.spread * rng.standard_normal((self.rows, self.vocabulary))
        logits[0] += 50.0  # a shift of a whole row changes nothing but the size of exp
        targets = rng.integers(0, self.vocabulary, self.rows, dtype=np.int32)
        if self.ignored == "some":
            targets[1::3] = -100
        elif self.ignored == "all":
            targets[:] = -100
        return {"logits": logits, "targets": targets}


@dataclass(frozen=True)
class ConvCase:
    """`conv1d`: x (batch, length, width), w (width, taps); the booleans say which arguments are given."""

    name: str
    batch: int
    length: int
    width: int
    taps: int
    bias: bool = False
    activation: str | None = "silu"
    initial_state: bool = False
    d_final_state: bool = False
    seq_start: bool = False
    lengths: bool = False

    def make(self, rng: np.random.Generator) -> Arrays:
        shape = (self.batch, self.length, self.width)
        state = (self.batch, self.taps - 1, self.width)
        arrays = {
            "x": rng.standard_normal(shape),
            "w": rng.standard_normal((self.width, self.taps)),
            "dy": rng.standard_normal(shape),
        }
        if self.bias:
            arrays["bias"] = rng.standard_normal(self.width)
        for name in ("initial_state", "d_final_state"):
            if getattr(self, name):
                arrays[name] = rng.standard_normal(state)
        return arrays | _masks(self, rng)


@dataclass(frozen=True)
class ScanCase:
    """`selective_scan`: u (batch, length, width), a (width, states); booleans as in `ConvCase`."""

    name: str
    batch: int
    length: int
    width: int
    states: int
    d: bool = False
    z: bool = False
    delta_bias: bool = False
    delta_softplus: bool = True
    discretization: str = "zoh"
    initial_state: bool = False
    d_final_state: bool = False
    seq_start: bool = False
    lengths: bool = False
    any_a: bool = False
    """a holds zeros, tiny and positive values too, and delta holds zeros."""

    def make(self, rng: np.random.Generator) -> Arrays:
        long = (self.batch, self.length, self.width)
        narrow = (self.batch, self.length, self.states)
        state = (self.batch, self.width, self.states)
        normal = rng.standard_normal
        delta = 1.5 * normal(long) - 1.0 if self.delta_softplus else np.exp(normal(long) - 2.0)
        a = -np.exp(normal((self.width, self.states)))
        if self.any_a:
            a.flat[::4] = 0.0
            a.flat[1::4] = 0.3 * np.abs(a.flat[1::4]) / (1.0 + np.abs(a.flat[1::4]))
            a.flat[2::4] *= 1e-7
            delta.flat[::3] = 0.0
        arrays = {
            "u": normal(long),
            "delta": delta,
            "a": a,
            "b": normal(narrow),
            "c": normal(narrow),
            "dy": normal(long),
        }
        if self.d:
            arrays["d"] = normal(self.width)
        if self.z:
            arrays["z"] = normal(long)
        if self.delta_bias:
            arrays["delta_bias"] = (
                0.5 * normal(self.width) if self.delta_softplus else np.exp(normal(self.width) - 3)
            )
        for name in ("initial_state", "d_final_state"):
            if getattr(self, name):
                arrays[name] = normal(state)
        return arrays | _masks(self, rng)


@dataclass(frozen=True)
class AcceptanceCase:
    """The accuracy acceptance of SPEC 2: B, C, u, z, dy standard normal, D = 0."""

    length: int
    discretization: str
    decade: int | None = None
    """Delta is log-uniform in [10^decade, 10^(decade+1)] with A = -1..-N; None: Delta log-uniform in
    [1e-6, 10] and -A log-uniform in [1e-4, 100]."""
    delta_softplus: bool = True
    batch: int = 2
    width: int = 9
    states: int = 16

    @property
    def name(self) -> str:
        delta = "all" if self.decade is None else f"1e{self.decade}"
        return f"{self.discretization}-L{self.length}-delta_{delta}{'' if self.delta_softplus else '-direct'}"

    def make(self, rng: np.random.Generator) -> Arrays:
        long = (self.batch, self.length, self.width)
        narrow = (self.batch, self.length, self.states)
        if self.decade is None:
            step = 10.0 ** rng.uniform(-6.0, 1.0, long)
            a = 10.0 ** rng.uniform(-4.0, 2.0, (self.width, self.states))
        else:
            step = 10.0 ** rng.uniform(self.decade, self.decade + 1.0, long)
            a = np.tile(np.arange(1.0, self.states + 1.0), (self.width, 1))
        return {
            "u": rng.standard_normal(long),
            # The inverse of softplus, in the form that does not overflow.
            "delta": step + np.log(-np.expm1(-step)) if self.delta_softplus else step,
            "a_log": np.log(a),
            "b": rng.standard_normal(narrow),
            "c": rng.standard_normal(narrow),
            "d": np.zeros(self.width),
            "z": rng.standard_normal(long),
            "dy": rng.standard_normal(long),
        }


def _masks(case: ConvCase | ScanCase, rng: np.random.Generator) -> Arrays:
    """Restarts and lengths: one row restarts at t = 0, one row is as long as it can be, one has length 1."""
    arrays = {}
    if case.seq_start:
        starts = (rng.random((case.batch, case.length)) < 0.25).astype(np.int32)
        starts[0, 0] = 1
        starts[-1, 0] = 0 if case.batch > 1 else 1
        starts[:, case.length // 2] = 1
        arrays["seq_start"] = starts
    if case.lengths:
        lengths = rng.integers(1, case.length + 1, case.batch, dtype=np.int32)
        lengths[0] = max(1, case.length - 1)
        if case.batch > 1:
            lengths[1] = case.length
        if case.batch > 2:
            lengths[2] = 1
        arrays["lengths"] = lengths
    return arrays


Case = LinearCase | NormCase | EmbeddingCase | LossCase | ConvCase | ScanCase | AcceptanceCase


@cache
def inputs(case: Case) -> Arrays:
    """The arrays of a case, by argument name, float32 and int32, read-only."""
    seed = zlib.crc32(f"{type(case).__name__} {case.name}".encode())
    arrays = {}
    for name, array in case.make(np.random.default_rng(seed)).items():
        arrays[name] = array if array.dtype == np.int32 else np.ascontiguousarray(array, dtype=np.float32)
        arrays[name].setflags(write=False)
    return arrays


LINEAR_CASES = (
    LinearCase("one_by_one", (1,), 1, 1),
    LinearCase("one_row_no_leading_axis", (), 5, 3),
    LinearCase("odd", (3, 5), 7, 13, alpha=0.5),
    LinearCase("no_bias", (2, 3), 13, 5, bias=False),
    LinearCase("around_64", (1, 3), 65, 63),
    LinearCase("long_sum", (2, 65), 64, 2, alpha=-2.0),
    LinearCase("four_axes", (2, 1, 3), 4, 6, bias=False, alpha=3.0),
)

NORM_CASES = (
    NormCase("width_1", (3,), 1),
    NormCase("odd", (3, 5), 7),
    NormCase("no_weight", (2, 3), 5, weight=False),
    NormCase("eps_matters", (2, 4), 13, eps=1e-5, scale=1e-3),
    NormCase("large", (2, 2), 9, scale=1e6),
    NormCase("width_63", (1, 4), 63),
    NormCase("width_64", (1, 4), 64),
    NormCase("width_65", (3, 3), 65),
)

EMBEDDING_CASES = (
    EmbeddingCase("one_token", (1, 1), 1, 1),
    EmbeddingCase("odd", (3, 7), 11, 5),
    EmbeddingCase("many_repeats", (2, 33), 3, 13),
    EmbeddingCase("flat_ids", (9,), 65, 64),
)

LOSS_CASES = (
    LossCase("one_row", 1, 2, ignored="none"),
    LossCase("vocabulary_1", 4, 1),
    LossCase("odd", 7, 13, scale=0.25),
    LossCase("all_ignored", 5, 7, ignored="all"),
    LossCase("none_ignored", 6, 63, ignored="none", scale=3.0),
    LossCase("width_65", 5, 65),
    LossCase("huge_logits", 8, 17, spread=1000.0),
    LossCase("tiny_scale", 8, 257, scale=1e-6),
)

_CONV_FULL = ConvCase(
    "everything", 3, 11, 5, 4,
    bias=True, initial_state=True, d_final_state=True, seq_start=True, lengths=True,
)  # fmt: skip

CONV_CASES = (
    ConvCase("smallest", 1, 1, 1, 1),
    ConvCase("one_step", 3, 1, 5, 4, bias=True, initial_state=True, d_final_state=True),
    ConvCase("shorter_than_taps", 1, 2, 7, 4, bias=True),
    ConvCase("shorter_than_taps_with_state", 3, 2, 7, 5, bias=True, initial_state=True, d_final_state=True),
    ConvCase("one_tap", 3, 5, 7, 1, bias=True, initial_state=True, d_final_state=True),
    ConvCase("one_tap_masked", 3, 5, 3, 1, bias=True, seq_start=True, lengths=True, d_final_state=True),
    ConvCase("two_taps", 3, 5, 3, 2, initial_state=True, d_final_state=True, seq_start=True),
    ConvCase("width_63", 1, 7, 63, 4, bias=True),
    ConvCase("width_64", 1, 5, 64, 4, bias=True),
    ConvCase("width_65", 3, 4, 65, 3, bias=True),
    ConvCase("eight_taps", 1, 23, 3, 8, bias=True, seq_start=True, initial_state=True, d_final_state=True),
    _CONV_FULL,
    replace(_CONV_FULL, name="no_activation", activation=None),
    replace(_CONV_FULL, name="no_bias", bias=False),
    replace(_CONV_FULL, name="no_initial_state", initial_state=False),
    replace(_CONV_FULL, name="no_d_final_state", d_final_state=False),
    replace(_CONV_FULL, name="no_seq_start", seq_start=False),
    replace(_CONV_FULL, name="no_lengths", lengths=False),
    replace(_CONV_FULL, name="one_row", batch=1),
)

_SCAN_FULL = ScanCase(
    "everything", 3, 13, 7, 5,
    d=True, z=True, delta_bias=True, initial_state=True, d_final_state=True, seq_start=True, lengths=True,
)  # fmt: skip

_SCAN_ANY_A = ScanCase(
    "any_a", 3, 7, 5, 8, any_a=True, delta_softplus=False, d=True, initial_state=True, d_final_state=True
)

SCAN_CASES = (
    ScanCase("smallest", 1, 1, 1, 1),
    ScanCase("smallest_euler", 1, 1, 1, 1, discretization="euler"),
    ScanCase("nothing_optional", 3, 5, 5, 8),
    ScanCase("one_step", 3, 1, 5, 16, d=True, z=True, initial_state=True, d_final_state=True),
    ScanCase("width_63_states_1", 1, 7, 63, 1, d=True, z=True),
    ScanCase("width_64_states_16", 1, 5, 64, 16, d=True, z=True, delta_bias=True),
    ScanCase("width_65_states_17", 1, 4, 65, 17, d=True, z=True, initial_state=True, d_final_state=True),
    ScanCase("width_65_states_8_euler", 3, 3, 65, 8, d=True, z=True, discretization="euler"),
    ScanCase("long", 1, 130, 3, 16, d=True, z=True, delta_bias=True, initial_state=True, d_final_state=True),
    ScanCase(
        "long_masked_euler", 3, 67, 3, 8,
        d=True, z=True, seq_start=True, lengths=True, d_final_state=True, discretization="euler",
    ),
    _SCAN_ANY_A,
    replace(_SCAN_ANY_A, name="any_a_euler", discretization="euler"),
    _SCAN_FULL,
    replace(_SCAN_FULL, name="everything_euler", discretization="euler"),
    replace(_SCAN_FULL, name="everything_states_16", states=16, width=9),
    replace(_SCAN_FULL, name="no_softplus", delta_softplus=False),
    replace(_SCAN_FULL, name="no_d", d=False),
    replace(_SCAN_FULL, name="no_z", z=False),
    replace(_SCAN_FULL, name="no_delta_bias", delta_bias=False),
    replace(_SCAN_FULL, name="no_initial_state", initial_state=False),
    replace(_SCAN_FULL, name="no_d_final_state", d_final_state=False),
    replace(_SCAN_FULL, name="no_seq_start", seq_start=False),
    replace(_SCAN_FULL, name="no_lengths", lengths=False),
    replace(_SCAN_FULL, name="one_row", batch=1),
)  # fmt: skip

ACCEPTANCE_CASES = tuple(
    AcceptanceCase(length, discretization, decade)
    for discretization in ("zoh", "euler")
    for length in (8, 256)
    for decade in (None, *range(-7, 1))
) + tuple(AcceptanceCase(8, discretization, delta_softplus=False) for discretization in ("zoh", "euler"))
