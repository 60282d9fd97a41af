"""One call of the hook's `plan`: from TorchRec's search space to placed options.

TorchRec's planner asks a proposer, a partitioner and a performance model in turn; `SearchInTurn`
answers for all three with `Planning.place`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from predictor.errors import InfeasibleError, InputError, ShardoptError
from predictor.model.plan import ShardingPlan as OurPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import predict
from search.constraint_costs import ConstraintCosts
from search.problem import NOMINAL, Problem, Result
from search.stop import Stop
from shardopt.api.answer import FREE_EFFORT, FREE_RESERVE, TOP_K, find_plans
from shardopt.api.cache import ResultCache
from shardopt.api.scenarios import ScenarioSource
from shardopt.extras import needs_torchrec
from shardopt.formatting import listed
from shardopt.logs import logger
from shardopt.race import TORCHREC
from shardopt.torchrec.beside import TorchRecsPlan, tell_column_states, tell_replicable
from shardopt.torchrec.confirming import Confirm
from shardopt.torchrec.constraint_price import price_lines, price_torchrecs_constraints
from shardopt.torchrec.machine import Machine, given_costs, read_topology, usual_topology
from shardopt.torchrec.offered import (
    REPLICATED,
    Options,
    TorchRecSearch,
    all_left,
    check_storage,
    describe_reasons,
    plan_by_usual_costs,
    reasons_of,
    runnable,
    tell_dense,
    tell_widths,
    torchrecs_plan,
    trained_alike,
    with_room_for,
    without,
)
from shardopt.torchrec.options import CUSTOMIZED, TableKey, group_by_table, to_options, to_plan
from shardopt.torchrec.private import constraints_of
from shardopt.torchrec.read_module import UserInputs, by_module, read_workload
from shardopt.torchrec.report import LastSearch, describe, short_of

with needs_torchrec():
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import (
        Enumerator,
        Partitioner,
        PerfModel,
        PlanLoader,
        PlannerError,
        PlannerErrorType,
        Proposer,
        ShardingOption,
    )
    from torchrec.distributed.types import ModuleSharder


@dataclass(frozen=True)
class Settings:
    """Arguments of a `ShardoptPlanner` that TorchRec's planner does not have, read and checked.

    Args:
        inputs: inputs for reading the module, without the enumerator's constraints.
        effort: None for the default.
        confirm: how the best plans are measured; None for no measurement.
    """

    inputs: UserInputs
    machine: Machine
    seed: int
    effort: float | None
    objective: str
    scenarios: ScenarioSource
    cache: ResultCache | None
    confirm: Confirm | None


class Searched(NamedTuple):
    """Chosen plan before callbacks change it; without a result if the plan is TorchRec's."""

    problem: Problem
    result: Result | None
    plan: OurPlan
    torchrecs: TorchRecsPlan | None


class Planning:
    """Planning of one module: its options, the search and the choice.

    Args:
        topology: topology of the planner, before the storage reservation.
        torchrec: TorchRec's own search, for tables that shardopt has no model for.
        request: module and sharders.
        stop: budget of the whole call.

    Attributes:
        space: TorchRec's search space.
        searched: the choice; None before it is made, and if TorchRec places all tables.
        rivals: name -> plan to measure against the chosen one.
    """

    def __init__(
        self,
        settings: Settings,
        topology: TorchRecTopology,
        torchrec: TorchRecSearch,
        request: tuple[nn.Module, Sequence[ModuleSharder[nn.Module]]],
        stop: Stop,
    ) -> None:
        self.settings, self.machine = settings, settings.machine
        self.topology, self.torchrec = topology, torchrec
        self.request, self.stop = request, stop
        self.enumerator = torchrec.enumerator
        # the enumerator's own constraints decide, as in TorchRec
        inputs = settings.inputs
        constraints = {**inputs.constraints, **constraints_of(self.enumerator)}
        self.inputs = inputs._replace(constraints=constraints)
        self.space: Options = []
        self.searched: Searched | None = None
        self.rivals: dict[str, Options] = {}

    def place(self, free_topology: TorchRecTopology) -> tuple[Options, float]:
        """Return the best plan as one placed option per table, and its rating in ms; TorchRec's own
        if that places all tables.

        Args:
            free_topology: ranks with the memory that the reservation left.
        """
        usable = self._usable(free_topology)
        reasons = self.reasons(usable)
        placed, rating = self._leave_to_torchrec(usable, reasons, free_topology)
        ours = [option for option in usable if (option.path, option.name) not in reasons]
        if ours:
            chosen, rating = self._choose(ours, without(free_topology, placed))
            self.rivals = {
                name: self._in_order([*placed, *rival]) for name, rival in self.rivals.items()
            }
            placed = [*placed, *chosen]
        tell_dense(placed)
        tell_widths(placed)
        return self._in_order(placed), rating

    def reasons(self, options: Options) -> dict[TableKey, str]:
        """Tables that are left to TorchRec, and why."""
        return reasons_of(options, self.topology, by_module(self.request[1]))

    def _in_order(self, placed: Options) -> Options:
        """Placed options, table by table as TorchRec enumerates them."""
        by_table = {(option.path, option.name): option for option in placed}
        return [by_table[key] for key in group_by_table(self.space)]

    def _usable(self, free_topology: TorchRecTopology) -> Options:
        """Return the offered options that run and keep the optimizer of every table."""
        usable = runnable(self.space, self.topology)
        if all_left(usable, free_topology):
            return usable  # TorchRec's own plan of all tables is the one that is made
        ranks = read_topology(free_topology, self.machine.hardware)

        def plan_of_torchrec() -> Options | None:
            """Plan by TorchRec's own costs, as those of a Topology say nothing of shardopt's."""
            if not given_costs(free_topology):
                return torchrecs_plan(usable, ranks)
            usual = usual_topology(self.topology)
            inputs = self.inputs
            enumerator = EmbeddingEnumerator(usual, inputs.batch_size, inputs.constraints)
            return plan_by_usual_costs(usable, ranks, enumerator, self.request)

        return trained_alike(usable, plan_of_torchrec, self.inputs.constraint)

    def _leave_to_torchrec(
        self, usable: Options, reasons: dict[TableKey, str], free_topology: TorchRecTopology
    ) -> tuple[Options, float]:
        """Return TorchRec's choice for tables that shardopt has no model for, and its rating."""
        left = [option for option in usable if (option.path, option.name) in reasons]
        if not left:
            return [], 0.0
        placed, rating = self.torchrec.place(left, free_topology)
        logger.warning(
            "left to TorchRec's own estimate (%.3g ms, not validated, and not in the predicted "
            "time): %s",
            rating,
            describe_reasons(reasons),
        )
        return placed, rating

    def _choose(self, space: Options, free_topology: TorchRecTopology) -> tuple[Options, float]:
        """Choose the options of the tables that shardopt predicts.

        Args:
            space: options that train every table as TorchRec's plan does.
        """
        problem = self._problem(space, free_topology)
        tables = group_by_table(space)
        offered = runnable(self.space, self.topology)
        offered = [option for option in offered if (option.path, option.name) in tables]
        theirs = torchrecs_plan(offered, problem.topology)
        strict = self.inputs.strict
        try:
            return self._search(problem, space, free_topology, theirs)
        except (ShardoptError, PlannerError) as error:
            if theirs is not None and self.stop.remaining_s <= 0 and not strict:
                logger.warning("no time is left to search, so the plan is TorchRec's: %s", error)
                return self._keep(problem, None, theirs), 0.0
            if not isinstance(error, InfeasibleError | PlannerError):
                raise
            if theirs is None or strict:
                kind = PlannerErrorType.PARTITION
                raise PlannerError(error_type=kind, message=str(error)) from error
            logger.warning(
                "shardopt's count of memory and that of the storage estimator differ; the plan "
                "fits by the estimator only (strict=True refuses it): %s",
                error,
            )
            too_little = isinstance(error, InfeasibleError)
        problem = with_room_for(to_plan(theirs, problem.workload, problem.topology), problem)
        if too_little:
            self.stop.resume()
            with suppress(InfeasibleError, PlannerError):
                return self._search(problem, space, free_topology, theirs)
        return self._keep(problem, None, theirs), 0.0

    def _problem(self, space: Options, free_topology: TorchRecTopology) -> Problem:
        """The tables that options are of, on the ranks with the memory that is left."""
        workload = read_workload(*self.request, space, self.inputs)
        return self.machine.problem(workload, free_topology)

    def _search(
        self,
        problem: Problem,
        space: Options,
        free_topology: TorchRecTopology,
        theirs: Options | None,
    ) -> tuple[Options, float]:
        """Return the fastest plan of a problem, if the user's storage estimator accepts it;
        TorchRec's where that gains nothing.

        Args:
            theirs: TorchRec's plan.
        """
        settings, confirm = self.settings, self.settings.confirm
        windows = settings.scenarios.read_windows(
            lambda window: read_workload(*self.request, space, self.inputs._replace(known=window))
        )
        result, _ = find_plans(
            replace(problem, aim=settings.objective),
            self.stop,
            settings.seed,
            replace(settings.scenarios, windows=windows),
            settings.cache,
            top_k=TOP_K if confirm is None else max(TOP_K, confirm.plans),
        )
        torchrecs = None
        if theirs is not None:
            plan = to_plan(theirs, problem.workload, problem.topology)
            torchrecs = TorchRecsPlan.rated(plan, problem)
            # times say nothing of another aim, and dynamicemb's tables have their own planners
            free = settings.objective == NOMINAL and confirm is None
            free = free and all(option.compute_kernel != CUSTOMIZED for option in theirs)
            if free and torchrecs.ties(result.best.iteration_ms):
                returned = replace(torchrecs, returned=True)
                return self._keep(problem, result, theirs, returned), torchrecs.iteration_ms
        options = to_options(result.best.plan, problem.workload, space)
        self.enumerator.populate_estimates(options)
        check_storage(options, free_topology)
        if confirm is not None and self.machine.replicas is None:
            self.rivals = {
                f"plan {i}": to_options(ranked.plan, problem.workload, space)
                for i, ranked in enumerate(result.plans[1 : confirm.plans], 2)
            }
            self.rivals |= {} if theirs is None else {TORCHREC: theirs}
        return self._keep(problem, result, options, torchrecs), result.best.iteration_ms

    def _keep(
        self,
        problem: Problem,
        result: Result | None,
        options: Options,
        torchrecs: TorchRecsPlan | None = None,
    ) -> Options:
        """Keep the choice as it is before callbacks see it."""
        plan = to_plan(options, problem.workload, problem.topology)
        self.searched = Searched(problem, result, plan, torchrecs)
        return options

    def describe(self, options: Options, free_topology: TorchRecTopology) -> LastSearch | None:
        """Predict the plan that is returned; None where nothing can be predicted.

        Args:
            options: the plan, with what callbacks changed.

        Raises:
            InputError: callbacks left out a table.
        """
        unpredicted = self.reasons(options)
        ours = [option for option in options if (option.path, option.name) not in unpredicted]
        if not ours:
            return None
        problem, result, before, torchrecs = self.searched or (None, None, None, None)
        if problem is None:
            problem = self._problem(ours, free_topology)
        present, workload = {(o.path or "ebc", o.name) for o in ours}, problem.workload
        tables = zip(workload.keys, workload.tables, strict=True)
        missing = [f"'{key}'" for key, table in tables if (table.module, table.name) not in present]
        if missing:
            raise InputError(
                f"callbacks left out table{'s' * (len(missing) > 1)} {listed(missing)}"
            )
        plan = to_plan(ours, workload, problem.topology)
        unchanged = (before or plan).tables
        return LastSearch(
            problem,
            result,
            plan,
            predict(workload, self._installed(problem), problem.hardware, plan),
            tuple(key for key, table in plan.tables.items() if table != unchanged[key]),
            unpredicted,
            self.machine.stand_in,
            torchrecs,
        )

    def _installed(self, problem: Problem) -> Topology:
        """The ranks of a problem, with what their devices have before the reservation."""
        storages = [device.storage for device in self.topology.devices]
        on_cpu = problem.hardware.device == "cpu"
        installed = tuple(int(s.ddr if on_cpu else s.hbm) for s in storages)
        return replace(problem.topology, installed_bytes=installed, limit_bytes=installed)

    def constraint_costs(self, last_search: LastSearch) -> ConstraintCosts | None:
        """Price the user's constraints; None if no time is left, or if the user's own enumerator
        class decides which options there are without them."""
        remaining_s = self.stop.remaining_s
        custom = type(self.enumerator) is not EmbeddingEnumerator
        if last_search.result is None or remaining_s <= 0 or custom:
            return None
        budget = Stop(
            self.stop.effort * FREE_EFFORT,
            None if remaining_s == math.inf else remaining_s,
            reserve=FREE_RESERVE,
        )
        arguments = self.request, self.inputs, self.topology
        return price_torchrecs_constraints(
            last_search.problem, last_search.plan, *arguments, budget, self.settings.seed
        )

    def tell(self, last_search: LastSearch) -> None:
        """Log what is predicted, how training differs from TorchRec's, and what is not allowed."""
        problem, costs = last_search.problem, last_search.constraint_costs
        for line in (describe(last_search), *short_of(last_search.prediction.memory)):
            logger.warning("%s", line)
        if last_search.result is None:
            return
        if costs is not None:
            logger.warning("%s", price_lines(costs, problem, self.inputs.constraints))
        tell_column_states(last_search.plan, last_search.torchrecs, problem)
        if self.stop.remaining_s > 0:
            tell_replicable(last_search.plan, problem, self._replicable(problem.workload))

    def _replicable(self, workload: Workload) -> list[str]:
        """Keys of tables that TorchRec offers to replicate."""
        offered = runnable(self.space, self.topology)
        free = {(o.path or "ebc", o.name) for o in offered if o.sharding_type == REPLICATED}
        tables = zip(workload.keys, workload.tables, strict=True)
        return [key for key, table in tables if (table.module, table.name) in free]


class SearchInTurn(Proposer, Partitioner, PerfModel):
    """One search as proposer, partitioner and performance model.

    It proposes once, the options of least memory: TorchRec explains from them why nothing fits. As
    a partitioner it searches all that the enumerator offers, whatever is proposed; as a model it
    rates what the search found.
    """

    def __init__(self, planning: Planning) -> None:
        self._planning = planning
        self._rating = 0.0

    def load(self, search_space: Options, enumerator: Enumerator | None = None) -> None:
        self._planning.space = search_space
        self._proposals = [[min(o, key=_bytes) for o in group_by_table(search_space).values()]]

    def propose(self) -> Options | None:
        return self._proposals.pop() if self._proposals else None

    def feedback(
        self,
        partitionable: bool,
        plan: Options | None = None,
        perf_rating: float | None = None,
        storage_constraint: TorchRecTopology | None = None,
    ) -> None:
        """Ignore feedback: the search is complete after one call."""

    def partition(self, proposal: Options, storage_constraint: TorchRecTopology) -> Options:
        placed, self._rating = self._planning.place(storage_constraint)
        return placed

    def rate(self, plan: Options) -> float:
        return self._rating


def _bytes(option: ShardingOption) -> int:
    return sum(shard.storage.hbm + shard.storage.ddr for shard in option.shards if shard.storage)


class LoadedOptions:
    """A user's `PlanLoader`, for `EmbeddingShardingPlanner.plan`.

    TorchRec finds a loaded option in the search space by a hash of its kind, its number of shards
    and the load factor of its cache (`extract_plan` in planner/planners.py), and takes only its
    shards. Column cuts and load factors that the search added are not in that space, so they go
    under the hash of the enumerator's option of the same kind; `restored` brings the load factor
    back.

    Args:
        loader: the user's.
        enumerator: whose last search space the options belong to.
    """

    def __init__(self, loader: PlanLoader, enumerator: Enumerator) -> None:
        self._loader = loader
        self._enumerator = enumerator
        self._loaded: dict[str, ShardingOption] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load(self) -> dict[int, ShardingOption] | None:
        """The loaded options, each under a hash of the search space where it has one."""
        loaded = self._loader.load()
        self._loaded = {option.fqn: option for option in (loaded or {}).values()}
        if loaded is None:
            return None
        space = getattr(self._enumerator, "last_stored_search_space", None) or []
        listed = {option.storage_hash() for option in space}
        same = {(o.fqn, o.sharding_type, o.compute_kernel): o for o in reversed(space)}
        by_hash = {}
        for key, option in loaded.items():
            twin = same.get((option.fqn, option.sharding_type, option.compute_kernel))
            if key not in listed and twin is not None:
                key = twin.storage_hash()
            by_hash[key] = option
        return by_hash

    def restored(self, options: Options) -> Options:
        """The plan that was made of the loaded options, with the load factors they had."""
        restored = [copy.copy(option) for option in options]
        for option in restored:
            if option.fqn in self._loaded:
                option.cache_params = self._loaded[option.fqn].cache_params
        return restored
