"""Why a module does not run on fake tensors, in terms of the user's own code."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from predictor.errors import InputError
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import fbgemm_gpu
    import torch
    import torchrec
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    from shardopt.torchrec.capture.recorder import Recorder

OTHER_WAYS = (
    "'dense: {measured: {...}}' in the model file (dense= of to_yaml) with times from a trace, or "
    "a DLRM that comes near, 'dense: {bottom_mlp: ..., top_mlp: ...}'"
)
_LONGEST = 300


@contextlib.contextmanager
def blamed(recorder: Recorder) -> Iterator[None]:
    """Turn what goes wrong within into an error that names the op and the user's line.

    Raises:
        InputError: with the other ways to describe the dense part.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(_why(error, recorder)) from error


def _why(error: Exception, recorder: Recorder) -> str:
    op = _op(error) or recorder.under_way
    where = _user_line(error.__traceback__)
    ways = f"other ways in: {OTHER_WAYS}"
    part = list(recorder.recording.marks or {"forward": 0})[-1]
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        what = "depends on the values of its input, and a capture computes none"
    elif isinstance(error, UnsupportedOperatorException | NotImplementedError):
        what = "has no kernel for fake tensors; register one with torch.library.register_fake"
    else:
        reason = " ".join(str(error).split())[:_LONGEST]
        what = f"fails: {type(error).__name__}: {reason}"
        ways = f"other ways in: example_inputs= with a batch that the module can run, {OTHER_WAYS}"
    at = f" at {where}" if where else f" in the {part}"
    return f"the module cannot be captured: {f'op {op}' if op else 'it'}{at} {what}; {ways}"


def _op(error: Exception) -> str:
    """Name of the op that fake tensors refused; other errors do not tell."""
    func: Any = getattr(error, "func", None)
    if isinstance(func, torch._ops.OpOverload):
        return str(func)
    return ""


def _user_line(trace: TracebackType | None) -> str:
    """File, line and text of the innermost frame that is the user's own."""
    libraries = [
        Path(str(package.__file__)).parent for package in (torch, torchrec, fbgemm_gpu, contextlib)
    ]
    inside = tuple(f"{folder}{os.sep}" for folder in (*libraries, Path(__file__).parents[2]))
    frames = traceback.extract_tb(trace)
    own = [f for f in frames if not f.filename.startswith((*inside, "<"))]
    if not own:
        return ""
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno} ({(frame.line or frame.name).strip()[:100]})"
