"""`ShardoptPlanner`: a drop-in for TorchRec's `EmbeddingShardingPlanner`.

TorchRec's planner stays in charge of all but the choice: reservation, enumeration, callbacks,
statistics, plan loading, validation and errors are its own code. It asks a proposer, a partitioner
and a performance model in turn; here one search answers for all three.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from os import PathLike
from typing import Any

from predictor.errors import InfeasibleError, InputError, ShardoptError
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan as OurPlan
from predictor.model.topology import ReplicaGroups, Topology
from predictor.model.workload import Workload
from predictor.predict import predict
from search.constraint_costs import ConstraintCosts
from search.problem import NOMINAL, Problem, Result
from search.stop import Stop
from shardopt.api.answer import FREE_EFFORT, FREE_RESERVE, TOP_K, find_plans
from shardopt.api.cache import ResultCache
from shardopt.api.scenarios import read_scenarios, windows_of
from shardopt.config.cluster import hardware_of
from shardopt.extras import needs_torchrec
from shardopt.formatting import listed
from shardopt.race import TORCHREC, Confirmation
from shardopt.torchrec.beside import TorchRecsPlan, tell_column_states, tell_replicable
from shardopt.torchrec.collective import (
    check_ranks,
    joined,
    on_all_ranks,
    on_first_rank,
    search_seconds,
)
from shardopt.torchrec.confirming import Confirm
from shardopt.torchrec.confirming import confirm as confirm_plans
from shardopt.torchrec.constraint_price import price_lines, price_torchrecs_constraints
from shardopt.torchrec.failures import tell_fallback
from shardopt.torchrec.logs import logger
from shardopt.torchrec.machine import (
    DEVICES,
    TooLargeError,
    check_bandwidths,
    check_table_sizes,
    detect_hardware,
    find_replicas,
    given_costs,
    problem_of,
    profile_of_here,
    read_cluster,
    read_topology,
    unknown_device,
    usual_topology,
)
from shardopt.torchrec.offered import (
    REPLICATED,
    Options,
    TorchRecSearch,
    all_left,
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
from shardopt.torchrec.pipelines import tell
from shardopt.torchrec.private import constraints_of, describe_reservation, pipeline_of
from shardopt.torchrec.read_module import (
    UserInputs,
    by_module,
    check_pooling_factor,
    known_workload,
    merge_constraints,
    read_workload,
    tell_device_groups,
)
from shardopt.torchrec.report import LastSearch, ShardoptStats, describe, short_of
from shardopt.torchrec.tables import find_tables

with needs_torchrec():
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import ProcessGroup
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.constants import BATCH_SIZE
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
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
        ShardingOption,
        Stats,
        StorageReservation,
    )
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.types import ModuleSharder, ShardingPlan


class PlannerInputError(InputError, PlannerError):
    """Something given cannot be used; says what and what to do. TorchRec's and shardopt's error."""

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
    """Wrap an ``__init__`` so that where it fails it leaves TorchRec's planner, and the error for
    `plan`.

    Arguments of shardopt's own that cannot be used are raised: nothing has begun yet.
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


Searched = tuple[Problem, Result | None, OurPlan, TorchRecsPlan | None]
"""Problem, result of the search, plan before callbacks saw it, and TorchRec's plan."""

SECONDS, TABLES = 5.0, 100
"""Default limit in s of a plan, and the tables it is for; more tables take longer in proportion."""
RESERVE = 0.15
"""Share of a ceiling for the steps after the search."""


def plans_alone() -> bool:
    """Tell if no other process needs the same plan: one that the clock cuts short depends on the
    machine."""
    alone = not joined() or dist.get_world_size() == 1
    return alone and os.environ.get("WORLD_SIZE", "1") in ("", "1")


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


class _SearchInTurn(Proposer, Partitioner, PerfModel):
    """One search as proposer, partitioner and performance model.

    It proposes once, the options of least memory: TorchRec explains from them why nothing fits. As
    a partitioner it searches all that the enumerator offers, whatever is proposed; as a model it
    rates what the search found.

    Args:
        search: ranks with the memory that the reservation left -> placed options, one a table, and
            their rating in ms.
    """

    def __init__(self, search: Callable[[TorchRecTopology], tuple[Options, float]]) -> None:
        self._search = search
        self.space: Options = []
        self._rating = 0.0

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

    def partition(self, proposal: Options, storage_constraint: TorchRecTopology) -> Options:
        placed, self._rating = self._search(storage_constraint)
        return placed

    def rate(self, plan: Options) -> float:
        return self._rating


def _bytes(option: ShardingOption) -> int:
    return sum(shard.storage.hbm + shard.storage.ddr for shard in option.shards if shard.storage)


def _in_order_of(space: Options, placed: Options) -> Options:
    """Placed options, table by table as TorchRec enumerates them."""
    by_table = {(option.path, option.name): option for option in placed}
    return [by_table[key] for key in group_by_table(space)]


def check_storage(options: Options, topology: TorchRecTopology) -> None:
    """Refuse a plan that does not fit by the user's own storage estimator."""
    for before, after in zip(topology.devices, without(topology, options).devices, strict=True):
        needed = before.storage - after.storage
        if not needed.fits_in(before.storage):
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"the storage estimator counts {needed} on rank {before.rank}, which has "
                f"only {before.storage} left, while shardopt counted less; use a larger "
                "storage_reservation",
            )


class ShardoptPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with shardopt's objective and search.

    Args:
        topology: ranks and memory; by default those of the process group. Its bandwidths are not
            used: costs come from ``hardware``.
        batch_size: samples per rank; by default the model file's, else TorchRec's 512.
        enumerator, storage_reservation, debug, callbacks, plan_loader: as in
            `EmbeddingShardingPlanner`. Of a table, only what the enumerator offers is considered,
            and constraints that it alone was given count, too.
        stats: reports of the plan; by default `ShardoptStats`.
        proposer, partitioner, performance_model: decide over tables that shardopt has no model
            for; for all others the search replaces them.
        constraints: TorchRec's, by table name; all fields are honoured.
        timeout_seconds: ceiling on the whole call, > 0; the best plan found by then is returned. In
            `collective_plan` at most a quarter of the group's timeout. By default 5 s up to 100
            tables, and longer in proportion, where ``effort`` is not given and one process plans:
            in `collective_plan`, and in `plan` outside of a job of several.
        hardware: name or file of a hardware profile; by default that of the cluster file, or of
            the GPU found.
        cluster: a cluster file with the ranks of the topology, for its NVLink domain, the levels of
            its network and its hardware.
        model: a model file (or its `Workload`) with what no module holds: pooling factors, index
            distributions, train pipeline, dense part. Tables and features are matched by name.
        example_inputs: what the module's forward takes, as in `to_yaml`, to capture the dense part
            with where no ``model`` says it; None to make it from the features.
        default_pooling_factor: mean ids per sample of features for which nobody gives them, > 0;
            if None TorchRec's 1, with a warning.
        strict: raise instead of warning: where pooling factors are missing, where only one of
            shardopt's and the storage estimator's counts of memory accepts the plan, and where
            TorchRec's own planner would have to plan.
        seed: of every random choice of the search, >= 0; all processes find the same plan.
        effort: multiple of the default work budget, > 0.
        objective: ``nominal`` (the predicted time), ``mean`` (over the scenarios) or ``regret``.
        scenarios: draws of the profile's stated errors (16 by default), ``none``, or a file.
        replica_groups: 2D sparse parallelism; by default the model file's. The topology is then
            that of all ranks, and the plan that of one sharding group.
        cache: keep the answer under the user's cache directory, and take it from there.
        train_pipeline: ``base``, ``sparse_dist``, ``prefetch_sparse_dist``, ``semi_sync``, or
            TorchRec's pipeline, its class or the name of that; by default the model file's, else
            what the enumerator's storage estimator was told, else ``base``. What is left out of it
            is logged.
        confirm: run the best plans and TorchRec's for real in `collective_plan`, and return the
            fastest measured one. See docs/learning.md.

    Attributes:
        confirmed: the last measured plans; None without ``confirm``.
        found: result of the last `plan`; None before, and where nothing can be predicted.
        replicas: how ranks form groups, and what `DMPCollection` takes; None for one copy.

    Raises:
        PlannerError: an argument that TorchRec's planner does not have cannot be used.
    """

    _failure: Exception | None = None
    _their_search: TorchRecSearch | None = None
    _strict = False
    _confirm: Confirm | None = None
    found: LastSearch | None = None
    confirmed: Confirmation | None = None
    _callbacks: list[Callable[[Options], Options]]
    _proposers: list[Proposer]
    _partitioner: Partitioner
    _perf_model: PerfModel
    _request: tuple[nn.Module, Sequence[ModuleSharder[nn.Module]]]

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
            callbacks=[*(callbacks or []), self._note],
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
        links = None if cluster is None else read_cluster(cluster, job or self._topology)
        if hardware is None and links is not None:
            _, hardware = hardware_of(links) or (None, None)
        device = self._topology.compute_device
        self._strict = strict
        if device not in DEVICES:
            self._failure = unknown_device(device)
            if strict:
                raise self._failure
            return
        costs = detect_hardware(hardware, device)
        costs = costs if links is None else links.joined(costs)
        self._stand_in = hardware is None and profile_of_here(device) is None
        self._hardware, self._links = costs, links
        Stop(1.0 if effort is None else effort, timeout_seconds)  # checks both
        self._effort = effort
        self._seed, self._objective = seed, objective
        self._scenarios = read_scenarios(scenarios, costs, windows_of(model))
        self._cache = ResultCache.of_user() if cache else None
        parts = {"proposer": proposer, "partitioner": partitioner}
        parts["performance_model"] = performance_model
        replaced = [name for name, part in parts.items() if part]
        if replaced:
            logger.warning(
                "%s: shardopt's search takes the place; only tables that it has no model for are "
                "left to them",
                ", ".join(replaced),
            )
        self._their_search = TorchRecSearch(
            self._proposers, self._partitioner, self._perf_model, self._enumerator
        )
        self._search = _SearchInTurn(self._find)
        self._proposers = [self._search]
        self._partitioner = self._perf_model = self._search
        if train_pipeline is None and workload is None:
            train_pipeline = pipeline_of(self._enumerator)
        self._train_pipeline = None if train_pipeline is None else tell(train_pipeline)
        self._known = workload
        self._default_pooling_factor = default_pooling_factor
        self._example_inputs = example_inputs
        self._stop = Stop()
        self._waited_s: float | None = None  # by other ranks, at most
        self._searched: Searched | None = None
        self._confirm = confirm
        self._rivals: dict[str, Options] = {}

    @as_planner_errors()
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return the plan with the least predicted iteration time, or TorchRec's own, with a
        warning, where shardopt cannot plan.

        Raises:
            PlannerError: TorchRec's planner finds no plan either, with its error types and
                remedies; or ``strict`` refuses what shardopt does not plan.
        """
        self._request = (module, sharders)
        failure = self._failure
        if failure is None:
            try:
                return self._plan_and_search(module, sharders)
            except TooLargeError:
                raise
            except Exception as error:
                failure = error
        if not self._strict:
            return self._plan_as_torchrec(module, sharders, failure)
        if isinstance(failure, ShardoptError | PlannerError):
            raise failure
        message = f"{type(failure).__name__}: {failure}"
        raise PlannerError(error_type=PlannerErrorType.OTHER, message=message) from failure

    def _plan_and_search(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
        """Run TorchRec's planner with shardopt's search in it."""
        self._searched = self.found = None
        self._rivals = {}
        effort = 1.0 if self._effort is None else self._effort
        self._stop = Stop(effort, self._limit_s(module), reserve=RESERVE)
        constraints = self._inputs().constraints
        tell_device_groups(module, constraints, self._topology.compute_device)
        check_table_sizes(module, self._topology, describe_reservation(self._storage_reservation))
        return super().plan(module, sharders)

    def _limit_s(self, module: nn.Module) -> float | None:
        """Ceiling on the call; None without one."""
        limits = [self._timeout_seconds, self._waited_s]
        alone = self._waited_s is not None or plans_alone()
        if limits[0] is None and self._effort is None and alone:
            limits.append(SECONDS * max(1.0, len(list(find_tables(module))) / TABLES))
        return min((limit for limit in limits if limit is not None), default=None)

    def _plan_as_torchrec(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], failure: Exception
    ) -> ShardingPlan:
        """The plan of TorchRec's planner, as its arguments make it.

        Raises:
            PlannerError: it finds none.
        """
        self._searched = self.found = None
        self._rivals = {}
        mine = self._proposers, self._partitioner, self._perf_model, self._callbacks
        self._callbacks = [callback for callback in self._callbacks if callback != self._note]
        theirs = self._their_search
        if theirs is not None:
            self._proposers, self._partitioner = list(theirs.proposers), theirs.partitioner
            self._perf_model = theirs.performance_model
        try:
            plan = super().plan(module, sharders)
        except PlannerError as error:
            if isinstance(failure, PlannerError):  # it says more
                raise failure from error
            raise
        finally:
            self._proposers, self._partitioner, self._perf_model, self._callbacks = mine
        tell_fallback(failure, module, self._topology)
        return plan

    @as_planner_errors()
    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 of the group and return its plan, or raise its error, on all ranks; with
        ``confirm`` all ranks run the best plans and the fastest is returned.

        Raises:
            PlannerError: as `plan`; or there is no process group, or a rank of it does not answer
                within its timeout.
        """
        chosen = get_default_sharders() if sharders is None else sharders
        best_plan, rivals = on_first_rank(lambda: self._plan_for_group(module, chosen, pg), pg)
        if self._confirm is None:
            return best_plan
        if not rivals or self._topology.world_size < dist.get_world_size():
            logger.warning(
                "nothing is measured: confirm compares plans of one search for all ranks of the job"
            )
            return best_plan
        plans = {"plan 1": best_plan, **rivals}
        try:
            self.confirmed = confirm_plans(module, plans, self._confirm, sharders=chosen)
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
        """The plan for which the other ranks wait, and others to run beside it where plans are
        confirmed."""
        check_ranks(self._topology.world_size, group)
        self._waited_s = search_seconds(self._timeout_seconds, group)
        try:
            best_plan = self.plan(module, sharders)
        finally:
            self._waited_s = None
        if self._confirm is None:
            return best_plan, {}
        rivals = {}
        try:
            for name, options in self._rivals.items():
                for callback in self._callbacks[:-1]:  # the last keeps what is known of the plan
                    options = callback(options)
                rivals[name] = to_sharding_plan(options, self._topology)
        except Exception as error:  # a callback may take no other plan
            logger.warning("no other plan is run: %s: %s", type(error).__name__, error)
        return best_plan, rivals

    def _find(self, free_topology: TorchRecTopology) -> tuple[Options, float]:
        """Return the best plan as one placed option per table, and its rating in ms: TorchRec's own
        where it places all tables.

        Args:
            free_topology: ranks with the memory that the reservation left.
        """
        whole, rating = self._search.space, 0.0
        space = self._usable(whole, free_topology)
        reasons = self._reasons(space)
        mine = [o for o in space if (o.path, o.name) not in reasons]
        theirs = [o for o in space if (o.path, o.name) in reasons]
        placed: Options = []
        if theirs:
            assert self._their_search is not None
            placed, rating = self._their_search.place(theirs, free_topology)
            logger.warning(
                "left to TorchRec's own estimate (%.3g ms, not validated, and not in the "
                "predicted time): %s",
                rating,
                describe_reasons(reasons),
            )
        if mine:
            tables = group_by_table(mine)
            offered = runnable(whole, self._topology)
            offered = [o for o in offered if (o.path, o.name) in tables]
            chosen, rating = self._choose(mine, without(free_topology, placed), offered)
            self._rivals = {
                name: _in_order_of(whole, [*placed, *rival]) for name, rival in self._rivals.items()
            }
            placed += chosen
        tell_dense(placed)
        tell_widths(placed)
        return _in_order_of(whole, placed), rating

    def _usable(self, space: Options, free_topology: TorchRecTopology) -> Options:
        """Return the offered options that run and keep the optimizer of every table."""
        usable = runnable(space, self._topology)
        if all_left(usable, free_topology):
            return usable  # TorchRec's own plan of all tables is the one that is made
        ranks = read_topology(free_topology, self._hardware)

        def plan_of_torchrec() -> Options | None:
            """Plan by TorchRec's own costs, as those of a Topology say nothing of shardopt's."""
            if not given_costs(free_topology):
                return torchrecs_plan(usable, ranks)
            usual = usual_topology(self._topology)
            enumerator = EmbeddingEnumerator(usual, self._batch_size, self._inputs().constraints)
            return plan_by_usual_costs(usable, ranks, enumerator, self._request)

        return trained_alike(usable, plan_of_torchrec, self._inputs().constraint)

    def _reasons(self, options: Options) -> dict[TableKey, str]:
        """Tables that are left to TorchRec, and why."""
        return reasons_of(options, self._topology, by_module(self._request[1]))

    def _problem(self, space: Options, free_topology: TorchRecTopology) -> Problem:
        """The tables that options are of, on the ranks with the memory that is left."""
        workload = read_workload(*self._request, space, self._inputs())
        return problem_of(workload, free_topology, self._hardware, self._links, self.replicas)

    def _choose(
        self, space: Options, free_topology: TorchRecTopology, offered: Options
    ) -> tuple[Options, float]:
        """Choose the options of the tables that shardopt predicts.

        Args:
            space: options that train every table as TorchRec's plan does.
            offered: all options of the same tables that run.
        """
        problem = self._problem(space, free_topology)
        theirs = torchrecs_plan(offered, problem.topology)
        try:
            return self._search_in(problem, space, free_topology, theirs)
        except (ShardoptError, PlannerError) as error:
            if theirs is not None and self._stop.remaining_s <= 0 and not self._strict:
                logger.warning("no time is left to search, so the plan is TorchRec's: %s", error)
                self._keep(problem, None, theirs)
                return theirs, 0.0
            if not isinstance(error, InfeasibleError | PlannerError):
                raise
            if theirs is None or self._strict:
                kind = PlannerErrorType.PARTITION
                raise PlannerError(error_type=kind, message=str(error)) from error
            logger.warning(
                "shardopt's count of memory and that of the storage estimator differ; the plan is "
                "one that the estimator accepts (strict=True refuses it): %s",
                error,
            )
            too_little = isinstance(error, InfeasibleError)
        problem = with_room_for(to_plan(theirs, problem.workload, problem.topology), problem)
        if too_little:
            self._stop.resume()
            with suppress(InfeasibleError, PlannerError):
                return self._search_in(problem, space, free_topology, theirs)
        self._keep(problem, None, theirs)
        return theirs, 0.0

    def _search_in(
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
        inputs = self._inputs()
        windows = self._scenarios.read_windows(
            lambda window: read_workload(*self._request, space, inputs._replace(known=window))
        )
        result, *_ = find_plans(
            replace(problem, aim=self._objective),
            self._stop,
            self._seed,
            replace(self._scenarios, windows=windows),
            self._cache,
            top_k=TOP_K if self._confirm is None else max(TOP_K, self._confirm.plans),
        )
        torchrecs = None
        if theirs is not None:
            plan = to_plan(theirs, problem.workload, problem.topology)
            torchrecs = TorchRecsPlan.rated(plan, problem)
            # times say nothing of another aim, and dynamicemb's tables have their own planners
            free = self._objective == NOMINAL and self._confirm is None
            free = free and all(option.compute_kernel != CUSTOMIZED for option in theirs)
            if free and torchrecs.ties(result.best.iteration_ms):
                self._keep(problem, result, theirs, replace(torchrecs, returned=True))
                return theirs, torchrecs.iteration_ms
        options = to_options(result.best.plan, problem.workload, space)
        self._enumerator.populate_estimates(options)
        check_storage(options, free_topology)
        self._keep(problem, result, options, torchrecs)
        if self._confirm is not None and self.replicas is None:  # plans to measure beside the best
            self._rivals = {
                f"plan {i}": to_options(ranked.plan, problem.workload, space)
                for i, ranked in enumerate(result.plans[1 : self._confirm.plans], 2)
            }
            self._rivals |= {} if theirs is None else {TORCHREC: theirs}
        return options, result.best.iteration_ms

    def _keep(
        self,
        problem: Problem,
        result: Result | None,
        options: Options,
        torchrecs: TorchRecsPlan | None = None,
    ) -> None:
        """Keep the chosen plan as it is before callbacks see it."""
        plan = to_plan(options, problem.workload, problem.topology)
        self._searched = problem, result, plan, torchrecs

    def _inputs(self) -> UserInputs:
        """Return the user's inputs; the enumerator's own constraints decide, as in TorchRec."""
        theirs = constraints_of(self._enumerator)
        return UserInputs(
            self._batch_size,
            {**(self._constraints or {}), **theirs},
            self._known,
            self._default_pooling_factor,
            self._strict,
            self._example_inputs,
            self._topology.compute_device,
            train_pipeline=self._train_pipeline,
        )

    def _note(self, options: Options) -> Options:
        """Keep what is known of the plan that is returned; the last callback."""
        try:
            self.found = self._describe(options)
            if self.found is not None:
                costs = self._constraint_costs(self.found)
                self.found = replace(self.found, constraint_costs=costs)
                self._tell(self.found)
        except Exception as error:  # callbacks may return anything
            reason = str(error) if isinstance(error, ShardoptError) else repr(error)
            logger.warning("the plan cannot be predicted: %s", reason)
        return options

    def _tell(self, last_search: LastSearch) -> None:
        """Log what is predicted, how training differs from TorchRec's, and what is not allowed."""
        for line in (describe(last_search), *short_of(last_search.prediction.memory)):
            logger.warning("%s", line)
        if last_search.result is None:
            return
        costs = last_search.constraint_costs
        if costs is not None:
            logger.warning(
                "%s",
                price_lines(costs, last_search.problem, self._inputs().constraints),
            )
        tell_column_states(last_search.plan, last_search.torchrecs, last_search.problem)
        if self._stop.remaining_s > 0:
            tell_replicable(
                last_search.plan,
                last_search.problem,
                self._replicable(last_search.problem.workload),
            )

    def _constraint_costs(self, last_search: LastSearch) -> ConstraintCosts | None:
        """Price the user's constraints; None where no time is left, and where the options without
        them are up to an enumerator of the user's own."""
        remaining_s = self._stop.remaining_s
        if (
            last_search.result is None
            or remaining_s <= 0
            or type(self._enumerator) is not EmbeddingEnumerator
        ):
            return None
        budget = Stop(
            self._stop.effort * FREE_EFFORT,
            None if remaining_s == math.inf else remaining_s,
            reserve=FREE_RESERVE,
        )
        arguments = self._request, self._inputs(), self._topology
        return price_torchrecs_constraints(
            last_search.problem, last_search.plan, *arguments, budget, self._seed
        )

    def _replicable(self, workload: Workload) -> list[str]:
        """Keys of tables that TorchRec offers to replicate."""
        offered = runnable(self._search.space, self._topology)
        free = {(o.path or "ebc", o.name) for o in offered if o.sharding_type == REPLICATED}
        tables = zip(workload.keys, workload.tables, strict=True)
        return [key for key, table in tables if (table.module, table.name) in free]

    def _installed(self, problem: Problem) -> Topology:
        """The ranks of a problem, with what their devices have before the reservation."""
        storages = [device.storage for device in self._topology.devices]
        on_cpu = problem.hardware.device == "cpu"
        installed = tuple(int(s.ddr if on_cpu else s.hbm) for s in storages)
        return replace(problem.topology, installed_bytes=installed, limit_bytes=installed)

    def _describe(self, options: Options) -> LastSearch | None:
        unpredicted = self._reasons(options)
        mine = [option for option in options if (option.path, option.name) not in unpredicted]
        if not mine:
            return None
        problem, result, before, torchrecs = self._searched or (None, None, None, None)
        if problem is None:
            reserved = self._storage_reservation.last_reserved_topology or self._topology
            problem = self._problem(mine, reserved)
        there, workload = {(o.path or "ebc", o.name) for o in mine}, problem.workload
        tables = zip(workload.keys, workload.tables, strict=True)
        missing = [f"'{key}'" for key, table in tables if (table.module, table.name) not in there]
        if missing:
            raise InputError(
                f"callbacks left out table{'s' * (len(missing) > 1)} {listed(missing)}"
            )
        plan = to_plan(mine, workload, problem.topology)
        unchanged = (before or plan).tables
        return LastSearch(
            problem,
            result,
            plan,
            predict(problem.workload, self._installed(problem), problem.hardware, plan),
            tuple(key for key, table in plan.tables.items() if table != unchanged[key]),
            unpredicted,
            self._stand_in,
            torchrecs,
        )


for _name in ("__init__", "plan", "collective_plan"):
    # TorchRec's test of its stable interface compares annotations as objects, not by meaning
    _theirs = inspect.unwrap(getattr(EmbeddingShardingPlanner, _name)).__annotations__
    inspect.unwrap(getattr(ShardoptPlanner, _name)).__annotations__.update(_theirs)
