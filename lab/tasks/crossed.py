"""Tasks whose plans make ranks wait for each other: one in the forward, another in the backward.

Tables are of two kinds. Forward-heavy ones read many ids and update little: few hot rows, or an
optimizer without state. Of backward-heavy ones nearly every id is another narrow row with state of
its own. With each kind on its own half of the ranks, all ranks have as much to do, yet every
exchange of outputs waits for one of them: the iteration takes the sum of the maxima, where the
largest sum is what it would take if nobody waited. Other plans of the same tables, in which all
ranks are alike or the same one is always last, tell the waiting from errors about the tables.

Why: docs/decisions/0004-timeline.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from lab.tasks.draw import MAX_TABLES_BYTES, PROFILE, Task, task_topology
from lab.tasks.plans import halves, plan_of, table_wise
from lab.tasks.task_set import task_name
from predictor.cost.loads import Load
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Optimizer, Table, Workload
from predictor.predict import Prediction, predict
from shardopt.config.write import with_digest

CROSSED, CROSSED_IN_PART, CROSSED_MODULES = "crossed", "crossed_in_part", "crossed_modules"
SAME_RANK, BALANCED, RANDOM = "same_rank", "balanced", "table_wise_random"
"""The plans of a task: kinds apart, most of each apart, each module on a half of its own (of models
with two modules); most of both kinds together, even halves, and anything."""

MIN_MS, MAX_MS = 20.0, 80.0
"""Predicted iterations of all plans, all ranks on one host."""
MIN_WAIT = 0.1
"""Least share of the crossed plan's iteration in which even the busiest rank waits for others."""
DRAWS = 300

FORWARD_MS = (6.0, 10.0)
"""Predicted lookups of all forward-heavy tables together."""
TABLES = (4, 7)
"""Of each kind."""
BATCH = (512, 1024)
MAX_IDS = 200_000
"""Of a table in an iteration; `shardopt calibrate` measures lookups of so many."""
PIPELINES = ("base", "sparse_dist")
MODULES = ("first", "second")
MOST = 0.75
"""Share of the tables that one half of the ranks has of what it has more of."""
BOTTOM, TOP = (64,), (128, 1)


@dataclass(frozen=True)
class Kind:
    """What tables of one kind are drawn from.

    Args:
        rows, pooling: from and to, log-uniform.
        alphas: of Zipf, from and to; 0 is uniform.
    """

    rows: tuple[int, int]
    dims: tuple[int, ...]
    pooling: tuple[float, float]
    alphas: tuple[float, float]
    optimizer: Optimizer


HOT = Kind((1_000, 5_000), (32, 64), (60.0, 100.0), (1.05, 1.25), Optimizer.ROWWISE_ADAGRAD)
STATELESS = Kind((50_000, 100_000), (64,), (10.0, 20.0), (0.0, 0.4), Optimizer.EXACT_SGD)
"""Sizes as of those that `shardopt calibrate` measures without state."""
FORWARD_HEAVY = (HOT, STATELESS)
BACKWARD_HEAVY = (
    Kind((200_000, 800_000), (16, 32), (2.0, 10.0), (0.0, 0.4), Optimizer.ROWWISE_ADAGRAD),
)


def draw_crossed_task(
    seed: int,
    *,
    world_size: int = 2,
    local_world_size: int = 2,
    hardware: HardwareProfile | None = None,
) -> Task:
    """The model and plans of a seed.

    A seed decides pipeline and modules by its remainder by 4, all else at random.

    Args:
        hardware: whose predictions size the tables; None: the shipped profile. Which kind is slower
            in which pass depends on the machine, so a task set gives its own calibration.

    Raises:
        InputError: the seed is negative, or no model of it crosses on so many ranks.
    """
    if seed < 0:
        raise InputError(f"a task's seed is {seed}; it must be at least 0")
    hardware = hardware or load_hardware(PROFILE)
    one_host = task_topology(hardware, world_size, world_size)
    topology = task_topology(hardware, world_size, local_world_size)
    for attempt in range(DRAWS):
        rng = random.Random(f"shardopt crossed task {seed} {attempt}")
        workload = _draw_workload(seed, rng, one_host, hardware)
        if _crosses(workload, one_host, hardware):
            return Task(seed, workload.name, workload, _plans(seed, workload, topology, hardware))
    raise InputError(
        f"no model of seed {seed} on {world_size} ranks has a crossed plan of at most "
        f"{MAX_MS:g} ms with {100 * MIN_WAIT:g} % of waiting; try two ranks, or another seed"
    )


def _draw_workload(
    seed: int, rng: random.Random, topology: Topology, hardware: HardwareProfile
) -> Workload:
    """A model whose tables of each kind take about as long as those of the other, all in all."""
    modules = MODULES[: 1 + seed // 2 % 2]
    workload = Workload(
        task_name(seed),
        rng.choice(BATCH),
        tuple(
            _draw_table(f"{name}{i:02d}", rng.choice(kinds), modules[i % len(modules)], rng)
            for name, kinds in (("f", FORWARD_HEAVY), ("b", BACKWARD_HEAVY))
            for i in range(rng.randint(*TABLES))
        ),
        DenseArch(13, BOTTOM, TOP, "concat"),
        PIPELINES[seed % 2],
    )
    forward, backward = _lookups_ms(workload, topology, hardware)
    heavy = _forward_heavy(workload)
    rest = set(range(len(workload.tables))) - heavy
    scale = rng.uniform(*FORWARD_MS) / sum(forward[i] for i in heavy)
    whole = scale * sum(forward[i] + backward[i] for i in heavy)
    other = whole / sum(forward[i] + backward[i] for i in rest)
    most = MAX_IDS / (topology.world_size * workload.batch_size)
    tables = (
        _scaled(table, scale if i in heavy else other, most)
        for i, table in enumerate(workload.tables)
    )
    return with_digest(replace(workload, tables=tuple(tables)))


def _draw_table(name: str, kind: Kind, module: str, rng: random.Random) -> Table:
    rows, pooling = (
        math.exp(rng.uniform(math.log(low), math.log(high)))
        for low, high in (kind.rows, kind.pooling)
    )
    feature = Feature(
        f"{name}_ids", pooling, distribution=Zipf(round(rng.uniform(*kind.alphas), 2))
    )
    return Table(
        name, int(rows), rng.choice(kind.dims), (feature,), module, optimizer=kind.optimizer
    )


def _scaled(table: Table, factor: float, most: float) -> Table:
    """With pooling factors so many times as large, but of one to ``most`` ids."""
    (feature,) = table.features
    pooling = round(min(max(factor * feature.pooling_factor, 1.0), most), 1)
    return replace(table, features=(replace(feature, pooling_factor=pooling),))


def _lookups_ms(
    workload: Workload, topology: Topology, hardware: HardwareProfile
) -> tuple[list[float], list[float]]:
    """Predicted forward and backward of every table, whole on a rank."""
    scorer = PlanScorer(workload, topology, hardware)
    loads = [scorer.table(i, table_wise(t, 0))[1][0] for i, t in enumerate(workload.tables)]
    times = np.array(loads)[:, [Load.FORWARD_MS, Load.BACKWARD_MS]]
    return times[:, 0].tolist(), times[:, 1].tolist()


def _forward_heavy(workload: Workload) -> set[int]:
    return {i for i, table in enumerate(workload.tables) if table.name.startswith("f")}


def _first_halves(
    workload: Workload, topology: Topology, hardware: HardwareProfile
) -> dict[str, set[int]]:
    """Plan -> the tables that are on the first half of the ranks."""
    forward, backward = _lookups_ms(workload, topology, hardware)
    heavy = _forward_heavy(workload)
    rest = set(range(len(workload.tables))) - heavy
    found = {
        CROSSED: heavy,
        CROSSED_IN_PART: _share(heavy, forward, MOST) | (rest - _share(rest, backward, MOST)),
        SAME_RANK: _share(heavy, forward, MOST) | _share(rest, backward, MOST),
        BALANCED: _even(workload, forward, backward),
    }
    if len(workload.modules) > 1:
        first = workload.modules[0]
        found[CROSSED_MODULES] = {i for i, t in enumerate(workload.tables) if t.module == first}
    return found


def _share(tables: Collection[int], weights: Sequence[float], share: float) -> set[int]:
    """The tables whose weight is nearest to a share of that of all."""
    aim = share * sum(weights[i] for i in tables)
    subsets = (c for n in range(len(tables) + 1) for c in combinations(sorted(tables), n))
    return set(min(subsets, key=lambda chosen: abs(sum(weights[i] for i in chosen) - aim)))


def _even(workload: Workload, forward: Sequence[float], backward: Sequence[float]) -> set[int]:
    """The tables of one half, where both have about as much forward in each module, and backward.

    Under the base pipeline, modules wait for each other's ids in the forward.
    """
    modules = np.array([[t.module == name for name in workload.modules] for t in workload.tables])
    sums = np.column_stack((np.array(forward)[:, None] * modules, backward))
    sides = np.array(list(product((-1.0, 1.0), repeat=len(workload.tables))))
    best = sides[np.abs(sides @ sums).sum(axis=1).argmin()]
    return {int(i) for i in np.flatnonzero(best > 0)}


def _plans(
    seed: int, workload: Workload, topology: Topology, hardware: HardwareProfile
) -> dict[str, ShardingPlan]:
    """Name -> plan, the best by prediction first."""
    rng = random.Random(f"shardopt crossed plans {seed}")
    found = _first_halves(workload, topology, hardware)
    found[RANDOM] = {i for i in range(len(workload.tables)) if rng.random() < 0.5}
    plans = {
        name: plan_of(workload, topology, halves(workload.tables, first, topology.world_size))
        for name, first in found.items()
    }
    times = {n: predict(workload, topology, hardware, p).iteration_ms for n, p in plans.items()}
    return {name: plans[name] for name in sorted(plans, key=times.__getitem__)}


def _crosses(workload: Workload, topology: Topology, hardware: HardwareProfile) -> bool:
    """Whether the model is small enough, all plans take a time that a clock tells, and the crossed
    plan waits for more than the balanced one does."""
    if workload.embedding_bytes > MAX_TABLES_BYTES:
        return False
    found = {
        name: predict(
            workload,
            topology,
            hardware,
            plan_of(workload, topology, halves(workload.tables, first, topology.world_size)),
        )
        for name, first in _first_halves(workload, topology, hardware).items()
    }
    times = [prediction.iteration_ms for prediction in found.values()]
    waits = _waiting_ms(found[CROSSED]) - _waiting_ms(found[BALANCED])
    return (
        min(times) >= MIN_MS
        and max(times) <= MAX_MS
        and waits >= MIN_WAIT * found[CROSSED].iteration_ms
    )


def _waiting_ms(predicted: Prediction) -> float:
    """Time in which even the busiest rank waits, and host time, which all plans have alike."""
    return min(load.idle_ms for load in predicted.per_rank)
