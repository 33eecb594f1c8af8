"""The training log: one JSON object a line, so that any tool can follow or plot a run.

Every record has "event" and "step". "train" records hold loss, lr, grad_norm and so on, "validation"
records validation_loss, "warning" records a message. A number that is not finite is written as null:
JSON has no other word for it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mamba_fast.checkpoint import write_bytes, writing_failed
from mamba_fast.config import parse_json

__all__ = ["MetricsLog", "read_log"]


class MetricsLog:
    """An append-only log file. Each record reaches the system as one write of one line.

    Parameters
    ----------
    path
        made anew, unless `resumed_step` is given
    resumed_step
        go on with an existing log: records of later steps, which the resumed run will write again,
        and a last line that a crash cut short are removed first

    OSError, which names the file, where the disk is full or the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, resumed_step: int | None = None) -> None:
        path = Path(path)
        kept: list[dict[str, Any]] = []
        if resumed_step is not None and path.exists():
            kept = [record for record in read_log(path) if record["step"] <= resumed_step]
        write_bytes(path, "".join(map(_line, kept)).encode())
        self._path = path
        # Without a buffer, which would hold a line that a full disk refused and refuse again on closing.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (see close)

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append one record."""
        line = _line({"event": event, "step": step, **values}).encode()
        try:
            while line:  # a nearly full disk takes a part first
                line = line[self._file.write(line) :]
        except OSError as error:
            raise writing_failed(self._path, error) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All records of a log, in order. A last line that was cut short is left out.

    FileNotFoundError without the file; ValueError, with the line's number, for a damaged line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no training log {path}")
    return list(_records(path))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line end is cut short or nothing
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int) or "event" not in record:
            raise ValueError(f"{path}, line {number} is not a record of a training log")
        yield record


def _line(record: dict[str, Any]) -> str:
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
