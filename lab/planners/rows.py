"""Rows of the search benchmark: one planner on one instance, as CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from predictor.csv_rows import Row as Cells
from predictor.csv_rows import count, number
from shardopt.measure.store import RowKind

TORCHREC, SHARDOPT, RANDOM = "torchrec", "shardopt", "random"
RATED, RATED_SAME = "shardopt on torchrec's cost", "shardopt on torchrec's cost and options"
OURS = (RATED_SAME, RATED, SHARDOPT)
"""Planners that other modules name; `lab.planners.run` has them all."""
NO_PLAN, KILLED = "no plan", "killed"
"""How a planner ended that found none, and one that was ended from outside."""


@dataclass(frozen=True)
class SearchRow:
    """What one planner made of one instance.

    Args:
        memory: ``loose``, ``tight`` or ``packed``.
        seconds: from the problem to the plan.
        iteration_ms: predicted time of its plan; None without one.
        fits: by shardopt's count of memory; None without a plan.
        rating_ms: TorchRec's rating; ``rating_fits``: by TorchRec's count.
        bound_ms: proven for what the planner minimises.
        ended: how it did; see `lab.planners.run.Outcome`.
        incumbents: (second, ms) of every better plan on the way.
        machine: processor, cores, versions.
        load: load average before.
        sources: digest of the code that it comes from; empty where none was kept.
    """

    instance: str
    tables: int
    gpus: int
    memory: str
    planner: str
    seconds: float
    iteration_ms: float | None
    fits: bool | None
    rating_ms: float | None
    rating_fits: bool | None
    bound_ms: float | None
    ended: str
    incumbents: tuple[tuple[float, float], ...]
    machine: str
    load: float
    sources: str = ""

    @property
    def time_ms(self) -> float | None:
        """Predicted time of a plan that fits; None where there is none."""
        return self.iteration_ms if self.fits else None

    @property
    def rated_ms(self) -> float | None:
        """Rating of a plan that fits by TorchRec's count; None where there is none."""
        return self.rating_ms if self.rating_fits else None

    def seconds_to(self, ms: float) -> float | None:
        """When it first had a plan at least this fast; None if it never had, or does not tell."""
        reached = (at for at, best in self.incumbents if best <= ms * (1 + SAME))
        return next(reached, None)


SAME = 1e-9
"""Relative difference of times that differ by rounding alone."""
COLUMNS = tuple(field.name for field in fields(SearchRow))
_COMMENT = "# rows of `python -m lab search`; see docs/benchmarks.md\n"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(f"{at:.4f}:{ms!r}" for at, ms in value)
    return repr(value) if isinstance(value, float) else str(value)


def _row(cells: Cells) -> SearchRow:
    return SearchRow(
        cells["instance"],
        count(cells, "tables"),
        count(cells, "gpus"),
        cells["memory"],
        cells["planner"],
        number(cells, "seconds"),
        _maybe(cells, "iteration_ms", number),
        _maybe(cells, "fits", _yes),
        _maybe(cells, "rating_ms", number),
        _maybe(cells, "rating_fits", _yes),
        _maybe(cells, "bound_ms", number),
        cells["ended"],
        _incumbents(cells["incumbents"]),
        cells["machine"],
        float(cells["load"]),
        cells["sources"],
    )


def _maybe(cells: Cells, column: str, parse: Callable[[Cells, str], Any]) -> Any:
    return parse(cells, column) if cells[column] else None


def _yes(cells: Mapping[str, str], column: str) -> bool:
    if cells[column] not in ("yes", "no"):
        raise ValueError(f"{column} is '{cells[column]}'; allowed: yes, no, or nothing")
    return cells[column] == "yes"


def _incumbents(text: str) -> tuple[tuple[float, float], ...]:
    try:
        return tuple((float(at), float(ms)) for at, ms in (p.split(":") for p in text.split()))
    except ValueError:
        raise ValueError(f"incumbents is '{text}'; it has pairs such as 0.25:13.7") from None


SEARCH_ROWS = RowKind(
    what="row of the search benchmark",
    keys=COLUMNS,
    parse=_row,
    fields=lambda row: {column: _text(getattr(row, column)) for column in COLUMNS},
    comment=_COMMENT,
    remedy="delete this line to run its planner again",
)
"""For `shardopt.measure.store`: one planner on one instance."""
