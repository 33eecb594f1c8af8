"""AdamW over a model's parameters, and the learning rate's schedule (SPEC 5).

The arithmetic is one op of the backend, `adamw_`: clipping, the guard against gradients that are not
finite and the trust region all happen where the tensors are, so a step needs no host read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import TrainConfig
from mamba_fast.params import Layout, ParamStore, Slabs

__all__ = ["AdamW", "OptimizerStats", "schedule"]


class OptimizerStats(NamedTuple):
    """What `AdamW.stats` reads back."""

    skipped: int
    """Steps so far that changed nothing because a gradient was not finite."""
    grad_norm: float
    """Global norm of the last step's gradients, before clipping."""
    clip: float
    """What the last step's gradients were multiplied by."""
    clamped: int
    """Elements that the trust region limited in the last step."""


class AdamW:
    """AdamW (Loshchilov and Hutter 2019) on those parameters of a store that are trainable now.

    Parameters
    ----------
    backend, store
        the model's; `store.trainable` is read once, here. Only those names have moments.
    max_grad_norm
        global clip norm, 0 for none
    max_delta
        largest change of one element in one step, 0 for no limit

    Attributes
    ----------
    names : tuple of str
        what is trained, in the store's order
    attempts : int
        steps so far, the skipped ones included
    """

    def __init__(
        self,
        backend: Backend,
        store: ParamStore,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        max_delta: float = 0.0,
    ) -> None:
        self._backend = backend
        self._store = store
        self._options = {
            "beta1": beta1, "beta2": beta2, "eps": eps, "max_grad_norm": max_grad_norm, "max_delta": max_delta
        }  # fmt: skip
        self.names = tuple(name for name in store.names if name in store.trainable)
        if not self.names:
            raise ValueError("no parameter is trainable: the store's `trainable` set is empty")
        layout = store.layout
        own = Layout({n: layout.shapes[n] for n in self.names}, layout.decayed.intersection(self.names))
        self._m, self._v = Slabs(backend, own), Slabs(backend, own)
        self._stats = backend.zeros((4,))
        self.attempts = 0

        # A few long runs where the moments lie as the weights do (everything is trained, or all but
        # the end of a slab); tensor by tensor where only some names are.
        runs = store.values.runs(self.names)
        own_runs = self._m.runs(self.names)
        if [(t.shape, decays) for t, decays in runs] == [(t.shape, decays) for t, decays in own_runs]:
            self._params = [tensor for tensor, _ in runs]
            self._grads = [tensor for tensor, _ in store.grads.runs(self.names)]
            self._moments = [[t for t, _ in slabs.runs(self.names)] for slabs in (self._m, self._v)]
            decays = [decays for _, decays in runs]
        else:
            self._params = [store.values[name] for name in self.names]
            self._grads = [store.grads[name] for name in self.names]
            self._moments = [[slabs[name] for name in self.names] for slabs in (self._m, self._v)]
            decays = [name in layout.decayed for name in self.names]
        self._weight_decay = [weight_decay if decayed else 0.0 for decayed in decays]

    def step(self, lr: float) -> None:
        """Apply the store's gradients, which are only read. Nothing waits."""
        self.attempts += 1
        m, v = self._moments
        try:
            self._backend.adamw_(
                self._params,
                self._grads,
                m,
                v,
                lr=lr,
                weight_decay=self._weight_decay,
                step=self.attempts,
                grad_norm=self._backend.global_norm(self._grads),
                stats=self._stats,
                **self._options,
            )
        finally:
            self._store.changed()

    def stats(self) -> OptimizerStats:
        """Counters and norms of the last step. Waits for the device."""
        skipped, norm, clip, clamped = self._backend.to_host(self._stats).tolist()
        return OptimizerStats(int(skipped), norm, clip, int(clamped))

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs besides `attempts`: `m.{name}`, `v.{name}`, `stats`.

        The tensors are the live ones, not copies.
        """
        moments = {
            f"{kind}.{n}": slabs[n] for kind, slabs in (("m", self._m), ("v", self._v)) for n in self.names
        }
        return {**moments, "stats": self._stats}

    def load(self, state: Mapping[str, Tensor], attempts: int) -> None:
        """Take over what `state()` gave in another run. Nothing is changed if names or shapes differ.

        ValueError names what is missing, surplus or wrongly shaped.
        """
        own = self.state()
        for name, tensor in own.items():
            if name not in state:
                raise ValueError(f"the optimizer state lacks {name!r} of shape {tuple(tensor.shape)}")
            if tuple(state[name].shape) != tuple(tensor.shape):
                raise ValueError(
                    f"optimizer state {name!r} has shape {tuple(state[name].shape)}, "
                    f"expected {tuple(tensor.shape)}"
                )
        for name, tensor in state.items():
            if name not in own:
                raise ValueError(
                    f"the optimizer state has {name!r} of shape {tuple(tensor.shape)}, which is not trained"
                )
        for name, tensor in own.items():
            self._backend.copy_(tensor, state[name])
        self.attempts = attempts


def schedule(config: TrainConfig, step: int, total: int) -> float:
    """The learning rate of a step.

    Linear from lr/warmup_steps at step 1 up to lr at step `warmup_steps`; then constant, or half a
    cosine down to min_lr_ratio * lr at step `total`.

    Parameters
    ----------
    step
        1 to total
    total
        steps of the whole run
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    fallen = (1.0 - config.min_lr_ratio) * 0.5 * (1.0 - math.cos(math.pi * min(1.0, progress)))
    return config.lr * (1.0 - fallen)
