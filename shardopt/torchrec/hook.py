"""`ShardoptPlanner`: a drop-in for TorchRec's `EmbeddingShardingPlanner`.

Only the choice of a plan is replaced: reservation, enumeration, callbacks, statistics, plan
loading, validation and errors are TorchRec's own code. During a call of `plan`, the search of
`planning` stands in for TorchRec's proposers, partitioner and performance model.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any

from predictor.errors import InputError, ShardoptError
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import Workload
from search.problem import NOMINAL
from search.stop import Stop
from shardopt.api.cache import ResultCache
from shardopt.api.scenarios import read_scenarios, windows_of
from shardopt.extras import needs_torchrec
from shardopt.logs import logger
from shardopt.race import Confirmation
from shardopt.torchrec.collective import (
    check_ranks,
    joined,
    on_all_ranks,
    on_first_rank,
    search_seconds,
)
from shardopt.torchrec.confirming import Confirm
from shardopt.torchrec.confirming import confirm as confirm_plans
from shardopt.torchrec.failures import tell_fallback
from shardopt.torchrec.machine import (
    DEVICES,
    Replicas,
    TooLargeError,
    check_bandwidths,
    check_table_sizes,
    find_replicas,
    read_machine,
    unknown_device,
)
from shardopt.torchrec.offered import Options, TorchRecSearch
from shardopt.torchrec.pipelines import tell
from shardopt.torchrec.planning import LoadedOptions, Planning, SearchInTurn, Settings
from shardopt.torchrec.private import describe_reservation, pipeline_of
from shardopt.torchrec.read_module import (
    UserInputs,
    check_pooling_factor,
    known_workload,
    merge_constraints,
    tell_device_groups,
)
from shardopt.torchrec.report import LastSearch, ShardoptStats
from shardopt.torchrec.tables import find_tables

with needs_torchrec():
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import ProcessGroup
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.constants import BATCH_SIZE
    from torchrec.distributed.planner.planners import to_sharding_plan
    from torchrec.distributed.planner.types import (
        Enumerator,
        ParameterConstraints,
        Partitioner,
        PerfModel,
        PlanLoader,
        PlannerError,
        PlannerErrorType,
        Proposer,
        Stats,
        StorageReservation,
    )
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.types import ModuleSharder, ShardingPlan


class PlannerInputError(InputError, PlannerError):
    """Error for an argument that cannot be used, both TorchRec's and shardopt's; the message says
    which and what to do."""

    def __init__(self, message: str, inputs: Iterable[str] = ()) -> None:
        super().__init__(message, inputs)
        self.error_type = PlannerErrorType.INPUT_VALIDATION


@contextmanager
def as_planner_errors() -> Iterator[None]:
    """Raise shardopt's errors as TorchRec's too."""
    try:
        yield
    except PlannerError:
        raise
    except ShardoptError as error:
        raise PlannerInputError(str(error), error.inputs) from error


Begin = Callable[..., None]


def or_torchrecs(begin: Begin) -> Begin:
    """Wrap an ``__init__`` to fall back on TorchRec's planner after an unexpected error.

    The planner is then initialised as TorchRec's, and `plan` reports the error. Errors about
    shardopt's own arguments are raised, as the job has not begun yet.
    """

    @functools.wraps(begin)
    def safely(self: ShardoptPlanner, *args: Any, **more: Any) -> None:
        try:
            begin(self, *args, **more)
        except (ShardoptError, PlannerError):
            raise
        except Exception as error:
            arguments = inspect.signature(begin).bind(self, *args, **more).arguments
            theirs = inspect.signature(EmbeddingShardingPlanner.__init__).parameters
            own = {name: arguments[name] for name in theirs if name in arguments and name != "self"}
            EmbeddingShardingPlanner.__init__(self, **own)
            self._failure = error

    return safely


SECONDS, TABLES = 5.0, 100
"""Default time limit of a call in s, and up to how many tables it holds; beyond that it grows in
proportion to the tables."""
RESERVE = 0.15
"""Share of the time limit that is reserved for the steps after the search."""


def plans_alone() -> bool:
    """Return True if no other process needs the same plan.

    Only then may the clock end the search: processes that search on their own must find the same
    plan, whatever their speed.
    """
    alone = not joined() or dist.get_world_size() == 1
    return alone and os.environ.get("WORLD_SIZE", "1") in ("", "1")


class ShardoptPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with shardopt's objective and search.

    Args:
        topology: ranks and memory; by default those of the process group. Its bandwidths are not
            used: costs come from ``hardware``.
        batch_size: samples per rank; by default the model file's, else TorchRec's 512.
        enumerator, storage_reservation, debug, callbacks, plan_loader: as in
            `EmbeddingShardingPlanner`. Only options that the enumerator offers are considered.
            Constraints that were given only to the enumerator count, too.
        stats: reports of the plan; by default `ShardoptStats`.
        proposer, partitioner, performance_model: used only for tables that shardopt has no model
            for; the search replaces them for all others.
        constraints: TorchRec's, by table name; all fields are honoured.
        timeout_seconds: limit on the whole call, > 0; the best plan found by then is returned. In
            `collective_plan` it is at most a quarter of the group's timeout. The default is 5 s up
            to 100 tables, and in proportion beyond. There is no default limit if ``effort`` is
            given, or if several processes of a job call `plan` each for itself.
        hardware: name or file of a hardware profile; by default that of the cluster file, or that
            of the GPU in this machine.
        cluster: a cluster file with as many ranks as the topology; it adds the NVLink domain, the
            levels of the network and the hardware.
        model: a model file (or its `Workload`) with facts that no module holds: pooling factors,
            index distributions, train pipeline, dense part. Tables and features are matched by
            name.
        example_inputs: arguments of the module's forward, as in `to_yaml`, used to capture the
            dense part if ``model`` has none; None to make them from the features.
        default_pooling_factor: mean ids per sample of features without a pooling factor, > 0; None
            for TorchRec's 1, with a warning.
        strict: raise instead of warning: if pooling factors are missing, if shardopt's count of
            memory and that of the storage estimator disagree on whether the plan fits, and if
            TorchRec's own planner would have to plan.
        seed: seed of every random choice of the search, >= 0; all processes find the same plan.
        effort: multiple of the default work budget, > 0.
        objective: ``nominal`` (the predicted time), ``mean`` (over the scenarios) or ``regret``.
        scenarios: draws of the profile's stated errors (16 by default), ``none``, or a file.
        replica_groups: 2D sparse parallelism; by default the model file's. The topology is then
            that of all ranks, and the plan that of one sharding group.
        cache: keep answers in the user's cache directory, and reuse them.
        train_pipeline: ``base``, ``sparse_dist``, ``prefetch_sparse_dist``, ``semi_sync``, or one
            of TorchRec's pipelines: an instance, the class or its name. By default that of the
            model file, else that of the enumerator's storage estimator, else ``base``. Features of
            a pipeline that are not modelled are logged.
        confirm: run the best plans and TorchRec's for real in `collective_plan`, and return the
            fastest measured one. See docs/learning.md.

    Attributes:
        confirmed: measurements of the last plans; None without ``confirm``.
        found: result of the last `plan`; None before it, and if nothing can be predicted.
        replicas: groups of ranks and the arguments of `DMPCollection`; None for one copy.

    Raises:
        PlannerError: an argument cannot be used that only `ShardoptPlanner` has.
    """

    found: LastSearch | None = None
    confirmed: Confirmation | None = None
    replicas: Replicas | None = None
    _failure: Exception | None = None
    _settings: Settings | None = None
    _planning: Planning | None = None
    _strict = False
    _waited_s: float | None = None  # by other ranks, at most
    _callbacks: list[Callable[[Options], Options]]
    _proposers: list[Proposer]
    _partitioner: Partitioner
    _perf_model: PerfModel

    @as_planner_errors()
    @or_torchrecs
    def __init__(
        self,
        topology: TorchRecTopology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[Options], Options]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        hardware: str | HardwareProfile | None = None,
        cluster: str | PathLike[str] | None = None,
        model: str | PathLike[str] | Workload | None = None,
        default_pooling_factor: float | None = None,
        strict: bool = False,
        seed: int = 0,
        effort: float | None = None,
        objective: str = NOMINAL,
        scenarios: int | str | PathLike[str] | None = None,
        example_inputs: Any = None,
        replica_groups: ReplicaGroups | None = None,
        cache: bool = True,
        train_pipeline: Any = None,
        confirm: Confirm | None = None,
    ) -> None:
        workload = known_workload(model)
        constraints = merge_constraints(workload, constraints)
        batch_size = workload.batch_size if batch_size is None and workload else batch_size
        if batch_size is None:
            logger.warning(
                "batch_size is not given; planning for TorchRec's default of %d samples per rank",
                BATCH_SIZE,
            )
        check_pooling_factor(default_pooling_factor)
        groups = replica_groups or (workload.replica_groups if workload else None)
        self.replicas = find_replicas(groups, topology, hardware, cluster)
        job = topology
        if self.replicas is not None and job is not None:
            topology = self.replicas.planner_topology(job)
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=ShardoptStats() if stats is None else stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        if plan_loader is not None:
            loaded = LoadedOptions(plan_loader, self._enumerator)
            self.plan_loader, self._callbacks = loaded, [loaded.restored, *self._callbacks]
        for sink in self._stats:
            if isinstance(sink, ShardoptStats):
                sink.ask = lambda: self.found
        check_bandwidths(self._topology)
        device = self._topology.compute_device
        self._strict = strict
        if device not in DEVICES:
            self._failure = unknown_device(device)
            if strict:
                raise self._failure
            return
        machine = read_machine(hardware, cluster, job or self._topology, device, self.replicas)
        Stop(1.0 if effort is None else effort, timeout_seconds)  # checks both
        scenario_source = read_scenarios(scenarios, machine.hardware, windows_of(model))
        parts = {"proposer": proposer, "partitioner": partitioner}
        parts["performance_model"] = performance_model
        replaced = [name for name, part in parts.items() if part]
        if replaced:
            logger.warning(
                "%s: shardopt's search is used instead, except for tables that it has no model for",
                ", ".join(replaced),
            )
        if train_pipeline is None and workload is None:
            train_pipeline = pipeline_of(self._enumerator)
        inputs = UserInputs(
            self._batch_size,
            self._constraints or {},
            workload,
            default_pooling_factor,
            strict,
            example_inputs,
            device,
            train_pipeline=None if train_pipeline is None else tell(train_pipeline),
        )
        result_cache = ResultCache.of_user() if cache else None
        self._settings = Settings(
            inputs, machine, seed, effort, objective, scenario_source, result_cache, confirm
        )

    @as_planner_errors()
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return the plan with the least predicted iteration time.

        If shardopt cannot plan, return the plan of TorchRec's planner, with a warning.

        Raises:
            PlannerError: TorchRec's planner finds no plan either (its own error), or shardopt
                cannot plan and ``strict`` is set.
        """
        self.found = self._planning = None
        failure = self._failure
        if failure is None:
            try:
                planning = self._planning = self._begin(module, sharders)
                self._check(module, planning)
                with self._in_charge(planning):
                    return super().plan(module, sharders)
            except TooLargeError:
                raise
            except Exception as error:
                failure = error
        if self._strict:
            if isinstance(failure, ShardoptError | PlannerError):
                raise failure
            message = f"{type(failure).__name__}: {failure}"
            raise PlannerError(error_type=PlannerErrorType.OTHER, message=message) from failure
        self.found = self._planning = None
        try:
            plan = super().plan(module, sharders)
        except PlannerError as error:
            if isinstance(failure, PlannerError):  # it says more
                raise failure from error
            raise
        tell_fallback(failure, module, self._topology)
        return plan

    def _begin(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> Planning:
        """Begin a call: set its budget of work and time, with TorchRec's own search at hand."""
        settings = self._settings
        assert settings is not None
        effort = 1.0 if settings.effort is None else settings.effort
        return Planning(
            settings,
            self._topology,
            TorchRecSearch(self._proposers, self._partitioner, self._perf_model, self._enumerator),
            (module, sharders),
            Stop(effort, self._limit_s(module, settings), reserve=RESERVE),
        )

    def _limit_s(self, module: nn.Module, settings: Settings) -> float | None:
        """Return the time limit of the call in s; None without one."""
        limits = [self._timeout_seconds, self._waited_s]
        alone = self._waited_s is not None or plans_alone()
        if limits[0] is None and settings.effort is None and alone:
            limits.append(SECONDS * max(1.0, len(list(find_tables(module))) / TABLES))
        return min((limit for limit in limits if limit is not None), default=None)

    def _check(self, module: nn.Module, planning: Planning) -> None:
        """Warn about tables of another device, and refuse tables that no memory can hold."""
        constraints = planning.inputs.constraints
        tell_device_groups(module, constraints, self._topology.compute_device)
        check_table_sizes(module, self._topology, describe_reservation(self._storage_reservation))

    @contextmanager
    def _in_charge(self, planning: Planning) -> Iterator[None]:
        """Replace TorchRec's search by ours while TorchRec's planner runs."""
        theirs = self._proposers, self._partitioner, self._perf_model, self._callbacks
        search = SearchInTurn(planning)
        self._proposers, self._partitioner, self._perf_model = [search], search, search
        self._callbacks = [*self._callbacks, functools.partial(self._note, planning)]
        try:
            yield
        finally:
            self._proposers, self._partitioner, self._perf_model, self._callbacks = theirs

    def _note(self, planning: Planning, options: Options) -> Options:
        """Describe, keep and log the plan that is returned; runs as the last callback."""
        try:
            free_topology = self._storage_reservation.last_reserved_topology or self._topology
            found = self.found = planning.describe(options, free_topology)
            if found is not None:
                costs = planning.constraint_costs(found)
                found = self.found = replace(found, constraint_costs=costs)
                planning.tell(found)
        except Exception as error:  # callbacks may return anything
            reason = str(error) if isinstance(error, ShardoptError) else repr(error)
            logger.warning("the plan cannot be predicted: %s", reason)
        return options

    @as_planner_errors()
    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 of the group, and return its plan or raise its error on all ranks.

        With ``confirm``, all ranks run the best plans, and the fastest is returned.

        Raises:
            PlannerError: see `plan`; or there is no process group, or a rank of it does not answer
                within its timeout.
        """
        chosen = get_default_sharders() if sharders is None else sharders
        best_plan, rivals = on_first_rank(lambda: self._plan_for_group(module, chosen, pg), pg)
        confirm = self._settings.confirm if self._settings else None
        if confirm is None:
            return best_plan
        if not rivals or self._topology.world_size < dist.get_world_size():
            logger.warning(
                "nothing is measured: confirm needs plans of one search for all ranks of the job"
            )
            return best_plan
        plans = {"plan 1": best_plan, **rivals}
        try:
            self.confirmed = confirm_plans(module, plans, confirm, sharders=chosen)
        except Exception as error:
            logger.warning("nothing is measured: %s: %s", type(error).__name__, error)
        if not on_all_ranks(self.confirmed is not None, pg):
            self.confirmed = None
        return best_plan if self.confirmed is None else self.confirmed.best.plan

    def _plan_for_group(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        group: ProcessGroup | None,
    ) -> tuple[ShardingPlan, dict[str, ShardingPlan]]:
        """Return the plan that the other ranks wait for, and the plans to measure against it."""
        check_ranks(self._topology.world_size, group)
        self._waited_s = search_seconds(self._timeout_seconds, group)
        try:
            best_plan = self.plan(module, sharders)
        finally:
            self._waited_s = None
        rivals = {}
        try:
            for name, options in (self._planning.rivals if self._planning else {}).items():
                for callback in self._callbacks:
                    options = callback(options)
                rivals[name] = to_sharding_plan(options, self._topology)
        except Exception as error:  # a callback may take no other plan
            logger.warning("no other plan is run: %s: %s", type(error).__name__, error)
        return best_plan, rivals


for _name in ("__init__", "plan", "collective_plan"):
    # TorchRec's test of its stable interface compares annotations as objects, not by meaning
    _theirs = inspect.unwrap(getattr(EmbeddingShardingPlanner, _name)).__annotations__
    inspect.unwrap(getattr(ShardoptPlanner, _name)).__annotations__.update(_theirs)
