"""Where tokens come from, how they are split, and the windows that training reads."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_fast.data import (
    IGNORED,
    TokenData,
    TokenizerNeededError,
    Windows,
    evenly,
    load_data,
    shuffled,
)
from mamba_fast.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
EOS = BYTES.eos_id


def text_of(data: TokenData) -> list[int]:
    return data.read(0, len(data)).tolist()


def encoded(*texts: str) -> list[int]:
    return [i for text in texts for i in [*text.encode(), EOS]]


# ---- windows --------------------------------------------------------------------------------------


def numbered_documents(lengths: Sequence[int]) -> list[np.ndarray]:
    """Documents in which every token is its own position in the stream."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda x: sum(x) >= 2), st.integers(1, 9))
def test_every_pair_of_a_document_comes_up_exactly_once(lengths, seq_len):
    documents = numbered_documents(lengths)
    windows = Windows(load_data(documents), seq_len)
    pairs = []
    for ids, targets, _ in windows:
        pairs += [(int(i), int(t)) for i, t in zip(ids, targets, strict=True) if t != IGNORED]
    assert sorted(pairs) == [(int(i), int(i) + 1) for document in documents for i in document[:-1]]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda x: sum(x) >= 2), st.integers(1, 9))
def test_the_state_restarts_at_the_first_token_of_each_document(lengths, seq_len):
    documents = numbered_documents(lengths)
    firsts = {int(document[0]) for document in documents}
    windows = Windows(load_data(documents), seq_len)
    for number, (ids, _, seq_start) in enumerate(windows):
        for t in range(seq_len):
            position = number * seq_len + t
            if position < sum(lengths) - 1:  # beyond is padding
                assert ids[t] == position
                assert seq_start[t] == (position in firsts)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8).filter(lambda x: sum(x) >= 2), st.integers(1, 9))
def test_an_unpacked_stream_is_one_document(lengths, seq_len):
    windows = Windows(load_data(numbered_documents(lengths)), seq_len, packed=False)
    pairs = []
    for ids, targets, seq_start in windows:
        assert not seq_start.any()
        pairs += [(int(i), int(t)) for i, t in zip(ids, targets, strict=True) if t != IGNORED]
    assert pairs == [(i, i + 1) for i in range(sum(lengths) - 1)]


def test_an_end_of_text_id_inside_a_stream_ends_a_document():
    class Ends:
        eos_id = 9

    stream = np.array([1, 2, 9, 3, 4, 5, 9, 6])
    ids, targets, seq_start = Windows(load_data(stream, Ends()), 7)[0]
    assert ids.tolist() == [1, 2, 9, 3, 4, 5, 9]
    assert targets.tolist() == [2, 9, IGNORED, 4, 5, 9, IGNORED]
    assert np.flatnonzero(seq_start).tolist() == [0, 3]


def test_the_last_window_is_padded_with_ignored_targets():
    ids, targets, _ = Windows(load_data(np.arange(1, 8)), 4)[1]
    assert ids.tolist() == [5, 6, 0, 0]
    assert targets.tolist() == [6, 7, IGNORED, IGNORED]


def test_a_batch_without_restarts_inside_has_no_mask():
    windows = Windows(load_data([np.arange(8), np.arange(9)]), 4)
    ids, targets, seq_start = windows.batch([0, 2])
    assert ids.shape == targets.shape == (2, 4)
    assert seq_start is None
    assert windows.batch([1, 3])[2] is None
    assert Windows(load_data([np.arange(7), np.arange(9)]), 4).batch([1])[2].tolist() == [[0, 0, 0, 1]]


def test_windows_have_the_ends_of_a_sequence():
    windows = Windows(load_data(np.arange(9)), 4)
    assert len(windows) == 2
    np.testing.assert_array_equal(windows[-1][0], windows[1][0])
    with pytest.raises(IndexError, match="window 2 of 2"):
        windows[2]


def test_a_single_token_has_nothing_to_predict():
    with pytest.raises(ValueError, match="1 tokens hold nothing to predict"):
        Windows(load_data([3]), 4)


@pytest.mark.parametrize(("bad", "value"), [(70, "70"), (-1, "-1")])
def test_an_id_out_of_range_is_named_with_its_place_when_its_window_is_read(bad, value):
    stream = np.arange(40)
    stream[33] = bad
    windows = Windows(load_data(stream), 8, vocab_size=64)
    windows[0]
    with pytest.raises(
        ValueError, match=rf"array of ids, token 33: id {value} is out of range, expected 0 to 63"
    ):
        windows[4]


@pytest.mark.parametrize("seq_len", [7, 8, 10**12])
def test_data_shorter_than_a_window_makes_a_window_of_its_own_length(seq_len):
    windows = Windows(load_data(np.arange(1, 9)), seq_len)
    assert (len(windows), windows.seq_len) == (1, 7)
    ids, targets, seq_start = windows.batch([0])
    assert ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert targets.tolist() == [[2, 3, 4, 5, 6, 7, 8]]
    assert seq_start is None


# ---- orders ---------------------------------------------------------------------------------------


def test_a_shuffled_order_is_a_permutation_fixed_for_all_time():
    order = shuffled(1000, 7, 3)
    assert sorted(order.tolist()) == list(range(1000))
    # Of PCG64's raw bits, which numpy promises never to change.
    assert shuffled(10, 7, 3).tolist() == [2, 4, 7, 3, 5, 1, 8, 9, 0, 6]
    assert (
        hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
        == "160278cb88d645cb32d9c289e687b1a986c6d1a89154881b7488fc8858704447"
    )


@pytest.mark.parametrize("other", [(7, 4), (8, 3), (7,)])
def test_another_seed_or_epoch_gives_another_order(other):
    assert shuffled(100, 7, 3).tolist() != shuffled(100, *other).tolist()


@given(st.integers(1, 200), st.integers(0, 60))
def test_evenly_spread_numbers_are_distinct_and_at_most_one_gap_apart(count, wanted):
    chosen = evenly(count, wanted)
    assert len(chosen) == (min(count, wanted) if wanted else count)
    assert chosen == sorted(set(chosen))
    assert chosen[0] >= 0
    assert chosen[-1] < count
    gaps = np.diff([*chosen]) if len(chosen) > 1 else np.array([1])
    assert gaps.max() - gaps.min() <= 1


# ---- splitting ------------------------------------------------------------------------------------


def numbers(data: TokenData | None) -> set[int]:
    assert data is not None
    return set(text_of(data))


def test_whole_documents_are_held_out():
    lengths = [13, 40, 7, 22, 31, 9, 18, 25, 35, 11, 14, 28]
    documents = numbered_documents(lengths)
    training, held_out = load_data(documents).split(0.2, seed=1)
    together = numbers(training) | numbers(held_out)
    assert together == set(range(sum(lengths)))
    assert len(training) + len(held_out) == sum(lengths)
    for document in documents:
        assert set(document.tolist()) <= numbers(training) or set(document.tolist()) <= numbers(held_out)
    assert 0.1 * sum(lengths) <= len(held_out) <= 0.2 * sum(lengths)


def test_the_seed_decides_which_documents_are_held_out():
    data = load_data(numbered_documents([10] * 50))
    assert text_of(data.split(0.1, 0)[1]) == text_of(data.split(0.1, 0)[1])
    assert text_of(data.split(0.1, 0)[1]) != text_of(data.split(0.1, 1)[1])


def test_a_single_stream_is_split_at_its_end():
    training, held_out = load_data(np.arange(100)).split(0.05, seed=0)
    assert text_of(training) == list(range(95))
    assert text_of(held_out) == list(range(95, 100))


def test_documents_too_large_to_hold_out_are_split_at_the_end_of_the_stream():
    training, held_out = load_data(numbered_documents([50, 50])).split(0.1, seed=0)
    assert text_of(training) == list(range(90))
    assert text_of(held_out) == list(range(90, 100))


def test_a_cut_through_several_documents_keeps_their_borders():
    training, held_out = load_data(numbered_documents([60, 1, 39])).split(0.8, seed=0)
    assert numbers(training) | numbers(held_out) == set(range(100))
    assert len(training) + len(held_out) == 100


@pytest.mark.parametrize(("tokens", "fraction"), [(100, 0.0), (3, 0.5)])
def test_nothing_is_held_out_where_nothing_is_asked_for_or_there_is_too_little(tokens, fraction):
    data = load_data(np.arange(tokens))
    assert data.split(fraction, 0) == (data, None)


def test_a_fraction_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\), got 1.5"):
        load_data(np.arange(10)).split(1.5, 0)


# ---- fingerprints ---------------------------------------------------------------------------------


def test_a_fingerprint_depends_on_the_tokens_and_not_on_how_they_are_stored(tmp_path):
    ids = np.arange(1000) % 50
    (tmp_path / "t.bin").write_bytes(ids.astype("<u2").tobytes())
    np.save(tmp_path / "t.npy", ids.astype(np.int64))
    same = {load_data(s).fingerprint() for s in (ids, tmp_path / "t.bin", tmp_path / "t.npy")}
    assert len(same) == 1


def test_a_fingerprint_changes_with_a_token_and_with_a_document_border():
    ids = np.arange(1000) % 50
    changed = ids.copy()
    changed[777] += 1
    prints = {load_data(s).fingerprint() for s in (ids, changed, [ids[:10], ids[10:]], [ids[:11], ids[11:]])}
    assert len(prints) == 4


# ---- text -----------------------------------------------------------------------------------------


def test_a_text_file_is_one_document_with_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes("héllo\r\n".encode())
    data = load_data(tmp_path / "a.txt", BYTES)
    assert text_of(data) == encoded("héllo\r\n")
    assert data.n_documents == 1


def test_a_folder_is_read_in_the_order_of_names_whatever_the_order_on_disk(tmp_path):
    for name in ("b.txt", "a/z.txt", "a.txt", "c/d/e.txt", "B.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    data = load_data(str(tmp_path), BYTES)
    assert text_of(data) == encoded("B.txt", "a/z.txt", "a.txt", "b.txt", "c/d/e.txt")
    assert data.n_documents == 5


def test_a_glob_chooses_files(tmp_path):
    for name in ("a.py", "b.txt", "sub/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert text_of(load_data(tmp_path, BYTES, glob="**/*.py")) == encoded("a.py", "sub/c.py")
    assert text_of(load_data(tmp_path, BYTES, glob="*.py")) == encoded("a.py")


def test_hidden_and_empty_files_of_a_folder_are_left_out(tmp_path):
    for name in (".git/config", ".hidden", "sub/.cache/x", "seen.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    assert text_of(load_data(tmp_path, BYTES)) == encoded("seen.txt")
    assert text_of(load_data(tmp_path, BYTES, glob=".hidden")) == encoded(".hidden")


def test_a_list_of_paths_keeps_its_order(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    assert text_of(load_data([tmp_path / "b", str(tmp_path / "a")], BYTES)) == encoded("b", "a")


def test_json_lines_are_documents(tmp_path):
    lines = [{"text": "one", "id": 1}, {"text": ""}, {"text": "zwei ü"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    data = load_data(tmp_path / "d.jsonl", BYTES)
    assert text_of(data) == encoded("one", "zwei ü")
    assert data.n_documents == 2


def test_the_field_of_json_lines_can_be_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"body": "x"}')
    assert text_of(load_data(tmp_path / "d.jsonl", BYTES, text_field="body")) == encoded("x")


def test_more_documents_than_one_batch_of_the_tokenizer_keep_their_order(tmp_path):
    texts = [f"document {i}" for i in range(2500)]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    data = load_data(tmp_path / "d.jsonl", BYTES)
    assert data.n_documents == 2500
    assert text_of(data) == encoded(*texts)


def test_a_tokenizer_without_an_end_of_text_id_appends_nothing(tmp_path):
    class NoEnd(ByteTokenizer):
        eos_id = None

    (tmp_path / "a.txt").write_text("ab")
    assert text_of(load_data(tmp_path / "a.txt", NoEnd())) == [97, 98]


def test_text_with_a_large_vocabulary_keeps_its_ids(tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 200_000
        eos_id = 150_000

    (tmp_path / "a.txt").write_text("ab")
    assert text_of(load_data(tmp_path / "a.txt", Large())) == [97, 98, 150_000]


def test_reading_text_shows_a_bar_if_asked(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab")
    load_data(tmp_path / "a.txt", BYTES, progress=True)
    assert "read text: 100%" in capsys.readouterr().err
    load_data(tmp_path / "a.txt", BYTES)
    assert capsys.readouterr().err == ""


# ---- token files and arrays -------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [("<u2", None), ("<u2", "uint16"), ("<u4", "uint32")])
def test_a_raw_token_file_is_mapped_and_not_read(tmp_path, dtype, name):
    ids = (np.arange(5000) * 7) % 1000 + 1
    (tmp_path / "t.bin").write_bytes(ids.astype(dtype).tobytes())
    data = load_data(tmp_path / "t.bin", token_dtype=name)
    assert isinstance(data._stores[0].ids, np.memmap)
    assert data.read(4000, 4010).tolist() == ids[4000:4010].tolist()


@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
def test_a_token_file_larger_than_memory_can_be_used(tmp_path):
    # 2^40 tokens in a sparse file, of which a few exist: reading all of it could not end well.
    with open(tmp_path / "t.bin", "wb") as file:
        file.write(np.arange(1, 101, dtype="<u2").tobytes())
        file.truncate(1 << 41)
    data = load_data(tmp_path / "t.bin", token_dtype="uint16")
    training, held_out = data.split(0.1, 0)
    assert len(training) + len(held_out) == len(data) == 1 << 40
    assert Windows(training, 50, vocab_size=200)[1][0].tolist() == list(range(51, 101))
    assert len(data.fingerprint()) == 64


def test_a_numpy_token_file_is_mapped(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(100, dtype=">u4"))
    data = load_data(tmp_path / "t.npy")
    assert isinstance(data._stores[0].ids, np.memmap)
    assert text_of(data) == list(range(100))


def test_token_files_and_text_can_be_mixed(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.array([5, 6, 7], "<u2").tobytes())
    (tmp_path / "b.txt").write_text("x")
    assert text_of(load_data(tmp_path, BYTES)) == [5, 6, 7, *encoded("x")]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(20)[::2],
        np.arange(10, dtype=">i4") * 2,
        np.arange(10, dtype=np.uint8) * 2,
        (np.arange(10) * 2).tolist(),
        range(0, 20, 2),
    ],
    ids=["strided", "big-endian", "uint8", "list", "range"],
)
def test_any_array_of_integers_is_a_stream(array):
    assert text_of(load_data(array)) == list(range(0, 20, 2))


def test_token_data_is_returned_as_it_is():
    data = load_data(np.arange(10))
    assert load_data(data) is data


# ---- bad input --------------------------------------------------------------------------------------


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nothing\.txt"):
        load_data(tmp_path / "nothing.txt", BYTES)


def test_a_glob_that_matches_nothing_is_named_with_its_folder(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(FileNotFoundError, match=rf"no file in {tmp_path} matches the glob '\*\.md'"):
        load_data(tmp_path, BYTES, glob="*.md")


@pytest.mark.parametrize("glob", ["/abs/*", ""])
def test_a_glob_that_is_no_pattern_inside_a_folder_is_refused(tmp_path, glob):
    with pytest.raises(ValueError, match="is not a pattern inside a folder"):
        load_data(tmp_path, BYTES, glob=glob)


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.npy", "a.jsonl"])
def test_an_empty_file_that_is_named_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name} is empty"):
        load_data(tmp_path / name, BYTES)


def test_a_folder_of_empty_files_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match="there is no text in it"):
        load_data(tmp_path, BYTES)


def test_text_that_is_not_utf8_is_refused_with_file_and_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes("déjà".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text: byte 0xe9 at offset 1"):
        load_data(tmp_path, BYTES)


def test_a_binary_file_is_refused_with_the_offset(tmp_path):
    (tmp_path / "a.o").write_bytes(b"ELF\0\1")
    with pytest.raises(ValueError, match=r"a\.o is binary, not text: a zero byte at offset 3"):
        load_data(tmp_path / "a.o", BYTES)


def test_files_that_are_no_text_can_be_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.o").write_bytes(b"\0")
    assert text_of(load_data(tmp_path, BYTES, skip_undecodable=True)) == encoded("b")


def test_text_without_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(TokenizerNeededError, match="is text: give a tokenizer"):
        load_data(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", "line 2 is not JSON"),
        (b"\xff", "line 2 is not UTF-8: byte 0xff at 0"),
        (b"[1]", "line 2 is a list, expected an object with a field 'text'"),
        (b'{"body": "x"}', "line 2 has no field 'text'; it has 'body'"),
        (b'{"text": 5}', "line 2: field 'text' is a int, expected a string"),
        (b'{"text": "\\ud800"}', "line 2: field 'text' has half of a surrogate pair"),
    ],
)
def test_a_wrong_line_of_json_is_refused_with_its_number(tmp_path, line, message):
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"d\.jsonl, {message}"):
        load_data(tmp_path / "d.jsonl", BYTES)


def test_a_raw_token_file_of_a_wrong_size_is_refused(tmp_path):
    (tmp_path / "t.bin").write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"t\.bin has 5 bytes, not a multiple of 2 as uint16 ids are"):
        load_data(tmp_path / "t.bin")


def test_uint32_ids_are_not_taken_for_uint16(tmp_path):
    (tmp_path / "t.bin").write_bytes(np.arange(100, dtype="<u4").tobytes())
    with pytest.raises(ValueError, match="looks like uint32 ids, not uint16: say token_dtype='uint32'"):
        load_data(tmp_path / "t.bin")
    assert len(load_data(tmp_path / "t.bin", token_dtype="uint16")) == 200


def test_an_unknown_token_type_is_refused(tmp_path):
    with pytest.raises(ValueError, match="token_dtype must be 'uint16' or 'uint32', got 'int8'"):
        load_data(tmp_path, token_dtype="int8")


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((2, 2), int), np.zeros(0, int)])
def test_a_numpy_file_of_something_else_is_refused(tmp_path, array):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(ValueError, match=r"t\.npy .*expected integers of shape \(n,\)"):
        load_data(tmp_path / "t.npy")


def test_a_file_that_only_claims_to_be_numpy_is_refused(tmp_path):
    (tmp_path / "t.npy").write_text("hello there")
    with pytest.raises(ValueError, match=r"t\.npy is not a readable \.npy file"):
        load_data(tmp_path / "t.npy")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros(3), "the array of ids has type float64, expected integers"),
        (np.array([True, False]), "has type bool, expected integers"),
        ([1.5, 2.0], "has type float64, expected integers"),
        (np.zeros((2, 3), int), r"has shape \(2, 3\), expected \(n,\)"),
        (np.zeros(0, int), r"has shape \(0,\), expected \(n,\) with n at least 1"),
        ([[1, 2], []], r"array 1 of ids has shape \(0,\)"),
        ([], "data must be a path, a list of paths, an array of ids or a TokenData, got"),
        (None, "data must be a path"),
    ],
)
def test_data_that_is_none_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        load_data(source)
