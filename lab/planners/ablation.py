"""Contribution of each stage of the search: the same search with other parameters, by instance.

A stage is judged by the predicted time of the best plan, among plans that tie the fastest, and by
the proven bound. Work is counted in steps and deterministic time, so only the seconds depend on the
machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from lab.planners.instances import Instance, problem_of
from predictor.csv_rows import Row as Cells
from predictor.csv_rows import number
from predictor.errors import InfeasibleError
from search.params import DEFAULT, SearchParams
from search.solve import SEARCHERS, solve
from search.stop import Stop
from shardopt.measure.store import RowKind, RowsFile

ABLATION = "ablation.csv"
"""File of its rows beside those of the planners."""
WHOLE = "all"
"""Name of the run with every stage."""


@dataclass(frozen=True)
class Change:
    """Searchers and parameters of a search without a stage, or with one more.

    Args:
        proves: the stage is one of the bound, and is judged by it.
    """

    searchers: Sequence[str] = SEARCHERS
    params: SearchParams = DEFAULT
    proves: bool = False


CHANGES: Mapping[str, Change] = {
    WHOLE: Change(),
    "annealing": Change(searchers=()),
    "starts from sets of exchanges": Change(params=SearchParams(sets=0)),
    "annealing to the end": Change(params=SearchParams(finalists=0)),
    "placing a program's options": Change(params=SearchParams(placing=0.0)),
    "generations of finalists": Change(params=SearchParams(generations=1)),
    "merged exchanges": Change(params=SearchParams(merges=0)),
    "cuts of earlier plans": Change(params=SearchParams(cuts=1)),
    "bound: branches at peaks": Change(params=SearchParams(branching=0.0), proves=True),
    "bound: every shard on a rank": Change(params=SearchParams(rank_targets=0.0), proves=True),
    "with cpsat": Change(searchers=(*SEARCHERS, "cpsat")),
    "with optuna": Change(searchers=(*SEARCHERS, "optuna")),
}
"""Name of a stage -> the search without it; the last two are added to the default search."""


@dataclass(frozen=True)
class AblationRow:
    """One instance without one stage.

    Args:
        without: the stage; `WHOLE` where none is left out.
        iteration_ms: of the best plan; None where none was found.
        found_by: stage that found it.
        bound_ms: proven lower bound; None where no plan was found.
        seconds: of processor time.
    """

    instance: str
    without: str
    iteration_ms: float | None
    found_by: str
    bound_ms: float | None
    seconds: float


COLUMNS = tuple(field.name for field in fields(AblationRow))


def _row(cells: Cells) -> AblationRow:
    best, bound = (
        number(cells, column) if cells[column] else None for column in ("iteration_ms", "bound_ms")
    )
    names = cells["instance"], cells["without"]
    return AblationRow(*names, best, cells["found_by"], bound, number(cells, "seconds"))


ABLATION_ROWS = RowKind(
    what="row of the ablation",
    keys=COLUMNS,
    parse=_row,
    fields=lambda row: {
        name: "" if value is None else f"{value:.7g}" if isinstance(value, float) else value
        for name, value in zip(COLUMNS, astuple(row), strict=True)
    },
    comment="# rows of `python -m lab ablate`; see docs/benchmarks.md\n",
    remedy="delete this line to run it again",
)


def ablate(
    instances: Sequence[Instance], rows: Path, effort: float, say: Callable[[str], None]
) -> list[AblationRow]:
    """Run the instances that are not among the rows yet, and write each row once it is known.

    Args:
        say: receives a line for each row.

    Raises:
        InputError: the rows cannot be read or written.
        InfeasibleError: no plan of an instance is found with all stages.
    """
    file = RowsFile(rows, ABLATION_ROWS)
    finished = {(row.instance, row.without) for row in file.rows}
    for instance in instances:
        missing = [name for name in CHANGES if (instance.name, name) not in finished]
        for row in _rows(instance, missing, effort):
            file.append(row)
            bound = "" if row.bound_ms is None else f", bound {row.bound_ms:.4g}"
            best = "no plan" if row.iteration_ms is None else f"{row.iteration_ms:.5g} ms"
            say(f"{row.instance}, {row.without}: {best}{bound}")
    return file.rows


def _rows(instance: Instance, names: Sequence[str], effort: float) -> Iterator[AblationRow]:
    """Yield the rows of an instance; every run starts from a new problem with empty caches."""
    for name in names:
        problem, start = replace(problem_of(instance), scenarios=()), time.process_time()
        best_ms, found_by, bound_ms = None, "", None
        try:
            result = solve(
                problem,
                Stop(effort),
                0,
                tolerance=0.0,
                searchers=CHANGES[name].searchers,
                params=CHANGES[name].params,
            )
        except InfeasibleError:
            if name == WHOLE:
                raise
        else:
            best, bound_ms = result.fastest or result.best, result.lower_bound_ms
            best_ms, found_by = best.iteration_ms, best.found_by
        seconds = time.process_time() - start
        yield AblationRow(instance.name, name, best_ms, found_by, bound_ms, seconds)
