"""Conformance with the contract itself: signatures, errors for wrong shapes and for overlaps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mamba_fast.backend import API_VERSION, Backend
from mamba_fast.testing.conformance_base import Checks

__all__ = ["ContractChecks"]

_OPS = tuple(
    name for name, member in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")
)

# Shapes of a valid call, by argument: B = 2, L = 3, E = 4, N = 5, K = 2, V = 6.
_LONG, _NARROW, _STATE, _TAPS = (2, 3, 4), (2, 3, 5), (2, 4, 5), (4, 2)
_IDS = frozenset({"ids", "targets", "seq_start", "lengths"})

Shapes = dict[str, tuple[int, ...]]


def _tensors(backend: Backend, shapes: Shapes) -> dict[str, Any]:
    """A tensor of ones for each argument, which is a valid id, target, restart and length too."""
    return {
        name: backend.from_host(np.ones(shape), "i32" if name in _IDS else "f32")
        for name, shape in shapes.items()
    }


def _forward(op: str, shapes: Shapes, **options: Any) -> tuple[Shapes, Callable[..., Any]]:
    return shapes, lambda backend, t: getattr(backend, op)(**t, **options)


def _linear_backward(backend: Backend, t: dict[str, Any]) -> Any:
    _, saved = backend.linear(backend.from_host(np.ones(_LONG)), backend.from_host(np.ones((6, 4))))
    return backend.linear_backward(saved=saved, **t)


def _norm_backward(backend: Backend, t: dict[str, Any]) -> Any:
    _, saved = backend.rms_norm(backend.from_host(np.ones(_LONG)), backend.from_host(np.ones(4)), 1e-6)
    return backend.rms_norm_backward(saved=saved, **t)


def _embedding_backward(backend: Backend, t: dict[str, Any]) -> Any:
    ids = backend.from_host(np.ones((2, 3)), "i32")
    _, saved = backend.embedding(ids, backend.from_host(np.ones((6, 4))))
    return backend.embedding_backward(saved=saved, **t)


def _conv_backward(backend: Backend, t: dict[str, Any]) -> Any:
    _, _, saved = backend.conv1d(backend.from_host(np.ones(_LONG)), backend.from_host(np.ones(_TAPS)))
    return backend.conv1d_backward(saved=saved, **t)


def _scan_inputs(backend: Backend) -> dict[str, Any]:
    shapes = {"u": _LONG, "delta": _LONG, "a": (4, 5), "b": _NARROW, "c": _NARROW, "d": (4,), "z": _LONG}
    return _tensors(backend, {**shapes, "delta_bias": (4,)})


def _scan_backward(backend: Backend, t: dict[str, Any]) -> Any:
    _, _, saved = backend.selective_scan(**_scan_inputs(backend))
    return backend.selective_scan_backward(saved=saved, **t)


def _adamw(backend: Backend, t: dict[str, Any]) -> Any:
    lists = {name: [t[name]] for name in ("params", "grads", "m", "v")}
    # The second step: stats, of ones, say that one was skipped.
    return backend.adamw_(
        **lists, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=[0.0], step=2,
        grad_norm=t["grad_norm"], stats=t["stats"],
    )  # fmt: skip


# A valid call of each op: the shapes of its arguments, and how it is made from tensors.
_CALLS: dict[str, tuple[Shapes, Callable[..., Any]]] = {
    "add": _forward("add", {"a": (2, 3), "b": (2, 3), "out": (2, 3)}),
    "add_": _forward("add_", {"dst": (2, 3), "src": (2, 3)}),
    "copy_": _forward("copy_", {"dst": (2, 3), "src": (2, 3)}),
    "decay": _forward("decay", {"a_log": (4, 5)}),
    "embedding": _forward("embedding", {"ids": (2, 3), "table": (6, 4), "out": _LONG}),
    "embedding_backward": ({"dy": _LONG, "d_table": (6, 4)}, _embedding_backward),
    "linear": _forward("linear", {"x": _LONG, "w": (6, 4), "bias": (6,), "out": (2, 3, 6)}),
    "linear_backward": (
        {"dy": (2, 3, 6), "w": (6, 4), "dw": (6, 4), "dbias": (6,), "out": _LONG},
        _linear_backward,
    ),
    "rms_norm": _forward("rms_norm", {"x": _LONG, "w": (4,), "out": _LONG}, eps=1e-6),
    "rms_norm_backward": ({"dy": _LONG, "w": (4,), "dw": (4,), "out": _LONG}, _norm_backward),
    "conv1d": _forward(
        "conv1d",
        {
            "x": _LONG,
            "w": _TAPS,
            "bias": (4,),
            "initial_state": (2, 1, 4),
            "seq_start": (2, 3),
            "lengths": (2,),
            "out": _LONG,
        },
    ),
    "conv1d_backward": (
        {"dy": _LONG, "w": _TAPS, "dw": _TAPS, "dbias": (4,), "d_final_state": (2, 1, 4), "out": _LONG},
        _conv_backward,
    ),
    "conv1d_step": _forward(
        "conv1d_step", {"x": (2, 4), "state": (2, 1, 4), "w": _TAPS, "bias": (4,), "out": (2, 4)}
    ),
    "selective_scan": _forward(
        "selective_scan",
        {
            "u": _LONG,
            "delta": _LONG,
            "a": (4, 5),
            "b": _NARROW,
            "c": _NARROW,
            "d": (4,),
            "z": _LONG,
            "delta_bias": (4,),
            "initial_state": _STATE,
            "seq_start": (2, 3),
            "lengths": (2,),
            "out": _LONG,
        },
    ),
    "selective_scan_backward": (
        {
            "dy": _LONG,
            "d_final_state": _STATE,
            "d_a": (4, 5),
            "d_d": (4,),
            "d_delta_bias": (4,),
            "du_out": _LONG,
            "ddelta_out": _LONG,
            "db_out": _NARROW,
            "dc_out": _NARROW,
            "dz_out": _LONG,
        },
        _scan_backward,
    ),
    "selective_scan_step": _forward(
        "selective_scan_step",
        {
            "u": (2, 4),
            "delta": (2, 4),
            "a": (4, 5),
            "b": (2, 5),
            "c": (2, 5),
            "d": (4,),
            "z": (2, 4),
            "delta_bias": (4,),
            "state": _STATE,
            "out": (2, 4),
        },
    ),
    "cross_entropy_": _forward("cross_entropy_", {"logits": (2, 6), "targets": (2,)}),
    "adamw_": (
        {
            "params": (2, 3),
            "grads": (2, 3),
            "m": (2, 3),
            "v": (2, 3),
            "grad_norm": (1,),
            "stats": (4,),
        },
        _adamw,
    ),
}

# Arguments that fix the sizes which others are compared with: their wrong last axis shows at another
# argument, or, where the comparison is the other way round, under a common name.
_SET_THE_SIZES = frozenset(
    {
        ("add", "a"), ("add", "b"), ("add_", "dst"), ("add_", "src"), ("copy_", "dst"), ("copy_", "src"),
        ("linear", "x"), ("linear", "w"), ("linear_backward", "w"), ("rms_norm", "x"),
        ("embedding_backward", "d_table"), ("conv1d", "x"), ("conv1d", "w"), ("conv1d_backward", "w"),
        ("conv1d_step", "x"), ("conv1d_step", "w"), ("selective_scan", "u"), ("selective_scan", "a"),
        ("selective_scan_step", "u"), ("selective_scan_step", "a"), ("cross_entropy_", "logits"),
        ("adamw_", "params"),
    }
)  # fmt: skip

# A wrong last axis of these alone is no error: ids and A_log have any, a table any width, logits any V.
_FREE_LAST_AXIS = frozenset(
    {("decay", "a_log"), ("embedding", "ids"), ("embedding", "table"), ("cross_entropy_", "logits")}
)

# More leading axes are no error here.
_FREE_RANK = frozenset({("embedding", "ids"), ("rms_norm", "x")})

_ARGUMENTS = [(op, argument) for op, (shapes, _) in _CALLS.items() for argument in shapes]
_WRONG_AXIS = [pair for pair in _ARGUMENTS if pair not in _FREE_LAST_AXIS]
_WRONG_RANK = [pair for pair in _ARGUMENTS if pair not in _FREE_RANK]


def _pairs(pairs: list[tuple[str, str]]) -> Any:
    return pytest.mark.parametrize(("op", "argument"), pairs, ids=[f"{op}-{name}" for op, name in pairs])


# Calls that write over something they read, or write two things to one place.


def _add_onto_an_operand(backend: Backend) -> None:
    a = backend.zeros((2, 4))
    backend.add(a, backend.zeros((2, 4)), out=a)


def _add_in_place_across_overlapping_columns(backend: Backend) -> None:
    base = backend.zeros((2, 6))
    backend.add_(backend.view(base, -1, 0, 4), backend.view(base, -1, 2, 6))


def _copy_across_overlapping_rows(backend: Backend) -> None:
    base = backend.zeros((5, 2))
    backend.copy_(backend.view(base, 0, 0, 3), backend.view(base, 0, 2, 5))


def _linear_onto_its_input(backend: Backend) -> None:
    x = backend.zeros((2, 4))
    backend.linear(x, backend.zeros((4, 4)), out=x)


def _linear_backward_onto_dy(backend: Backend) -> None:
    w, dy = backend.zeros((4, 4)), backend.zeros((2, 4))
    _, saved = backend.linear(backend.zeros((2, 4)), w)
    backend.linear_backward(dy, saved, w, out=dy)


def _rms_norm_backward_onto_its_saved_input(backend: Backend) -> None:
    x, w = backend.zeros((2, 4)), backend.zeros((4,))
    _, saved = backend.rms_norm(x, w, 1e-6)
    backend.rms_norm_backward(backend.zeros((2, 4)), saved, w, out=x)


def _conv1d_backward_onto_dy(backend: Backend) -> None:
    w, dy = backend.zeros(_TAPS), backend.zeros(_LONG)
    _, _, saved = backend.conv1d(backend.zeros(_LONG), w)
    backend.conv1d_backward(dy, saved, w, out=dy)


def _scan_backward_onto_dy(backend: Backend) -> None:
    dy = backend.zeros(_LONG)
    _, _, saved = backend.selective_scan(**_scan_inputs(backend))
    backend.selective_scan_backward(dy, saved, du_out=dy)


def _scan_backward_of_two_gradients_to_one_place(backend: Backend) -> None:
    _, _, saved = backend.selective_scan(**_scan_inputs(backend))
    both = backend.zeros((2, 3, 6))
    backend.selective_scan_backward(
        backend.zeros(_LONG), saved, du_out=backend.view(both, -1, 0, 4), dz_out=backend.view(both, -1, 2, 6)
    )


def _forward_onto_an_operand(op: str, argument: str) -> Callable[[Backend], None]:
    def call(backend: Backend) -> None:
        shapes, run = _CALLS[op]
        tensors = _tensors(backend, shapes)
        run(backend, {**tensors, "out": backend.reshape(tensors[argument], shapes["out"])})

    call.__name__ = f"{op}_onto_{argument}"
    return call


def _embedding_onto_its_table(backend: Backend) -> None:
    table = backend.zeros((6, 4))
    backend.embedding(backend.zeros((3,), "i32"), table, out=backend.view(table, 0, 0, 3))


def _step_onto_its_state(backend: Backend) -> None:
    state = backend.zeros((2, 1, 4))
    backend.conv1d_step(
        backend.zeros((2, 4)), state, backend.zeros(_TAPS), out=backend.reshape(state, (2, 4))
    )


def _adamw_with(change: Callable[[Backend, dict[str, Any]], None], name: str) -> Callable[[Backend], None]:
    """A step of three tensors of which `change` makes two share memory."""

    def call(backend: Backend) -> None:
        lists = {kind: [backend.zeros((4,)) for _ in range(3)] for kind in ("params", "grads", "m", "v")}
        arguments = {**lists, "grad_norm": backend.zeros((1,)), "stats": backend.zeros((4,))}
        change(backend, arguments)
        backend.adamw_(**arguments, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=[0.0] * 3, step=1)

    call.__name__ = f"adamw_{name}"
    return call


def _same_parameter_twice(backend: Backend, t: dict[str, Any]) -> None:
    t["params"][2] = t["params"][0]


def _parameter_across_a_moment(backend: Backend, t: dict[str, Any]) -> None:
    base = backend.zeros((6,))
    t["params"][0], t["m"][1] = backend.view(base, 0, 0, 4), backend.view(base, 0, 2, 6)


def _moment_in_a_gradient(backend: Backend, t: dict[str, Any]) -> None:
    t["v"][2] = t["grads"][1]


def _stats_in_a_parameter(backend: Backend, t: dict[str, Any]) -> None:
    t["stats"] = t["params"][1]


def _stats_in_a_gradient(backend: Backend, t: dict[str, Any]) -> None:
    t["stats"] = t["grads"][0]


def _norm_in_the_stats(backend: Backend, t: dict[str, Any]) -> None:
    t["grad_norm"] = backend.view(t["stats"], 0, 1, 2)


def _norm_in_a_parameter(backend: Backend, t: dict[str, Any]) -> None:
    t["grad_norm"] = backend.view(t["params"][2], 0, 1, 2)


_OVERLAPS = (
    *(
        _forward_onto_an_operand(op, argument)
        for op, argument in (
            ("rms_norm", "x"),
            ("conv1d", "x"),
            ("selective_scan", "u"),
            ("selective_scan", "delta"),
            ("selective_scan", "z"),
            ("conv1d_step", "x"),
            ("selective_scan_step", "u"),
            ("selective_scan_step", "z"),
        )
    ),
    _embedding_onto_its_table,
    _step_onto_its_state,
    *(
        _adamw_with(change, change.__name__.strip("_"))
        for change in (
            _same_parameter_twice,
            _parameter_across_a_moment,
            _moment_in_a_gradient,
            _stats_in_a_parameter,
            _stats_in_a_gradient,
            _norm_in_the_stats,
            _norm_in_a_parameter,
        )
    ),
    _add_onto_an_operand,
    _add_in_place_across_overlapping_columns,
    _copy_across_overlapping_rows,
    _linear_onto_its_input,
    _linear_backward_onto_dy,
    _rms_norm_backward_onto_its_saved_input,
    _conv1d_backward_onto_dy,
    _scan_backward_onto_dy,
    _scan_backward_of_two_gradients_to_one_place,
)


class ContractChecks(Checks):
    """What holds for the backend as a whole, and for every op's arguments."""

    def test_the_backend_bears_its_name_and_the_version_of_this_contract(self, backend: Backend) -> None:
        assert backend.name == self.backend_name
        compared = 1 if API_VERSION[0] else 2  # provisional versions have to be the same
        assert backend.api_version[:compared] == API_VERSION[:compared]

    def test_the_backends_capabilities_are_names(self, backend: Backend) -> None:
        assert isinstance(backend.capabilities, frozenset)
        assert all(isinstance(name, str) for name in backend.capabilities)

    def test_the_backend_describes_itself_in_one_line(self, backend: Backend) -> None:
        text = backend.describe()
        assert text.strip() == text
        assert text
        assert "\n" not in text

    @pytest.mark.parametrize("op", _OPS)
    def test_every_method_has_the_signature_of_the_contract(self, backend: Backend, op: str) -> None:
        def shape(function: Any) -> list[tuple[str, Any, Any]]:
            parameters = inspect.signature(function).parameters.values()
            return [(p.name, p.kind, p.default) for p in parameters]

        assert shape(getattr(type(backend), op)) == shape(getattr(Backend, op))

    @pytest.mark.parametrize("op", _CALLS)
    def test_the_call_that_the_error_checks_start_from_is_valid(self, backend: Backend, op: str) -> None:
        shapes, call = _CALLS[op]
        call(backend, _tensors(backend, shapes))

    @_pairs(_WRONG_AXIS)
    def test_a_wrong_shape_is_an_error_that_names_op_argument_and_shape(
        self, backend: Backend, op: str, argument: str
    ) -> None:
        shapes, call = _CALLS[op]
        wrong = (*shapes[argument][:-1], shapes[argument][-1] + 1)
        tensors = _tensors(backend, {**shapes, argument: wrong})
        with pytest.raises(ValueError, match=f"^{op}: ") as caught:
            call(backend, tensors)
        message = str(caught.value)
        assert "shape" in message
        if (op, argument) not in _SET_THE_SIZES:
            assert argument in message.split()[1], message
            assert str(wrong) in message
            assert str(shapes[argument]) in message

    @_pairs(_WRONG_RANK)
    def test_a_wrong_rank_is_an_error_that_names_the_op(
        self, backend: Backend, op: str, argument: str
    ) -> None:
        shapes, call = _CALLS[op]
        tensors = _tensors(backend, {**shapes, argument: (1, 1, *shapes[argument])})
        with pytest.raises(ValueError, match=f"^{op}: "):
            call(backend, tensors)

    @pytest.mark.parametrize(
        ("op", "option"),
        [
            ("conv1d", {"activation": "relu"}),
            ("conv1d_step", {"activation": "relu"}),
            ("selective_scan", {"discretization": "bilinear"}),
            ("selective_scan_step", {"discretization": "bilinear"}),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_an_unknown_option_is_an_error_that_names_op_and_value(
        self, backend: Backend, op: str, option: dict[str, str]
    ) -> None:
        tensors = _tensors(backend, _CALLS[op][0])
        with pytest.raises(ValueError, match=f"^{op}: .*{next(iter(option.values()))}"):
            getattr(backend, op)(**tensors, **option)

    @pytest.mark.parametrize("op", ["linear", "linear_backward", "rms_norm_backward"])
    def test_accumulate_without_out_is_an_error(self, backend: Backend, op: str) -> None:
        shapes, call = _CALLS[op]
        tensors = _tensors(backend, {name: shape for name, shape in shapes.items() if name != "out"})
        with pytest.raises(ValueError, match=f"^{op}: accumulate=True needs out"):
            call(backend, {**tensors, "accumulate": True})

    @pytest.mark.parametrize("op", ["conv1d", "selective_scan"])
    @pytest.mark.parametrize("empty", [0, 1, 2], ids=["batch", "length", "width"])
    def test_an_empty_axis_is_an_error(self, backend: Backend, op: str, empty: int) -> None:
        shapes, call = _CALLS[op]
        first = next(iter(shapes))
        shape = tuple(0 if axis == empty else extent for axis, extent in enumerate(shapes[first]))
        with pytest.raises(ValueError, match=f"^{op}: {first}"):
            call(backend, {**_tensors(backend, shapes), first: backend.zeros(shape)})

    @pytest.mark.parametrize("call", _OVERLAPS, ids=lambda call: call.__name__.strip("_"))
    def test_writing_over_what_is_read_is_an_error(
        self, backend: Backend, call: Callable[[Backend], None]
    ) -> None:
        with pytest.raises(ValueError, match="overlap"):
            call(backend)

    def test_columns_of_one_tensor_side_by_side_do_not_overlap(self, backend: Backend) -> None:
        base = backend.from_host(np.arange(12.0).reshape(2, 6))
        left, right = backend.view(base, -1, 0, 3), backend.view(base, -1, 3, 6)
        backend.copy_(left, right)
        assert backend.to_host(base).tolist() == [[3, 4, 5, 3, 4, 5], [9, 10, 11, 9, 10, 11]]
        _, _, saved = backend.selective_scan(**_scan_inputs(backend))
        both = backend.zeros((2, 3, 8))
        d_u, d_z = backend.view(both, -1, 0, 4), backend.view(both, -1, 4, 8)
        dy = backend.from_host(np.ones(_LONG))
        backend.selective_scan_backward(dy, saved, du_out=d_u, dz_out=d_z)
        assert backend.to_host(both).all()

    def test_an_op_may_write_beside_the_columns_that_it_reads(self, backend: Backend) -> None:
        base = backend.from_host(np.arange(12.0).reshape(2, 6))
        left, right = backend.view(base, -1, 0, 3), backend.view(base, -1, 3, 6)
        expected = backend.to_host(backend.rms_norm(left, None, 1e-6, grad=False)[0])
        backend.rms_norm(left, None, 1e-6, out=right, grad=False)
        assert np.array_equal(backend.to_host(right), expected)
        assert backend.to_host(left).tolist() == [[0, 1, 2], [6, 7, 8]]
