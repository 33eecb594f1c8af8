"""Ctrl-C and SIGTERM as requests to stop at the next good moment."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["Stop", "Terminated", "ctrl_c"]

# SIGTERM is what `kill`, service managers and batch systems send.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated as Ctrl-C is."""


@dataclass
class Stop:
    """Whether somebody asked to stop, and how."""

    requested: bool = False
    terminated: bool = False
    """it was SIGTERM"""

    def error(self, message: str) -> KeyboardInterrupt:
        """What ends the program in its place."""
        return Terminated(message) if self.terminated else KeyboardInterrupt(message)


@contextmanager
def ctrl_c() -> Iterator[Stop]:
    """Makes the first Ctrl-C or SIGTERM a request to stop after the step; a second one acts at once.

    Only in the main thread, where Python delivers signals, and neither where the signal is ignored (a
    background job) nor where SIGTERM has a handler already. The handlers that were there before are put
    back.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handler(number: int, frame: Any) -> None:
        terminated = number == signal.SIGTERM
        if stop.requested:
            raise Terminated if terminated else KeyboardInterrupt
        stop.requested, stop.terminated = True, terminated
        again = "a second SIGTERM stops" if terminated else "press Ctrl-C again to stop"
        with suppress(OSError):  # straight to the descriptor: the stream may be in the middle of a write
            os.write(2, f"\nstopping after this step; {again} at once\n".encode())

    previous = {}
    try:
        for number in _SIGNALS:
            before = signal.getsignal(number)
            ours = number == signal.SIGINT or before == signal.SIG_DFL
            if ours and before not in (None, signal.SIG_IGN):
                previous[number] = before
                signal.signal(number, handler)
        yield stop
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
