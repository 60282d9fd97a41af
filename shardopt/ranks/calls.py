"""Calls in a process of their own, ended when their time is up.

The processes are forked from a server that has imported what they need and done nothing else: a
call finds no caches warm and leaves none behind, and its time has no imports in it. They may have
processes of their own.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from predictor.errors import ShardoptError

T = TypeVar("T")


class CallError(ShardoptError):
    """A call ended without an answer: it raised something unforeseen, or its process died."""


class OutOfTime(ShardoptError):  # noqa: N818  # an outcome, not a fault
    """A call did not end in its time."""


class CallServer:
    """Makes calls with a limit.

    Args:
        modules: that the server imports; the functions called are from among them.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))

    def call(self, limit_s: float | None, function: Callable[..., T], *args: object) -> T:
        """Call the function in the server and return its result.

        Args:
            limit_s: wall time after which the process is killed; None for no limit.

        Raises:
            OutOfTime: it was.
            ShardoptError: as the function raises it.
            CallError: anything else that goes wrong.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(sender, function, args))
        process.start()
        sender.close()
        try:
            if not receiver.poll(limit_s):
                raise OutOfTime(f"no answer in {limit_s:g} s")
            answer, error = receiver.recv()
        except EOFError:
            process.join()
            raise CallError(f"its process ended with exit code {process.exitcode}") from None
        finally:
            process.kill()
            process.join()
            receiver.close()
        if error is not None:
            raise error
        return answer


def _answer(sender: Connection, function: Callable[..., Any], args: Sequence[object]) -> None:
    try:
        sender.send((function(*args), None))
    except ShardoptError as error:
        sender.send((None, error))
    except Exception:
        sender.send((None, CallError(traceback.format_exc())))
