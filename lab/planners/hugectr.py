"""HugeCTR's planner: small tables on every rank, the hottest split again and again.

After the planner of NVIDIA's MLPerf submissions (sharding plans of the dlrm_dcnv2 implementation,
mlcommons/training_results): tables below a size are data-parallel; the others are placed greedily,
a bucket's cost being the ids it reads and, weighted by the ratio of memory to link bandwidth, the
embeddings it sends; then the hottest table is split in two and all are placed anew, 20 times.

Differences: HugeCTR splits rows over any ranks. TorchRec's splits nearest to that are tried both:
columns, halved while they go, then rows over all ranks; or rows over all ranks at once. Costs are
per column, as dims differ here and not there. The threshold is a grid, for no one rule is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from lab.planners.columns import list_halvings, option_of_type, ranks_of, shards_of
from lab.planners.planner import PlannerInputs
from predictor.model.plan import ShardingType
from predictor.model.workload import Table
from search.baselines.greedy import Array, place_greedily
from search.objective import Assignment
from search.space.option import Choice, Option
from search.stop import Stop

SPLITS = 20
THRESHOLDS_BYTES = (0, 10**5, 10**6, 10**7, 10**8)
"""Tables of at most this size are data-parallel; submissions use 0 to some hundred MB."""
NVLINK_RATIO, NIC_RATIO = 7.4, 67.0
"""``mem_comm_bw_ratio`` of the submissions: HBM of 3.35 TB/s over NVLink's 450 GB/s, or over a
NIC's 50 GB/s where there are several hosts."""
WORK_RATIO = 4
"""``mem_comm_work_ratio``: bytes a weight is read and written for one that is sent."""


class HugeCtr:
    """See the module."""

    name = "hugectr"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """A plan after each split, for every threshold and both ways of splitting."""
        for threshold, by_rows in itertools.product(THRESHOLDS_BYTES, (False, True)):
            ladders = [
                _ladder(inputs.problem.workload.tables[t], options, threshold, by_rows)
                for t, options in enumerate(inputs.options)
            ]
            if not all(ladders):
                continue
            at = [0] * len(ladders)
            for _ in range(SPLITS + 1):
                if stop.reached():
                    return
                chosen = [ladder[i] for ladder, i in zip(ladders, at, strict=True)]
                plan = _placed(inputs, chosen)
                if plan is not None:
                    yield plan
                heat = [
                    _cost(inputs, o) if i + 1 < len(ladder) else -1.0
                    for o, ladder, i in zip(chosen, ladders, at, strict=True)
                ]
                hottest = int(np.argmax(heat))
                if heat[hottest] < 0:
                    break
                at[hottest] += 1


def _ladder(table: Table, options: Sequence[Option], threshold: int, rows: bool) -> list[Option]:
    """A table's options, each a finer split than the one before."""
    replica = option_of_type(options, ShardingType.DATA_PARALLEL)
    if table.weight_bytes <= threshold and replica is not None:
        return [replica]
    columns = list_halvings(options)
    by_row = option_of_type(options, ShardingType.ROW_WISE)
    ladder = columns[:1] if rows else columns
    return [*ladder, by_row] if by_row is not None else ladder


def _cost(inputs: PlannerInputs, option: Option) -> float:
    """Of each shard: columns times ids read and embeddings sent."""
    table = inputs.problem.workload.tables[option.table]
    topology = inputs.problem.topology
    ratio = NVLINK_RATIO if topology.hosts == 1 else NIC_RATIO
    share = topology.world_size if option.sharding_type is ShardingType.ROW_WISE else 1
    sent = ratio / WORK_RATIO * len(table.features)
    return option.column_width * (table.lookups_per_sample / share + sent)


def _placed(inputs: PlannerInputs, chosen: Sequence[Option]) -> Assignment | None:
    everyone = tuple(range(inputs.problem.topology.world_size))
    placed: dict[int, Choice] = {}
    room: Array = inputs.objective.caps.T.copy()
    free: list[Option] = []
    for option in chosen:
        if option.num_shards == len(everyone) and option.sharding_type in (
            ShardingType.ROW_WISE,
            ShardingType.DATA_PARALLEL,
        ):
            placed[option.table] = (option, everyone)
            room -= inputs.objective.footprint(option, everyone).T
        else:
            free.append(option)
    shards, owner = shards_of(free, [np.full(o.num_shards, _cost(inputs, o)) for o in free])
    (ranks,) = place_greedily(shards, room)
    if ranks is None or (room < 0).any():
        return None
    for option, where in zip(free, ranks_of(owner, ranks, free), strict=True):
        placed[option.table] = (option, where)
    return tuple(placed[table] for table in range(len(inputs.options)))
