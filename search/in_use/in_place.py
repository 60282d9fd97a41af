"""Which moves TorchRec can make while a job runs, and why it cannot make the others.

`DistributedModelParallel.reshard` (torchrec 1.8 and 1.9, torchrec/distributed/embeddingbag.py
`update_shards`, torchrec/distributed/sharding/dynamic_sharding.py) was seen to fail, to hang or to
lose optimizer state for all that is named here (tests/distributed/test_live.py).

Why: docs/decisions/0066.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import Optimizer, Table

IN_PLACE = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
"""Sharding types that it moves (`prepare_comm_ops`)."""
STATELESS = (Optimizer.SGD, Optimizer.EXACT_SGD)
ROW_STATE = (Optimizer.ROWWISE_ADAGRAD,)
"""Optimizers with one state for each row and column shard."""
MOVED_STATE = (*STATELESS, *ROW_STATE, Optimizer.ADAGRAD, Optimizer.LARS_SGD)
"""Optimizers whose whole state moves: it takes `momentum1` and nothing else."""


def find_obstacles(
    tables: Mapping[str, Table], before: ShardingPlan, after: ShardingPlan, moved: Sequence[str]
) -> list[str]:
    """Why a move cannot be made in place, a phrase for each table or module; empty if it can.

    Args:
        tables: of the model, under the keys of both plans.
        moved: keys of those that differ.
    """
    found = []
    for key in moved:
        found += [
            f"table '{key}' {why}"
            for why in _of_table(tables[key], before.tables[key], after.tables[key])
        ]
    for module in dict.fromkeys(tables[key].module for key in moved):
        mine = {key: table for key, table in tables.items() if table.module == module}
        found += [f"module '{module}' {why}" for why in _of_module(mine, before)]
    return found


def allowed_in_place(
    tables: Mapping[str, Table], plan: ShardingPlan
) -> Callable[[str, TablePlan], bool]:
    """Whether TorchRec could change a table's sharding to another one in place, on whatever
    distinct ranks, as `PlanInUse.allows` takes it.

    Args:
        tables: of the model, under the keys of the plan.
        plan: what runs.
    """
    stuck: set[str] = set()
    for module in {table.module for table in tables.values()}:
        mine = {key: table for key, table in tables.items() if table.module == module}
        if any(_of_module(mine, plan)):
            stuck |= mine.keys()

    def allows(key: str, after: TablePlan) -> bool:
        return key not in stuck and not any(_of_table(tables[key], plan.tables[key], after))

    return allows


def _of_table(table: Table, before: TablePlan, after: TablePlan) -> Iterator[str]:
    was, now = before.sharding_type, after.sharding_type
    if was is not now or was not in IN_PLACE:
        yield f"goes from {was} to {now}; only table_wise and column_wise stay what they are"
    if not before.compute_kernel == after.compute_kernel == ComputeKernel.FUSED:
        yield f"has the kernel {before.compute_kernel}, then {after.compute_kernel}; only fused"
    if len(set(after.ranks)) < len(after.ranks):
        yield "has two shards on one rank afterwards, of which only one is filled"
    widths = sorted({shard.size[1] for shard in after.shards})
    if len(widths) > 1:
        yield f"has column shards of {widths} columns afterwards; TorchRec loads only equal ones"
    if table.optimizer not in MOVED_STATE:
        yield f"has {table.optimizer}, of whose states only the first is moved"
    cuts = [sorted(shard.offset[1] for shard in plan.shards) for plan in (before, after)]
    if table.optimizer in ROW_STATE and cuts[0] != cuts[1]:
        yield f"has {table.optimizer}, whose states do not follow other column cuts"


def _of_module(tables: Mapping[str, Table], before: ShardingPlan) -> Iterator[str]:
    if not all(table.is_pooled for table in tables.values()):
        yield "does not pool; only an EmbeddingBagCollection can be resharded"
    plans = [before.tables[key] for key in tables]
    if any(plan.sharding_type is ShardingType.DATA_PARALLEL for plan in plans):
        yield "has data_parallel tables, which TorchRec does not build anew"
    stateless = {table.optimizer in STATELESS for table in tables.values()}
    if len(stateless) > 1:
        yield "mixes optimizers with and without state, and would wait for states nobody sends"
