"""Checks of the input of `bench generate` and `bench replay`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
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
            f"ids cannot be drawn by {text!r}; give uniform or zipf:ALPHA with ALPHA from 0 to "
            f"{MAX_ALPHA:g}, such as zipf:1.05",
            inputs=("indices",),
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


@dataclass(frozen=True)
class Scale:
    """Size of a benchmark over that of its traces.

    Args:
        batch: its samples over theirs, from 1.
        tables: its embedding tables over theirs, from 1.
    """

    batch: int = 1
    tables: int = 1


PART = re.compile(r"(batch|tables)=(\d{1,9})", re.ASCII)


def check_scale(scale: str | None, doubled: Path | None, *, join: bool = False) -> Scale:
    """Read the scale of a benchmark.

    Args:
        doubled: trace of the job at twice the batch.

    Raises:
        InputError: the scale cannot be read, or the traces do not support it.
    """
    parsed = Scale() if scale is None else _parse_scale(scale)
    if doubled is None and "batch=" in (scale or ""):
        raise InputError(
            f"{scale}: one trace does not tell which of its sizes grow with the batch; give a "
            "trace of the same job at twice the batch too",
            inputs=("scale", "doubled"),
        )
    if doubled is not None and "batch=" not in (scale or ""):
        raise InputError(
            f"{doubled} is for a scaled batch only; give the scale too, such as batch=2",
            inputs=("doubled", "scale"),
        )
    if scale is not None and join:
        raise InputError("joined traces cannot be scaled", inputs=("scale", "join"))
    return parsed


def _parse_scale(scale: str) -> Scale:
    parts = [PART.fullmatch(part) for part in scale.split(",")]
    factors = {part[1]: int(part[2]) for part in parts if part}
    if len(factors) < len(parts) or not all(1 <= times <= MAX_TIMES for times in factors.values()):
        raise InputError(
            f"{scale!r} is no scale; give batch=N, tables=N or both, such as batch=2,tables=2, "
            f"with N from 1 to {MAX_TIMES}",
            inputs=("scale",),
        )
    return Scale(**factors)


def check_tables(tables: Path | None, plan: Path | None, *, join: bool = False) -> None:
    """Refuse options that do not go with a table summary.

    Raises:
        InputError: a plan without a summary, or a summary of several jobs.
    """
    if plan is not None and tables is None:
        raise InputError(
            "a plan says which tables a rank has; give the model file with the tables too",
            inputs=("plan", "tables"),
        )
    if tables is not None and join:
        raise InputError(
            "a model file has the tables of one job, not of joined ones", inputs=("tables", "join")
        )
