"""What a model remembers between tokens: the convolution window and the scan state of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig

__all__ = ["DecodeState", "LayerState"]


class LayerState(NamedTuple):
    """One layer's memory of the tokens so far (SPEC 2, restarts and states)."""

    conv: Tensor
    """(B, K-1, E): the last inputs of the convolution, oldest first."""
    ssm: Tensor
    """(B, E, N): the state of the scan."""


class DecodeState:
    """The memory of a batch of sequences: fixed in size, whatever number of tokens it has seen.

    `prefill` and `step` update it. All zeros is the state before the first token. A copy is on the
    same backend. Pickled, it holds host arrays; unpickled, it belongs to the model that uses it first.

    Attributes
    ----------
    batch : int
        how many sequences
    layers : list of LayerState
    """

    def __init__(self, backend: Backend, layers: list[LayerState]) -> None:
        self._backend = backend
        self.layers = layers
        self._may_move = False  # to another backend object: it was unpickled and no model has used it yet

    @classmethod
    def zeros(cls, backend: Backend, config: MambaConfig, batch: int) -> DecodeState:
        """The state before the first token."""
        e, n, k = config.d_inner, config.d_state, config.d_conv
        assert isinstance(e, int)  # the config resolved None
        return cls(
            backend,
            [
                LayerState(backend.zeros((batch, k - 1, e)), backend.zeros((batch, e, n)))
                for _ in range(config.n_layers)
            ],
        )

    @property
    def batch(self) -> int:
        return self.layers[0].ssm.shape[0]

    def copy(self) -> DecodeState:
        """An independent copy: two continuations of one prompt."""
        twin = DecodeState(
            self._backend, [LayerState(self._copied(s.conv), self._copied(s.ssm)) for s in self.layers]
        )
        twin._may_move = self._may_move
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeState:
        return self.copy()

    __copy__ = copy

    def __getstate__(self) -> dict[str, Any]:
        to_host = self._backend.to_host
        return {
            "backend": self._backend,
            "layers": [(to_host(layer.conv), to_host(layer.ssm)) for layer in self.layers],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._backend = state["backend"]
        self.layers = [LayerState(*map(self._backend.from_host, layer)) for layer in state["layers"]]
        self._may_move = True

    def check(self, backend: Backend, config: MambaConfig) -> None:
        """ValueError unless this is a state of a model with this backend object and these sizes.

        An unpickled one that no model has used yet moves to this backend.
        """
        e, n, k = config.d_inner, config.d_state, config.d_conv
        fault = None
        if self._backend is not backend and not self._may_move:
            fault = (
                f"it lies on another backend object ({self._backend.name!r}; the model's: {backend.name!r})"
            )
        elif len(self.layers) != config.n_layers:
            fault = f"it has {len(self.layers)} layers, expected {config.n_layers}"
        else:
            conv, ssm = (self.batch, k - 1, e), (self.batch, e, n)
            for i, layer in enumerate(self.layers):
                shapes = tuple(layer.conv.shape), tuple(layer.ssm.shape)
                if shapes != (conv, ssm):
                    fault = f"layer {i} has the shapes {shapes[0]} and {shapes[1]}, expected {conv} and {ssm}"
                    break
        if fault:
            raise ValueError(
                f"state is not one of this model: {fault}; make one with model.init_state(batch)"
            )
        if self._backend is not backend:
            to_host = self._backend.to_host
            self.layers = [
                LayerState(backend.from_host(to_host(layer.conv)), backend.from_host(to_host(layer.ssm)))
                for layer in self.layers
            ]
            self._backend = backend
        self._may_move = False

    def advance(self, layers: list[LayerState], staying: Sequence[int] = ()) -> None:
        """Take over the layers of a later moment, but for the rows `staying`, which keep what they hold.

        Those rows are overwritten in `layers`.
        """
        if staying:
            for later, now in zip(layers, self.layers, strict=True):
                for new_tensor, old_tensor in zip(later, now, strict=True):
                    for row in staying:
                        self._backend.copy_(
                            self._backend.view(new_tensor, 0, row, row + 1),
                            self._backend.view(old_tensor, 0, row, row + 1),
                        )
        self.layers = layers

    def _copied(self, tensor: Tensor) -> Tensor:
        copy = self._backend.empty(tensor.shape)
        self._backend.copy_(copy, tensor)
        return copy
