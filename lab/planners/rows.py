"""Rows of the search benchmark: one planner on one instance, as CSV."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import predictor
import search
from predictor.csv_rows import Row as Cells
from predictor.csv_rows import count, number
from shardopt.extras import needs_torchrec
from shardopt.measure.store import RowKind

TORCHREC, SHARDOPT, RANDOM = "torchrec", "shardopt", "random"
RATED, RATED_SAME = "shardopt on torchrec's cost", "shardopt on torchrec's cost and options"
OURS = (RATED_SAME, RATED, SHARDOPT)
"""Planners that other modules name; `lab.planners.run` has them all."""
NO_PLAN, KILLED = "no plan", "killed"
"""Ends of a planner that found no plan, and of one that was killed at its limit."""
SAME = 1e-9
"""Relative difference below which times differ by rounding alone."""


@dataclass(frozen=True)
class Outcome:
    """Value of a planner's plan by both objectives.

    Args:
        seconds: from the problem to the plan, without imports and reading of files.
        iteration_ms: predicted time; None without a plan.
        fits: true if it fits by shardopt's count of memory.
        rating_ms: TorchRec's; published planners are rated by their best plan under it.
        rating_fits: true if it fits by TorchRec's count.
        bound_ms: proven lower bound on the planner's objective; None where it proves nothing.
        ended: ``work``, ``gap`` or ``time`` as a search ends; ``done``, ``limit``, `NO_PLAN` or
            `KILLED`.
        incumbents: (second, ms) of every incumbent, where the planner reports them.
        found_by: stage that proposed the plan, where the planner reports it.
        stages: seconds of every stage of a search, likewise.
    """

    seconds: float
    iteration_ms: float | None = None
    fits: bool | None = None
    rating_ms: float | None = None
    rating_fits: bool | None = None
    bound_ms: float | None = None
    ended: str = NO_PLAN
    incumbents: tuple[tuple[float, float], ...] = ()
    found_by: str = ""
    stages: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SearchRow(Outcome):
    """Outcome of one planner on one instance.

    Args:
        memory: ``loose``, ``tight`` or ``packed``.
        machine: processor, cores, versions.
        load: load average before the run.
        sources: digest of the code that made the row; empty in rows older than digests.
    """

    instance: str
    tables: int
    gpus: int
    memory: str
    planner: str
    machine: str
    load: float
    sources: str = ""

    @property
    def time_ms(self) -> float | None:
        """Objective (a): predicted time of a plan that fits; None without one."""
        return self.iteration_ms if self.fits else None

    @property
    def rated_ms(self) -> float | None:
        """Objective (b): rating of a plan that fits by TorchRec's count; None without one."""
        return self.rating_ms if self.rating_fits else None

    def seconds_to(self, ms: float) -> float | None:
        """Return the second of the first plan at least this fast; None if there was none.

        A planner that reports no incumbents has its plan at the end.
        """
        most = ms * (1 + SAME)
        reached = next((at for at, best in self.incumbents if best <= most), None)
        if reached is None and self.time_ms is not None and self.time_ms <= most:
            return self.seconds
        return reached


COLUMNS = (
    *("instance", "tables", "gpus", "memory", "planner"),
    *(field.name for field in fields(Outcome)),
    *("machine", "load", "sources"),
)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(
            f"{at:.4f}:{ms!r}" if isinstance(at, float) else f"{at.replace(' ', '-')}:{ms:.3f}"
            for at, ms in value
        )
    return repr(value) if isinstance(value, float) else str(value)


def _yes(cells: Cells, column: str) -> bool:
    if cells[column] not in ("yes", "no"):
        raise ValueError(f"{column} is '{cells[column]}'; allowed: yes, no, or nothing")
    return cells[column] == "yes"


def _incumbents(cells: Cells, column: str) -> tuple[tuple[float, float], ...]:
    text = cells[column]
    try:
        return tuple((float(at), float(ms)) for at, ms in (p.split(":") for p in text.split()))
    except ValueError:
        raise ValueError(f"{column} is '{text}'; it has pairs such as 0.25:13.7") from None


def _stages(cells: Cells, column: str) -> tuple[tuple[str, float], ...]:
    text = cells[column]
    try:
        pairs = (pair.split(":") for pair in text.split())
        return tuple((name.replace("-", " "), float(seconds)) for name, seconds in pairs)
    except ValueError:
        raise ValueError(f"{column} is '{text}'; it has pairs such as rounding:1.25") from None


_PARSERS: Mapping[str, Callable[[Cells, str], Any]] = {
    **dict.fromkeys(("tables", "gpus"), count),
    **dict.fromkeys(("seconds", "iteration_ms", "rating_ms", "bound_ms"), number),
    **dict.fromkeys(("fits", "rating_fits"), _yes),
    "incumbents": _incumbents,
    "stages": _stages,
    "load": lambda cells, column: float(cells[column]),
}
_MAY_LACK = frozenset({"iteration_ms", "fits", "rating_ms", "rating_fits", "bound_ms"})


def _row(cells: Cells) -> SearchRow:
    cells_by_column: dict[str, Any] = {
        column: _PARSERS[column](cells, column) if column in _PARSERS else cells[column]
        for column in COLUMNS
        if cells[column] or column not in _MAY_LACK
    }
    return SearchRow(**cells_by_column)


SEARCH_ROWS = RowKind(
    what="row of the search benchmark",
    keys=COLUMNS,
    parse=_row,
    fields=lambda row: {column: _text(getattr(row, column)) for column in COLUMNS},
    comment="# rows of `python -m lab search`; see docs/benchmarks.md\n",
    remedy="delete this line to run its planner again",
)
"""For `shardopt.measure.store`: one planner on one instance."""

DIGITS = 12
"""Hexadecimal digits of a digest."""
SUFFIXES = (".py", ".yaml", ".csv")
RATING = "baselines"
"""Package of `search` with TorchRec's rating; TorchRec's own rows depend on no other."""


@cache
def sources_of(planner: str) -> str:
    """Return the digest of the code that makes a planner's rows; rows of other code run again.

    It covers `predictor` with its profiles, which scores every plan, `search`, and this package
    with its instances. TorchRec's planners do not use our search; their digest has torchrec's
    version instead.

    Raises:
        MissingPackageError: a planner of TorchRec is asked for, and torchrec is not installed.
    """
    theirs = planner.startswith(TORCHREC)
    search_folder = Path(search.__file__).parent
    folders = [Path(predictor.__file__).parent, search_folder / RATING if theirs else search_folder]
    with needs_torchrec():
        digest = hashlib.sha256(metadata.version("torchrec").encode() if theirs else b"")
    for folder in [*folders, Path(__file__).parent]:
        for path in (path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES):
            digest.update(f"\0{folder.name}/{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGITS]
