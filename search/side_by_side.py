"""Runs pieces of work at the same time where there are cores for it, with the same results.

Each piece runs in a forked process, which has all that is known so far without it being sent, and
ends with it. Where forking is not safe or gains nothing, the pieces run one after the other: with
torch loaded, whose threads do not survive a fork, so also in the hook on a training rank; in a
daemon, which may have no children; on one core. A piece must depend on nothing that another one
changes.
"""

from __future__ import annotations

import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
LOOK_S = 0.5
"""Longest wait in seconds: a signal that another thread of this process took does not end it."""


def usable_cores() -> int:
    """Processes that may run side by side from here; 1 where none may be forked."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return 1
    if multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0))


def side_by_side(pieces: Sequence[Callable[[], T]], shared: Sequence[object]) -> Iterator[T]:
    """The result of every piece, in their order.

    Args:
        pieces: work that changes nothing that the caller needs; results are pickled.
        shared: objects in results that are not copied, but the same ones as here.

    Raises:
        KeyboardInterrupt: Ctrl-C came; after all results that there are by then.
    """
    count = min(usable_cores(), len(pieces))
    if count > 1:
        yield from _forked(pieces, shared, count)
    else:
        for piece in pieces:
            yield piece()


def _forked(pieces: Sequence[Callable[[], T]], shared: Sequence[object], count: int) -> Iterator[T]:
    """The results of pieces that run in at most ``count`` processes at a time."""
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    results: dict[int, T] = {}
    begun = shown = 0
    try:
        while running or begun < len(pieces):
            while begun < len(pieces) and len(running) < count:
                if not _start(pieces[begun], begun, shared, running):
                    if running:
                        break  # no more processes than these
                    results[begun] = pieces[begun]()
                begun += 1
            for pipe in wait(list(running), LOOK_S) if running else ():
                assert isinstance(pipe, Connection)
                number, process = running.pop(pipe)
                sent = _received(pipe)
                process.join()
                if sent is None:  # it died or failed, which is found out here
                    results[number] = pieces[number]()
                else:
                    results[number] = _Reader(io.BytesIO(sent), shared).load()
            while shown in results:
                yield results.pop(shown)
                shown += 1
    except KeyboardInterrupt:
        yield from (results[number] for number in sorted(results))
        raise
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _start(
    piece: Callable[[], Any],
    number: int,
    shared: Sequence[object],
    running: dict[Connection, tuple[int, ForkProcess]],
) -> bool:
    """Fork a process for a piece; False if there cannot be one."""
    here, there = Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_serve, args=(piece, shared, there), daemon=True
    )
    try:
        with _interrupted_later(), warnings.catch_warnings():
            # threads that this process has are those of numpy and of the progress shown
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
            running[here] = number, process
            return True
    except OSError:
        here.close()
        return False
    finally:
        there.close()


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """A Ctrl-C that comes while the block forks is handled after it: what a handler raises inside
    the callbacks of a fork is lost, and a child has no handler of its own yet."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread alone
        return
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _received(pipe: Connection) -> bytes | None:
    """The pickled result of a piece; None if its process died."""
    with pipe:
        try:
            return pipe.recv_bytes()
        except (EOFError, OSError):
            return None


def _serve(piece: Callable[[], Any], shared: Sequence[object], pipe: Connection) -> NoReturn:
    """Run a piece in a child process, which its parent ends, and send the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
    gc.freeze()  # what the parent has is not looked through again, nor copied for that
    code = 0
    try:
        written = io.BytesIO()
        _Writer(written, shared).dump(piece())
        pipe.send_bytes(written.getvalue())
    except BaseException:  # the parent runs the piece itself, and says what is wrong
        code = 1
    os._exit(code)


class _Writer(pickle.Pickler):
    """Writes objects that both sides have as their numbers."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self.numbers = {id(item): number for number, item in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self.numbers.get(id(obj))


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` wrote."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, pid: int) -> object:
        return self.shared[pid]
