"""Sharding tasks drawn at random: what predictions are tested on.

The models of the family `random` are drawn here, after Lin et al. 2024, who draw tables, dims,
pooling factors and the dense part of each task. Each is sized so that its best plan is predicted to
take some tens of milliseconds on CPU ranks: long enough for a clock, short enough to measure dozens
of tasks. The predictor was developed on this family; `lab.tasks.models` has others,
which no prediction sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lab.architecture import Architecture
from lab.tasks.models import RANDOM, draw_model
from lab.tasks.plans import MIN_CLOSE, quick_ms, task_plans
from lab.tasks.task_set import task_name
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.distribution import Distribution, Uniform, Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.config.write import with_digest

PROFILE = "cpu-gloo"
"""Whose predictions size the tasks; only sizes and the choice of plans depend on it."""
MIN_MS, MAX_MS = 20.0, 70.0
"""Predicted iteration of a task's best plan, all ranks on one host."""
AIM_MS = (27.0, 60.0)
"""What sizes are scaled for; inside the range, as the search still improves on it."""

TABLES = (8, 24)
ROWS = (1_000, 5_000_000)
MEDIAN_ROWS, ROWS_SIGMA = 40_000, 1.8
MAX_TABLES_BYTES = 400 * 10**6
"""Of one model; a dozen plans of it are in memory at once."""
DIMS = (16, 32, 64, 128)
POOLING = (1.0, 50.0)
MIN_MEAN_POOLING = 5.0
ALPHA = (0.6, 1.2)
SKEWS = ("uniform", "zipf", "mixed")
BATCH = (256, 4096)
BOTTOMS = ((128,), (256,), (256, 128), (512, 256))
BOTTOM_WIDTHS = (64, 128)
TOPS = ((128,), (256,), (256, 128), (512, 256))
DOT_SHARE = 1 / 6
PIPELINED = 7
"""Seeds whose remainder by 8 it is run under `sparse_dist`."""

DRAWS = 40
STEPS = 16


@dataclass(frozen=True)
class Task:
    """A model and the plans of it that are run side by side.

    Args:
        workload: as its model file reads, with the digest of that.
        plans: name -> plan; the first is what others are compared with.
        architecture: of the model beside its tables; None: the DLRM that the workload describes.
        windows: the same model with other data, which plans are run in too.
    """

    seed: int
    name: str
    workload: Workload
    plans: Mapping[str, ShardingPlan]
    architecture: Architecture | None = None
    windows: tuple[Workload, ...] = ()


def draw_task(seed: int, ranks: Topology, models: str = RANDOM) -> Task:
    """The task of a seed: the same on any machine.

    Args:
        seed: at least 0.
        ranks: the plans of a seed depend on how many there are on each host, its model does not.
        models: the family, one of `lab.tasks.models`. The model of another
            than `RANDOM` depends on the seed alone.

    Raises:
        InputError: a number is out of range.
    """
    hardware = load_hardware(PROFILE)
    topology = task_topology(hardware, ranks.world_size, ranks.local_world_size)
    if models == RANDOM:
        return _draw_random(seed, topology, hardware)
    workload = draw_model(models, seed)
    plans = task_plans(seed, workload, topology, hardware).plans
    return Task(seed, task_name(seed), workload, plans)


def draw_workload(seed: int, ranks: Topology, models: str) -> Workload:
    """The model of a task alone, as `draw_task` has it."""
    return draw_model(models, seed) if models != RANDOM else draw_task(seed, ranks).workload


def _draw_random(seed: int, topology: Topology, hardware: HardwareProfile) -> Task:
    if seed < 0:
        raise InputError(f"a task's seed is {seed}; it must be at least 0")
    world_size = topology.world_size
    one_host = task_topology(hardware, world_size, world_size)
    for attempt in range(DRAWS):
        rng = random.Random(f"shardopt task {seed} {attempt}")
        workload = _scale_to_time(_draw_workload(seed, rng), rng, one_host, hardware)
        if workload is None:
            continue
        found = task_plans(seed, workload, topology, hardware)
        if found.close < MIN_CLOSE:
            continue
        if topology != one_host or MIN_MS <= found.best_ms <= MAX_MS:
            return Task(seed, workload.name, workload, found.plans)
    raise InputError(
        f"no task of seed {seed} on {world_size} ranks has a best plan predicted within "
        f"{MIN_MS:g} to {MAX_MS:g} ms; try fewer ranks, or another seed"
    )


def task_topology(hardware: HardwareProfile, world_size: int, local_world_size: int) -> Topology:
    """The ranks of tasks, with the memory that the profile says."""
    return Topology.uniform(
        world_size,
        local_world_size,
        hbm_bytes=hardware.hbm_bytes,
        ddr_bytes=hardware.ddr_bytes,
        nvlink_domain=math.gcd(hardware.nvlink_domain, local_world_size),
    )


def _draw_workload(seed: int, rng: random.Random) -> Workload:
    name = task_name(seed)
    count = rng.randint(*TABLES)
    dot = rng.random() < DOT_SHARE
    # interaction dot needs one dim for all
    dims = [rng.choice(DIMS)] * count if dot else [rng.choice(DIMS) for _ in range(count)]
    skew = rng.choice(SKEWS)
    tables = tuple(
        Table(f"t{i:02d}", rows, dim, (_feature(f"f{i:02d}", skew, rng),))
        for i, (rows, dim) in enumerate(zip(_rows(dims, rng), dims, strict=True))
    )
    width = dims[0] if dot else rng.choice(BOTTOM_WIDTHS)
    dense = DenseArch(
        in_features=13,
        bottom_mlp=(*rng.choice(BOTTOMS), width),
        top_mlp=(*rng.choice(TOPS), 1),
        interaction="dot" if dot else "concat",
    )
    batch = 2 ** rng.randint(int(math.log2(BATCH[0])), int(math.log2(BATCH[1])))
    pipeline = "sparse_dist" if seed % 8 == PIPELINED else "base"
    return Workload(name, batch, tables, dense, pipeline)


def _rows(dims: list[int], rng: random.Random) -> list[int]:
    """Rows of every table, fewer of each where all together would be too large."""
    rows = [_clip(rng.lognormvariate(math.log(MEDIAN_ROWS), ROWS_SIGMA), ROWS) for _ in dims]
    while 4 * sum(r * d for r, d in zip(rows, dims, strict=True)) > MAX_TABLES_BYTES:
        rows = [_clip(0.9 * r, ROWS) for r in rows]
    return [int(r) for r in rows]


def _feature(name: str, skew: str, rng: random.Random) -> Feature:
    pooling = math.exp(rng.uniform(math.log(POOLING[0]), math.log(POOLING[1])))
    alpha = round(rng.uniform(*ALPHA), 2)
    skewed = skew == "zipf" or (skew == "mixed" and rng.random() < 0.5)
    distribution: Distribution = Zipf(alpha) if skewed else Uniform()
    return Feature(name, round(pooling, 1), distribution=distribution)


def _scale_to_time(
    workload: Workload, rng: random.Random, topology: Topology, hardware: HardwareProfile
) -> Workload | None:
    """The workload scaled to a time drawn for it; None where it cannot be."""
    aim = math.exp(rng.uniform(math.log(AIM_MS[0]), math.log(AIM_MS[1])))
    for _ in range(STEPS):
        ratio = aim / quick_ms(workload, topology, hardware)
        if 0.87 < ratio < 1.15:
            return with_digest(workload)
        levers = [lever for lever in (_batch, _tables, _pooling) if lever(workload, ratio)]
        if not levers:
            return None
        workload = rng.choice(levers)(workload, ratio) or workload
    return None


def _batch(workload: Workload, ratio: float) -> Workload | None:
    """Twice or half the batch, where that is no step too far."""
    batch = workload.batch_size * 2 if ratio > 1 else workload.batch_size // 2
    if 0.7 < ratio < 1.4 or not BATCH[0] <= batch <= BATCH[1]:
        return None
    return replace(workload, batch_size=batch)


def _tables(workload: Workload, ratio: float) -> Workload | None:
    """A sixth of the tables less, where there is too much work."""
    count = max(TABLES[0], len(workload.tables) * 5 // 6)
    if ratio > 1 or count == len(workload.tables):
        return None
    return replace(workload, tables=workload.tables[:count])


def _pooling(workload: Workload, ratio: float) -> Workload | None:
    """Pooling factors scaled, but not until all are of one id."""
    factor = min(max(ratio, 0.5), 2.0)
    tables = []
    for table in workload.tables:
        feature = table.features[0]
        pooling = round(_clip(feature.pooling_factor * factor, POOLING), 1)
        tables.append(replace(table, features=(replace(feature, pooling_factor=pooling),)))
    mean = sum(t.lookups_per_sample for t in tables) / len(tables)
    if tables == list(workload.tables) or mean < MIN_MEAN_POOLING:
        return None
    return replace(workload, tables=tuple(tables))


def _clip(value: float, within: tuple[float, float]) -> float:
    return min(max(value, within[0]), within[1])
