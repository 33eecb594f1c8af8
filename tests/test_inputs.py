"""Checks of ids, targets, masks and lengths."""

from __future__ import annotations

import numpy as np
import pytest

from mamba_fast.inputs import check_lengths, check_seq_start, model_batch, next_ids, piece

V = 10
IDS = np.arange(8).reshape(2, 4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1, -1]], r"ids\[0, 2\] is -1, expected an id in \[0, 10\)"),
        ([[0], [10]], r"ids\[1, 0\] is 10, expected an id in \[0, 10\)"),
        ([[2**40]], r"ids\[0, 0\] is 1099511627776, expected an id in \[0, 10\)"),
        (np.array([[2**63]], np.uint64), r"ids\[0, 0\] is 9223372036854775808, expected"),
        ([[2**70]], "ids must be integers, got dtype object"),
        ([[1.0, 2.0]], r"ids must be integers, got dtype float64 \(the first value is 1.0\)"),
        ([[True, False]], r"ids must be integers, got dtype bool \(the first value is True\)"),
        ([["a"]], r"ids must be integers, got dtype <U1 \(the first value is 'a'\)"),
        ([], r"ids is empty: shape \(0,\)"),
        ([[]], r"ids is empty: shape \(1, 0\)"),
        (np.zeros((0, 5), int), r"ids is empty: shape \(0, 5\)"),
        ([1, 2, 3], r"ids has shape \(3,\), expected \(B, L\); for a single sequence pass \[ids\]"),
        (3, r"ids has shape \(\), expected \(B, L\)"),
        ([[1, 2], [3]], "ids must be a rectangular array: its rows differ in length"),
    ],
)
def test_wrong_ids_are_named_with_their_value(ids, message):
    with pytest.raises(ValueError, match=message):
        model_batch(ids, V)


@pytest.mark.parametrize(
    "ids",
    [
        IDS.tolist(),
        IDS.astype(np.uint8),
        IDS.astype(">i4"),
        IDS.astype(np.uint64),
        np.asfortranarray(IDS),
        np.repeat(IDS, 2, axis=1)[:, ::2],
    ],
    ids=["list", "uint8", "big-endian", "uint64", "fortran", "strided"],
)
def test_integers_of_any_type_and_layout_become_the_same_int32_ids(ids):
    batch = model_batch(ids, V)
    assert batch.ids.dtype == np.int32
    assert batch.ids.tolist() == IDS.tolist()


def test_a_plain_batch_has_no_masks():
    batch = model_batch(IDS, V)
    assert (batch.seq_start, batch.lengths, batch.targets) == (None, None, None)
    assert batch.last.tolist() == [3, 7]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([[0, 1, 2]], r"targets has shape \(1, 3\), expected \(2, 4\) = the shape of ids"),
        (IDS - 1, r"targets\[0, 0\] is -1, expected an id in \[0, 10\), or -100 for a position"),
        (IDS + 3, r"targets\[1, 3\] is 10, expected an id in \[0, 10\), or -100 for a position"),
        (IDS / 2, "targets must be integers, got dtype float64"),
    ],
)
def test_wrong_targets_are_named_with_their_value(targets, message):
    with pytest.raises(ValueError, match=message):
        model_batch(IDS, V, targets=targets)


def test_ignored_targets_are_not_counted():
    targets = IDS.copy()
    targets[0, 1:3] = -100
    assert model_batch(IDS, V, targets=targets).predicted == 6


def test_left_padding_becomes_a_restart_at_the_first_real_position():
    batch = model_batch(IDS, V, attention_mask=[[0, 0, 1, 1], [1, 1, 1, 1]])
    assert batch.seq_start.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert batch.lengths is None
    assert batch.last.tolist() == [3, 7]


def test_right_padding_becomes_a_length():
    batch = model_batch(IDS, V, attention_mask=[[1, 1, 0, 0], [1, 1, 1, 1]])
    assert batch.seq_start is None
    assert batch.lengths.tolist() == [2, 4]
    assert batch.last.tolist() == [1, 7]


def test_padding_on_both_sides_of_a_row_is_understood():
    batch = model_batch(IDS, V, attention_mask=[[0, 1, 1, 0], [1, 1, 1, 1]])
    assert batch.seq_start.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert batch.lengths.tolist() == [3, 4]


def test_a_mask_of_ones_changes_nothing():
    batch = model_batch(IDS, V, attention_mask=np.ones((2, 4)))
    assert (batch.seq_start, batch.lengths) == (None, None)


def test_ids_and_targets_at_masked_positions_are_not_looked_at():
    ids, targets = IDS.copy(), IDS.copy()
    ids[0, 0] = -1
    targets[0, 0] = 99
    batch = model_batch(ids, V, targets=targets, attention_mask=[[0, 1, 1, 1], [1, 1, 1, 1]])
    assert batch.ids[0, 0] == 0
    assert batch.targets[0, 0] == -100
    assert batch.predicted == 7
    assert (ids[0, 0], targets[0, 0]) == (-1, 99)  # the caller's arrays are left alone


def test_targets_beyond_a_length_are_not_predicted():
    batch = model_batch(IDS, V, targets=IDS, lengths=[2, 4])
    assert batch.targets.tolist() == [[0, 1, -100, -100], [4, 5, 6, 7]]


def test_a_mask_and_restarts_combine():
    batch = model_batch(
        IDS, V, attention_mask=[[0, 1, 1, 1], [1, 1, 1, 1]], seq_start=[[0, 0, 0, 1], [1, 0, 0, 0]]
    )
    assert batch.seq_start.tolist() == [[0, 1, 0, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1, 1], [1, 0, 1, 1]], "attention_mask row 1 has a 0 between real positions"),
        ([[0, 1, 0, 1], [1, 1, 1, 1]], "attention_mask row 0 has a 0 between real positions"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "attention_mask row 1 is all 0"),
        ([[1, 1, 1, 1]], r"attention_mask has shape \(1, 4\), expected \(2, 4\)"),
        ([[1, 1, 1, 2], [1, 1, 1, 1]], "attention_mask must hold 1 at real positions and 0 at padding"),
        ([[1, 1, 1, -1], [1, 1, 1, 1]], "attention_mask must hold 1 at real positions"),
        ([["1"] * 4] * 2, "attention_mask must hold 1 at real positions"),
    ],
)
def test_a_wrong_mask_is_named_with_its_row(mask, message):
    with pytest.raises(ValueError, match=message):
        model_batch(IDS, V, attention_mask=mask)


def test_a_mask_and_lengths_together_are_refused():
    with pytest.raises(ValueError, match="attention_mask or lengths, not both"):
        model_batch(IDS, V, attention_mask=np.ones((2, 4)), lengths=[4, 4])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 5], r"lengths\[1\] is 5, expected a value in \[1, 4\]"),
        ([0, 4], r"lengths\[0\] is 0, expected a value in \[1, 4\]"),
        ([-1, 4], r"lengths\[0\] is -1"),
        ([4], r"lengths has shape \(1,\), expected \(2,\)"),
        ([4.0, 4.0], "lengths must be integers"),
    ],
)
def test_wrong_lengths_are_named_with_their_value(lengths, message):
    with pytest.raises(ValueError, match=message):
        check_lengths(lengths, 2, 4)


@pytest.mark.parametrize(
    ("seq_start", "message"),
    [
        (np.zeros((2, 3), bool), r"seq_start has shape \(2, 3\), expected \(2, 4\)"),
        (np.zeros((2, 4)), "seq_start must be bool or integer"),
        (np.zeros((0, 4), bool), "seq_start is empty"),
    ],
)
def test_a_wrong_restart_mask_is_named(seq_start, message):
    with pytest.raises(ValueError, match=message):
        check_seq_start(seq_start, (2, 4))


@pytest.mark.parametrize("kind", [bool, np.int64, np.uint8])
def test_restarts_may_be_bool_or_integers(kind):
    assert check_seq_start(np.eye(2, 4, dtype=kind), (2, 4)).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]


def test_a_row_may_sit_a_piece_of_a_prompt_out():
    batch = piece(IDS, V, lengths=[0, 3])
    assert batch.absent == (0,)
    assert batch.lengths.tolist() == [1, 3]
    assert piece(IDS, V, attention_mask=[[0] * 4, [1] * 4]).absent == (0,)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3], r"ids has shape \(3,\), expected \(2,\)"),
        ([[1], [2]], r"ids has shape \(2, 1\), expected \(2,\)"),
        ([1, 10], r"ids\[1\] is 10, expected an id in \[0, 10\)"),
        ([1.0, 2.0], "ids must be integers"),
    ],
)
def test_wrong_next_ids_are_named(ids, message):
    with pytest.raises(ValueError, match=message):
        next_ids(ids, V, 2)
