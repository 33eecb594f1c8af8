"""Configurations: frozen, validated, and the same in Python, in JSON and on the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["MambaConfig", "TrainConfig", "parse_json", "shown"]

C = TypeVar("C", bound="_Config")

# What a 64-bit integer holds: what lies beyond cannot be the size of anything.
_LARGEST = 2**63 - 1
# A seed may be as long as the system's entropy that numpy's SeedSequence hands out.
_LARGEST_SEED = 2**128 - 1


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """What a JSON text says. ValueError for whatever is wrong with it, that it is nested too deeply or
    holds a number of thousands of digits included; with `unique`, also a key that comes twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates if unique else None)
    except RecursionError:
        raise ValueError("not JSON that can be read: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON: not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except _DuplicateKeyError:
        raise
    except ValueError:
        raise ValueError("not JSON that can be read: a number has too many digits") from None


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return values


def shown(value: object) -> str:
    """A value as an error quotes it: never long, and never an error itself."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"an {type(value).__name__} of thousands of digits"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


class _Config:
    """What every configuration can do."""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in JSON types."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """A configuration from a mapping. An unknown key is a ValueError that names it."""
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in known:
                raise ValueError(f"unknown key {key!r} in {cls.__name__}; known keys: {', '.join(known)}")
        missing = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
            and f.name not in values
        ]
        if missing:
            raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls: type[C], text: str) -> C:
        try:
            values = parse_json(text, unique=True)
        except ValueError as error:
            raise ValueError(f"{cls.__name__}: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{cls.__name__}: expected a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)

    def replace(self: C, **changes: Any) -> C:
        """A copy with some fields changed, validated again."""
        return self.from_dict(
            {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, **changes}
        )  # type: ignore[arg-type]


def _take_plain_scalars(config: object) -> None:
    """Turn scalars of numpy (and arrays without an axis) into Python's, which JSON can hold."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            object.__setattr__(config, field.name, value.item())


def _check_int(config: object, name: str, low: int, high: int = _LARGEST) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {shown(value)}")
    value = int(value)
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {shown(value)}")
    if value > high:
        raise ValueError(f"{name} must be at most {high}, got {shown(value)}")
    object.__setattr__(config, name, value)


def _check_float(
    config: object, name: str, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    given = getattr(config, name)
    try:
        value = float(given) if isinstance(given, numbers.Real) and not isinstance(given, bool) else math.nan
    except OverflowError:  # an integer beyond every float
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {shown(given)}")
    if value < low or value > high or (open_low and value == low):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
        raise ValueError(f"{name} must be in {interval}, got {shown(given)}")
    object.__setattr__(config, name, value)


def _check_bool(config: object, name: str) -> None:
    if not isinstance(getattr(config, name), bool):
        raise ValueError(f"{name} must be true or false, got {shown(getattr(config, name))}")


def _check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")


@dataclass(frozen=True)
class MambaConfig(_Config):
    """The architecture of a Mamba-1 language model (SPEC 1 and 8).

    `d_inner=None` and `dt_rank="auto"` are resolved when the object is made: to
    `expand * d_model` and to ceil(d_model / 16). Where `d_inner` is given it wins over `expand`.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    d_state: int = 16
    d_conv: int = 4
    expand: int = 2
    d_inner: int | None = None
    dt_rank: int | str = "auto"
    discretization: str = "zoh"
    """ "zoh" (exact) or "euler" (what published checkpoints were trained with)."""
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    use_bias: bool = True
    """Biases of in_proj and out_proj."""
    use_conv_bias: bool = True
    use_x_proj_bias: bool = True
    use_lm_head_bias: bool = True
    train_lm_head_bias: bool = False
    """The head's bias is zero and frozen unless this is set."""
    init: str = "mamba"
    """ "mamba" (SPEC 8) or "original"."""

    def __post_init__(self) -> None:
        _take_plain_scalars(self)
        for name in ("vocab_size", "d_model", "n_layers", "d_state", "d_conv", "expand"):
            _check_int(self, name, 1)
        if self.d_inner is None:
            object.__setattr__(self, "d_inner", self.expand * self.d_model)
        _check_int(self, "d_inner", 1)
        if isinstance(self.dt_rank, str) and self.dt_rank == "auto":
            object.__setattr__(self, "dt_rank", -(-self.d_model // 16))
        if isinstance(self.dt_rank, str):
            raise ValueError(f"dt_rank must be an integer or 'auto', got {shown(self.dt_rank)}")
        _check_int(self, "dt_rank", 1)
        _check_choice(self, "discretization", ("zoh", "euler"))
        _check_choice(self, "init", ("mamba", "original"))
        _check_float(self, "norm_eps", 0.0, 1.0, open_low=True)
        switches = [f.name for f in dataclasses.fields(self) if f.type == "bool"]
        for name in switches:
            _check_bool(self, name)
        if self.train_lm_head_bias and not self.use_lm_head_bias:
            raise ValueError("train_lm_head_bias=True contradicts use_lm_head_bias=False")

    def replace(self, **changes: Any) -> MambaConfig:
        """A copy with some fields changed, validated again. Fields that followed from others
        (d_inner, dt_rank) follow the changed ones."""
        if self.d_inner == self.expand * self.d_model:
            changes.setdefault("d_inner", None)
        if self.dt_rank == -(-self.d_model // 16):
            changes.setdefault("dt_rank", "auto")
        return super().replace(**changes)

    @classmethod
    def hf(cls, vocab_size: int, d_model: int, n_layers: int, **changes: Any) -> MambaConfig:
        """The preset that the Hugging Face form of Mamba can express: Euler, eps 1e-5, no bias on
        in_proj, x_proj, out_proj and the head."""
        preset: dict[str, Any] = {
            "discretization": "euler", "norm_eps": 1e-5, "use_bias": False,
            "use_x_proj_bias": False, "use_lm_head_bias": False,
        }  # fmt: skip
        return cls(vocab_size, d_model, n_layers, **{**preset, **changes})


@dataclass(frozen=True)
class TrainConfig(_Config):
    """How to train (SPEC 5). Lengths are in optimizer steps, tokens or epochs as the name says."""

    steps: int | None = None
    """Optimizer steps to take in all, or None: `epochs` decides."""
    epochs: float = 1.0
    """Passes over the data; used when `steps` is None."""
    batch_size: int = 8
    """Windows in one micro-batch."""
    seq_len: int = 256
    """Predicted tokens in one window."""
    grad_accumulation: int = 1
    """Micro-batches to one optimizer step."""
    lr: float = 1e-4
    schedule: str = "cosine"
    """ "cosine" (down to `min_lr_ratio * lr` at the last step) or "constant"; both after the warm-up."""
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    """Global clip norm; 0 turns clipping off."""
    max_delta: float | None = None
    """Trust region: largest change of one element in one step; 0 is off; None is 0.05 with `wsla`, else 0."""
    wsla: bool = False
    """Train only wXProj and bXProj of every layer."""
    activation_checkpointing: bool = False
    packed: bool = True
    """Restart the state at document boundaries inside a window."""
    shuffle: bool = True
    seed: int = 0
    validation_fraction: float = 0.05
    """Share of the documents (or, for a single stream of tokens, of its end) held out; 0 is none."""
    eval_every: int = 0
    """Steps between validations; 0: only at the end."""
    eval_windows: int = 64
    """Windows in one validation, drawn evenly over the held-out data; 0: all."""
    log_every: int = 10
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay; 0: all."""

    def __post_init__(self) -> None:
        _take_plain_scalars(self)
        if self.steps is not None:
            _check_int(self, "steps", 1)
        for name in ("batch_size", "seq_len", "grad_accumulation"):
            _check_int(self, name, 1)
        for name in (
            "warmup_steps",
            "eval_every",
            "eval_windows",
            "log_every",
            "checkpoint_every",
            "keep_checkpoints",
        ):
            _check_int(self, name, 0)
        _check_int(self, "seed", 0, _LARGEST_SEED)
        _check_float(self, "epochs", 0.0, open_low=True)
        _check_float(self, "lr", 0.0)
        _check_float(self, "eps", 0.0, open_low=True)
        for name in ("weight_decay", "max_grad_norm"):
            _check_float(self, name, 0.0)
        if self.max_delta is not None:
            _check_float(self, "max_delta", 0.0)
        _check_float(self, "min_lr_ratio", 0.0, 1.0)
        _check_float(self, "validation_fraction", 0.0, 0.9)
        for name in ("beta1", "beta2"):
            _check_float(self, name, 0.0, 1.0)
            if getattr(self, name) == 1.0:
                raise ValueError(f"{name} must be below 1, got 1")
        _check_choice(self, "schedule", ("cosine", "constant"))
        for name in ("wsla", "activation_checkpointing", "packed", "shuffle"):
            _check_bool(self, name)

    @property
    def trust_region(self) -> float:
        """`max_delta` with its default resolved."""
        return (0.05 if self.wsla else 0.0) if self.max_delta is None else float(self.max_delta)
