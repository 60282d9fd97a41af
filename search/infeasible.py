"""What would make an infeasible problem feasible, cheapest first, and the message about it.

What makes a problem infeasible: a smallest set of demands that exclude each other.

Demands are the memory of the ranks, by kind, and each thing that a table's constraints ask for. A
set of them is irreducible when no plan meets it and every smaller one can be met. It is found by
dividing the demands (QuickXplain, Junker 2004) over proofs of CP-SAT. If there are several such
sets, any of them may be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from predictor.errors import InfeasibleError, InputError
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, Table
from predictor.units import format_bytes
from search.in_use.plan import PlanInUse, find_misfits
from search.objective import Objective
from search.problem import Problem
from search.propose.feasibility import Feasibility, can_fit, least_extra_bytes, least_moves
from search.propose.searchers import FEASIBILITY_WORK
from search.space.enumerate import enumerate_space
from search.space.filters import deduplicate, prune
from search.space.option import Space
from search.stop import Stop

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


WORK = 1.0
"""Deterministic time of one proof at effort 1, about seconds on one core."""
ANSWERS = 60
"""Proofs that the search for an irreducible set may ask for."""
PROOFS_S = 20.0
"""Seconds after which no further proof is begun; the error then says what is known by then."""
LARGEST = 4000
"""Tables times ranks beyond which a proof takes seconds: the error only says what is missing."""
SIZES = 10
"""Larger clusters that are tried, at most."""
TIMES = (2, 4, 8)
"""Multiples of the hosts that are tried after up to three more hosts."""
GPUS_OF_A_HOST = 8
ADVICE = "\nTo try:"
INPUTS = {HBM: ("hbm_gib", "reserve"), DDR: ("ddr_gib",)}
"""What a user changes to have more memory for tables."""


@dataclass(frozen=True)
class Remedy:
    """One thing that makes a plan possible.

    Args:
        inputs: what to change, as in `predictor.errors.ShardoptError`.
    """

    words: str
    inputs: tuple[str, ...] = ()


def explain_infeasible(problem: Problem, error: InfeasibleError, stop: Stop) -> InfeasibleError:
    """The error with the demands that exclude each other and what would help, as far as the time
    left allows to prove them."""
    size = len(problem.workload.tables) * problem.topology.world_size
    end_s = stop.elapsed_s + min(PROOFS_S, stop.remaining_s)
    work = WORK * max(1.0, stop.effort)
    oracle = Oracle(problem, work, ANSWERS, lambda: stop.elapsed_s > end_s or not stop.remaining_s)
    found = find_conflict(oracle) if size <= LARGEST else None
    text, inputs = str(error), error.inputs
    parts: list[str] = []
    if found is not None:
        head = "These demands alone cannot be met together; with any one of them dropped, they can:"
        parts.append("\n".join([head, *(f"  {demand.words}" for demand in found)]))
    if size <= LARGEST:
        told = find_remedies(oracle, list_memory_demands(problem) if found is None else found)
        if told:
            # general advice gives way to what is shown to help
            text = text.partition(ADVICE)[0]
            inputs = tuple(dict.fromkeys(name for r in told for name in r.inputs))
            head = "To try; each of these makes a plan possible:"
            parts.append("\n".join([head, *(f"  {remedy.words}" for remedy in told)]))
    return InfeasibleError("\n".join([text, *parts]), inputs)


def explain_no_plan(
    objective: Objective,
    nearest: Feasibility,
    in_use: PlanInUse | None,
    stop: Stop,
    seed: int,
) -> InfeasibleError:
    """The error of a search without a plan: too few moves are allowed, or memory is short."""
    limit = objective.space.in_use
    if in_use is not None and limit is not None and limit.max_moves < len(limit.choices):
        work = FEASIBILITY_WORK * max(1.0, stop.effort)
        least, found = least_moves(objective, work, seed, max(1.0, stop.remaining_s))
        if found is not None:
            why = find_misfits(objective.space, objective.problem, in_use)
            return InfeasibleError(_too_few(limit.max_moves, least, found, why), ("max_moves",))
    return explain_infeasible(objective.problem, missing_memory(objective, nearest), stop)


def _too_few(moves: int, least: int, found: int, why: Sequence[str]) -> str:
    """What to say where a plan exists, but none was found within the moves allowed."""
    lines = ["the given plan cannot stay as it is:", *(f"  {reason}" for reason in why)]
    tables = "1 table differs" if moves == 1 else f"{moves} tables differ"
    if least > moves:
        number = f"{least} must" if least == found else f"{least}, at most {found} must"
        lines.append(f"No plan fits in which at most {tables} from it: at least {number}")
    else:
        lines.append(
            f"No plan was found in which at most {tables} from it; whether there is one is not "
            f"known, with {found} there is"
        )
    lines.append(f"To try: allow {found} {'move' if found == 1 else 'moves'}")
    return "\n".join(lines)


def find_remedies(oracle: Oracle, found: Sequence[Demand]) -> list[Remedy]:
    """Each alone makes a plan possible, which is proven.

    Args:
        found: demands that exclude each other.
    """
    told = []
    for demand in found:
        extra = _extra_bytes(oracle, demand)
        if extra:
            told.append(extra)
    gpus = _gpus(oracle)
    if gpus and any(d.what in (HBM, DDR) for d in found):
        told.append(gpus)
    oracle.answers = max(oracle.answers, len(found))
    for demand in found:
        if demand.what not in (HBM, DDR) and oracle.fits_without([demand]):
            told.append(Remedy(f"dropping {demand.words}"))
    return told


def _extra_bytes(oracle: Oracle, demand: Demand) -> Remedy | None:
    if demand.what not in (HBM, DDR):
        return None
    kind = (HBM, DDR).index(demand.what)
    space = oracle.space_without([demand])
    if space is None:
        return None
    extra, least = least_extra_bytes(oracle.problem, space, kind, oracle.work)
    if not extra:
        return None
    word = "" if least else "at most "
    size = f"{word}{extra} bytes ({format_bytes(extra)})"
    return Remedy(f"{size} more {demand.what} for tables on every rank", INPUTS[demand.what])


def _gpus(oracle: Oracle) -> Remedy | None:
    """The smallest larger cluster of the same hosts that is shown to do."""
    least = True
    oracle.answers = max(oracle.answers, SIZES)
    for topology in _larger(oracle.problem.topology):
        fits = oracle.fits(replace(oracle.problem, topology=topology))
        if fits:
            ranks, hosts = topology.world_size, topology.hosts
            word = "" if least else "at most "
            where = f"{hosts} hosts of {topology.local_world_size}" if hosts > 1 else "one host"
            return Remedy(f"{word}{ranks} GPUs of this kind ({where})", ("gpus",))
        least = least and fits is False
    return None


def _larger(topology: Topology) -> Iterator[Topology]:
    """Clusters of more such ranks; none where ranks differ."""
    if len({*topology.hbm_cap_bytes}) > 1 or len({*topology.ddr_cap_bytes}) > 1:
        return
    ranks, local, hosts = topology.world_size, topology.local_world_size, topology.hosts
    sizes = [
        (n * local, local) for n in (hosts + 1, hosts + 2, hosts + 3, *(hosts * f for f in TIMES))
    ]
    if hosts == 1 and local < GPUS_OF_A_HOST:
        one_host = [(n, n) for n in range(ranks + 1, GPUS_OF_A_HOST + 1)]
        sizes = [*one_host, *((f * GPUS_OF_A_HOST, GPUS_OF_A_HOST) for f in TIMES)]
    for world, host in sorted({*sizes})[:SIZES]:
        for domain in (topology.nvlink_domain if hosts > 1 else 0, 0):
            try:
                yield Topology.uniform(
                    world,
                    host,
                    hbm_bytes=topology.hbm_cap_bytes[0],
                    ddr_bytes=topology.ddr_cap_bytes[0],
                    nvlink_domain=domain,
                )
            except InputError:
                continue
            break


def missing_memory(objective: Objective, known: Feasibility) -> InfeasibleError:
    """The error that says what is missing."""
    topology, options = objective.problem.topology, objective.space.options
    need = sum(min(sum(m.hbm_bytes + m.ddr_bytes for m in o.memory) for o in t) for t in options)
    hbm, ddr = sum(topology.hbm_cap_bytes), sum(topology.ddr_cap_bytes)
    lines = [
        f"  rank {rank} is short of {size} bytes ({format_bytes(size)}) of {kind}"
        for rank, sizes in enumerate(known.missing)
        for kind, size in zip(("HBM", "host memory"), sizes, strict=True)
        if size
    ]
    head = "no plan fits" if known.proven else "no plan was found that fits"
    best = ["; in the plan that comes nearest", *lines] if lines else [""]
    together = " and co_locate" if objective.space.co_locate else ""
    return InfeasibleError(
        head + "\n".join(best) + f"\nThe tables need at least {format_bytes(need)} in all; the "
        f"{topology.world_size} ranks have {format_bytes(hbm)} of HBM and {format_bytes(ddr)} of "
        "host memory for them.\n"
        "To try: more GPUs, more HBM on each, a smaller reserve, fused_uvm_caching, or looser "
        f"constraints on ranks{together}",
        inputs=("gpus", "hbm_gib", "reserve"),
    )
