"""The peers compute what this project computes; otherwise a comparison of times says nothing."""

from __future__ import annotations

import numpy as np
import peers
import pytest

from mamba_fast import MambaConfig, MambaLM

SMALL = MambaConfig.hf(61, 32, 2)

# Other projects' warnings (deprecations, a missing CUDA driver) are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def need():
    def need(make, *args, **options):
        try:
            return make(*args, **options)
        except peers.MissingPeerError as missing:
            pytest.skip(str(missing))

    return need


@pytest.fixture
def ids():
    return np.random.default_rng(3).integers(0, SMALL.vocab_size, size=(2, 19))


@pytest.mark.parametrize("name", peers.SCANS)
def test_a_peers_scan_gives_the_same_output_and_gradients(need, name):
    assert need(peers.check_scan, name, 1) < peers.CLOSE


def test_a_scan_that_computes_something_else_is_refused(monkeypatch):
    real = peers.numpy_loop

    def slightly_off(arrays):
        y, gradients = real(arrays)
        return y, gradients | {"B": gradients["B"] * 1.001}

    monkeypatch.setattr(peers, "numpy_loop", slightly_off)
    with pytest.raises(ValueError, match="numpy loop computes something else: dB"):
        peers.check_scan("numpy loop", 1)


def test_transformers_gives_the_same_loss(need, ids):
    own = MambaLM(SMALL)
    model = need(peers.transformers_model, SMALL, own.parameters(), 1)
    assert peers.transformers_step(model, ids)() == pytest.approx(own.loss(ids[:, :-1], ids[:, 1:]), rel=1e-5)


@pytest.mark.parametrize("scan", ["torch loop", "mambapy"])
def test_the_torch_model_gives_the_same_loss_and_learns(need, ids, scan):
    own = MambaLM(SMALL)
    step = need(peers.torch_model, SMALL, own.parameters(), scan, 1, lr=1e-2)
    first = step(ids, ids)
    assert first == pytest.approx(own.loss(ids, ids), rel=1e-5)
    assert step(ids, ids) < first
