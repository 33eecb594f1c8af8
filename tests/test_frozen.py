"""A model trained in part: the backward pass goes as far down as something is trained, and no further."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from model_cases import T2, random_ids, strong_model

from mamba_fast.backend import Backend
from mamba_fast.config import MambaConfig
from mamba_fast.model import MambaLM
from mamba_fast.params import BLOCK_PARAMETERS
from mamba_fast.registry import get_backend

DEEP = T2.replace(n_layers=3, train_lm_head_bias=True)
UNTIED = DEEP.replace(tie_embeddings=False)
WSLA = {f"layer{i}.{name}" for i in range(3) for name in ("wXProj", "bXProj")}


class Counting:
    """A backend that counts its calls: ops forward that keep something, ops backward, products for a dx."""

    def __init__(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in ("embedding", "linear", "rms_norm", "conv1d", "selective_scan", "decay"):
            self._count(backend, name, monkeypatch, forward=True)
            self._count(backend, f"{name}_backward", monkeypatch, forward=False)

    def _count(self, backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch, *, forward: bool) -> None:
        op = getattr(backend, name)

        def counted(*args: Any, **options: Any) -> Any:
            if not forward or options.get("grad", True):
                self.calls[name] += 1
            if name == "linear_backward":
                self.calls["dx"] += options.get("need_dx", True)
            return op(*args, **options)

        monkeypatch.setattr(backend, name, counted)


def accumulate(model: MambaLM, trainable: set[str], **options: Any) -> float:
    ids, targets = random_ids(model.config, (2, 9), 3), random_ids(model.config, (2, 9), 4)
    model.store.trainable = set(trainable)
    model.store.grads.zero()
    total = model.accumulate_gradients(ids, targets, scale=0.5, **options)
    return float(model.backend.to_host(total)[0])


def gradients(model: MambaLM) -> dict[str, np.ndarray]:
    return {name: model.backend.to_host(model.store.grads[name]) for name in model.store.names}


PARTS = {
    "everything": set(MambaLM(UNTIED, "oracle").store.names),
    "nothing": set(),
    "wsla": WSLA,
    "head": {"lm_head"},
    "head bias": {"lm_head_bias"},
    "final norm": {"final_norm"},
    "embedding": {"embedding"},
    "top layer": {f"layer2.{name}" for name in BLOCK_PARAMETERS},
    "two layers, in part": {"layer1.wOutProj", "layer2.wConv"},
    **{f"layer1.{name}": {f"layer1.{name}"} for name in BLOCK_PARAMETERS},
}


@pytest.mark.parametrize("name", ["oracle", "cython"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_every_gradient_that_is_wanted_has_the_bits_of_the_full_backward_pass(name, checkpointing):
    for config in (DEEP, UNTIED):
        model = strong_model(config, get_backend(name))
        full_loss = accumulate(model, set(model.store.names))
        full = gradients(model)
        for part in PARTS.values():
            wanted = part & set(model.store.names)
            assert accumulate(model, wanted, activation_checkpointing=checkpointing) == full_loss
            for parameter, gradient in gradients(model).items():
                expected = full[parameter] if parameter in wanted else np.zeros_like(gradient)
                assert np.array_equal(gradient, expected), (parameter, wanted)


def counts(monkeypatch: pytest.MonkeyPatch, config: MambaConfig, trainable: set[str]) -> Counter[str]:
    backend = get_backend("cython")
    model = strong_model(config, backend)
    counting = Counting(backend, monkeypatch)
    accumulate(model, trainable)
    return counting.calls


def test_training_everything_runs_every_op_backward(monkeypatch):
    calls = counts(monkeypatch, UNTIED, PARTS["everything"])
    assert calls["embedding_backward"] == 1
    assert calls["linear_backward"] == calls["dx"] == 4 * 3 + 1
    assert calls["rms_norm_backward"] == 3 + 1
    assert calls["conv1d_backward"] == calls["selective_scan_backward"] == calls["decay_backward"] == 3


def test_wsla_ends_at_the_selection_of_the_first_layer(monkeypatch):
    calls = counts(monkeypatch, DEEP, WSLA)
    assert calls["embedding"] == calls["embedding_backward"] == 0
    assert calls["selective_scan_backward"] == 3
    assert calls["conv1d_backward"] == 2
    assert calls["rms_norm_backward"] == 2 + 1
    assert calls["linear_backward"] == 4 * 3 + 1 - 1  # in_proj of the first layer is not reached
    assert calls["dx"] == 4 * 3 + 1 - 2  # and its x_proj has nobody to give a dx to
    assert calls["decay_backward"] == 0


def test_layers_below_the_lowest_trained_one_keep_nothing_and_are_not_walked_back(monkeypatch):
    calls = counts(monkeypatch, DEEP, PARTS["top layer"])
    assert calls["selective_scan"] == calls["selective_scan_backward"] == 1
    assert calls["conv1d"] == calls["conv1d_backward"] == 1
    assert calls["linear"] == calls["linear_backward"] == 4 + 1
    assert calls["rms_norm"] == calls["rms_norm_backward"] == 1 + 1


def test_an_output_projection_alone_needs_no_scan_backward(monkeypatch):
    calls = counts(monkeypatch, DEEP, {"layer1.wOutProj"})
    assert calls["selective_scan_backward"] == 1  # layer 2's
    assert calls["linear_backward"] == 1 + 4 + 1
    assert calls["dx"] == 1 + 4


def test_a_final_norm_alone_leaves_the_blocks_alone(monkeypatch):
    calls = counts(monkeypatch, DEEP, {"final_norm"})
    assert calls["rms_norm_backward"] == 1
    assert calls["linear_backward"] == calls["dx"] == 1
    assert calls["selective_scan"] == calls["selective_scan_backward"] == 0


def test_a_head_alone_needs_no_gradient_of_what_it_reads(monkeypatch):
    calls = counts(monkeypatch, UNTIED, {"lm_head"})
    assert calls["linear_backward"] == 1
    assert calls["dx"] == calls["rms_norm_backward"] == calls["rms_norm"] == 0


def test_a_tied_embedding_that_is_trained_is_reached(monkeypatch):
    calls = counts(monkeypatch, DEEP, {"embedding"})
    assert calls["embedding_backward"] == 1
    assert calls["conv1d_backward"] == 3
