"""`MambaLM`: the language model that people hold. Host arrays in, host arrays out.

It picks the backend, makes or loads the weights, checks what it is given and hands over to `lm`,
which works on tensors. Everything about arrays, files and error messages is here; everything about
the mathematics is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mamba_fast import checkpoint, inputs, lm
from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig
from mamba_fast.generate import generate, stream
from mamba_fast.init import initial_parameters
from mamba_fast.inputs import Batch
from mamba_fast.params import ParamStore, Slabs, bind, model_layout
from mamba_fast.registry import get_backend
from mamba_fast.state import DecodeState

__all__ = ["MambaLM", "load_model"]


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
    row. Wrong input raises ValueError before anything is computed.
    """

    def __init__(self, config: MambaConfig, backend: str | Backend = "cython", seed: int | None = 0) -> None:
        if not isinstance(config, MambaConfig):
            raise TypeError(f"config must be a MambaConfig, got {type(config).__name__}")
        self.config = config
        self.backend = get_backend(backend)
        self.store = ParamStore(self.backend, model_layout(config))
        if config.use_lm_head_bias and not config.train_lm_head_bias:
            self.store.trainable.discard("lm_head_bias")
        if seed is not None:
            self._write(initial_parameters(config, seed))

    # ---- parameters ---------------------------------------------------------------------------

    def parameters(self) -> dict[str, np.ndarray]:
        """A copy of every parameter by name, frozen ones included, in the order of SPEC 1."""
        values = self.store.values
        return {name: self.backend.to_host(values[name]) for name in self.store.names}

    def load_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Set every parameter, from arrays of any float type and layout.

        Raises
        ------
        ValueError
            a parameter is missing, is not one of this model's, has another shape, is not made of
            numbers, or holds a value that is not finite. Nothing has been changed then.
        """
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
        batch = self._checked(ids, targets=targets, seq_start=seq_start, attention_mask=attention_mask)
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
        batch = self._checked(ids, targets=targets, seq_start=seq_start, attention_mask=attention_mask)
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
        batch = self._checked(ids, targets=targets, seq_start=seq_start, lengths=lengths)
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
        ValueError
            wrong input, or a state of another model or backend object. The state is untouched then.
        """
        state.check(self.backend, self.config)
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

        Its time does not depend on how many tokens came before. ValueError for wrong ids, and for a
        state of another model or backend object.
        """
        state.check(self.backend, self.config)
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
    """The model that `save` wrote into a directory."""
    config, parameters = checkpoint.read_model(directory)
    model = MambaLM(config, backend, seed=None)
    model.load_parameters(parameters)
    return model


def _some_predicted(count: int) -> None:
    if count == 0:
        raise ValueError(
            f"targets predict nothing: every position is {inputs.IGNORED} or masked, expected at least one id"
        )


def _checked_parameters(
    parameters: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """All parameters as float arrays, or a ValueError that lists every fault."""
    faults = [
        f"{name} is missing, expected shape {shape}"
        for name, shape in shapes.items()
        if name not in parameters
    ]
    for name in parameters:
        if name not in shapes:
            faults.append(f"{name} of shape {np.shape(parameters[name])} is not a parameter of this model")
    arrays = {}
    for name, shape in shapes.items():
        if name not in parameters:
            continue
        array = np.asarray(parameters[name])
        if array.dtype.kind not in "fiu":
            faults.append(f"{name} has dtype {array.dtype}, expected numbers")
        elif array.shape != shape:
            faults.append(f"{name} has shape {array.shape}, expected {shape}")
        else:
            with np.errstate(over="ignore"):  # a float64 beyond float32's range becomes inf, and is reported
                wrong = np.argwhere(~np.isfinite(array.astype(np.float32)))
            if len(wrong):
                at = tuple(int(i) for i in wrong[0])
                others = f" ({len(wrong)} such values in all)"
                faults.append(f"{name}{list(at)} is {array[at]}, expected a finite float32{others}")
            arrays[name] = array
    if faults:
        raise ValueError("parameters do not fit, nothing was loaded: " + "; ".join(faults))
    return arrays
