"""Ctrl-C and SIGTERM, from the first import to the last line; nothing heavy is imported here.

A scheduler's SIGTERM is one more Ctrl-C, but for the exit code: the first one ends a search with
the best plan so far.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread, Timer, current_thread, main_thread
from types import FrameType

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
MESSAGES = {EXIT_INTERRUPTED: "interrupted", EXIT_TERMINATED: "terminated"}
AGAIN_S = 0.01
PATIENCE = 2
"""Interrupts that raise; a command asked more often ends without cleaning up."""
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def end_at_once(number: int, frame: FrameType | None = None) -> None:
    """End the process here and now, with the message and the exit code of a signal."""
    code = 128 + number
    os.write(2, f"shardopt: error: {MESSAGES[code]}\n".encode())
    os._exit(code)


def end_at_interrupts() -> None:
    """While modules are imported: an exception would count as a failure of one of them."""
    for number in _ours():
        signal.signal(number, end_at_once)


@contextmanager
def remember_interrupts(codes: list[int]) -> Iterator[None]:
    """Append the exit codes of the signals that come meanwhile to ``codes``; the first of them
    raise KeyboardInterrupt all the same, in the block or as it begins."""
    terminated: list[int] = []
    last: list[int] = []
    hook = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs) -> None:
        """Send a signal again if its error was lost in a finalizer or a callback of a fork."""
        if not (codes and last and issubclass(lost.exc_type, KeyboardInterrupt)):
            hook(lost)
            return
        codes.pop()
        Timer(AGAIN_S, os.kill, (os.getpid(), last[0])).start()

    def handle(number: int, frame: FrameType | None) -> None:
        last[:] = [number]
        codes.append(EXIT_TERMINATED if terminated else EXIT_INTERRUPTED)
        if len(codes) > PATIENCE:
            end_at_once(signal.SIGTERM if terminated else number)
        raise KeyboardInterrupt

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        handle(number, frame)

    ours = _ours()
    before = {number: signal.getsignal(number) for number in ours}
    if signal.SIGINT in ours:
        signal.signal(signal.SIGINT, handle)
    elif signal.SIGTERM in ours:  # a shell ignores SIGINT in what it starts in the background
        signal.signal(signal.SIGTERM, terminate)
    with _sigterm_as_sigint(terminated) if len(ours) == len(DEFAULTS) else nullcontext():
        sys.unraisablehook = again
        try:
            yield
        finally:
            sys.unraisablehook = hook
            for number, handler in before.items():
                if handler is not end_at_once:  # the whole process is this command's otherwise
                    signal.signal(number, handler)


@contextmanager
def _sigterm_as_sigint(terminated: list[int]) -> Iterator[None]:
    """Pass SIGTERM on as SIGINT, which solvers in C end at, too; a handler in Python would only run
    once they are done. A thread reads what the C handler of Python writes."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = os.getpid()

    def watch() -> None:
        while numbers := os.read(read, 1):
            if numbers[0] == signal.SIGTERM and os.getpid() == process:
                terminated.append(signal.SIGTERM)
                os.kill(process, signal.SIGINT)
        os.close(read)

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is ignore:  # a fork, whose own business that is
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ignore(*_: object) -> None:
        pass

    Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, ignore)
    fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        os.close(write)


def _ours() -> list[signal.Signals]:
    """Return the signals to handle: none that others handle, and none outside the main thread."""
    if current_thread() is not main_thread():
        return []
    return [n for n, default in DEFAULTS.items() if signal.getsignal(n) in (default, end_at_once)]
