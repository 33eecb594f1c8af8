"""Small models for the model's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mamba_fast.config import MambaConfig
from mamba_fast.model import MambaLM
from mamba_fast.params import parameter_shapes

GOLDEN = Path(__file__).parent / "data" / "golden"

T2 = MambaConfig(vocab_size=24, d_model=8, n_layers=2, d_state=4, d_conv=3)
"""The tiny model of the cases."""

T2_IDS = (np.arange(64) * 5 + 3) % 24


def strong_parameters(config: MambaConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights at which everything matters: no bias is 0, and every gradient is far from 0."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, shape in parameter_shapes(config).items():
        short = name.rpartition(".")[2]
        noise = rng.standard_normal(shape)
        if short == "A_log":
            values[name] = np.log(np.arange(1, shape[1] + 1)) + 0.2 * noise
        elif short in ("normWeight", "final_norm", "D_vec"):
            values[name] = 1.0 + 0.2 * noise
        elif len(shape) == 1:
            values[name] = 0.3 * noise
        else:
            values[name] = 1.5 * noise / np.sqrt(shape[1])
    return {name: value.astype(np.float32) for name, value in values.items()}


def strong_model(config: MambaConfig, backend: object, seed: int = 1) -> MambaLM:
    model = MambaLM(config, backend, seed=None)
    model.load_parameters(strong_parameters(config, seed))
    return model


def random_ids(config: MambaConfig, shape: tuple[int, ...], seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)
