"""Explanation why no plan fits, remedies (cheapest first), and the error message.

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
from predictor.model.workload import Constraints
from predictor.units import format_bytes
from search.feasibility import Feasibility, can_fit, least_extra_bytes, least_moves
from search.in_use.plan import find_misfits
from search.objective import Objective
from search.params import SearchParams
from search.problem import Problem
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
"""Number of demands above which the smallest set takes too many proofs."""
WORK = 1.0
"""Deterministic time of one proof at effort 1, about seconds on one core."""
ANSWERS = 60
"""Proofs that the search for an irreducible set may ask for."""
PROOFS_S = 20.0
"""Seconds after which no further proof begins; the error then says what is proven so far."""
LARGEST = 4000
"""Tables times ranks beyond which a proof takes seconds: the error only says what is missing."""
SIZES = 10
"""Largest number of larger clusters that are tried."""
TIMES = (2, 4, 8)
"""Multiples of the hosts that are tried after up to three more hosts."""
GPUS_OF_A_HOST = 8
ADVICE = "\nTo try:"
INPUTS = {HBM: ("hbm_gib", "reserve"), DDR: ("ddr_gib",)}
"""Inputs that give tables more memory."""


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
    """Oracle that answers whether plans exist, and counts its work.

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
        """Return True if some plan fits, False if none does, None if it is unknown."""
        if self.answers <= 0 or self.stop():
            self.spent = True
            return None
        self.answers -= 1
        space = _space(problem)
        return space is not None and can_fit(problem, space, self.work)

    def fits_without(self, dropped: Iterable[Demand]) -> bool | None:
        """Return `fits` once these demands are dropped."""
        return self.fits(drop_demands(self.problem, dropped))


def _space(problem: Problem) -> Space | None:
    """Return all options that can be placed; None if a table has none."""
    topology = problem.topology
    try:
        space = enumerate_space(problem.workload, topology, problem.hardware.device)
        return prune(deduplicate(space, topology), topology)
    except InfeasibleError:
        return None


def list_memory_demands(problem: Problem) -> list[Demand]:
    """List the memory of the ranks as demands, by kind."""
    demands = []
    for kind, caps in (
        (HBM, problem.topology.hbm_cap_bytes),
        (DDR, problem.topology.ddr_cap_bytes),
    ):
        low, high = format_bytes(min(caps)), format_bytes(max(caps))
        each = f"{low} on each" if low == high else f"{low} to {high} each"
        demands.append(Demand(kind, "", f"the {kind} of the ranks: {each} for tables"))
    return demands


def list_demands(problem: Problem) -> list[Demand]:
    """List every demand of a problem, memory first."""
    workload = problem.workload
    demands = list_memory_demands(problem)
    groups: dict[str, list[str]] = {}
    for key, table in zip(workload.keys, workload.tables, strict=True):
        wants = table.constraints
        for field in FIELDS:
            value = getattr(wants, field)
            if value is not None:
                words = f"constraints.{field} {_value(value)} of table '{key}'"
                demands.append(Demand(field, key, words))
        if wants.co_locate is not None:
            groups.setdefault(wants.co_locate, []).append(key)
    for group, keys in groups.items():
        if len(keys) > 1:
            words = f"constraints.co_locate {group} of tables {_listed(keys)}"
            demands.append(Demand("co_locate", group, words))
    return demands


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(keys: Sequence[str], most: int = 4) -> str:
    names = ", ".join(f"'{key}'" for key in keys[:most])
    return names if len(keys) <= most else f"{names} and {len(keys) - most} more"


def drop_demands(problem: Problem, dropped: Iterable[Demand]) -> Problem:
    """Return the problem with some demands dropped."""
    dropped_keys = {(demand.what, demand.where) for demand in dropped}
    workload, topology = problem.workload, problem.topology

    def without(wants: Constraints, key: str) -> Constraints:
        fields = [field for field in FIELDS if (field, key) in dropped_keys]
        if ("co_locate", wants.co_locate) in dropped_keys:
            fields.append("co_locate")
        return replace(wants, **dict.fromkeys(fields, None)) if fields else wants

    tables = tuple(
        replace(table, constraints=without(table.constraints, key))
        for key, table in zip(workload.keys, workload.tables, strict=True)
    )
    endless = (ENDLESS,) * topology.world_size
    if (HBM, "") in dropped_keys:
        topology = replace(topology, hbm_cap_bytes=endless)
    if (DDR, "") in dropped_keys:
        topology = replace(topology, ddr_cap_bytes=endless)
    if (
        DDR if problem.hardware.device == "cpu" else HBM,
        "",
    ) in dropped_keys and topology.limit_bytes:
        topology = replace(topology, limit_bytes=endless)
    return replace(problem, workload=replace(workload, tables=tables), topology=topology)


def find_conflict(oracle: Oracle) -> list[Demand] | None:
    """Find an irreducible set of demands that no plan meets together.

    Returns:
        The demands; None if infeasibility or irreducibility is not proven.
    """
    everything = list_demands(oracle.problem)
    if len(everything) > MAX_DEMANDS or oracle.fits(oracle.problem) is not False:
        return None

    def excluded(demands: Sequence[Demand]) -> bool:
        return oracle.fits_without(set(everything) - set(demands)) is False

    conflict = _quick_explain(excluded, [], False, everything)
    rest = set(everything) - set(conflict)
    # an answer that took too long counts as a plan, so what is found may be too large
    irreducible = not oracle.spent and excluded(conflict)
    irreducible = irreducible and all(
        oracle.fits_without(rest | {demand}) is True for demand in conflict
    )
    return conflict if irreducible else None


def _quick_explain(
    excluded: Callable[[Sequence[Demand]], bool],
    background: list[Demand],
    grown: bool,
    rest: list[Demand],
) -> list[Demand]:
    if grown and excluded(background):
        return []
    if len(rest) == 1:
        return rest
    half = len(rest) // 2
    second = _quick_explain(excluded, background + rest[:half], True, rest[half:])
    first = _quick_explain(excluded, background + second, bool(second), rest[:half])
    return first + second


@dataclass(frozen=True)
class Remedy:
    """Change that makes a plan possible.

    Args:
        inputs: what to change, as in `predictor.errors.ShardoptError`.
    """

    words: str
    inputs: tuple[str, ...] = ()


def explain_infeasible(problem: Problem, error: InfeasibleError, stop: Stop) -> InfeasibleError:
    """Return the error with the conflicting demands and the remedies that the remaining time can
    prove."""
    if len(problem.workload.tables) * problem.topology.world_size > LARGEST:
        return error
    end_s = stop.elapsed_s + min(PROOFS_S, stop.remaining_s)
    work = WORK * max(1.0, stop.effort)
    oracle = Oracle(problem, work, ANSWERS, lambda: stop.elapsed_s > end_s or not stop.remaining_s)
    conflict = find_conflict(oracle)
    text, inputs, lines = str(error), error.inputs, []
    if conflict is not None:
        head = (
            "This demand alone cannot be met; with it dropped, a plan is possible:"
            if len(conflict) == 1
            else "These demands alone cannot be met together; with any one of them dropped, they "
            "can:"
        )
        lines += [head, *(f"  {demand.words}" for demand in conflict)]
    remedies = find_remedies(oracle, list_memory_demands(problem) if conflict is None else conflict)
    if remedies:
        # general advice gives way to what is shown to help
        text = text.partition(ADVICE)[0]
        inputs = tuple(dict.fromkeys(name for r in remedies for name in r.inputs))
        head = "To try; each of these makes a plan possible:"
        lines += [head, *(f"  {remedy.words}" for remedy in remedies)]
    return InfeasibleError("\n".join([text, *lines]), inputs)


def explain_no_plan(
    objective: Objective,
    nearest: Feasibility,
    params: SearchParams,
    stop: Stop,
    seed: int,
) -> InfeasibleError:
    """Return the error of a search without a plan: too few allowed moves or short memory."""
    limit = objective.space.in_use
    if limit is not None and limit.max_moves < len(limit.choices):
        least, moves = least_moves(objective, params.proof_work, seed, max(1.0, stop.remaining_s))
        if moves is not None:
            why = find_misfits(objective)
            return InfeasibleError(_too_few(limit.max_moves, least, moves, why), ("max_moves",))
    return explain_infeasible(objective.problem, missing_memory(objective, nearest), stop)


def _too_few(moves: int, least: int, needed: int, why: Sequence[str]) -> str:
    """Compose the message for a plan that exists, but not within the allowed moves."""
    lines = ["the given plan cannot stay as it is:", *(f"  {reason}" for reason in why)]
    tables = "1 table differs" if moves == 1 else f"{moves} tables differ"
    if least > moves:
        number = f"{least} must" if least == needed else f"{least}, at most {needed} must"
        lines.append(f"No plan fits in which at most {tables} from it: at least {number}")
    else:
        lines.append(
            f"No plan was found in which at most {tables} from it; whether there is one is not "
            f"known, with {needed} there is"
        )
    lines.append(f"To try: allow {needed} {'move' if needed == 1 else 'moves'}")
    return "\n".join(lines)


def find_remedies(oracle: Oracle, conflict: Sequence[Demand]) -> list[Remedy]:
    """List remedies each of which is proven to make a plan possible.

    Args:
        conflict: demands that exclude each other.
    """
    memory = [demand for demand in conflict if demand.what in (HBM, DDR)]
    remedies = [remedy for demand in memory if (remedy := _extra_bytes(oracle, demand))]
    gpus = _gpus(oracle)
    if gpus and memory:
        remedies.append(gpus)
    oracle.answers = max(oracle.answers, len(conflict))
    for demand in conflict:
        if demand not in memory and oracle.fits_without([demand]):
            remedies.append(Remedy(f"dropping {demand.words}"))
    return remedies


def _extra_bytes(oracle: Oracle, demand: Demand) -> Remedy | None:
    """Return the remedy of more memory of a kind; None if none is known."""
    space = _space(drop_demands(oracle.problem, [demand]))
    if space is None:
        return None
    kind = (HBM, DDR).index(demand.what)
    extra, least = least_extra_bytes(oracle.problem, space, kind, oracle.work)
    if not extra:
        return None
    size = f"{'' if least else 'at most '}{format_bytes(extra, round_up=True)}"
    return Remedy(f"{size} more {demand.what} for tables on every rank", INPUTS[demand.what])


def _gpus(oracle: Oracle) -> Remedy | None:
    """Return the smallest larger cluster of the same hosts that is shown to suffice."""
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
    """Yield clusters of more such ranks; none if ranks differ."""
    if len({*topology.hbm_cap_bytes}) > 1 or len({*topology.ddr_cap_bytes}) > 1:
        return
    ranks, local, hosts = topology.world_size, topology.local_world_size, topology.hosts
    several = (hosts + 1, hosts + 2, hosts + 3, *(hosts * f for f in TIMES))
    sizes = {(n * local, local) for n in several}
    if hosts == 1 and local < GPUS_OF_A_HOST:
        sizes = {(n, n) for n in range(ranks + 1, GPUS_OF_A_HOST + 1)}
        sizes |= {(f * GPUS_OF_A_HOST, GPUS_OF_A_HOST) for f in TIMES}
    for world, host in sorted(sizes)[:SIZES]:
        for domain in (topology.nvlink_domain if hosts > 1 else 0, 0):
            try:
                larger = Topology.uniform(
                    world,
                    host,
                    hbm_bytes=topology.hbm_cap_bytes[0],
                    ddr_bytes=topology.ddr_cap_bytes[0],
                    nvlink_domain=domain,
                )
                yield replace(
                    larger,
                    installed_bytes=topology.installed_bytes[:1] * world,
                    limit_bytes=topology.limit_bytes[:1] * world,
                )
            except InputError:
                continue
            break


def missing_memory(objective: Objective, nearest: Feasibility) -> InfeasibleError:
    """Return the error that states the missing memory."""
    topology = objective.problem.topology
    need = sum(min(sum(map(sum, o.bytes_of)) for o in table) for table in objective.space.options)
    hbm, ddr = sum(topology.hbm_cap_bytes), sum(topology.ddr_cap_bytes)
    short = nearest.missing
    if nearest.assignment is not None:  # its shards fit, its peak does not
        short = objective.missing(nearest.assignment)
    lines = [
        f"\n  rank {rank} is short of {format_bytes(size, round_up=True)} of {kind}"
        for rank, sizes in enumerate(short)
        for kind, size in zip((HBM, DDR), sizes, strict=True)
        if size
    ]
    head = "no plan fits" if nearest.proven else "no plan was found that fits"
    head += "; in the plan that comes nearest" + "".join(lines) if lines else ""
    together = " and co_locate" if objective.space.co_locate else ""
    return InfeasibleError(
        f"{head}\nThe tables need at least {format_bytes(need)} in all; the "
        f"{topology.world_size} ranks have {format_bytes(hbm)} of HBM and {format_bytes(ddr)} of "
        "host memory for them.\n"
        "To try: more GPUs, more HBM on each, a smaller reserve, fused_uvm_caching, or looser "
        f"constraints on ranks{together}",
        inputs=("gpus", "hbm_gib", "reserve"),
    )
