"""The loopback backend itself: what it refuses, what it notices, what it counts."""

import copy
import gc
import math
import operator
import pickle

import numpy as np
import pytest

from mamba_fast.config import MambaConfig
from mamba_fast.model import MambaLM
from mamba_fast.testing.loopback import ContractError, HostAccessError, SealedTensor, create_backend

CONFIG = MambaConfig(24, 8, 2, d_state=4, d_conv=3)


@pytest.fixture
def backend():
    return create_backend()


@pytest.mark.parametrize(
    "use",
    [
        np.asarray, np.array, np.exp, np.sum, len, iter, list, bool, float, int, complex, operator.index,
        bytes, math.floor, round, abs, operator.neg, next, reversed, hash,
        pickle.dumps, copy.copy, copy.deepcopy,
        operator.itemgetter(0), operator.itemgetter(slice(None)), operator.itemgetter(...),
    ],
    ids=lambda use: getattr(use, "__name__", str(use)),
)  # fmt: skip
def test_a_sealed_tensor_refuses_every_access_to_its_values(backend, use):
    with pytest.raises(HostAccessError):
        use(backend.zeros((1,)))


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sub",
        "mul",
        "truediv",
        "matmul",
        "pow",
        "iadd",
        "imul",
        "eq",
        "ne",
        "lt",
        "ge",
        "contains",
        "and_",
    ],
)
def test_a_sealed_tensor_refuses_every_operator(backend, name):
    tensor = backend.zeros((2,))
    with pytest.raises(HostAccessError):
        getattr(operator, name)(tensor, 1.0)
    if name not in ("contains", "iadd", "imul"):
        with pytest.raises(HostAccessError):
            getattr(operator, name)(1.0, tensor)
        with pytest.raises(HostAccessError):
            getattr(operator, name)(np.ones(2), tensor)


def test_a_sealed_tensor_refuses_assignment_to_its_elements(backend):
    tensor = backend.zeros((2,))
    with pytest.raises(HostAccessError):
        tensor[0] = 1.0
    with pytest.raises(HostAccessError):
        np.zeros(2)[...] = tensor


@pytest.mark.parametrize(
    "name", ["dtype", "ndim", "size", "T", "item", "tolist", "reshape", "data", "strides"]
)
def test_a_sealed_tensor_has_a_shape_and_no_other_attribute(backend, name):
    tensor = backend.zeros((2, 3))
    assert tensor.shape == (2, 3)
    assert not hasattr(tensor, name)


def test_a_sealed_tensor_cannot_change_its_shape_or_be_given_attributes(backend):
    tensor = backend.zeros((2, 3))
    with pytest.raises(AttributeError):
        tensor.shape = (6,)
    with pytest.raises(AttributeError):
        tensor.label = "x"


def test_an_op_refuses_a_host_array_and_another_backends_tensor(backend):
    for foreign in (np.zeros(2), create_backend().zeros((2,)), [0.0, 0.0]):
        with pytest.raises(TypeError, match=r"^add: b is a \w+, not a tensor of this backend"):
            backend.add(backend.zeros((2,)), foreign)


def test_a_saved_value_cannot_be_used_twice(backend):
    w, dy = backend.zeros((3, 2)), backend.zeros((4, 3))
    _, saved = backend.linear(backend.zeros((4, 2)), w)
    backend.linear_backward(dy, saved, w)
    with pytest.raises(ContractError, match="linear_backward: saved has been used already"):
        backend.linear_backward(dy, saved, w)


def test_a_saved_value_cannot_be_used_by_another_op(backend):
    x = backend.zeros((4, 2))
    _, saved = backend.linear(x, backend.zeros((2, 2)))
    with pytest.raises(ContractError, match="rms_norm_backward: saved is of linear"):
        backend.rms_norm_backward(x, saved, None)


def test_a_backward_op_of_a_forward_op_without_grad_is_an_error(backend):
    x = backend.zeros((4, 2))
    _, saved = backend.rms_norm(x, None, 1e-6, grad=False)
    with pytest.raises(ContractError, match="rms_norm_backward: saved is a NoneType"):
        backend.rms_norm_backward(x, saved, None)


def test_an_operand_that_changes_before_the_backward_op_is_an_error(backend):
    x, w = backend.zeros((4, 2)), backend.zeros((3, 2))
    _, saved = backend.linear(x, w)
    backend.fill_(backend.view(x, -1, 0, 1), 1.0)
    with pytest.raises(ContractError, match="linear_backward: x has changed since linear saved it"):
        backend.linear_backward(backend.zeros((4, 3)), saved, w)


def test_a_gradient_cannot_be_written_over_what_was_saved(backend):
    x, w = backend.zeros((4, 2)), backend.zeros((2, 2))
    _, saved = backend.linear(x, w)
    with pytest.raises(ValueError, match="linear_backward: out overlaps the saved x"):
        backend.linear_backward(backend.zeros((4, 2)), saved, w, out=x)


def test_the_optimizer_refuses_moments_that_overlap_parameters(backend):
    params, stats, norm = backend.zeros((4,)), backend.zeros((4,)), backend.zeros((1,))
    with pytest.raises(ValueError, match=r"adamw_: (params|m)\[0\] overlaps"):
        backend.adamw_(
            [params], [backend.zeros((4,))], [params], [backend.zeros((4,))], lr=0.1, beta1=0.9, beta2=0.99,
            eps=1e-8, weight_decay=[0.0], step=1, grad_norm=norm, stats=stats,
        )  # fmt: skip


def test_memory_with_undefined_values_holds_nan(backend):
    assert np.isnan(backend.to_host(backend.empty((2, 3)))).all()
    assert (backend.to_host(backend.empty((2,), "i32")) < 0).all()
    logits, targets = backend.zeros((2, 3)), backend.zeros((2,), "i32")
    backend.cross_entropy_(logits, targets, grad=False)
    assert np.isnan(backend.to_host(logits)).all()


def test_transfers_are_counted_by_direction(backend):
    tensor = backend.from_host(np.ones(2))
    backend.to_host(tensor)
    backend.to_host(tensor)
    assert (backend.uploads, backend.downloads, backend.transfers) == (1, 2, 3)


def test_live_tensors_counts_views_and_forgets_what_is_dropped(backend):
    base = backend.zeros((4, 2))
    part = backend.view(base, 0, 0, 2)
    assert backend.live_tensors == 2
    del base
    assert backend.live_tensors == 1
    del part
    assert backend.live_tensors == 0


def test_live_saved_counts_until_the_backward_op_or_the_last_reference(backend):
    w = backend.zeros((3, 2))
    _, used = backend.linear(backend.zeros((4, 2)), w)
    _, dropped = backend.linear(backend.zeros((4, 2)), w)
    assert backend.live_saved == 2
    backend.linear_backward(backend.zeros((4, 3)), used, w)
    assert backend.live_saved == 1
    del dropped
    assert backend.live_saved == 0


# ---- models on it -----------------------------------------------------------------------------


def _batch():
    ids = (np.arange(32).reshape(2, 16) * 5 + 3) % CONFIG.vocab_size
    return ids, np.roll(ids, -1, axis=1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_leaves_no_tensor_and_no_saved_value_behind(backend, checkpointing):
    model = MambaLM(CONFIG, backend)
    ids, targets = _batch()
    model.accumulate_gradients(ids, targets, scale=1.0, activation_checkpointing=checkpointing)
    gc.collect()  # what is left is held by the model: its weights and gradients
    before = backend.live_tensors
    loss = model.accumulate_gradients(ids, targets, scale=1.0, activation_checkpointing=checkpointing)
    assert isinstance(loss, SealedTensor)
    del loss
    gc.collect()
    assert backend.live_tensors == before
    assert backend.live_saved == 0


def test_a_training_step_reads_nothing_back(backend):
    model = MambaLM(CONFIG, backend)
    ids, targets = _batch()
    before = backend.downloads
    model.accumulate_gradients(ids, targets, scale=1.0)
    backend.global_norm([model.store.grads[name] for name in model.store.names])
    assert backend.downloads == before


def test_generation_costs_two_transfers_a_token_and_no_more(backend):
    model = MambaLM(CONFIG, backend)
    costs = []
    for new in (2, 5):
        before = backend.transfers
        model.generate(np.array([[1, 2, 3]]), new, temperature=0)
        costs.append(backend.transfers - before)
    # The last token is not read by the model: one id up and one row of logits down for each of the others.
    assert costs[1] - costs[0] == 2 * 3


def test_decoding_keeps_the_same_number_of_tensors_however_long_it_runs(backend):
    model = MambaLM(CONFIG, backend)
    _, state = model.prefill(np.array([[1, 2, 3]]), model.init_state(1))
    counts = set()
    for _ in range(4):
        _, state = model.step(np.array([5]), state)
        gc.collect()
        counts.add(backend.live_tensors)
    assert len(counts) == 1
