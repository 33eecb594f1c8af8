"""Files of data that are damaged, of another kind, out of reach or too large: one clear error each."""

from __future__ import annotations

import errno
import os
import struct
import sys
import tracemalloc

import numpy as np
import pytest

from mamba_fast.data import load_data
from mamba_fast.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def npy(header: bytes, data: bytes = bytes(16)) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


# ---- token files --------------------------------------------------------------------------------------


def test_an_npz_file_of_the_name_npy_is_refused(tmp_path):
    np.savez(tmp_path / "t.npz", ids=np.arange(9))
    (tmp_path / "t.npz").rename(tmp_path / "t.npy")
    with pytest.raises(ValueError, match=r"t\.npy is not a readable \.npy file: "):
        load_data(tmp_path / "t.npy")


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }" + b"\x00\xff" * 4,
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (-2,), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (9" + b"9" * 30 + b",), }",
        b"{'descr': '<i8', 'fortran_order': False, 'shape': (99,), }",
        b"{'descr': ['<i8', 3, ()], 'fortran_order': False, 'shape': (2,), }",
        b"{'descr': {}, 'fortran_order': False, 'shape': (2,), }",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        b"{[]: 1}",
        b"{'descr'",
        b"(" * 5000,
        b"",
    ],
)
def test_a_damaged_npy_header_is_refused_with_the_files_name(tmp_path, header):
    (tmp_path / "t.npy").write_bytes(npy(header))
    with pytest.raises(ValueError, match=r"t\.npy "):
        load_data(tmp_path / "t.npy")


@pytest.mark.parametrize("name", ["T.NPY", "T.Npy"])
def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        np.save(file, np.arange(5))
    assert load_data(tmp_path / name).read(0, 5).tolist() == [0, 1, 2, 3, 4]


def test_raw_ids_and_json_lines_are_known_by_suffixes_in_capitals(tmp_path):
    (tmp_path / "A.BIN").write_bytes(np.arange(5, dtype="<u2").tobytes())
    (tmp_path / "B.JSONL").write_text('{"text": "hi"}\n')
    assert load_data(tmp_path / "A.BIN").read(0, 5).tolist() == [0, 1, 2, 3, 4]
    assert load_data(tmp_path / "B.JSONL", BYTES).read(0, 3).tolist() == [104, 105, BYTES.eos_id]


def test_ids_beyond_63_bits_are_refused_where_they_are_and_not_wrapped(tmp_path):
    np.save(tmp_path / "t.npy", np.array([1, 2, 2**64 - 1], np.uint64))
    data = load_data(tmp_path / "t.npy")
    assert data.read(0, 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match=rf"t\.npy, token 2: id {2**64 - 1} is out of range"):
        data.read(1, 3)


# ---- arrays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: [a, a]], ids=["one", "list"])
def test_a_masked_array_is_refused_because_its_mask_would_be_lost(wrap):
    masked = np.ma.masked_array(np.arange(9), np.arange(9) > 5)
    with pytest.raises(ValueError, match=r"of ids is masked.*compressed\(\)"):
        load_data(wrap(masked))


@pytest.mark.parametrize("ids", [[[1, [2, 3]]], [1, [2, 3]], [1, 10**30]])
def test_ids_that_are_no_flat_list_are_refused(ids):
    with pytest.raises(ValueError, match="the array of ids .*integers"):
        load_data(ids)


# ---- text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"text": ' * 100_000, '{"text": "a", "n": 1' + "0" * 5000 + "}"],
    ids=["lists", "objects", "digits"],
)  # fmt: skip
def test_json_that_python_cannot_take_is_refused_with_file_and_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON that can be read: "):
        load_data(tmp_path / "a.jsonl", BYTES)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_huge_hole_of_a_file_is_refused_at_its_first_byte_and_not_read(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"{name} is binary, .*a zero byte at offset 0"):
            load_data(tmp_path / name, BYTES)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_larger_than_memory_is_named(tmp_path, name):
    (tmp_path / name).write_text('{"text": "hi"}\n')

    class Large(ByteTokenizer):
        def encode_batch(self, texts):
            raise MemoryError

    with pytest.raises(ValueError, match=rf"{name} \(15 bytes\) does not fit into memory"):
        load_data(tmp_path / name, Large())


def test_a_zero_byte_far_into_a_text_is_found(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 100_000 + b"\0")
    with pytest.raises(ValueError, match=r"a\.txt is binary, not text: a zero byte at offset 100000"):
        load_data(tmp_path / "a.txt", BYTES)


def test_a_text_longer_than_its_head_is_read_whole(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 100_000)
    assert len(load_data(tmp_path / "a.txt", BYTES)) == 100_001


# ---- places -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["", [""], ["a", ""]])
def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch, source):
    (tmp_path / "a").write_text("secret")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is an empty path"):
        load_data(source, BYTES)
    assert len(load_data(".", BYTES)) == 7


@pytest.mark.parametrize("glob", ["../*", "sub/../../*"])
def test_a_glob_does_not_leave_the_folder(tmp_path, glob):
    (tmp_path / "inside" / "sub").mkdir(parents=True)
    (tmp_path / "outside.txt").write_text("secret")
    with pytest.raises(ValueError, match=r"is not a pattern inside a folder: it has '\.\.'"):
        load_data(tmp_path / "inside", BYTES, glob=glob)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
def test_a_pipe_is_said_to_be_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe is a pipe or a device.*save it in a file first"):
        load_data(tmp_path / "pipe", BYTES)


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A folder of texts with a subfolder that may not be listed, also where root runs the tests."""
    for name in ("a.txt", "sub/b.txt", "sub/locked/c.txt", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    real = os.scandir

    def refusing(path="."):
        if os.fspath(path).endswith(("locked", ".git")):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refusing)
    return tmp_path


@pytest.mark.parametrize("glob", ["**/*", "**/*.txt", "sub/*/*.txt", "sub/locked/*"])
def test_a_folder_that_may_not_be_read_is_an_error_that_names_it(locked, glob):
    with pytest.raises(PermissionError, match=r"Permission denied: '.*locked'"):
        load_data(locked, BYTES, glob=glob)


@pytest.mark.parametrize("glob", ["*", "*.txt", "sub/*"])
def test_a_folder_that_may_not_be_read_does_no_harm_where_the_glob_does_not_enter_it(locked, glob):
    assert load_data(locked, BYTES, glob=glob).n_documents == 1


def test_a_tokenizer_may_be_given_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("hi")
    assert load_data(tmp_path / "a.txt", "bytes").read(0, 3).tolist() == [104, 105, BYTES.eos_id]
    with pytest.raises(TypeError, match="tokenizer must be a Tokenizer, 'bytes' or a path, got 5"):
        load_data(tmp_path / "a.txt", 5)
