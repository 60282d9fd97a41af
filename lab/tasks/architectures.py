"""Tasks of models whose dense part is no DLRM: built for real, captured, and planned.

Each has TorchRec's plan and ours, and structures that need no search. Ours is searched on the
calibration of the task set, which no measured iteration is part of.

Why: docs/decisions/0055.
"""

from __future__ import annotations

import random
from dataclasses import replace

from lab.tasks.draw import Task
from lab.tasks.models.architectures import DrawnModel, draw_architecture
from lab.tasks.plans import EFFORT, signature, their_plan
from lab.tasks.structures import Candidate, plan_of, structures
from lab.tasks.task_set import TaskSet, task_name
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import (
    RuntimeSetting,
    find_runtime_problem,
    in_torchrec_order,
)
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from shardopt.config.write import with_digest

THEIRS, OURS = "torchrec", "shardopt"
MAX_PLANS = 6
STRUCTURES = (
    *("table_wise_by_lookups", "row_wise", "column_wise", "small_data_parallel"),
    *("mix_table_row_column", "mix_data_table_row", "table_wise_by_bytes", "table_wise_random"),
)
"""In the order in which they are taken until there are `MAX_PLANS`."""


def draw_architecture_task(seed: int, task_set: TaskSet) -> Task:
    """The model and plans of a seed.

    Args:
        task_set: whose calibration our plan is searched on.

    Raises:
        InputError: the seed is negative, or TorchRec's planner finds no plan.
    """
    drawn = draw_architecture(seed)
    workload = with_digest(captured(drawn, f"{task_name(seed)}.ops.json"))
    ranks = task_set.ranks
    ours = solve(
        Problem(workload, ranks, task_set.made.profile), Stop(effort=EFFORT), seed=0
    ).best.plan
    named = {THEIRS: their_plan(drawn.workload, ranks, seed), OURS: ours}
    known = structures(workload, ranks, random.Random(f"shardopt plans {seed}"))
    named |= {
        name: plan_of(workload, ranks, known[name])
        for name in STRUCTURES
        if name in known and _runs(known[name], workload, ranks)
    }
    return Task(seed, task_name(seed), workload, _different(named, workload), drawn.architecture)


def captured(drawn: DrawnModel, file: str) -> Workload:
    """The model with its dense part as the built module runs it; a DLRM as it is.

    Args:
        file: name of the ops file beside the model file.
    """
    from lab.rankers.ranker import RankerBuilder
    from shardopt.torchrec.capture.capture import capture_dense
    from shardopt.training.batch import computed_dense, synthetic_batch

    workload = drawn.workload
    if drawn.architecture is None:
        return workload
    dense = capture_dense(
        RankerBuilder(drawn.architecture)(workload, "meta"),
        workload.tables,
        workload.batch_size,
        example_inputs=synthetic_batch(workload),
        optimizer=computed_dense(workload).optimizer,
    )
    return replace(workload, dense=replace(dense, file=file))


def _runs(plan: Candidate, workload: Workload, ranks: Topology) -> bool:
    """Whether TorchRec runs it: FBGEMM replicates no sequences on CPUs."""
    world, group = ranks.world_size, ranks.intra_group_size
    return not any(
        find_runtime_problem(
            in_torchrec_order(placed),
            RuntimeSetting(
                (table.num_embeddings, table.embedding_dim), table.pooling, world, group, "cpu"
            ),
        )
        for table, placed in zip(workload.tables, plan, strict=True)
    )


def _different(named: dict[str, ShardingPlan], workload: Workload) -> dict[str, ShardingPlan]:
    """The first plans that are not the same up to a renaming of ranks."""
    seen: set[object] = set()
    found: dict[str, ShardingPlan] = {}
    for name, plan in named.items():
        key = signature([plan.tables[k] for k in workload.keys])
        if key not in seen and len(found) < MAX_PLANS:
            seen.add(key)
            found[name] = plan
    return found
