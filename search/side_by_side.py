"""Runs pieces of work at the same time where there are cores for it, with the same results.

The pieces run in forked processes, which have all that is known so far without it being sent.
Where forking is not safe or gains nothing, they run one after the other: with torch loaded, whose
threads do not survive a fork, so also in the hook on a training rank; in a daemon, which may have
no children; on one core. A piece must depend on nothing that another one changes.

Why: docs/decisions/0069.
"""

from __future__ import annotations

import contextlib
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
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

DEATH_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class CutPiece(KeyboardInterrupt):
    """Ctrl-C came, and this is the result so far."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


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
    workers = _start(pieces, shared, count) if count > 1 else []
    if workers:
        yield from _collect(pieces, shared, workers)
        return
    for piece in pieces:
        try:
            yield piece()
        except CutPiece as cut:
            yield cut.result
            raise KeyboardInterrupt from None


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, process: ForkProcess, pipe: Connection) -> None:
        self.process, self.pipe = process, pipe
        self.piece: int | None = None

    def begin(self, piece: int | None) -> None:
        """Send it the number of its next piece; None ends it."""
        self.piece = piece
        with contextlib.suppress(OSError):  # it died, which `receive` finds
            self.pipe.send(piece)

    def receive(self) -> bytes | None:
        """The pickled result of its piece; None if it died."""
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None


def _start(
    pieces: Sequence[Callable[[], T]], shared: Sequence[object], count: int
) -> list[_Worker]:
    """Forked processes that wait for numbers of pieces; none if there cannot be any."""
    workers: list[_Worker] = []
    context = multiprocessing.get_context("fork")
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for _ in range(count):
            here, there = Pipe()
            ours = [here, *(w.pipe for w in workers)]
            process = context.Process(target=_serve, args=(pieces, shared, there, ours))
            process.daemon = True
            with warnings.catch_warnings():
                # threads that this process has are those of numpy and of the progress shown
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            workers.append(_Worker(process, here))
    except OSError:  # no more processes than these
        pass
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return workers


class _CtrlC:
    """While work goes on: the first Ctrl-C is passed on to the processes and remembered."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self.workers = workers
        self.came = False
        self.before: Any = None

    def __enter__(self) -> _CtrlC:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.before = signal.signal(signal.SIGINT, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _pass_on(self, *_: object) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        for worker in self.workers:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGINT)


def _collect(
    pieces: Sequence[Callable[[], T]], shared: Sequence[object], workers: list[_Worker]
) -> Iterator[T]:
    """Hand out the pieces, and yield their results in order."""
    left = list(range(len(pieces)))[::-1]
    found: dict[int, T] = {}
    shown = 0
    try:
        with _CtrlC(workers) as ctrl_c:
            for worker in workers:
                worker.begin(left.pop())
            while busy := [w for w in workers if w.piece is not None]:
                ready = wait([w.pipe for w in busy])
                for worker in (w for w in busy if w.pipe in ready):
                    _take(worker, None if ctrl_c.came else pieces, shared, found)
                    worker.begin(left.pop() if left and not ctrl_c.came else None)
                while shown in found:
                    yield found.pop(shown)
                    shown += 1
        yield from (found[piece] for piece in sorted(found))
    finally:
        _end(workers)
    if ctrl_c.came:
        raise KeyboardInterrupt


def _take(
    worker: _Worker,
    pieces: Sequence[Callable[[], T]] | None,
    shared: Sequence[object],
    found: dict[int, T],
) -> None:
    """Enter the result of a worker's piece; of one that died it is found here, if there are pieces
    for that."""
    piece, sent = worker.piece, worker.receive()
    assert piece is not None
    if sent is not None:
        has_result, result = _Reader(io.BytesIO(sent), shared).load()
        if has_result:
            found[piece] = result
    elif pieces is not None:
        found[piece] = pieces[piece]()


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.process.kill()
        worker.pipe.close()
    for worker in workers:
        worker.process.join()
        worker.process.close()


def _serve(
    pieces: Sequence[Callable[[], T]],
    shared: Sequence[object],
    pipe: Connection,
    others: Sequence[Connection],
) -> NoReturn:
    """What a process does: run pieces until there are no more."""
    ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
    gc.freeze()  # what the parent has is not looked through again, nor copied for that
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, _once)
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        while (piece := pipe.recv()) is not None:
            pipe.send_bytes(_run(pieces[piece], shared))
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    except BaseException:  # the parent runs the piece itself, and says what is wrong
        code = 1
    os._exit(code)


def _once(*_: object) -> NoReturn:
    """Ctrl-C reaches a process from the terminal and from its parent; one of them counts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(piece: Callable[[], T], shared: Sequence[object]) -> bytes:
    answer: tuple[bool, T | None]
    try:
        answer = True, piece()
    except CutPiece as cut:
        answer = True, cut.result
    except KeyboardInterrupt:
        answer = False, None
    written = io.BytesIO()
    _Writer(written, shared).dump(answer)
    return written.getvalue()


class _Writer(pickle.Pickler):
    """Writes objects that both sides have as their numbers."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self.numbers = {id(one): number for number, one in enumerate(shared)}

    def persistent_id(self, obj: object) -> int | None:
        return self.numbers.get(id(obj))


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` wrote."""

    def __init__(self, file: io.BytesIO, shared: Sequence[object]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, pid: int) -> object:
        return self.shared[pid]
