"""Contribution of each stage of the search: the same search without it, on each instance.

A stage that proposes plans is judged by the predicted time of the best plan without it, of plans
that tie the fastest, and the bound is left out. A stage of the bound is judged by what is proven
without it below the best plan of the whole search. Work is counted in steps and deterministic time,
so the figures are the same on any machine, but for the seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab.planners.instances import Instance, problem_of
from predictor.csv_rows import Row as Cells
from predictor.csv_rows import number
from predictor.errors import InfeasibleError
from search import solve as spine
from search.bound import lower_bound
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.params import SearchParams
from search.problem import Problem, RankedPlan
from search.propose.annealed import AnnealedPlans
from search.propose.searchers import SEARCHERS
from search.solve import SpaceSearcher
from search.space.option import Space
from search.stop import Stop
from shardopt.measure.store import RowKind, RowsFile

ABLATION = "ablation.csv"
"""File of its rows beside those of the planners."""
WHOLE = "all"
"""Name of the run with every stage."""
CPSAT, OPTUNA = "with cpsat", "with optuna"
Change = tuple[object, str, object]
"""Object, attribute, and the attribute's value without a stage."""


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


PROPOSING: Mapping[str, Sequence[Change]] = {
    "annealing": [(AnnealedPlans, "propose", _nothing)],
    "local search": [(SpaceSearcher, "_improve", _nothing)],
    CPSAT: [],
    OPTUNA: [],
}
"""Proposing stage -> changes that disable it; the last two are not in the default and are added."""
BOUNDING: Mapping[str, Sequence[Change]] = {
    "peaks": [(ExchangeSet, "halves", lambda *_: None)],
    "placing": [(lower_bound, "SMALL", 0)],
}
"""Bounding stage -> changes that disable it."""


@dataclass(frozen=True)
class AblationRow:
    """One instance without one stage.

    Args:
        without: the stage; `WHOLE` where none is left out.
        iteration_ms: of the best plan; None where none was found.
        found_by: stage that found it.
        bound_ms: proven lower bound; None where it was not computed.
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
        if all((instance.name, name) in finished for name in (WHOLE, *PROPOSING, *BOUNDING)):
            continue
        for row in _rows(instance, effort):
            if (row.instance, row.without) not in finished:
                file.append(row)
            bound = "" if row.bound_ms is None else f", bound {row.bound_ms:.4g}"
            best = "no plan" if row.iteration_ms is None else f"{row.iteration_ms:.5g} ms"
            say(f"{row.instance}, {row.without}: {best}{bound}")
    return file.rows


def _rows(instance: Instance, effort: float) -> Iterator[AblationRow]:
    """Yield the rows of an instance; every run starts from a new problem with empty caches."""
    whole, space, seconds = _searched(problem_of(instance), (), effort)
    best = whole.iteration_ms, whole.found_by
    bound_ms, more = _bounded(problem_of(instance), space, (), whole.iteration_ms, effort)
    yield AblationRow(instance.name, WHOLE, *best, bound_ms, seconds + more)
    for name, changes in BOUNDING.items():
        problem = problem_of(instance)
        bound_ms, seconds = _bounded(problem, space, changes, whole.iteration_ms, effort)
        yield AblationRow(instance.name, name, *best, bound_ms, seconds)
    for name, changes in PROPOSING.items():
        proposers = (*SEARCHERS, *(name.split()[1:] if name in (CPSAT, OPTUNA) else ()))
        start = time.process_time()
        try:
            other, _, seconds = _searched(problem_of(instance), changes, effort, proposers)
        except InfeasibleError:
            seconds = time.process_time() - start
            yield AblationRow(instance.name, name, None, "", None, seconds)
        else:
            found_by = other.found_by
            yield AblationRow(instance.name, name, other.iteration_ms, found_by, None, seconds)


def _searched(
    problem: Problem, changes: Sequence[Change], effort: float, proposers: Sequence[str] = SEARCHERS
) -> tuple[RankedPlan, Space, float]:
    """Return the fastest plan, the space it was found in, and seconds of processor time.

    Plans in host memory are compared only where no other fits.
    """
    spaces: list[Space] = []

    def untightened(searcher: SpaceSearcher, best_ms: float) -> float:
        spaces.append(searcher.objective.space)
        return 0.0

    start = time.process_time()
    with _changed(
        *changes,
        (SpaceSearcher, "_tighten", untightened),
        (spine, "_compare_host_memory", lambda best, *_: (best, "")),
    ):
        result = spine.solve(problem, Stop(effort), 0, searchers=proposers, tolerance=0.0)
    return result.fastest or result.best, spaces[-1], time.process_time() - start


def _bounded(
    problem: Problem, space: Space, changes: Sequence[Change], best_ms: float, effort: float
) -> tuple[float, float]:
    """Return the proven lower bound in ms and seconds of processor time."""
    start, steps = time.process_time(), Stop(effort).work(SearchParams.bound_steps)
    with _changed(*changes):
        bound = LowerBound(problem, space, problem.scorer, effort)
        bound.solve(steps, best_ms)
        proven = bound.tighten(steps, best_ms, effort, lambda _: False)
    return proven, time.process_time() - start


@contextmanager
def _changed(*changes: Change) -> Iterator[None]:
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patch.object(*change))
        yield
