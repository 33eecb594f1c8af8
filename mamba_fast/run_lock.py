"""One training at a time in a folder.

The lock is the operating system's, on an open file: it ends with the process that holds it, however
that ends, so a killed training never stands in the way of the next one. What the file says is for
people. It is removed when the training ends; one that a killed process left is taken over.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["LOCK_FILE", "locked"]

LOCK_FILE = "training.lock"

_log = logging.getLogger("mamba_fast")

if os.name == "nt":
    import msvcrt

    def _lock(descriptor: int) -> None:
        # Far behind the content: on Windows nobody else may read what is locked.
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one training; made if it does not exist, and taken away if it stays empty.

    Raises
    ------
    FileExistsError
        another training holds it, in this process or in another
    OSError
        the folder cannot be made or written to
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    try:
        descriptor = _held(path)
        try:
            yield
        finally:
            if os.name == "nt":  # a file that is open cannot be removed there
                os.close(descriptor)
            with suppress(OSError):
                path.unlink()
            if os.name != "nt":  # removed while it is held, so that nobody locks a file on its way out
                os.close(descriptor)
    finally:
        if made:
            with suppress(OSError):  # not empty
                folder.rmdir()


def _held(path: Path) -> int:
    """The descriptor of the lock file, locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                _lock(descriptor)
            except (BlockingIOError, PermissionError):
                raise FileExistsError(
                    f"another training is writing into {path.parent} ({_holder(path)}): wait for it, stop "
                    f"it, or choose another folder"
                ) from None
            except OSError as error:  # a file system without locks
                _log.warning("%s cannot be locked against a second training: %s", path.parent, error)
            if _is_still(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between our opening and our locking: try again


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file that is locked is the one that the next to come will open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "its process is not known"
    except (OSError, ValueError):
        return "its process is not known"
