"""What makes a problem infeasible: a smallest set of demands that exclude each other.

Demands are the memory of the ranks, by kind, and each thing that a table's constraints ask for. A
set of them is irreducible when no plan meets it and every smaller one can be met. It is found by
dividing the demands (QuickXplain, Junker 2004) over proofs of CP-SAT. If there are several such
sets, any of them may be found.

Why: docs/decisions/0024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from predictor.errors import InfeasibleError
from predictor.model.workload import Constraints, Table
from predictor.units import format_bytes
from search.problem import Problem
from search.propose.feasibility import can_fit
from search.space.enumerate import enumerate_space
from search.space.filters import deduplicate, prune
from search.space.option import Space

HBM, DDR = "HBM", "host memory"
FIELDS = (
    "ranks",
    "sharding_types",
    "compute_kernels",
    "min_partition",
    "cache_load_factor",
    "enforce_hbm",
)
"""Constraints of one table; ``co_locate`` is a demand of its whole group."""
ENDLESS = 1 << 50
"""Bytes that no table needs."""
MAX_DEMANDS = 400
"""With more, finding the smallest set takes too many proofs."""


@dataclass(frozen=True)
class Demand:
    """Memory of the ranks (``what`` is `HBM` or `DDR`), or a constraint of one table or group.

    Args:
        what: a kind of memory, a key of ``constraints``, or ``co_locate``.
        where: the table's key, the group's name, or empty.
        words: as a user reads it.
    """

    what: str
    where: str
    words: str


@dataclass
class Oracle:
    """Answers whether plans exist; counts its work.

    Args:
        problem: all demands of which hold unless dropped.
        work: deterministic time of CP-SAT for one answer, about seconds on one core.
        answers: how many may still be asked for.
        stop: asked before every answer.
    """

    problem: Problem
    work: float
    answers: int
    stop: Callable[[], bool] = lambda: False
    spent: bool = False

    def fits(self, problem: Problem) -> bool | None:
        """Whether some plan fits, None where that is not known."""
        if self.answers <= 0 or self.stop():
            self.spent = True
            return None
        self.answers -= 1
        space = _space(problem)
        return space is not None and can_fit(problem, space, self.work)

    def space_without(self, dropped: Iterable[Demand]) -> Space | None:
        """The space once these demands are dropped, None where a table has no option in it."""
        return _space(drop_demands(self.problem, dropped))

    def fits_without(self, dropped: Iterable[Demand]) -> bool | None:
        """Whether some plan fits once these demands are dropped."""
        return self.fits(drop_demands(self.problem, dropped))


def _space(problem: Problem) -> Space | None:
    """All options that can be placed; None where a table has none."""
    topology = problem.topology
    try:
        space = enumerate_space(problem.workload, topology, problem.hardware.device)
        return prune(deduplicate(space, topology), topology)
    except InfeasibleError:
        return None


def list_memory_demands(problem: Problem) -> list[Demand]:
    """The memory of the ranks, by kind."""
    topology = problem.topology
    return [
        Demand(kind, "", f"the {kind} of the ranks: {_caps_words(caps)} for tables")
        for kind, caps in ((HBM, topology.hbm_cap_bytes), (DDR, topology.ddr_cap_bytes))
    ]


def list_demands(problem: Problem) -> list[Demand]:
    """Every demand of a problem, memory first."""
    workload = problem.workload
    found = list_memory_demands(problem)
    groups: dict[str, list[str]] = {}
    for key, table in zip(workload.keys, workload.tables, strict=True):
        wants = table.constraints
        for field in FIELDS:
            value = getattr(wants, field)
            if value is not None:
                words = f"constraints.{field} {_value(value)} of table '{key}'"
                found.append(Demand(field, key, words))
        if wants.co_locate is not None:
            groups.setdefault(wants.co_locate, []).append(key)
    for group, keys in groups.items():
        if len(keys) > 1:
            words = f"constraints.co_locate {group} of tables {_listed(keys)}"
            found.append(Demand("co_locate", group, words))
    return found


def _caps_words(caps: Sequence[int]) -> str:
    low, high = min(caps), max(caps)
    if low == high:
        return f"{format_bytes(low)} on each"
    return f"{format_bytes(low)} to {format_bytes(high)} each"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(keys: Sequence[str], most: int = 4) -> str:
    names = ", ".join(f"'{key}'" for key in keys[:most])
    return names if len(keys) <= most else f"{names} and {len(keys) - most} more"


def drop_demands(problem: Problem, dropped: Iterable[Demand]) -> Problem:
    """The problem with some demands dropped."""
    gone = {(demand.what, demand.where) for demand in dropped}
    if not gone:
        return problem
    workload, topology = problem.workload, problem.topology
    tables = tuple(
        replace(table, constraints=_constraints_without(table, key, gone))
        for key, table in zip(workload.keys, workload.tables, strict=True)
    )
    endless = (ENDLESS,) * topology.world_size
    if (HBM, "") in gone:
        topology = replace(topology, hbm_cap_bytes=endless)
    if (DDR, "") in gone:
        topology = replace(topology, ddr_cap_bytes=endless)
    return replace(problem, workload=replace(workload, tables=tables), topology=topology)


def _constraints_without(table: Table, key: str, gone: set[tuple[str, str]]) -> Constraints:
    wants = table.constraints
    fields = [field for field in FIELDS if (field, key) in gone]
    if ("co_locate", wants.co_locate) in gone:
        fields.append("co_locate")
    return replace(wants, **dict.fromkeys(fields, None)) if fields else wants


def find_conflict(oracle: Oracle) -> list[Demand] | None:
    """Demands that no plan meets together, each of which is needed for that.

    Returns:
        None where it is not proven, that no plan fits or that the set is irreducible.
    """
    everything = list_demands(oracle.problem)
    if len(everything) > MAX_DEMANDS or oracle.fits(oracle.problem) is not False:
        return None

    def excluded(kept: Sequence[Demand]) -> bool:
        return oracle.fits_without(set(everything) - set(kept)) is False

    found = _quick_explain(excluded, [], False, everything)
    # an answer that took too long counts as a plan, so what is found may be too large
    return None if oracle.spent or not _is_irreducible(oracle, everything, found) else found


def _quick_explain(
    excluded: Callable[[Sequence[Demand]], bool],
    kept: list[Demand],
    grown: bool,
    rest: list[Demand],
) -> list[Demand]:
    if grown and excluded(kept):
        return []
    if len(rest) == 1:
        return rest
    half = len(rest) // 2
    second = _quick_explain(excluded, kept + rest[:half], True, rest[half:])
    first = _quick_explain(excluded, kept + second, bool(second), rest[:half])
    return first + second


def _is_irreducible(oracle: Oracle, everything: list[Demand], found: list[Demand]) -> bool:
    others = set(everything) - set(found)
    if oracle.fits_without(others) is not False:
        return False
    return all(oracle.fits_without(others | {demand}) is True for demand in found)
