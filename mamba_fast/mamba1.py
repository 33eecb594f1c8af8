"""The Mamba-1 block (Gu and Dao 2023, section 3.4; SPEC 2 and 3): forward, backward, one step.

    normed      = RMSNorm(x)
    xin, z      = in_proj(normed)
    u           = SiLU(conv1d(xin))
    low, B, C   = x_proj(u)
    delta       = dt_proj(low)
    y           = x + out_proj(scan(u, softplus(delta), A, B, C, D) * SiLU(z)),   A = -exp(A_log)

What in_proj and x_proj give is one matrix product each; the parts are column views of it, never
copies. The backward pass writes the parts' gradients into columns of one tensor in the same way.
Softplus, skip and gate happen inside the scan op.
"""

from __future__ import annotations

from collections.abc import Mapping

from mamba_fast import layers
from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig
from mamba_fast.layers import Backprop
from mamba_fast.params import Param
from mamba_fast.state import LayerState

__all__ = ["block", "block_step"]


def block(
    backend: Backend,
    config: MambaConfig,
    params: Mapping[str, Param | None],
    x: Tensor,
    *,
    state: LayerState | None = None,
    seq_start: Tensor | None = None,
    lengths: Tensor | None = None,
    grad: bool = True,
) -> tuple[Tensor, LayerState, Backprop | None]:
    """One block on whole sequences.

    Parameters
    ----------
    params
        the block's parameters by short name, from `params.layer_params`; None for an absent bias
    x : (B, L, d_model)
    state
        what came before t = 0; None: nothing. Only read.
    seq_start : (B, L) int32 or None
        where it is not 0 the block forgets what came before
    lengths : (B) int32 or None
        real positions of right-padded rows
    grad
        False: keep nothing for a backward pass, `backprop` is None

    Returns
    -------
    y : (B, L, d_model)
    state
        after each row's last real position, in new tensors
    backprop
        `backprop(dy)` adds the gradients of the parameters and returns that of x, IN THE MEMORY OF dy:
        the residual's gradient is dy itself, so the branch's is added to it. May be called once.
    """
    e, n, r = config.d_inner, config.d_state, config.dt_rank
    restarts = {"seq_start": seq_start, "lengths": lengths}
    conv_state, ssm_state = (None, None) if state is None else state

    normed, back_norm = layers.rms_norm(backend, x, params["normWeight"], config.norm_eps, grad=grad)
    xz, back_in = layers.linear(backend, normed, params["wInProj"], params["bInProj"], grad=grad)
    xin = backend.view(xz, -1, 0, e)
    z = backend.view(xz, -1, e, 2 * e)
    u, conv_state, back_conv = layers.causal_conv1d(
        backend, xin, params["wConv"], params["bConv"], initial_state=conv_state, **restarts, grad=grad
    )
    dbc, back_x = layers.linear(backend, u, params["wXProj"], params["bXProj"], grad=grad)
    delta_low, b, c = _delta_b_c(backend, dbc, r, n)
    # dt_proj's bias is added inside the scan, where softplus reads it: one pass over (B, L, E) less.
    delta, back_dt = layers.linear(backend, delta_low, params["wDtProj"], grad=grad)
    a, back_decay = layers.decay(backend, params["A_log"], grad=grad)
    gated, ssm_state, back_scan = layers.selective_scan(
        backend,
        u,
        delta,
        a,
        b,
        c,
        params["D_vec"],
        z,
        params["bDtProj"],
        discretization=config.discretization,
        initial_state=ssm_state,
        **restarts,
        grad=grad,
    )
    y, back_out = layers.linear(backend, gated, params["wOutProj"], params["bOutProj"], grad=grad)
    backend.add_(y, x)  # the residual; nothing has saved y

    def backprop(dy: Tensor) -> Tensor:
        d_gated = back_out(dy)
        d_xz = backend.empty(xz.shape)
        d_dbc = backend.empty(dbc.shape)
        d_delta_low, db, dc = _delta_b_c(backend, d_dbc, r, n)
        d_a = None if params["A_log"].grad is None else backend.zeros(a.shape)
        scan = back_scan(d_gated, d_a=d_a, db_out=db, dc_out=dc, dz_out=backend.view(d_xz, -1, e, 2 * e))
        if d_a is not None:
            back_decay(d_a)
        du = scan.du
        back_dt(scan.ddelta, out=d_delta_low)
        back_x(d_dbc, out=du, accumulate=True)
        back_conv(du, out=backend.view(d_xz, -1, 0, e))
        d_normed = back_in(d_xz)
        return back_norm(d_normed, out=dy, accumulate=True)

    return y, LayerState(conv_state, ssm_state), backprop if grad else None


def block_step(
    backend: Backend, config: MambaConfig, params: Mapping[str, Param | None], x: Tensor, state: LayerState
) -> Tensor:
    """One block on one token of each sequence: x (B, d_model) -> y (B, d_model). Updates `state`.

    The same arithmetic as `block` with L = 1, in time and memory that do not depend on how many
    tokens came before.
    """
    e, n, r = config.d_inner, config.d_state, config.dt_rank
    normed, _ = layers.rms_norm(backend, x, params["normWeight"], config.norm_eps, grad=False)
    xz, _ = layers.linear(backend, normed, params["wInProj"], params["bInProj"], grad=False)
    conv_bias = params["bConv"]
    u = backend.conv1d_step(
        backend.view(xz, -1, 0, e),
        state.conv,
        params["wConv"].value,
        None if conv_bias is None else conv_bias.value,
        activation="silu",
    )
    dbc, _ = layers.linear(backend, u, params["wXProj"], params["bXProj"], grad=False)
    delta_low, b, c = _delta_b_c(backend, dbc, r, n)
    delta, _ = layers.linear(backend, delta_low, params["wDtProj"], grad=False)
    a, _ = layers.decay(backend, params["A_log"], grad=False)
    gated = backend.selective_scan_step(
        u,
        delta,
        a,
        b,
        c,
        params["D_vec"].value,
        backend.view(xz, -1, e, 2 * e),
        params["bDtProj"].value,
        state.ssm,
        delta_softplus=True,
        discretization=config.discretization,
    )
    y, _ = layers.linear(backend, gated, params["wOutProj"], params["bOutProj"], grad=False)
    backend.add_(y, x)
    return y


def _delta_b_c(backend: Backend, dbc: Tensor, r: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of x_proj's output (..., R+2N): low-rank delta (R), B (N), C (N). Views."""
    return (
        backend.view(dbc, -1, 0, r),
        backend.view(dbc, -1, r, r + n),
        backend.view(dbc, -1, r + n, r + 2 * n),
    )
