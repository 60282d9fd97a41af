"""Advisor: changes outside the plan and the time each would save.

Every step of the knobs is tried with the best plan. The plan is predicted again, or placed again
if the ranks differ or it no longer fits. The best steps get a short new search and are combined
while that helps. Advice is ranked by time per sample and shown only if it gains more than the
tolerance of ties. Every setting that was not tried is named with the reason. Other machines are
listed apart, because the model file has no such setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from predictor.errors import InfeasibleError, InputError, ShardoptError
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.plan_check import match_plan
from predictor.units import MIB, format_bytes
from search.improve.annealing import Annealer, AnnealingTask
from search.improve.merges import ExchangeMerges
from search.objective import Objective
from search.params import SearchParams
from search.partitioner import GreedyPartitioner
from search.prefer import TOLERANCE
from search.problem import Problem
from search.side_by_side import side_by_side, usable_cores
from search.space.enumerate import reduced_space
from search.space.option import Option
from search.surrogate import Surrogate
from search.tune.knobs import PARAMETERS, Case, Step, Value, refusals, steps, turned
from search.tune.script import script_steps

SOURCES: tuple[Callable[[Case], Iterator[Step]], ...] = (steps, script_steps)
"""Sources of steps: settings of the model file, and settings of the training script."""
REPLANNED = 2
"""Number of best steps that get a new search."""
ROUNDS = 6
"""Rounds of annealing from the plan of one step."""
JOINED = 4
"""Number of best steps that are tried together."""
NAMED_BYTES = 64 * MIB
"""Increase of memory on the fullest rank from which advice mentions it."""
FASTER = 2.0
"""Factor on the network's rate for the faster network that is tried."""
NO_TIME = "no time was left"
ALWAYS_PRICED = 2**16
"""Tables times ranks up to which every setting is priced even after the deadline: a few seconds."""
STEP_S, STEP_CELL_S = 0.05, 2e-6
"""Seconds to price one setting, and seconds more per table times rank, on one core of 2024.
`reserve_s` sets time aside by them; no result depends on them."""
FIRST = (
    "dense.data_type",
    "dense.pairs",
    "OMP_NUM_THREADS",
    "bounds_check_mode",
    "qcomm",
    "index_dedup",
    "dense.compiled",
    "train_pipeline",
    "batch_size",
)
"""Settings that are priced first, as time may run out: they have gained most."""
EACH_VALUE = frozenset(("dense.data_type",))
"""Settings listed with every value that gains, because the values affect training differently."""
MOST_WORK = 2**20
"""Tables times ranks above which other machines are not tried."""


@dataclass(frozen=True)
class Advice:
    """A step, or several together, with the predicted gain.

    Args:
        steps: what to change; one, or several that were tried together.
        case: with the changes.
        plan: the best known for it.
        iteration_ms: of that plan.
        gain: share of the time per sample that goes; negative where it grows.
        costs: what it takes, in words.
        same_plan: the plan is the one that was given.
    """

    steps: tuple[Step, ...]
    case: Case
    plan: ShardingPlan
    iteration_ms: float
    gain: float
    costs: tuple[str, ...]
    same_plan: bool


@dataclass(frozen=True)
class OtherMachine:
    """The best plan known on another machine: ``gpus``, or ``network`` in times of its rate.

    Args:
        gain: share of the time per sample of the whole job that goes.
        gpu_time: of a sample, as a multiple of what it is.
    """

    name: str
    value: Value
    iteration_ms: float
    gain: float
    gpu_time: float


@dataclass(frozen=True)
class NotTried:
    """A setting that the advisor did not price, and why.

    Args:
        name: of the setting, as in `Step`; with the value and the table where only these failed.
    """

    name: str
    why: str


@dataclass(frozen=True)
class Advised:
    """Results of the advisor.

    Args:
        advice: single steps, best first.
        together: several of them, where that beats the first by more than ties differ.
        machines: other numbers of GPUs and another network.
        tried: number of steps that were predicted.
        not_tried: settings that could not be predicted here, with the reason of each.
    """

    advice: tuple[Advice, ...] = ()
    together: Advice | None = None
    machines: tuple[OtherMachine, ...] = ()
    tried: int = 0
    not_tried: tuple[NotTried, ...] = ()


class Advisor:
    """Tries steps around a plan.

    Args:
        plan: a good one for the case.
        iteration_ms: of the plan.
        effort: of planning again, as a multiple of the default.
        left_s: returns the seconds left. What was found is returned before a step that takes as
            long as the longest so far would end too late. Up to `ALWAYS_PRICED` the list of advice
            does not depend on it.
    """

    def __init__(
        self,
        case: Case,
        plan: ShardingPlan,
        iteration_ms: float,
        *,
        effort: float = 1.0,
        left_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.case, self.plan, self.iteration_ms = case, plan, iteration_ms
        self.effort, self.left_s, self._longest_s = effort, left_s, 0.0
        self.is_small = len(plan.tables) * case.ranks <= ALWAYS_PRICED
        problem = case.problem()
        self.loads = problem.scorer.shards
        self.memory = _memory(problem, plan)

    def late(self) -> bool:
        """Return True if there is no time for a step as long as the longest so far."""
        return self.left_s() <= self._longest_s

    def pricing_late(self) -> bool:
        """Return True if there is no time to price another setting."""
        return not self.is_small and self.late()

    def advise(self) -> Advised:
        """Return all advice worth showing; deterministic unless time runs out."""
        priced = list(self._single(self.steps()))
        tried = [outcome for outcome in priced if isinstance(outcome, Advice)]
        best = _one_a_name(a for a in tried if a.gain > TOLERANCE)
        best = [*map(self._again, best[:REPLANNED]), *best[REPLANNED:]]
        best.sort(key=lambda a: -a.gain)
        not_tried = [NotTried(name, why) for name, why in refusals(self.case).items()]
        not_tried += [outcome for outcome in priced if isinstance(outcome, NotTried)]
        machines = tuple(self._machines())
        return Advised(tuple(best), self._together(best), machines, len(tried), tuple(not_tried))

    def choose(self, advised: Advised, numbers: Sequence[int]) -> Advice:
        """Combine some of the advice, by number from 1.

        Raises:
            InputError: there is no such advice, or no plan fits under all of it.
        """
        there = len(advised.advice)
        for number in numbers:
            if not 1 <= number <= there:
                allowed = f"1 to {there}" if there else "none, as nothing gains"
                raise InputError(f"there is no advice {number}; there is {allowed}", ("advice",))
        selected = [advised.advice[n - 1] for n in dict.fromkeys(numbers)]
        chosen = tuple(step for advice in selected for step in advice.steps)
        for advice in (selected[0], advised.together):
            if advice is not None and set(advice.steps) == set(chosen):
                return advice
        combined = self.found(chosen, selected[0].plan)
        if combined is None:
            raise InputError("no plan fits under all of this advice; choose less", ("advice",))
        return combined

    def found(self, chosen: Sequence[Step], plan: ShardingPlan) -> Advice | None:
        """Predict steps together with a plan, or with a similar one if it no longer fits.

        Returns:
            None if nothing fits, or the steps exclude each other.
        """
        predicted = self._predicted(chosen, plan)
        if isinstance(predicted, str):
            return None
        return self._advice(chosen, self._turned(chosen), *predicted)

    def _single(self, every: Sequence[Step]) -> Iterator[Advice | NotTried]:
        """Predict each step by itself, on all cores."""
        count = min(usable_cores(), max(1, len(every)))

        def predicted_of(part: Sequence[Step]) -> list[tuple[ShardingPlan, float, int] | str]:
            return [self._predicted([step], self.plan, gains_only=True) for step in part]

        pieces = [partial(predicted_of, every[i::count]) for i in range(count)]
        parts = list(side_by_side(pieces, [self.plan]))
        for i, step in enumerate(every):
            predicted = parts[i % count][i // count]
            if isinstance(predicted, str):
                yield NotTried(step.label, predicted)
            else:
                yield self._advice([step], self._turned([step]), *predicted)

    def _turned(self, chosen: Sequence[Step]) -> Case:
        case = self.case
        for step in chosen:
            case = step.turn(case)
        return case

    def _predicted(
        self, chosen: Sequence[Step], plan: ShardingPlan, *, gains_only: bool = False
    ) -> tuple[ShardingPlan, float, int] | str:
        """Return a plan under these steps, its ms and the bytes reserved on the fullest rank.

        The plan is the given one if it fits. If there is none, return the reason.

        Args:
            gains_only: leave out the check of memory, which takes longest, where the plan is no
                faster under these steps; the bytes are then 0.
        """
        if self.pricing_late():
            return NO_TIME
        before_s = self.left_s()
        try:
            case = self._turned(chosen)
            problem = self._problem(case)
            if plan.world_size == problem.topology.world_size:
                ms = _time(problem, plan)
                if gains_only and self._gain(case, ms) <= TOLERANCE:
                    return plan, ms, 0
                if problem.fits(plan):
                    return plan, ms, _memory(problem, plan)
            placed = _placed_again(problem, plan)
            if placed is None:
                return "no plan with it was found that fits"
            return placed, _time(problem, placed), _memory(problem, placed)
        except ShardoptError as error:
            return str(error)
        finally:
            if before_s < math.inf:
                self._longest_s = max(self._longest_s, before_s - self.left_s())

    def _problem(self, case: Case) -> Problem:
        """Return a case's problem; it shares the loads of shards where they stay as they are.

        They depend neither on the dense part nor on the quantisation of collectives.
        """
        ours, problem = self.case, case.problem()
        like = replace(case.workload, dense=ours.workload.dense, qcomm=ours.workload.qcomm)
        if like == ours.workload and (case.hardware, case.installed) == (
            ours.hardware,
            ours.installed,
        ):
            return replace(problem, loads=self.loads)
        return problem

    def _gain(self, case: Case, ms: float) -> float:
        """Return the share of the time per sample that goes."""
        before = self.iteration_ms / self.case.workload.batch_size
        return 1 - ms / case.workload.batch_size / before

    def _advice(
        self, chosen: Sequence[Step], case: Case, plan: ShardingPlan, ms: float, memory: int
    ) -> Advice:
        gain = self._gain(case, ms)
        costs = dict.fromkeys(cost for step in chosen for cost in step.costs)
        more = memory - self.memory if gain > TOLERANCE else 0
        if more >= NAMED_BYTES:
            costs[f"{format_bytes(more)} more on the fullest rank"] = None
        return Advice(tuple(chosen), case, plan, ms, gain, tuple(costs), plan is self.plan)

    def steps(self) -> list[Step]:
        """Return the steps to try one at a time, the most promising first."""
        cached = any(t.cache_load_factor is not None for t in self.plan.tables.values())
        proposed = (step for source in SOURCES for step in source(self.case))
        tried = [s for s in proposed if cached or s.name != "cache_load_factor"]
        order = {name: place for place, name in enumerate(FIRST)}
        return sorted(tried, key=lambda s: (s.target is not None, order.get(s.name, len(FIRST))))

    def _again(self, advice: Advice) -> Advice:
        """Replace the plan if another one is better beyond ties: with exchanges merged as long as
        that saves time, and annealed."""
        size = len(advice.plan.tables) * advice.plan.world_size
        moves = round(self.effort * SearchParams.tie_moves)
        if self.pricing_late() or not moves or size > SearchParams.large:
            return advice
        problem = advice.case.problem()
        objective = Objective(problem, reduced_space(problem))
        start = objective.assignment_of(advice.plan)
        if start is None:
            return advice
        surrogate = Surrogate(objective)
        merged = ExchangeMerges(objective, surrogate).descend(start, advice.iteration_ms)
        *_, (start, _) = [(start, advice.iteration_ms), *merged]
        task = AnnealingTask(start, objective.space.options, moves, ROUNDS, seed=0)
        plans = Annealer(objective, surrogate).improve(task, lambda _: self.pricing_late())
        better, ms = plans[0]
        if ms >= advice.iteration_ms * (1 - TOLERANCE):
            return advice
        plan = objective.sharding_plan(better)
        return self._advice(advice.steps, advice.case, plan, ms, _memory(problem, plan))

    def _together(self, best: Sequence[Advice]) -> Advice | None:
        """Return the best pair, extended by steps that help beside it or replace a part of it."""
        candidates = [] if self.late() else best[:JOINED]
        pairs = [
            self.found((*a.steps, *b.steps), a.plan)
            for i, a in enumerate(candidates)
            for b in candidates[:i]
            if a.steps[0].name != b.steps[0].name
        ]
        joined = max(filter(None, pairs), key=lambda a: a.gain, default=None)
        if joined is None or joined.gain <= best[0].gain + TOLERANCE:
            return None
        names = {step.name for step in joined.steps}
        for advice in sorted(best, key=lambda advice: advice.steps[0].name in names):
            if advice.steps[0] not in joined.steps:
                rest = [step for step in joined.steps if step.name != advice.steps[0].name]
                more = self.found((*rest, *advice.steps), joined.plan)
                if more is not None and more.gain > joined.gain + TOLERANCE:
                    joined = more
        return joined

    def _machines(self) -> Iterable[OtherMachine]:
        """Yield half and twice the hosts, and a faster network."""
        case = self.case
        ranks, hosts = case.installed.world_size, case.installed.hosts
        large = len(self.plan.tables) * ranks > MOST_WORK
        if large or case.workload.replica_groups is not None or self.late():
            return
        for value in [] if PARAMETERS["hosts"].refusal(case) else [hosts // 2, 2 * hosts]:
            turn = partial(turned, setting={"hosts": value})
            advice = self.found([Step("gpus", None, value, turn)], self.plan) if value else None
            if advice is not None:
                # a search gains about as much on other ranks as on these
                share = advice.case.installed.world_size / ranks
                gain = 1 - (1 - advice.gain) / share
                yield OtherMachine(
                    "gpus", round(ranks * share), advice.iteration_ms, gain, 1 - advice.gain
                )
        if case.problem().topology.groups > 1:

            def faster(case: Case) -> Case:
                levels = tuple(
                    level if level.gbit_s is None else replace(level, gbit_s=FASTER * level.gbit_s)
                    for level in case.installed.network
                )
                return replace(
                    case,
                    hardware=faster_link(case.hardware, "inter", FASTER),
                    installed=replace(case.installed, network=levels),
                )

            advice = self.found([Step("network", None, FASTER, faster)], self.plan)
            if advice is not None:
                ms = advice.iteration_ms
                yield OtherMachine("network", FASTER, ms, advice.gain, 1 - advice.gain)


def reserve_s(case: Case) -> float:
    """Return the seconds that a search with a time limit must leave for advice."""
    cells = len(case.workload.tables) * case.ranks
    count = sum(1 for source in SOURCES for _ in source(case))
    return count * (STEP_S + STEP_CELL_S * cells) / usable_cores()


def faster_link(hw: HardwareProfile, name: str, faster: float) -> HardwareProfile:
    """Speed up all collectives of one kind of link, ``intra`` or ``inter``; latencies stay."""
    link = getattr(hw.collectives, name)
    update: dict[str, object] = {}
    curves = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
    for collective in (*curves, *(["in_switch"] if link.in_switch else [])):
        curve = getattr(link, collective)
        costs = tuple(cost / faster for cost in curve.us_per_mib)
        update[collective] = curve.model_copy(update={"us_per_mib": costs})
    if name == "inter":
        update["nic_gbit_s"] = hw.collectives.inter.nic_gbit_s * faster
    collectives = hw.collectives.model_copy(update={name: link.model_copy(update=update)})
    return hw.model_copy(update={"collectives": collectives})


def _one_a_name(candidates: Iterable[Advice]) -> list[Advice]:
    """Return the best value of every setting, best first.

    Advice for one table alone wins if changing all tables gains no more beyond ties.
    """

    def key(advice: Advice) -> tuple[float, bool]:
        return -round(advice.gain / TOLERANCE), advice.steps[0].target is None

    best: dict[tuple[str, Value | bool | None], Advice] = {}
    for advice in sorted(candidates, key=key):
        step = advice.steps[0]
        best.setdefault((step.name, step.value if step.name in EACH_VALUE else None), advice)
    return sorted(best.values(), key=lambda a: -a.gain)


def _memory(problem: Problem, plan: ShardingPlan) -> int:
    return max(rank.reserved_bytes for rank in problem.peaks.peaks(plan))


def _time(problem: Problem, plan: ShardingPlan) -> float:
    candidate = match_plan(problem.workload, problem.topology, plan)
    return float(problem.scorer.score([candidate])[0])


def _placed_again(problem: Problem, plan: ShardingPlan) -> ShardingPlan | None:
    """Return a plan that fits, of options like those of a plan with other ranks or no room."""
    try:
        space = reduced_space(_of_types(problem, plan))
    except InfeasibleError:  # a table cannot keep its type on these ranks
        space = reduced_space(problem)
    objective = Objective(problem, space)
    tables = (plan.tables[key] for key in space.keys)
    options = [_like(o, t) for o, t in zip(space.options, tables, strict=True)]
    placed = GreedyPartitioner(objective, Surrogate(objective)).place_all(options)
    return objective.sharding_plan(placed) if placed and objective.fits(placed) else None


def _of_types(problem: Problem, plan: ShardingPlan) -> Problem:
    """Return the problem with every table held to its sharding type in a plan."""
    workload = problem.workload
    tables = tuple(
        replace(
            table,
            constraints=replace(
                table.constraints, sharding_types=(plan.tables[key].sharding_type,)
            ),
        )
        for key, table in zip(workload.keys, workload.tables, strict=True)
    )
    return replace(problem, workload=replace(workload, tables=tables))


def _like(options: Sequence[Option], table: TablePlan) -> Option:
    """Return the option most like a table's sharding."""

    def unlike(option: Option) -> tuple[bool, bool, int]:
        return (
            option.sharding_type is not table.sharding_type,
            option.compute_kernel is not table.compute_kernel,
            abs(option.num_shards - len(table.shards)),
        )

    return min(options, key=unlike)
