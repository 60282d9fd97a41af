"""`ShardoptPlanner`: a drop-in for TorchRec's `EmbeddingShardingPlanner`.

TorchRec's planner stays in charge of all but the choice: reservation, enumeration, callbacks,
statistics, plan loading, validation and errors are its own code. It asks a proposer, a partitioner
and a performance model in turn; here one search answers for all three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from predictor.errors import InfeasibleError, InputError
from predictor.hardware.loader import HardwareProfile
from predictor.model.workload import Workload
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from shardopt.config import load_model
from shardopt.extras import needs_torchrec
from shardopt.torchrec.logs import logger
from shardopt.torchrec.module.read_module import check_device_groups, read_workload
from shardopt.torchrec.module.read_table import UserInputs
from shardopt.torchrec.plan.options import group_by_table, to_options
from shardopt.torchrec.planning.collective import plan_on_first_rank
from shardopt.torchrec.planning.machine import check_bandwidths, detect_hardware, read_topology
from shardopt.torchrec.planning.torchrec_planner import parameter_constraints

with needs_torchrec():
    from torch import nn
    from torch.distributed import ProcessGroup
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.constants import BATCH_SIZE
    from torchrec.distributed.planner.types import (
        Enumerator,
        ParameterConstraints,
        Partitioner,
        PerfModel,
        PlanLoader,
        PlannerError,
        PlannerErrorType,
        Proposer,
        ShardingOption,
        Stats,
        StorageReservation,
    )
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.types import ModuleSharder, ShardingPlan


Options = list[ShardingOption]


@dataclass(frozen=True)
class LastSearch:
    """The problem of the last search and its result."""

    problem: Problem
    result: Result


class ShardoptPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with shardopt's objective and search.

    Args:
        topology: ranks and memory; by default those of the process group. Its bandwidths are not
            used: costs come from ``hardware``.
        batch_size: samples per rank; by default the model file's, else TorchRec's 512.
        hardware: name or file of a hardware profile; by default that of the GPU found.
        constraints: TorchRec's, by table name; all fields are honoured.
        storage_reservation, enumerator, stats, callbacks, plan_loader, debug: as in
            `EmbeddingShardingPlanner`. Of a table, only what the enumerator offers is considered.
        seed: of every random choice of the search, >= 0; all processes find the same plan.
        effort: multiple of the default work budget, > 0.
        timeout_seconds: ceiling on the search, > 0; the best plan found by then is returned.
        model: a model file (or its `Workload`) with what no module holds: pooling factors, index
            distributions, train pipeline, dense part. Tables and features are matched by name.

    Attributes:
        found: the problem of the last `plan` and its ranked plans with their bound; None before.
    """

    def __init__(
        self,
        topology: TorchRecTopology | None = None,
        batch_size: int | None = None,
        *,
        hardware: str | HardwareProfile | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        storage_reservation: StorageReservation | None = None,
        enumerator: Enumerator | None = None,
        stats: Stats | list[Stats] | None = None,
        callbacks: list[Callable[[Options], Options]] | None = None,
        plan_loader: PlanLoader | None = None,
        debug: bool = True,
        seed: int = 0,
        effort: float | None = None,
        timeout_seconds: int | None = None,
        model: str | PathLike[str] | Workload | None = None,
    ) -> None:
        known = model if isinstance(model, Workload | None) else load_model(Path(model))
        constraints = merge_constraints(known, constraints)
        if batch_size is None and known is not None:
            batch_size = known.batch_size
        if batch_size is None:
            logger.warning(
                "batch_size is not given; planning for TorchRec's default of %d samples per rank",
                BATCH_SIZE,
            )
        smallest = _SmallestProposer()
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=smallest,
            partitioner=_SearchPartitioner(self),
            performance_model=_PredictedPerfModel(self),
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        check_bandwidths(self._topology)
        self._proposer = smallest
        self._hardware = detect_hardware(hardware, self._topology.compute_device)
        self._known = known
        self._effort = 1.0 if effort is None else effort
        self._seed = seed
        self._request: tuple[nn.Module, Sequence[ModuleSharder[nn.Module]]] | None = None
        self.found: LastSearch | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan with the least predicted iteration time.

        Raises:
            PlannerError: nothing fits, with TorchRec's error types and remedies.
            InputError: a fact is missing (say, a pooling factor) or shardopt does not plan what
                the module holds.
        """
        check_device_groups(module, self._constraints or {}, self._topology.compute_device)
        self._request = (module, sharders)
        self.found = None
        return super().plan(module, sharders)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Rank 0 of the group plans, and all ranks get its plan, or the error it met.

        Raises:
            PlannerError: as `plan`, or a rank of the group does not answer within its timeout.
            InputError: as `plan`, or there is no process group.
        """
        chosen = get_default_sharders() if sharders is None else sharders
        return plan_on_first_rank(lambda: self.plan(module, chosen), pg)

    def search(self, left: TorchRecTopology) -> Options:
        """The best plan as one placed option per table.

        Args:
            left: ranks with the memory that the reservation left.
        """
        if self._request is None:
            raise InputError("there is no module to plan; call plan(module, sharders)")
        module, sharders = self._request
        space = self._proposer.space
        facts = UserInputs(self._batch_size, self._constraints or {}, self._known)
        workload = read_workload(module, sharders, space, facts)
        problem = Problem(workload, read_topology(left, self._hardware), self._hardware)
        try:
            result = solve(problem, Stop(self._effort, self._timeout_seconds), self._seed)
        except InfeasibleError as error:
            raise PlannerError(error_type=PlannerErrorType.PARTITION, message=str(error)) from error
        self.found = LastSearch(problem, result)
        best = result.best
        logger.info(
            "predicted %.3g ms per iteration on %s, at most %.1f %% from optimal; baselines: %s",
            best.iteration_ms,
            self._hardware.name,
            100 * (best.iteration_ms / result.lower_bound_ms - 1),
            ", ".join(f"{ms:.3g} ms ({name})" for name, ms in result.baselines.items()),
        )
        options = to_options(best.plan, workload, space)
        self._enumerator.populate_estimates(options)
        _check_storage(options, left)
        return options


def merge_constraints(
    known: Workload | None, given: Mapping[str, ParameterConstraints] | None
) -> dict[str, ParameterConstraints] | None:
    """The constraints of a model file, overridden by those given, table by table."""
    if known is None:
        return None if given is None else dict(given)
    return {**parameter_constraints(known), **(given or {})}


def _check_storage(options: Sequence[ShardingOption], left: TorchRecTopology) -> None:
    """Refuse a plan that does not fit by the user's own storage estimator."""
    taken: dict[int, Any] = {}
    for shard in (shard for option in options for shard in option.shards):
        before = taken.get(shard.rank)
        taken[shard.rank] = shard.storage if before is None else before + shard.storage
    for device in left.devices:
        if device.rank in taken and not taken[device.rank].fits_in(device.storage):
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"the storage estimator counts {taken[device.rank]} on rank {device.rank}, "
                f"which has only {device.storage} left, while shardopt counted less; use a larger "
                "storage_reservation",
            )


class _SmallestProposer(Proposer):
    """Proposes once, the options of least memory: TorchRec explains from them why nothing fits."""

    space: Options
    """All options of the enumerator."""

    def load(self, search_space: Options, enumerator: Enumerator | None = None) -> None:
        self.space = search_space
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
        """There is nothing to learn."""


def _bytes(option: ShardingOption) -> int:
    return sum(shard.storage.hbm + shard.storage.ddr for shard in option.shards if shard.storage)


class _SearchPartitioner(Partitioner):
    """Searches all that the enumerator offers, whatever is proposed."""

    def __init__(self, planner: ShardoptPlanner) -> None:
        self._planner = planner

    def partition(self, proposal: Options, storage_constraint: TorchRecTopology) -> Options:
        return self._planner.search(storage_constraint)


class _PredictedPerfModel(PerfModel):
    """The iteration time that the search predicted."""

    def __init__(self, planner: ShardoptPlanner) -> None:
        self._planner = planner

    def rate(self, plan: Options) -> float:
        found = self._planner.found
        if found is None:
            raise InputError("no plan was searched yet; call plan(module, sharders)")
        return found.result.best.iteration_ms
