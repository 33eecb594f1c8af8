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

`block` and `block_step` differ in the convolution and the scan alone: what comes before, between and
after those two is in `_project_in`, `_select` and `_project_out`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mamba_fast import layers
from mamba_fast.backend import Backend, Tensor
from mamba_fast.config import MambaConfig
from mamba_fast.layers import Backprop
from mamba_fast.params import Param
from mamba_fast.state import LayerState

__all__ = ["BlockParams", "block", "block_step"]

BlockParams = Mapping[str, Param | None]
"""A block's parameters by short name; None for an absent bias."""

# By the order of the backward pass, its end first: what is trained decides how far down it goes.
_BEFORE_SELECTION = ("normWeight", "wInProj", "bInProj", "wConv", "bConv")
_UP_TO_SCAN = ("wXProj", "bXProj", "wDtProj", "bDtProj", "A_log", "D_vec")


def block(
    backend: Backend,
    config: MambaConfig,
    params: BlockParams,
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
        the block's parameters by short name, an entry of `params.Params.layers`
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
        the residual's gradient is dy itself, so the branch's is added to it. With `need_dx=False` it
        goes no further down than there is a trained parameter, and returns None. May be called once.
    """
    restarts = {"seq_start": seq_start, "lengths": lengths}
    conv_state, ssm_state = (None, None) if state is None else state

    xin, z, back_in = _project_in(backend, config, params, x, grad=grad)
    u, conv_state, back_conv = layers.causal_conv1d(
        backend, xin, params["wConv"], params["bConv"], initial_state=conv_state, **restarts, grad=grad
    )
    delta, b, c, back_select = _select(backend, config, params, u, grad=grad)
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
    y, back_out = _project_out(backend, params, gated, x, grad=grad)

    def backprop(dy: Tensor, *, need_dx: bool = True) -> Tensor | None:
        need_du = need_dx or _trained(params, _BEFORE_SELECTION)
        if not (need_du or _trained(params, _UP_TO_SCAN)):
            back_out(dy, need_dx=False)
            return None
        d_gated = back_out(dy)
        d_xz = backend.empty((*dy.shape[:-1], 2 * config.d_inner))
        d_xin, d_z = _halves(backend, d_xz)
        d_dbc = backend.empty((*dy.shape[:-1], config.dt_rank + 2 * config.d_state))
        _, db, dc = _delta_b_c(backend, config, d_dbc)
        d_a = None if params["A_log"].grad is None else backend.zeros(a.shape)
        scan = back_scan(d_gated, d_a=d_a, db_out=db, dc_out=dc, dz_out=d_z)
        if d_a is not None:
            back_decay(d_a)
        back_select(scan.ddelta, d_dbc, du=scan.du if need_du else None)
        if not need_du:
            return None
        back_conv(scan.du, out=d_xin)
        return back_in(d_xz, need_dx=need_dx, dx=dy)

    return y, LayerState(conv_state, ssm_state), backprop if grad else None


def block_step(
    backend: Backend,
    config: MambaConfig,
    params: BlockParams,
    x: Tensor,
    state: LayerState,
    a: Tensor,
) -> Tensor:
    """One block on one token of each sequence: x (B, d_model) -> y (B, d_model). Updates `state`.

    The same arithmetic as `block` with L = 1, in time and memory that do not depend on how many
    tokens came before. `a` (E, N) is A, from `ParamStore.decays`.
    """
    xin, z, _ = _project_in(backend, config, params, x, grad=False)
    conv_bias = params["bConv"]
    u = backend.conv1d_step(
        xin,
        state.conv,
        params["wConv"].value,
        None if conv_bias is None else conv_bias.value,
        activation="silu",
    )
    delta, b, c, _ = _select(backend, config, params, u, grad=False)
    gated = backend.selective_scan_step(
        u,
        delta,
        a,
        b,
        c,
        params["D_vec"].value,
        z,
        params["bDtProj"].value,
        state.ssm,
        delta_softplus=True,
        discretization=config.discretization,
    )
    return _project_out(backend, params, gated, x, grad=False)[0]


# ---- parts, on x of any leading axes ------------------------------------------------------------


def _project_in(
    backend: Backend, config: MambaConfig, params: BlockParams, x: Tensor, *, grad: bool
) -> tuple[Tensor, Tensor, Backprop | None]:
    """Norm and in_proj: x (..., D) -> xin and z (..., E), which are views of one tensor (..., 2E).

    `backprop(d_xz, need_dx=..., dx=...)` adds the gradient of x to `dx` and returns it.
    """
    normed, back_norm = layers.rms_norm(backend, x, params["normWeight"], config.norm_eps, grad=grad)
    xz, back_in = layers.linear(backend, normed, params["wInProj"], params["bInProj"], grad=grad)
    xin, z = _halves(backend, xz)

    def backprop(d_xz: Tensor, *, need_dx: bool, dx: Tensor) -> Tensor | None:
        if not (need_dx or params["normWeight"].grad is not None):
            back_in(d_xz, need_dx=False)
            return None
        return back_norm(back_in(d_xz), out=dx, accumulate=True)

    return xin, z, backprop if grad else None


def _select(
    backend: Backend, config: MambaConfig, params: BlockParams, u: Tensor, *, grad: bool
) -> tuple[Tensor, Tensor, Tensor, Backprop | None]:
    """x_proj and dt_proj: u (..., E) -> delta (..., E), B and C (..., N).

    `backprop(d_delta, d_dbc, du=...)` takes the gradients of B and C in their columns of `d_dbc`
    (..., R+2N), writes its other columns, and adds to `du` where it is not None.
    """
    dbc, back_x = layers.linear(backend, u, params["wXProj"], params["bXProj"], grad=grad)
    low, b, c = _delta_b_c(backend, config, dbc)
    # dt_proj's bias is added inside the scan, where softplus reads it: one pass over (B, L, E) less.
    delta, back_dt = layers.linear(backend, low, params["wDtProj"], grad=grad)

    def backprop(d_delta: Tensor, d_dbc: Tensor, *, du: Tensor | None) -> None:
        d_low, _, _ = _delta_b_c(backend, config, d_dbc)
        back_dt(d_delta, out=d_low)
        back_x(d_dbc, need_dx=du is not None, out=du, accumulate=True)

    return delta, b, c, backprop if grad else None


def _project_out(
    backend: Backend, params: BlockParams, gated: Tensor, x: Tensor, *, grad: bool
) -> tuple[Tensor, Backprop | None]:
    """out_proj and the residual: gated (..., E), x (..., D) -> y (..., D)."""
    y, back_out = layers.linear(backend, gated, params["wOutProj"], params["bOutProj"], grad=grad)
    backend.add_(y, x)  # nothing has saved y
    return y, back_out


def _halves(backend: Backend, xz: Tensor) -> tuple[Tensor, Tensor]:
    """The columns of what in_proj gives (..., 2E): xin and z (..., E). Views."""
    e = xz.shape[-1] // 2
    return backend.view(xz, -1, 0, e), backend.view(xz, -1, e, 2 * e)


def _delta_b_c(backend: Backend, config: MambaConfig, dbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of what x_proj gives (..., R+2N): low-rank delta (R), B (N), C (N). Views."""
    r, n = config.dt_rank, config.d_state
    return (
        backend.view(dbc, -1, 0, r),
        backend.view(dbc, -1, r, r + n),
        backend.view(dbc, -1, r + n, r + 2 * n),
    )


def _trained(params: BlockParams, names: tuple[str, ...]) -> bool:
    return any(param is not None and param.grad is not None for param in map(params.get, names))
