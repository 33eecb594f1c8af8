"""Ctrl-C as a request to stop at the next good moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["Stop", "ctrl_c"]


@dataclass
class Stop:
    """Whether Ctrl-C was pressed."""

    requested: bool = False


@contextmanager
def ctrl_c() -> Iterator[Stop]:
    """Makes the first Ctrl-C a request to stop after the step; a second one acts at once.

    Only in the main thread, where Python delivers signals, and not where Ctrl-C is ignored (a
    background job). The handler that was there before is put back.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous in (None, signal.SIG_IGN):
        yield stop
        return

    def handler(number: int, frame: Any) -> None:
        if stop.requested:
            signal.default_int_handler(number, frame)
        stop.requested = True
        with suppress(OSError):  # straight to the descriptor: the stream may be in the middle of a write
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    signal.signal(signal.SIGINT, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
