"""`MambaLM`: the language model that people hold. Host arrays in, host arrays out.

It picks the backend, makes or loads the weights, checks what it is given and hands over to `lm`,
which works on tensors. Everything about arrays, files and error messages is here; everything about
the mathematics is there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from mamba_fast import checkpoint, inputs, lm
from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig
from mamba_fast.generate import generate, stream
from mamba_fast.init import initial_parameters
from mamba_fast.inputs import Batch
from mamba_fast.params import ParamStore, Slabs, bind, model_layout, parameter_count, shapes_in_order
from mamba_fast.registry import get_backend
from mamba_fast.state import DecodeState

__all__ = ["MambaLM", "load_model"]

# Parameters that an error lists before it stops: a small file may lack a million layers.
_LISTED_FAULTS = 20

_BYTES = 4  # of a stored parameter


class MambaLM:
    """A Mamba-1 language model (SPEC 4).

    Parameters
    ----------
    config
        the architecture
    backend
        a name ("cython", "oracle", "auto", a plugin's) or an object from `get_backend`
    seed
        of the initial weights; the same on every backend. None: all weights are zero, for a caller
        who loads them next.

    Attributes
    ----------
    config : MambaConfig
    backend : Backend
    store : ParamStore
        weights, gradients, and `trainable`: the names that training may change

    Notes
    -----
    Arrays that come back are float32, from the oracle backend float64. Token ids are integers of
    any width, (B, L) with B and L at least 1; targets are likewise, with -100 at positions that are
    not predicted. In rows of unequal length `attention_mask` (B, L) is 0 at padding, which may be at
    the left or at the right of a row; ids and targets there are not looked at, logits there are
    undefined. `seq_start` (B, L) is true at the first token of each document that is packed into a
    row. Wrong input raises ValueError (TypeError where it is not even of the kind that is expected)
    before anything is computed.

    `copy.deepcopy` and `pickle` give an independent model with the same weights and the same names in
    `store.trainable`; gradients are left behind. A deep copy shares the backend object, so a state of
    the one is a state of the other.
    """

    def __init__(self, config: MambaConfig, backend: str | Backend = "cython", seed: int | None = 0) -> None:
        if not isinstance(config, MambaConfig):
            raise TypeError(f"config must be a MambaConfig, got {type(config).__name__}")
        self.config = config
        self.backend = get_backend(backend)
        self._make_store()
        if config.use_lm_head_bias and not config.train_lm_head_bias:
            self.store.trainable.discard("lm_head_bias")
        if seed is not None:
            self._write(initial_parameters(config, seed))

    def _make_store(self) -> None:
        _refuse_what_no_memory_holds(self.config)
        try:
            self.store = ParamStore(self.backend, model_layout(self.config))
        except MemoryError:
            raise ValueError(_too_large(self.config, "could not be allocated")) from None

    # ---- copies -------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> MambaLM:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        memo[id(self.backend)] = self.backend
        for name, value in self.__dict__.items():
            if name != "store":
                twin.__dict__[name] = copy.deepcopy(value, memo)
        twin._restore(self.parameters(), self.store.trainable)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "store"}
        return {**state, "parameters": self.parameters(), "trainable": set(self.store.trainable)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters, trainable = state.pop("parameters"), state.pop("trainable")
        self.__dict__.update(state)
        self._restore(parameters, trainable)

    def _restore(self, parameters: Mapping[str, np.ndarray], trainable: set[str]) -> None:
        self._make_store()
        self.store.trainable = set(trainable)
        self._write(parameters)

    # ---- parameters ---------------------------------------------------------------------------

    def parameters(self) -> dict[str, np.ndarray]:
        """A copy of every parameter by name, frozen ones included, in the order of SPEC 1."""
        values = self.store.values
        return {name: self.backend.to_host(values[name]) for name in self.store.names}

    def load_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Set every parameter, from arrays of any float type and layout.

        Raises
        ------
        TypeError
            `parameters` is no mapping
        ValueError
            a parameter is missing, is not one of this model's, has another shape, is not made of
            numbers, or holds a value that is not finite. Nothing has been changed then.
        """
        if not isinstance(parameters, Mapping):
            raise TypeError(
                f"parameters must be a mapping from name to array, as parameters() gives, "
                f"got {type(parameters).__name__}"
            )
        self._write(_checked_parameters(parameters, self.store.layout.shapes))

    def num_parameters(self) -> int:
        """How many numbers the parameters hold, frozen ones included, tied ones counted once."""
        return sum(int(np.prod(shape)) for shape in self.store.layout.shapes.values())

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a directory, atomically."""
        parameters = {name: np.asarray(value, np.float32) for name, value in self.parameters().items()}
        checkpoint.write_model(directory, self.config, parameters)

    def _write(self, parameters: Mapping[str, np.ndarray]) -> None:
        values = self.store.values
        for name in self.store.names:
            self.backend.copy_(values[name], self.backend.from_host(parameters[name], copy=False))
        self.store.changed()

    # ---- whole sequences ----------------------------------------------------------------------

    def logits(self, ids: Any, attention_mask: Any = None, *, seq_start: Any = None) -> np.ndarray:
        """Logits of the next token at every position: ids (B, L) -> (B, L, V)."""
        batch = self._checked(ids, seq_start=seq_start, attention_mask=attention_mask)
        tensors = self._tensors(batch)
        result: np.ndarray | None = None
        start = 0
        for rows in lm.logits_by_rows(self.backend, self.config, self.store.weights(), **tensors):
            part = self.backend.to_host(rows)
            if result is None:
                result = np.empty((batch.ids.size, self.config.vocab_size), part.dtype)
            result[start : start + len(part)] = part
            start += len(part)
        assert result is not None
        return result.reshape(*batch.ids.shape, self.config.vocab_size)

    def loss(self, ids: Any, targets: Any, *, seq_start: Any = None, attention_mask: Any = None) -> float:
        """Mean cross-entropy, in nats, over the predicted positions."""
        total, count = self.loss_sum(ids, targets, seq_start=seq_start, attention_mask=attention_mask)
        _some_predicted(count)
        return total / count

    def loss_sum(
        self, ids: Any, targets: Any, *, seq_start: Any = None, attention_mask: Any = None
    ) -> tuple[float, int]:
        """Summed cross-entropy, in nats, and the number of predicted positions (which may be 0)."""
        batch = self._with_targets(ids, targets, seq_start=seq_start, attention_mask=attention_mask)
        total = lm.loss(self.backend, self.config, self.store.weights(), **self._tensors(batch))
        return self._float(total), batch.predicted

    def loss_and_grads(
        self,
        ids: Any,
        targets: Any,
        *,
        seq_start: Any = None,
        attention_mask: Any = None,
        activation_checkpointing: bool = False,
    ) -> tuple[float, dict[str, np.ndarray]]:
        """`loss`, and its gradient for EVERY parameter by name, frozen ones included.

        The model's own gradients (`store.grads`) are left alone.

        Parameters
        ----------
        activation_checkpointing
            hold one block's internals in memory at a time, for a third more work and the same bits
        """
        batch = self._with_targets(ids, targets, seq_start=seq_start, attention_mask=attention_mask)
        _some_predicted(batch.predicted)
        grads = Slabs(self.backend, self.store.layout)
        total = lm.loss_and_gradients(
            self.backend,
            self.config,
            bind(self.store.values, grads),
            scale=1.0 / batch.predicted,
            activation_checkpointing=activation_checkpointing,
            **self._tensors(batch),
        )
        named = {name: self.backend.to_host(grads[name]) for name in self.store.names}
        return self._float(total) / batch.predicted, named

    def accumulate_gradients(
        self,
        ids: Any,
        targets: Any,
        *,
        scale: float,
        seq_start: Any = None,
        lengths: Any = None,
        activation_checkpointing: bool = False,
    ) -> Tensor:
        """Add `scale` times the gradient of the SUMMED loss into `store.grads`, for `store.trainable`.

        For a training step: nothing is read back from the device.

        Parameters
        ----------
        scale
            1 / predicted positions of the whole step gives the gradient of its mean loss, over
            however many calls the step is split
        lengths : (B) or None
            real positions of right-padded rows, each in [1, L]

        Returns
        -------
        Tensor (1,)
            the sum of the losses, not scaled
        """
        batch = self._with_targets(ids, targets, seq_start=seq_start, lengths=lengths)
        return lm.loss_and_gradients(
            self.backend,
            self.config,
            self.store.training(),
            scale=scale,
            activation_checkpointing=activation_checkpointing,
            **self._tensors(batch),
        )

    # ---- token by token -----------------------------------------------------------------------

    def init_state(self, batch: int) -> DecodeState:
        """The state of `batch` sequences before their first token."""
        if isinstance(batch, bool) or not isinstance(batch, int | np.integer) or batch < 1:
            raise ValueError(f"batch must be an integer of at least 1, got {batch!r}")
        return DecodeState.zeros(self.backend, self.config, int(batch))

    def prefill(
        self, ids: Any, state: DecodeState, *, attention_mask: Any = None, lengths: Any = None
    ) -> tuple[np.ndarray, DecodeState]:
        """Read the next piece, of any length, of each sequence.

        Parameters
        ----------
        ids : (B, L)
        state
            what came before; updated
        attention_mask : (B, L) or None
            padding of this piece. Zeros at the left make the row forget what came before.
        lengths : (B) or None
            instead of a mask: real positions of right-padded rows, in [0, L]

        Returns
        -------
        logits : (B, V)
            at each row's last real position
        state
            the state passed in. A row without a real position in this piece keeps its state, and
            its logits are undefined.

        Raises
        ------
        ValueError, TypeError
            wrong input, a state of another model or backend object, or none. The state is untouched then.
        """
        self._check_state(state)
        batch = inputs.piece(ids, self.config.vocab_size, lengths=lengths, attention_mask=attention_mask)
        if batch.ids.shape[0] != state.batch:
            raise ValueError(f"ids has {batch.ids.shape[0]} rows, but the state has {state.batch} sequences")
        logits, layers = lm.prefill(
            self.backend,
            self.config,
            self.store.weights(),
            last=self.backend.from_host(batch.last, "i32"),
            states=state.layers,
            **self._tensors(batch),
        )
        host = self.backend.to_host(logits)
        state.advance(layers, staying=batch.absent)
        return host, state

    def step(self, ids: Any, state: DecodeState) -> tuple[np.ndarray, DecodeState]:
        """One more token of each sequence: ids (B) -> logits (B, V), and the state, updated.

        Its time does not depend on how many tokens came before. Errors as in `prefill`.
        """
        self._check_state(state)
        checked = inputs.next_ids(ids, self.config.vocab_size, state.batch)
        tensor = self.backend.from_host(checked, "i32")
        logits = lm.step(
            self.backend, self.config, self.store.weights(), tensor, state.layers, self.store.decays()
        )
        return self.backend.to_host(logits), state

    # ---- generation ---------------------------------------------------------------------------

    def generate(self, ids: Any, max_new_tokens: int, **options: Any) -> np.ndarray:
        """Continue each row: ids (B, L) -> (B, L + new). Options as in `mamba_fast.generate.generate`."""
        return generate(self, ids, max_new_tokens, **options)

    def stream(self, ids: Any, max_new_tokens: int, **options: Any) -> Iterator[np.ndarray]:
        """Continue each row, token by token. Options as in `mamba_fast.generate.stream`."""
        return stream(self, ids, max_new_tokens, **options)

    # ---- parts --------------------------------------------------------------------------------

    def _checked(self, ids: Any, **arrays: Any) -> Batch:
        return inputs.model_batch(ids, self.config.vocab_size, **arrays)

    def _with_targets(self, ids: Any, targets: Any, **arrays: Any) -> Batch:
        if targets is None:
            raise ValueError(
                f"targets is None, expected the ids to predict in the shape of ids, {inputs.IGNORED} where "
                f"nothing is to be predicted"
            )
        return self._checked(ids, targets=targets, **arrays)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, DecodeState):
            raise TypeError(
                f"state must be a DecodeState, got {type(state).__name__}: make one with "
                f"model.init_state(batch)"
            )
        state.check(self.backend, self.config)

    def _tensors(self, batch: Batch) -> dict[str, Tensor]:
        """The batch's arrays as tensors by name; those that are None are left out."""
        arrays = {
            "ids": batch.ids,
            "targets": batch.targets,
            "seq_start": batch.seq_start,
            "lengths": batch.lengths,
        }
        return {
            name: self.backend.from_host(array, "i32", copy=False)
            for name, array in arrays.items()
            if array is not None
        }

    def _float(self, scalar: Tensor) -> float:
        return float(self.backend.to_host(scalar)[0])

    def __repr__(self) -> str:
        return (
            f"MambaLM({self.config!r}, backend={self.backend.name!r}): {self.num_parameters():,} parameters"
        )


def load_model(directory: str | os.PathLike[str], backend: str | Backend = "cython") -> MambaLM:
    """The model that `save` wrote into a directory.

    Raises
    ------
    FileNotFoundError, OSError
        what `checkpoint.read_model` raises
    CheckpointError
        a file is damaged, or the weights are not those of the configuration; no model has been made
    """
    config, parameters = checkpoint.read_model(directory)
    # Before the model is made: a configuration may ask for more than any memory holds.
    faults = _listed(_misfits(parameters, shapes_in_order(config)))
    if faults:
        raise checkpoint.CheckpointError(
            f"{directory}: {checkpoint.WEIGHTS_FILE} does not hold the model that its configuration "
            f"describes: {faults}"
        )
    model = MambaLM(config, backend, seed=None)
    model.load_parameters(parameters)
    return model


def _some_predicted(count: int) -> None:
    if count == 0:
        raise ValueError(
            f"targets predict nothing: every position is {inputs.IGNORED} or masked, expected at least one id"
        )


def _refuse_what_no_memory_holds(config: MambaConfig) -> None:
    """ValueError for a model whose weights alone are larger than the machine's memory.

    They pass through it on any backend. Asked for in vain, memory may also be promised, and the process
    be killed once it is used.
    """
    memory = _physical_memory()
    if _BYTES * parameter_count(config) > memory:
        raise ValueError(_too_large(config, f"do not fit into this machine's {memory / 2**30:,.1f} GiB"))


def _too_large(config: MambaConfig, consequence: str) -> str:
    count = parameter_count(config)
    return (
        f"a model of {count:,} parameters is too large: its {_BYTES * count / 2**30:,.1f} GiB of weights "
        f"{consequence} (vocab_size={config.vocab_size}, d_model={config.d_model}, "
        f"n_layers={config.n_layers}, d_inner={config.d_inner}, d_state={config.d_state}, "
        f"dt_rank={config.dt_rank}, d_conv={config.d_conv}); make one of these smaller"
    )


def _physical_memory() -> int:
    """Bytes of memory that the machine has; where the system does not say, what none has."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        size = 0
    return size if size > 0 else 1 << 46


def _listed(faults: Iterator[str]) -> str:
    listed = list(islice(faults, _LISTED_FAULTS + 1))
    return "; ".join(listed[:_LISTED_FAULTS]) + ("; and more" if len(listed) > _LISTED_FAULTS else "")


def _misfits(parameters: Mapping[str, Any], shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[str]:
    """What is wrong with the names, types and shapes of parameters, one by one."""
    known = set()
    for name, shape in shapes:
        if name not in parameters:
            yield f"{name} is missing, expected shape {shape}"
            continue
        known.add(name)
        array = _as_array(parameters[name])
        if array is None:
            yield f"{name} is ragged: its rows differ in length, expected shape {shape}"
        elif array.dtype.kind not in "fiu":
            yield f"{name} has dtype {array.dtype}, expected numbers"
        elif array.shape != shape:
            yield f"{name} has shape {array.shape}, expected {shape}"
    for name in parameters:
        if name not in known:
            array = _as_array(parameters[name])
            of_shape = "" if array is None else f" of shape {array.shape}"
            yield f"{name}{of_shape} is not a parameter of this model"


def _as_array(value: Any) -> np.ndarray | None:
    """None for nested lists that are no array."""
    try:
        return np.asarray(value)
    except ValueError:
        return None


def _checked_parameters(
    parameters: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """All parameters as arrays of numbers, or a ValueError that lists the faults."""
    faults = _listed(_faults(parameters, shapes))
    if faults:
        raise ValueError(f"parameters do not fit, nothing was loaded: {faults}")
    return {name: np.asarray(parameters[name]) for name in shapes}


def _faults(parameters: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """`_misfits`, and the values that are not finite."""
    yield from _misfits(parameters, shapes.items())
    for name, shape in shapes.items():
        array = _as_array(parameters[name]) if name in parameters else None
        if array is None or array.dtype.kind not in "fiu" or array.shape != shape:
            continue
        with np.errstate(over="ignore"):  # a float64 beyond float32's range becomes inf, and is reported
            wrong = np.argwhere(~np.isfinite(array.astype(np.float32)))
        if len(wrong):
            at = tuple(int(i) for i in wrong[0])
            others = f" ({len(wrong)} such values in all)"
            yield f"{name}{list(at)} is {array[at]}, expected a finite float32{others}"
