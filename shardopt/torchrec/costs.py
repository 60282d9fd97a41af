"""shardopt's costs and objective inside TorchRec's own planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import COLUMNS, Load, ShardLoads
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.torchrec.sparse import Exchange
from predictor.model.lookup_group import LookupGroup, group_of
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.plan_check import match_plan
from predictor.model.workload import DenseArch, QComm, Workload
from shardopt.extras import needs_torchrec
from shardopt.logs import logger
from shardopt.torchrec.machine import check_bandwidths, detect_hardware, read_topology
from shardopt.torchrec.offered import describe_reasons, reasons_of
from shardopt.torchrec.options import TableKey, kernel_of, to_plan, to_table_plan
from shardopt.torchrec.read_module import (
    OfferedTable,
    UserInputs,
    by_module,
    check_pooling_factor,
    known_workload,
    read_workload,
    tables_of,
    tell_device_groups,
    tell_missing_factors,
)

with needs_torchrec():
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.perf_models import NoopPerfModel
    from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
    from torchrec.distributed.planner.types import (
        ParameterConstraints,
        Perf,
        PerfModel,
        SharderData,
        SharderDataMap,
        ShardEstimator,
        ShardingOption,
    )
    from torchrec.distributed.types import ModuleSharder

Array = NDArray[np.float64]

WIRE_PRECISION = {4: "fp32", 2: "fp16"}
"""Bytes of an element on the wire -> a precision of that width."""
NO_DENSE = DenseArch(in_features=1, bottom_mlp=(), top_mlp=(), interaction="concat")


def _inputs(
    topology: TorchRecTopology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
    model: str | PathLike[str] | Workload | None,
    default_pooling_factor: float | None,
) -> UserInputs:
    """Check and join a user's arguments of either class below; warn of values not used."""
    check_bandwidths(topology)
    check_pooling_factor(default_pooling_factor)
    return UserInputs(
        batch_size,
        constraints or {},
        known_workload(model),
        default_pooling_factor,
        device=topology.compute_device,
    )


class ShardoptPerfEstimator(ShardEstimator):
    """Fills the `Perf` of every shard from shardopt's predictor: give it to an
    `EmbeddingEnumerator` instead of `EmbeddingPerfEstimator`, with a storage estimator.

    A shard is costed alone. What only a plan as a whole decides is left out: launch floors and
    latencies, which the tables of a launch share, waiting for other ranks, what overlaps, and
    what tables of one launch do to each other's caches. So sums of shards do not rank plans whose
    ranks wait for the host, which the number of launches and exchanges decides. Collectives cost
    what one byte more costs when every rank sends an equal part of everything.
    `ShardoptPerfModel` and `ShardoptPlanner` see whole plans.

    With the ``base`` train pipeline ids travel ahead of every lookup, and ``fwd_comms`` holds
    that time, too: TorchRec's total leaves ``input_dist_comms`` out.

    Args:
        topology: ranks; its bandwidths are not used.
        constraints: TorchRec's, by table name; they carry the pooling factors.
        hardware, model, default_pooling_factor: as in `ShardoptPlanner`.
    """

    def __init__(
        self,
        topology: TorchRecTopology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        hardware: str | HardwareProfile | None = None,
        model: str | PathLike[str] | Workload | None = None,
        default_pooling_factor: float | None = None,
    ) -> None:
        self._inputs = _inputs(topology, 0, constraints, model, default_pooling_factor)
        self._hardware = detect_hardware(hardware, topology.compute_device)
        self._theirs = topology
        self._told_factors = False
        self._torchrec_estimator = EmbeddingPerfEstimator(topology, self._inputs.constraints)

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """Set ``perf`` of every shard, in ms.

        Options that shardopt has no model for keep TorchRec's estimate, which is logged.
        """

        def sharder_of(option: ShardingOption) -> SharderData:
            return sharder_data_map[option.module_type_key]

        reasons = reasons_of(sharding_options, self._theirs, sharder_of)
        unknown = {kernel_of(o) for o in sharding_options} - set(ComputeKernel)
        ours: list[ShardingOption] = []
        torchrecs: list[ShardingOption] = []
        for option in sharding_options:
            unpredicted = (option.path, option.name) in reasons or kernel_of(option) in unknown
            (torchrecs if unpredicted else ours).append(option)
        if torchrecs:
            logger.warning(
                "options that shardopt does not predict keep TorchRec's estimates: %s",
                describe_reasons(reasons) or f"compute kernels {', '.join(sorted(unknown))}",
            )
            self._torchrec_estimator.estimate(torchrecs, sharder_data_map=sharder_data_map)
        if not ours:
            return
        offered = tables_of(ours, sharder_of)
        workload = self._workload(offered, ours[0].batch_size)
        ranks = read_topology(self._theirs, self._hardware)
        costs = ShardCosts(workload, FixedCosts(workload, ranks, self._hardware))
        for index, (theirs, table) in enumerate(zip(offered, workload.tables, strict=True)):
            for option in theirs.options:
                option.is_weighted = table.weighted
                plan = to_table_plan(option, table.constraints.cache_load_factor)
                for shard, perf in zip(option.shards, costs.shard_perfs(index, plan), strict=True):
                    shard.perf = perf

    def _workload(self, offered: Sequence[OfferedTable], batch_size: int) -> Workload:
        """The tables alone; of the precision on the wire only its width is known here."""
        inputs = self._inputs._replace(batch_size=batch_size)
        if not self._told_factors:
            tell_missing_factors(offered, inputs)
            self._told_factors = True
        widths = (pair for t in offered for pair in t.sharder.qcomm_dtype_sizes.values())
        forward, backward = next(widths, (4, 4))
        return Workload(
            name="tables",
            batch_size=batch_size,
            tables=tuple(table.read(inputs) for table in offered),
            dense=NO_DENSE if inputs.known is None else inputs.known.dense,
            train_pipeline=inputs.pipeline,
            qcomm=QComm(
                WIRE_PRECISION.get(int(forward), "fp32"), WIRE_PRECISION.get(int(backward), "fp32")
            ),
        )


class ShardCosts:
    """Costs of single shards of a workload.

    Args:
        costs: of the workload, on some topology and profile.
    """

    def __init__(self, workload: Workload, costs: FixedCosts) -> None:
        self.workload = workload
        self.costs = costs
        self.world = costs.topology.world_size
        self.shards = ShardLoads(workload, costs.topology, costs.hardware)
        self.average = _average(workload)
        self._rates: dict[LookupGroup, tuple[float, float, float]] = {}

    def shard_perfs(self, index: int, plan: TablePlan) -> list[Perf]:
        """Return a `Perf` for each shard of a table, whatever ranks the shards lie on."""
        group = group_of(self.workload.tables[index], plan, self.workload.train_pipeline)
        return [
            self._perf(group, self.shards.of_shard(index, plan, shard)) for shard in plan.shards
        ]

    def _perf(self, group: LookupGroup, load: Array) -> Perf:
        forward, backward, ids = self.rates(group)
        if group.sharding_type is ShardingType.DATA_PARALLEL:
            alone = self._exchange(group, np.tile(load, (self.world, 1)))
            comms = _marginal(alone.gradient_sync_ms(), self._empty(group).gradient_sync_ms())
        else:
            alone = self._exchange(group, _on_one_rank(load, self.world))
            comms = backward * load[Load.OUTPUTS]
        step = float(np.max(alone.optimizer_ms(self.costs.optimizer_ms)))
        input_dist = ids * load[Load.IDS]
        waits = input_dist if self.workload.train_pipeline == "base" else 0.0
        return Perf(
            fwd_compute=float(load[Load.FORWARD_MS]) + _copies(alone, backward=False),
            fwd_comms=float(forward * load[Load.OUTPUTS] + waits),
            bwd_compute=float(load[Load.BACKWARD_MS]) + _copies(alone, backward=True) + step,
            bwd_comms=float(comms),
            input_dist_comms=float(input_dist),
            prefetch_compute=float(load[Load.PREFETCH_MS]),
        )

    def rates(self, group: LookupGroup) -> tuple[float, float, float]:
        """ms per output element forward and backward, and per id, when each rank has an equal
        part of everything; local lookups exchange nothing."""
        if group not in self._rates:
            full = self._exchange(group, np.tile(self.average, (self.world, 1)))
            empty = self._empty(group)
            outputs = [
                sum(
                    _marginal(a.cost_ms, b.cost_ms)
                    for a, b in zip(
                        full.outputs(backward=way), empty.outputs(backward=way), strict=True
                    )
                )
                / self.average[Load.OUTPUTS]
                for way in (False, True)
            ]
            sent = 0.0
            if not full.is_local:
                sent = _marginal(full.ids_ms() + full.recat_ms(), empty.ids_ms() + empty.recat_ms())
            self._rates[group] = outputs[0], outputs[1], sent / self.average[Load.IDS]
        return self._rates[group]

    def _empty(self, group: LookupGroup) -> Exchange:
        return self._exchange(group, np.zeros((self.world, COLUMNS)))

    def _exchange(self, group: LookupGroup, loads: Array) -> Exchange:
        """Alone in its module; ``loads`` are ``[ranks, COLUMNS]``."""
        return Exchange(self.costs, [group], [0], loads[None, None])


def _average(workload: Workload) -> Array:
    """Ids and outputs of all tables on one rank of many, ``[COLUMNS]``."""
    load = np.zeros(COLUMNS)
    for table in workload.tables:
        load[Load.IDS] += table.lookups_per_sample
        load[Load.WEIGHTED_IDS] += table.lookups_per_sample * table.weighted
        load[Load.BAGS] += sum(f.num_poolings for f in table.features)
        load[Load.OUTPUTS] += table.outputs_per_sample * table.embedding_dim
    return load * workload.batch_size


def _on_one_rank(load: Array, world: int) -> Array:
    loads = np.zeros((world, COLUMNS))
    loads[0] = load
    return loads


def _copies(alone: Exchange, *, backward: bool) -> float:
    """Copies around the collectives: on the shard's rank, and its part of everyone's."""
    packed = alone.pack_ms(0, backward=backward)
    unpacked = alone.unpack_ms(np.zeros(1, dtype=bool), backward=backward)
    return float(np.max(packed) + np.max(unpacked))


def _marginal(full: Array, empty: Array) -> float:
    return float(np.max(full - empty))


class ShardoptPerfModel(PerfModel):
    """Rates proposals by predicted iteration time, in ms.

    TorchRec still proposes and places by its own estimates, so it may miss what
    `ShardoptPlanner` finds; of what it does propose, the fastest wins. TorchRec's rating of tables
    that shardopt has no model for is added, and they are logged once.

    Args:
        topology: ranks; its bandwidths are not used.
        module, sharders: as `EmbeddingShardingPlanner.plan` gets them.
        batch_size: samples per rank.
        hardware, constraints, model, default_pooling_factor: as in `ShardoptPlanner`.

    Raises:
        InputError: as `ShardoptPlanner.plan` does, for missing facts on the first proposal.
    """

    def __init__(
        self,
        topology: TorchRecTopology,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]],
        batch_size: int,
        *,
        hardware: str | HardwareProfile | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        model: str | PathLike[str] | Workload | None = None,
        default_pooling_factor: float | None = None,
    ) -> None:
        self._facts = _inputs(topology, batch_size, constraints, model, default_pooling_factor)
        tell_device_groups(module, self._facts.constraints, topology.compute_device)
        self._hardware = detect_hardware(hardware, topology.compute_device)
        self._topology = topology
        self._request = (module, sharders)
        self._left: dict[TableKey, str] | None = None
        self._batch: PlanScorer | None = None

    def rate(self, plan: list[ShardingOption]) -> float:
        """Predicted iteration time of placed options, one a table."""
        if self._left is None:
            self._left = reasons_of(plan, self._topology, by_module(self._request[1]))
            if self._left:
                logger.warning(
                    "rated by TorchRec's own estimate, which is not validated: %s",
                    describe_reasons(self._left),
                )
        mine = [option for option in plan if (option.path, option.name) not in self._left]
        theirs = [option for option in plan if (option.path, option.name) in self._left]
        rating = float(NoopPerfModel(self._topology).rate(theirs))
        return rating + self._predict(mine) if mine else rating

    def _predict(self, plan: list[ShardingOption]) -> float:
        if self._batch is None:
            workload = read_workload(*self._request, plan, self._facts)
            ranks = read_topology(self._topology, self._hardware)
            self._batch = PlanScorer(workload, ranks, self._hardware)
        workload, ranks = self._batch.workload, self._batch.topology
        ours = to_plan(plan, workload, ranks)
        return float(self._batch.score([match_plan(workload, ranks, ours)])[0])
