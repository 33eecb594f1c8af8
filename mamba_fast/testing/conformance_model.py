"""Conformance of whole models: a training step, a loss curve and decoding, against the oracle.

The weights are drawn wide, so that no gradient is so small that an error could hide in it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig
from mamba_fast.testing.cases import Arrays
from mamba_fast.testing.conformance_base import Checks
from mamba_fast.testing.runs import oracle
from mamba_fast.testing.tolerances import relative_l2, tolerance

__all__ = ["ModelChecks"]

CONFIGS = {
    "zoh_tied": MambaConfig(24, 8, 2, d_state=4, d_conv=3, train_lm_head_bias=True),
    "euler_untied": MambaConfig.hf(
        23, 7, 2, d_state=5, d_conv=4, d_inner=9, dt_rank=3, tie_embeddings=False, use_conv_bias=False
    ),
    "one_tap": MambaConfig(11, 5, 1, d_state=1, d_conv=1, expand=1),
}
_STEPS = 10
_BATCH, _LENGTH = 2, 13


def _batch(config: MambaConfig, seed: int = 0) -> Arrays:
    rng = np.random.default_rng([seed, 31])
    shape = (_BATCH, _LENGTH)
    targets = rng.integers(0, config.vocab_size, shape)
    targets[0, 3:5] = -100
    seq_start = np.zeros(shape, dtype=bool)
    seq_start[:, 6] = True
    return {"ids": rng.integers(0, config.vocab_size, shape), "targets": targets, "seq_start": seq_start}


def _model(backend: Backend, config: MambaConfig) -> Any:
    """A model whose weights keep activations and gradients near 1, the same on every backend."""
    from mamba_fast.model import MambaLM

    model = MambaLM(config, backend)
    rng = np.random.default_rng(2)
    weights = {}
    for name, value in model.parameters().items():
        noise = rng.standard_normal(value.shape)
        if value.ndim == 2 and not name.endswith("A_log"):
            weights[name] = noise if name == "embedding" else noise * (2.0 / np.sqrt(value.shape[1]))
        else:
            weights[name] = value + 0.2 * noise
    model.load_parameters(weights)
    return model


@cache
def _expected_gradients(config: MambaConfig) -> tuple[float, Arrays]:
    return _model(oracle(), config).loss_and_grads(**_batch(config))


@cache
def _expected_curve(config: MambaConfig) -> np.ndarray:
    return _loss_curve(oracle(), config)


@cache
def _expected_logits(config: MambaConfig) -> np.ndarray:
    return _model(oracle(), config).logits(_batch(config)["ids"])


class _Trainer:
    """Training steps through the ops alone: gradients, norm, AdamW, without a read."""

    def __init__(self, backend: Backend, config: MambaConfig) -> None:
        self.backend = backend
        self.model = _model(backend, config)
        self.names = sorted(self.model.store.trainable)
        self.params = [self.model.store.values[name] for name in self.names]
        self.grads = [self.model.store.grads[name] for name in self.names]
        self.m = [backend.zeros(tensor.shape) for tensor in self.params]
        self.v = [backend.zeros(tensor.shape) for tensor in self.params]
        self.stats = backend.zeros((4,))
        self.taken = 0

    def step(self, batch: Arrays) -> Tensor:
        self.taken += 1
        self.model.store.grads.zero()
        predicted = int((batch["targets"] != -100).sum())
        loss = self.model.accumulate_gradients(
            batch["ids"], batch["targets"], scale=1.0 / predicted, seq_start=batch["seq_start"]
        )
        self.backend.adamw_(
            self.params, self.grads, self.m, self.v, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8,
            weight_decay=[0.01 if len(tensor.shape) == 2 else 0.0 for tensor in self.params],
            step=self.taken, grad_norm=self.backend.global_norm(self.grads), max_grad_norm=1.0,
            stats=self.stats,
        )  # fmt: skip
        return loss


def _loss_curve(backend: Backend, config: MambaConfig) -> np.ndarray:
    trainer = _Trainer(backend, config)
    losses = [trainer.step(_batch(config, seed=step % 2)) for step in range(_STEPS)]
    return np.concatenate([backend.to_host(loss) for loss in losses])


class ModelChecks(Checks):
    """`mamba_fast.model.MambaLM` on the backend."""

    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_tiny_models_loss_and_every_gradient_match_the_oracle(
        self, backend: Backend, name: str
    ) -> None:
        expected_loss, expected = _expected_gradients(CONFIGS[name])
        loss, grads = _model(backend, CONFIGS[name]).loss_and_grads(**_batch(CONFIGS[name]))
        assert relative_l2(loss, expected_loss) <= tolerance(self.backend_name, "logits")
        assert grads.keys() == expected.keys()
        limit = tolerance(self.backend_name, "model_gradient")
        errors = {parameter: relative_l2(grads[parameter], value) for parameter, value in expected.items()}
        wrong = {parameter: error for parameter, error in errors.items() if not error <= limit}
        assert not wrong, f"gradients further than {limit:.3g} from the oracle's: {wrong}"
        # No gradient is so small that the loss could do without it: the comparison has teeth.
        small = [parameter for parameter, value in expected.items() if np.abs(value).max() < 1e-4]
        assert not small, f"the case tests nothing for {small}"

    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_tiny_models_logits_match_the_oracle(self, backend: Backend, name: str) -> None:
        logits = _model(backend, CONFIGS[name]).logits(_batch(CONFIGS[name])["ids"])
        error = relative_l2(logits, _expected_logits(CONFIGS[name]))
        assert error <= tolerance(self.backend_name, "logits")

    @pytest.mark.parametrize("name", CONFIGS)
    def test_prefill_and_steps_give_the_logits_of_the_whole_sequence(
        self, backend: Backend, name: str
    ) -> None:
        model, ids = _model(backend, CONFIGS[name]), _batch(CONFIGS[name])["ids"]
        logits, state = model.prefill(ids[:, :4], model.init_state(_BATCH))
        decoded = [logits]
        for t in range(4, 7):
            logits, state = model.step(ids[:, t], state)
            decoded.append(logits)
        logits, state = model.prefill(ids[:, 7:], state)
        decoded.append(logits)
        expected = _expected_logits(CONFIGS[name])[:, [3, 4, 5, 6, _LENGTH - 1]]
        assert relative_l2(np.stack(decoded, axis=1), expected) <= tolerance(self.backend_name, "logits")

    @pytest.mark.parametrize("name", ["zoh_tied", "euler_untied"])
    def test_ten_training_steps_follow_the_oracles_loss_curve(self, backend: Backend, name: str) -> None:
        expected = _expected_curve(CONFIGS[name])
        actual = _loss_curve(backend, CONFIGS[name])
        assert relative_l2(actual, expected) <= tolerance(self.backend_name, "logits")
        assert expected[-1] < expected[1]  # it learns: both are losses of the same batch

    def test_activation_checkpointing_gives_the_same_bits(self, backend: Backend) -> None:
        model, batch = _model(backend, CONFIGS["zoh_tied"]), _batch(CONFIGS["zoh_tied"])
        loss, grads = model.loss_and_grads(**batch)
        other_loss, other_grads = model.loss_and_grads(**batch, activation_checkpointing=True)
        assert loss == other_loss
        self.assert_same_bits(grads, other_grads)

    def test_two_training_runs_give_the_same_bits(self, backend: Backend) -> None:
        weights = []
        for _ in range(2):
            trainer = _Trainer(backend, CONFIGS["zoh_tied"])
            for step in range(3):
                trainer.step(_batch(CONFIGS["zoh_tied"], seed=step))
            weights.append(trainer.model.parameters())
        self.assert_same_bits(*weights)

    def test_a_training_step_moves_its_batch_to_the_backend_and_nothing_else(self, backend: Backend) -> None:
        batch = _batch(CONFIGS["zoh_tied"])
        trainer = _Trainer(backend, CONFIGS["zoh_tied"])
        before = backend.transfers
        trainer.step(batch)
        assert backend.transfers - before == len(batch)
