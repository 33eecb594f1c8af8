"""Model files: what is read back, what is refused, and what survives a crash."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from mamba_fast.checkpoint import (
    CheckpointError,
    atomic_folder,
    read_model,
    read_tensors,
    write_bytes,
    write_model,
    write_tensors,
)
from mamba_fast.config import MambaConfig

CONFIG = MambaConfig(vocab_size=24, d_model=8, n_layers=2, d_state=4, d_conv=3)


def weights(seed: int = 0, dtype: type = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "embedding": rng.normal(size=(24, 8)).astype(dtype),
        "final_norm": rng.normal(size=8).astype(dtype),
    }


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(actual) == sorted(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array)


def raw_safetensors(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# ---- what is read back ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_model_comes_back_bit_for_bit(tmp_path, dtype):
    write_model(tmp_path / "m", CONFIG, weights(dtype=dtype))
    config, arrays = read_model(tmp_path / "m")
    assert config == CONFIG
    assert_same(arrays, weights(dtype=dtype))


def test_the_arrays_that_come_back_are_writable_and_independent_of_the_file(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    _, arrays = read_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    arrays["final_norm"][:] = 1.0
    assert arrays["final_norm"].sum() == 8.0


def test_saving_twice_gives_the_same_bytes(tmp_path):
    write_model(tmp_path / "a", CONFIG, weights())
    write_model(tmp_path / "b", CONFIG, weights())
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("layout", ["fortran", "strided", "big-endian", "read-only"])
def test_any_array_layout_is_stored_like_its_contiguous_copy(tmp_path, layout):
    plain = weights()["embedding"]
    given = {
        "fortran": np.asfortranarray(plain),
        "strided": np.repeat(plain, 2, axis=1)[:, ::2],
        "big-endian": plain.astype(">f4"),
        "read-only": plain.copy(),
    }[layout]
    given.flags.writeable = False
    write_tensors(tmp_path / "t.safetensors", {"w": given}, {})
    np.testing.assert_array_equal(read_tensors(tmp_path / "t.safetensors")[0]["w"], plain)


def test_half_precision_weights_are_widened_without_loss(tmp_path):
    half = weights()["embedding"].astype(np.float16)
    save_file({"w": half}, str(tmp_path / "t.safetensors"))
    read = read_tensors(tmp_path / "t.safetensors")[0]["w"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read.astype(np.float16), half)


def test_bfloat16_weights_are_widened_without_loss(tmp_path):
    # 1, -2, 3.140625, the smallest subnormal: the upper halves of the float32 of the same value.
    words = np.array([0x3F80, 0xC000, 0x4049, 0x0001], dtype="<u2")
    header = {"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    (tmp_path / "t.safetensors").write_bytes(raw_safetensors(header, words.tobytes()))
    read = read_tensors(tmp_path / "t.safetensors")[0]["w"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, np.float32([[1, -2], [3.140625, 2.0**-133]]))


def test_the_weights_file_alone_is_a_whole_model(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    (tmp_path / "config.json").unlink()
    config, arrays = read_model(tmp_path)
    assert config == CONFIG
    assert_same(arrays, weights())


def test_weights_from_elsewhere_take_their_configuration_from_config_json(tmp_path):
    save_file(weights(), str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(CONFIG.to_json())
    assert read_model(tmp_path)[0] == CONFIG


# ---- what is refused --------------------------------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model folder .*nowhere"):
        read_model(tmp_path / "nowhere")


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        read_model(tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "m").write_text("hello")
    with pytest.raises(CheckpointError, match="is a file; expected a folder"):
        read_model(tmp_path / "m")


def test_weights_without_any_configuration_are_refused(tmp_path):
    save_file(weights(), str(tmp_path / "model.safetensors"))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_model(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_weights_file_is_refused_with_its_size(tmp_path, keep):
    write_model(tmp_path, CONFIG, weights())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"\({path.stat().st_size} bytes\) is truncated or not"):
        read_model(tmp_path)


def test_a_file_that_is_not_safetensors_is_refused(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(500))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_model(tmp_path)


def test_a_tensor_of_integers_is_refused_by_name(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    save_file({"counts": np.arange(3)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="tensor 'counts' has type I64, expected one of F64, F32"):
        read_model(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_with_name_count_and_place(tmp_path, value):
    damaged = weights()
    damaged["embedding"][2, 3] = damaged["embedding"][5, 1] = value
    (tmp_path / "config.json").write_text(CONFIG.to_json())
    save_file(damaged, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"'embedding' has 2 elements .*\[2, 3\]"):
        read_model(tmp_path)


def test_an_unknown_configuration_key_is_named_with_its_file(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG.to_dict(), "hidden_dropout": 0.1}))
    with pytest.raises(CheckpointError, match=r"config\.json: unknown key 'hidden_dropout'"):
        read_model(tmp_path)


def test_a_configuration_that_contradicts_the_weights_is_refused_with_both_values(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    (tmp_path / "config.json").write_text(CONFIG.replace(norm_eps=1e-5).to_json())
    with pytest.raises(CheckpointError, match=r"norm_eps=1e-05 .* norm_eps=1e-06.* delete config\.json"):
        read_model(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff{}", b""])
def test_a_configuration_that_is_not_a_json_object_is_refused_with_its_file(tmp_path, content):
    write_model(tmp_path, CONFIG, weights())
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model(tmp_path)


def test_saving_weights_that_are_not_finite_leaves_the_old_model(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    broken = weights(1)
    broken["final_norm"][3] = np.nan
    with pytest.raises(ValueError, match=r"'final_norm' has 1 elements .* not saved"):
        write_model(tmp_path, CONFIG, broken)
    assert_same(read_model(tmp_path)[1], weights())


def test_saving_integers_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="tensor 'w' has type int64"):
        write_model(tmp_path / "m", CONFIG, {"w": np.arange(3)})
    assert not (tmp_path / "m").exists()


# ---- what survives ----------------------------------------------------------------------------------

SAVE = """
import os, resource, sys
import numpy as np
from mamba_fast import checkpoint
from mamba_fast.config import MambaConfig

config = MambaConfig(vocab_size=24, d_model=8, n_layers=2, d_state=4, d_conv=3, norm_eps=1e-3)
arrays = {"embedding": np.full((24, 8), 2.0, np.float32), "final_norm": np.full(8, 2.0, np.float32)}
"""


def run(code: str, folder: os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SAVE + code, str(folder)], capture_output=True, text=True, timeout=60
    )


def dying_at(call: int) -> str:
    """A save that dies at one after another of the system calls that it makes."""
    return f"""
left = {call}
def deadly(real):
    def wrapper(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return real(*args, **kwargs)
    return wrapper
for name in ("fsync", "replace", "unlink"):
    setattr(os, name, deadly(getattr(os, name)))
checkpoint.write_model(sys.argv[1], config, arrays)
"""


def assert_old_or_new(folder: os.PathLike[str]) -> None:
    config, arrays = read_model(folder)
    if config == CONFIG:
        assert_same(arrays, weights())
    else:
        assert config.norm_eps == 1e-3
        assert {float(a.mean()) for a in arrays.values()} == {2.0}


@pytest.mark.parametrize("call", range(1, 15))
def test_a_process_killed_during_a_save_leaves_the_old_or_the_new_model_whole(tmp_path, call):
    write_model(tmp_path, CONFIG, weights())
    assert run(dying_at(call), tmp_path).returncode == 9
    assert_old_or_new(tmp_path)
    write_model(tmp_path, CONFIG, weights(3))
    assert_same(read_model(tmp_path)[1], weights(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("call", range(1, 17))
def test_a_killed_save_over_weights_from_elsewhere_leaves_the_old_or_the_new_model_whole(tmp_path, call):
    """Their config.json is the only one: it must not go, nor meet the new weights."""
    metadata = {"format": "pt"} if call % 2 else None
    save_file(weights(), str(tmp_path / "model.safetensors"), metadata=metadata)
    (tmp_path / "config.json").write_text(CONFIG.to_json())
    assert run(dying_at(call), tmp_path).returncode == 9
    assert_old_or_new(tmp_path)
    write_model(tmp_path, CONFIG.replace(norm_eps=1e-2), weights(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes that kills")
def test_a_save_killed_while_it_writes_leaves_nothing_that_the_next_one_does_not_take_away(tmp_path):
    code = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
checkpoint.write_model(sys.argv[1], config, arrays)
"""
    assert run(code, tmp_path).returncode == -signal.SIGXFSZ
    assert [p.name for p in tmp_path.iterdir()] == [".model.safetensors.tmp"]
    write_model(tmp_path, CONFIG, weights())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on file sizes to stand for a full disk")
def test_a_full_disk_leaves_the_old_model_and_no_debris(tmp_path):
    write_model(tmp_path, CONFIG, weights())
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
checkpoint.write_model(sys.argv[1], config, arrays)
"""
    done = run(code, tmp_path)
    assert done.returncode == 1
    assert "OSError: could not write" in done.stderr
    assert_same(read_model(tmp_path)[1], weights())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_an_interrupted_file_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_bytes(tmp_path / "f", b"old")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(tmp_path / "f", b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"f": b"old"}


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    def fill(folder: os.PathLike[str]) -> None:
        with atomic_folder(tmp_path / "step") as temporary:
            (temporary / "a").write_text("a")
            assert not (tmp_path / "step").exists()
            if folder:
                raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fill("fail")
    assert list(tmp_path.iterdir()) == []
    fill("")
    assert [p.name for p in (tmp_path / "step").iterdir()] == ["a"]
    with pytest.raises(FileExistsError, match="exists already"):
        fill("")


# ---- what the files are like --------------------------------------------------------------------------

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")


def permissions(path: os.PathLike[str]) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def umask():
    old = os.umask(0o027)
    yield 0o027
    os.umask(old)


@POSIX
def test_files_have_the_permissions_that_the_umask_gives(tmp_path, umask):
    write_model(tmp_path, CONFIG, weights())
    write_tensors(tmp_path / "optimizer.safetensors", weights(), {})
    write_bytes(tmp_path / "log", b"x")
    assert {permissions(p) for p in tmp_path.iterdir()} == {0o640}


@POSIX
@pytest.mark.parametrize("mode", [0o600, 0o664, 0o444])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mode, umask):
    write_model(tmp_path, CONFIG, weights())
    for path in tmp_path.iterdir():
        path.chmod(mode)
    write_model(tmp_path, CONFIG.replace(norm_eps=1e-3), weights(1))
    assert permissions(tmp_path / "model.safetensors") == mode


@pytest.mark.parametrize("metadata", [{}, {"mamba_fast.config": 'a "quoted" line\nand \x01 Größe ☃'}])
def test_a_file_is_to_the_byte_what_the_library_writes(tmp_path, metadata):
    tensors = {
        **weights(), "Größe": np.zeros((3, 0), np.float32), "scalar": np.array(2.0), "b": np.ones(3),
        "a": np.float32([7.0]),
    }  # fmt: skip
    write_tensors(tmp_path / "t.safetensors", tensors, metadata)
    assert (tmp_path / "t.safetensors").read_bytes() == save(tensors, metadata or None)


def test_a_save_holds_no_second_copy_of_the_weights(tmp_path):
    tensors = {f"layers.{i}.w": np.zeros(1 << 18, np.float32) for i in range(8)}
    write_tensors(tmp_path / "t.safetensors", tensors, {})  # what is imported on first use does not count
    tracemalloc.start()
    try:
        write_tensors(tmp_path / "t.safetensors", tensors, {})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ---- files that the system does not give ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_no_damaged_one(tmp_path, monkeypatch, name):
    write_model(tmp_path, CONFIG, weights())
    real = io.open

    def refusing(file, *args, **options):
        if str(file) == str(tmp_path / name):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *args, **options)

    monkeypatch.setattr("builtins.open", refusing)
    monkeypatch.setattr("io.open", refusing)
    with pytest.raises(PermissionError, match=f"Permission denied: '.*{name}'"):
        read_model(tmp_path)


def test_a_folder_that_may_not_be_looked_into_is_no_missing_model(tmp_path, monkeypatch):
    write_model(tmp_path / "m", CONFIG, weights())
    real = os.stat

    def refusing(path, *args, **options):
        if "model.safetensors" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*model\.safetensors'"):
        read_model(tmp_path / "m")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_full_disk_names_the_file_and_keeps_the_systems_number(tmp_path, monkeypatch):
    real = io.open
    monkeypatch.setattr("builtins.open", lambda file, *args, **options: real("/dev/full", *args, **options))
    with pytest.raises(OSError, match=r"^could not write .*notes\.json: No space left") as caught:
        write_bytes(tmp_path / "notes.json", b"x")
    assert caught.value.errno == errno.ENOSPC


def test_a_target_that_cannot_be_replaced_is_named(tmp_path):
    (tmp_path / "log").mkdir()
    with pytest.raises(OSError, match=r"^could not write .*log: "):
        write_bytes(tmp_path / "log", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    write_model(tmp_path, CONFIG, weights())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the model's folder is an empty path"):
        read_model("")
    with pytest.raises(ValueError, match="the model's folder is an empty path"):
        write_model("", CONFIG, weights(1))
    assert read_model(".")[0] == CONFIG


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"vocab_size": 24, "vocab_size": 24}', '{"n": 1' + "0" * 5000]
)
def test_a_configuration_that_python_cannot_take_is_refused_with_its_file(tmp_path, content):
    write_model(tmp_path, CONFIG, weights())
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: MambaConfig: "):
        read_model(tmp_path)
