"""The language model on tensors: embedding, blocks, head; loss with gradients, prefill, step.

Knows the backend and the configuration only: host arrays and their checks are `model`'s business.
From token ids to a kernel: `loss_and_gradients` here, `mamba1.block`, `layers.selective_scan`,
`Backend.selective_scan`, and in the CPU backend `_scan.pyx`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from mamba_fast import layers
from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig
from mamba_fast.layers import Backprop
from mamba_fast.mamba1 import block, block_step
from mamba_fast.params import Params
from mamba_fast.state import LayerState

__all__ = ["logits_by_rows", "loss", "loss_and_gradients", "prefill", "step"]

# The head's logits are made a few rows at a time: all of them would be rows * V floats (412 MB for
# 2,048 rows of a 50,280-token vocabulary). Few enough rows to stay near the cache, but never so few
# that the matrix product is spent on re-reading the (V, d) weights.
_LOGITS_ELEMENTS = 1 << 20
_MIN_ROWS = 256


def loss_and_gradients(
    backend: Backend,
    config: MambaConfig,
    params: Params,
    ids: Tensor,
    targets: Tensor,
    *,
    scale: float,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
    activation_checkpointing: bool = False,
) -> Tensor:
    """Add `scale` times the gradient of the summed loss into every `Param.grad`; return that sum.

    Parameters
    ----------
    ids : (B, L) int32
    targets : (B, L) int32
        the token to predict at each position, or -100: not counted
    scale
        1 / number of predicted positions gives the gradient of the mean
    activation_checkpointing
        keep each block's input only, and run the block again when the backward pass reaches it: the
        same bits for a third more time, with one block's internals in memory at once

    Returns
    -------
    (1,) the sum of the losses, not scaled. Nothing is read back to the host.

    The backward pass ends at the lowest trained parameter; layers below keep nothing for it.
    """
    x, _, backprop = _blocks(
        backend,
        config,
        params,
        ids,
        seq_start=seq_start,
        lengths=lengths,
        grad=True,
        activation_checkpointing=activation_checkpointing,
    )
    final_norm = params.top["final_norm"]
    need_dh = final_norm.grad is not None or _lowest_trained(params) < config.n_layers
    h, back_norm = layers.rms_norm(backend, x, final_norm, config.norm_eps, grad=need_dh)
    del x  # only what a backprop keeps stays alive
    total, dh = _head_loss(backend, params, h, targets, scale=scale, grad=True, need_dh=need_dh)
    del h
    if need_dh:
        backprop(back_norm(dh))
    return total


def loss(
    backend: Backend,
    config: MambaConfig,
    params: Params,
    ids: Tensor,
    targets: Tensor,
    *,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The sum of the losses, (1,), without gradients; arguments as in `loss_and_gradients`."""
    h = _hidden(backend, config, params, ids, seq_start=seq_start, lengths=lengths)
    total, _ = _head_loss(backend, params, h, targets, scale=1.0, grad=False)
    return total


def logits_by_rows(
    backend: Backend,
    config: MambaConfig,
    params: Params,
    ids: Tensor,
    *,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Iterator[Tensor]:
    """The logits of ids (B, L), a few rows at a time: tensors (rows, V) that add up to (B*L, V)."""
    h = _hidden(backend, config, params, ids, seq_start=seq_start, lengths=lengths)
    rows = _rows(backend, h)
    for start, stop in _chunks(rows.shape[0], config.vocab_size):
        logits, _ = _head(backend, params, backend.view(rows, 0, start, stop), grad=False)
        yield logits


def prefill(
    backend: Backend,
    config: MambaConfig,
    params: Params,
    ids: Tensor,
    last: Tensor,
    states: Sequence[LayerState],
    *,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, list[LayerState]]:
    """Read a piece of each sequence: ids (B, L) -> logits (B, V), and the states after it, new tensors.

    `last` (B) int32 names the positions that logits are wanted for, one to a sequence, as indices
    into the B*L rows.
    """
    x, after, _ = _blocks(
        backend, config, params, ids, states=states, seq_start=seq_start, lengths=lengths, grad=False
    )
    # Rows picked by index are what `embedding` gives; the head then has B rows to do, not B*L.
    picked, _ = backend.embedding(last, _rows(backend, x), grad=False)
    return _normed_head(backend, config, params, picked), after


def step(
    backend: Backend,
    config: MambaConfig,
    params: Params,
    ids: Tensor,
    states: Sequence[LayerState],
    decays: Sequence[Tensor],
) -> Tensor:
    """One more token of each sequence: ids (B) -> logits (B, V). Updates the tensors of `states`.

    `decays` are A of each layer, from `ParamStore.decays`.
    """
    x, _ = layers.embedding(backend, ids, params.top["embedding"], grad=False)
    for block_params, state, a in zip(params.layers, states, decays, strict=True):
        x = block_step(backend, config, block_params, x, state, a)
    return _normed_head(backend, config, params, x)


# ---- parts ------------------------------------------------------------------------------------


def _blocks(
    backend: Backend,
    config: MambaConfig,
    params: Params,
    ids: Tensor,
    *,
    states: Sequence[LayerState] | None = None,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
    grad: bool,
    activation_checkpointing: bool = False,
) -> tuple[Tensor, list[LayerState], Backprop | None]:
    """Embedding and all blocks: ids (B, L) -> x (B, L, d_model), final states, backprop(dx).

    The final states are those of the layers where `states` was given; else the list is empty.
    """
    lowest = _lowest_trained(params) if grad else config.n_layers
    backprops = []
    x, back_embedding = layers.embedding(backend, ids, params.top["embedding"], grad=lowest < 0)
    if back_embedding is not None:
        backprops.append(back_embedding)
    final_states = []
    for i, block_params in enumerate(params.layers):
        run = partial(
            block,
            backend,
            config,
            block_params,
            x,
            state=None if states is None else states[i],
            seq_start=seq_start,
            lengths=lengths,
        )
        keeps = i >= lowest
        x, final_state, backprop = (
            _checkpointed(run) if keeps and activation_checkpointing else run(grad=keeps)
        )
        if backprop is not None:
            backprops.append(partial(backprop, need_dx=i > lowest))
        if states is not None:
            final_states.append(final_state)

    def backprop_all(dx: Tensor) -> None:
        while backprops:  # popped, so that a block's internals go as soon as it is done
            dx = backprops.pop()(dx)

    return x, final_states, backprop_all if grad else None


def _lowest_trained(params: Params) -> int:
    """Where the backward pass may end: -1 is the embedding, the number of layers none of them."""
    if params.top["embedding"].grad is not None:
        return -1
    for i, block_params in enumerate(params.layers):
        if any(param is not None and param.grad is not None for param in block_params.values()):
            return i
    return len(params.layers)


def _checkpointed(run: partial) -> tuple[Tensor, LayerState, Backprop]:
    """Run a block without keeping its internals; its backprop runs it again, with them."""
    y, final_state, _ = run(grad=False)

    def backprop(dy: Tensor, *, need_dx: bool) -> Tensor | None:
        return run(grad=True)[2](dy, need_dx=need_dx)

    return y, final_state, backprop


def _hidden(
    backend: Backend,
    config: MambaConfig,
    params: Params,
    ids: Tensor,
    *,
    seq_start: Tensor | None,
    lengths: Tensor | None,
) -> Tensor:
    """What the head reads, (B, L, d_model), without gradients."""
    x, _, _ = _blocks(backend, config, params, ids, seq_start=seq_start, lengths=lengths, grad=False)
    h, _ = layers.rms_norm(backend, x, params.top["final_norm"], config.norm_eps, grad=False)
    return h


def _head(backend: Backend, params: Params, h: Tensor, *, grad: bool) -> tuple[Tensor, Backprop | None]:
    """h (rows, d_model) -> logits (rows, V). The weights are the embedding's where the head is tied."""
    w = params.top.get("lm_head") or params.top["embedding"]
    return layers.linear(backend, h, w, params.top.get("lm_head_bias"), grad=grad)


def _normed_head(backend: Backend, config: MambaConfig, params: Params, x: Tensor) -> Tensor:
    h, _ = layers.rms_norm(backend, x, params.top["final_norm"], config.norm_eps, grad=False)
    logits, _ = _head(backend, params, h, grad=False)
    return logits


def _head_loss(
    backend: Backend,
    params: Params,
    h: Tensor,
    targets: Tensor,
    *,
    scale: float,
    grad: bool,
    need_dh: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Summed cross-entropy of h (B, L, d_model), and with `need_dh` the gradient of h.

    The one place where the backward pass runs together with the forward pass: the logits of a chunk
    of rows become their own gradient in place and are used up before the next chunk is made. Hence
    `scale` has to be known here, and the head's parameter gradients are added here.
    """
    rows = _rows(backend, h)
    count = rows.shape[0]
    targets = backend.reshape(targets, (count,))
    losses = backend.empty((count,))
    dh = backend.empty(h.shape) if need_dh else None
    for start, stop in _chunks(count, params.top["embedding"].value.shape[0]):
        logits, backprop = _head(backend, params, backend.view(rows, 0, start, stop), grad=grad)
        chunk = backend.cross_entropy_(logits, backend.view(targets, 0, start, stop), scale=scale, grad=grad)
        backend.copy_(backend.view(losses, 0, start, stop), chunk)
        if grad:
            dh_rows = backend.view(_rows(backend, dh), 0, start, stop) if need_dh else None
            backprop(logits, need_dx=need_dh, out=dh_rows)
    return backend.sum(losses), dh


def _rows(backend: Backend, x: Tensor) -> Tensor:
    """(B, L, d) seen as (B*L, d)."""
    batch, length, width = x.shape
    return backend.reshape(x, (batch * length, width))


def _chunks(rows: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    size = max(_MIN_ROWS, _LOGITS_ELEMENTS // vocab_size)
    for start in range(0, rows, size):
        yield start, min(start + size, rows)
