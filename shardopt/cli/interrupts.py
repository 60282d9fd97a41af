"""Ctrl-C, from the first import to the last line; nothing heavy is imported here."""

from __future__ import annotations

import os
import signal
from threading import current_thread, main_thread
from types import FrameType

EXIT_INTERRUPTED = 130
MESSAGE = "interrupted"
PATIENCE = 2
"""Interrupts that raise; a command asked more often ends without cleaning up."""


def end_at_once(*_: object) -> None:
    """End the process here and now, with the message and the exit code of an interrupt."""
    os.write(2, f"shardopt: error: {MESSAGE}\n".encode())
    os._exit(EXIT_INTERRUPTED)


def end_at_interrupts() -> None:
    """While modules are imported: an exception would count as a failure of one of them."""
    if _is_ours():
        signal.signal(signal.SIGINT, end_at_once)


def remember_interrupts() -> list[int]:
    """A list that each Ctrl-C lengthens; the first ones raise KeyboardInterrupt all the same."""
    seen: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > PATIENCE:
            end_at_once()
        signal.default_int_handler(number, frame)

    if _is_ours():
        signal.signal(signal.SIGINT, handle)
    return seen


def _is_ours() -> bool:
    """Not where somebody else handles it, nor outside the main thread."""
    return current_thread() is main_thread() and signal.getsignal(signal.SIGINT) in (
        signal.default_int_handler,
        end_at_once,
    )
