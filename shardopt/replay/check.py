"""Checks of what a user gives to `bench generate` and `bench replay`."""

from __future__ import annotations

import math
from pathlib import Path

from predictor.errors import InputError

MAX_ALPHA = 10.0
MAX_TIMES = 4096


def check_indices(text: str) -> None:
    """Refuse anything but ``uniform`` and ``zipf:ALPHA`` with ALPHA from 0 to 10.

    Raises:
        InputError: says what is allowed.
    """
    kind, _, alpha = text.partition(":")
    if text == "uniform":
        return
    try:
        value = float(alpha) if kind == "zipf" else math.nan
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_ALPHA:
        raise InputError(
            f"--indices is {text!r}; give uniform or zipf:ALPHA with ALPHA from 0 to "
            f"{MAX_ALPHA:g}, such as zipf:1.05"
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than a benchmark.

    Raises:
        InputError: the path is a file, or a folder with other files in it.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; give a folder to write the benchmark into")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "data.json").is_file():
        raise InputError(f"{folder}: holds other files; give an empty or a new folder")
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise InputError(f"{folder}: there is no directory {folder.parent}; create it first")


def check_scale(scale: str | None, doubled: Path | None, *, join: bool) -> int:
    """How many times its traces' batch a benchmark has.

    Raises:
        InputError: something that cannot be scaled, or cannot be scaled so.
    """
    if scale is None:
        if doubled is not None:
            raise InputError("--doubled is for --scale batch=N; give that too")
        return 1
    name, _, number = scale.partition("=")
    if name != "batch" or not number.isdecimal() or not 1 <= int(number) <= MAX_TIMES:
        raise InputError(
            f"--scale {scale}: give batch=N with N from 1 to {MAX_TIMES}; nothing else scales: "
            "what tables hold is not in a trace"
        )
    if doubled is None:
        raise InputError(
            f"--scale {scale} needs --doubled TRACE, the same job captured at twice the batch: "
            "one trace does not tell which of its sizes are the batch's"
        )
    if join:
        raise InputError("--scale and --join do not go together; give one of them")
    return int(number)
