"""Instances for comparing planners: models drawn from seeds, ranks with little or much memory.

Tables are drawn as in the synthetic models of configs/models, after public descriptions of
production models: rows lognormal over five decades, most tables small and a few that no single GPU
holds, mixed dims, lognormal pooling factors, Zipf ids of different skews. Nothing is drawn with
numpy or through `random`'s distributions, whose streams may change between versions: uniform
numbers of the Mersenne Twister and the inverse normal distribution give the same tables everywhere.
Memory is set by a share:

fill     whole tables take this share of all device memory. A plan of whole tables may not exist;
         ranks also have host memory.
packed   built around a known packing: tables are dealt to the ranks, largest first, and the rows of
         each rank's tables are scaled until all ranks hold the same bytes. This packing takes the
         given share of device memory. There is no host memory, so a plan must pack as tightly.

Bytes are the larger of shardopt's and TorchRec's count, which is fair to both planners.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Zipf
from predictor.model.memory.ranks import shard_memory
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DenseArch, Feature, Table, Workload
from predictor.units import gib
from search.baselines.torchrec_memory import torchrec_memory
from search.problem import Problem

GLOBAL_BATCH = 131_072
"""Samples of an iteration over all ranks."""
LEAST_BATCH = 512
"""Least samples of a rank."""
DENSE = DenseArch(128, (512, 256, 128), (1024, 512, 256, 1), "concat", data_type="tf32")
HOST_GIB = 64.0
"""Host memory of a rank where the instance is not packed."""

ROWS = (1_000, 100_000_000)
DIMS = (16, 32, 64, 128, 256)
POOLING = (1.0, 100.0)
ALPHA = (0.6, 1.3)

MEDIAN_ROWS, SIGMA_ROWS = 1_000_000, 2.3
MEDIAN_POOLING, SIGMA_POOLING = 10.0, 1.2


@dataclass(frozen=True)
class Instance:
    """Parameters of a planning problem.

    Args:
        fill: share of device memory that whole tables take, in (0, 1].
        packed: built around a known packing; see the module.
        sharding_types: allowed for all tables; any if empty. A packing needs ``table_wise``.
        hardware: name of the profile.

    Raises:
        ValueError: it cannot be drawn.
    """

    tables: int
    gpus: int
    seed: int
    fill: float
    packed: bool = False
    sharding_types: tuple[ShardingType, ...] = ()
    hardware: str = "h100-sxm"
    train_pipeline: str = "sparse_dist"

    def __post_init__(self) -> None:
        if not (1 <= self.tables <= 10_000 and 1 <= self.gpus <= 1024 and 0 < self.fill <= 1):
            raise ValueError(
                f"got {self.tables} tables, {self.gpus} gpus and a fill of {self.fill}; at most "
                "10,000, 1024 and 1, all above 0"
            )
        if self.gpus > 8 and self.gpus % 8:
            raise ValueError(f"got {self.gpus} gpus; more than 8 must be hosts of 8")
        whole = ShardingType.TABLE_WISE
        if self.packed and self.sharding_types and whole not in self.sharding_types:
            raise ValueError("the packing is one of whole tables: sharding_types needs table_wise")

    @property
    def name(self) -> str:
        """Such as ``100x8-fill40-1`` or ``50x8-packed99.5-tw-2``."""
        how = "packed" if self.packed else "fill"
        types = "".join(f"-{t.short.lower()}" for t in self.sharding_types)
        pipeline = "" if self.train_pipeline == "sparse_dist" else f"-{self.train_pipeline}"
        share = f"{100 * self.fill:g}"
        return f"{self.tables}x{self.gpus}-{how}{share}{types}{pipeline}-{self.seed}"

    @property
    def memory(self) -> str:
        """``packed``, ``tight`` or ``loose``."""
        return "packed" if self.packed else "tight" if self.fill >= TIGHT else "loose"


TIGHT = 0.8
"""Share of memory from which an instance is called tight."""


def problem_of(instance: Instance) -> Problem:
    """Draw the instance's problem, the same on any machine.

    Raises:
        ProfileError: there is no such hardware profile.
    """
    rng = random.Random(instance.seed)
    wants = Constraints(sharding_types=instance.sharding_types or None)
    tables = [_table(rng, index, wants) for index in range(instance.tables)]
    batch = max(LEAST_BATCH, GLOBAL_BATCH // instance.gpus)
    workload = Workload(
        instance.name, batch, tuple(tables), DENSE, train_pipeline=instance.train_pipeline
    )
    ranks = Topology.uniform(instance.gpus, hbm_bytes=0, ddr_bytes=0)
    if instance.packed:
        workload, bytes_of_rank = _packed(workload, ranks)
        hbm, ddr = int(bytes_of_rank / instance.fill), 0
    else:
        total = sum(_whole_bytes(t, workload, ranks) for t in workload.tables)
        hbm, ddr = int(total / instance.gpus / instance.fill), gib(HOST_GIB)
    topology = Topology.uniform(instance.gpus, hbm_bytes=hbm, ddr_bytes=ddr)
    return Problem(workload, topology, load_hardware(instance.hardware))


def _table(rng: random.Random, index: int, wants: Constraints) -> Table:
    drawn = draw_table(rng)
    feature = Feature(f"f_{index}", drawn.pooling_factor, distribution=Zipf(drawn.alpha))
    return Table(f"t_{index}", drawn.rows, drawn.dim, (feature,), constraints=wants)


def _whole_bytes(table: Table, workload: Workload, ranks: Topology) -> int:
    """Return the device memory of the whole table on one rank, the larger of both counts."""
    size = [(table.num_embeddings, table.embedding_dim)]
    kinds = ShardingType.TABLE_WISE, ComputeKernel.FUSED
    # TorchRec counts with its default pipeline, which holds fewer batches
    torchrec_view = replace(workload, train_pipeline="base")
    counted = (
        shard_memory(table, workload, ranks, *kinds, size),
        torchrec_memory(table, torchrec_view, ranks, *kinds, size),
    )
    return max(memory[0].hbm_bytes for memory in counted)


def _packed(workload: Workload, ranks: Topology) -> tuple[Workload, int]:
    """Scale the rows so that a packing of whole tables fills all ranks alike.

    Returns:
        The scaled workload, and the bytes of the fullest rank.
    """
    tables = list(workload.tables)
    bytes_of = [_whole_bytes(t, workload, ranks) for t in tables]
    dealt: list[list[int]] = [[] for _ in range(ranks.world_size)]
    bytes_on = [0] * ranks.world_size
    for index in sorted(range(len(tables)), key=lambda t: -bytes_of[t]):
        rank = min(range(ranks.world_size), key=lambda r: (bytes_on[r], r))
        dealt[rank].append(index)
        bytes_on[rank] += bytes_of[index]
    target = max(bytes_on)
    for rank, mine in enumerate(dealt):
        _fill_up(tables, mine, target - bytes_on[rank], workload, ranks)
    filled = replace(workload, tables=tuple(tables))
    loads = [sum(_whole_bytes(tables[t], filled, ranks) for t in mine) for mine in dealt]
    return filled, max(loads)


def _fill_up(
    tables: list[Table], mine: Sequence[int], missing: int, workload: Workload, ranks: Topology
) -> None:
    """Add rows to one rank's tables, in proportion, to take the missing bytes."""
    twice = {t: replace(tables[t], num_embeddings=2 * tables[t].num_embeddings) for t in mine}
    rows_take = sum(
        _whole_bytes(twice[t], workload, ranks) - _whole_bytes(tables[t], workload, ranks)
        for t in mine
    )
    for index in mine:
        rows = tables[index].num_embeddings
        more = int(rows * missing / max(rows_take, 1))
        tables[index] = replace(tables[index], num_embeddings=rows + more)


class DrawnTable(NamedTuple):
    """One table: rows, columns, mean ids a sample, and their Zipf exponent."""

    rows: int
    dim: int
    pooling_factor: float
    alpha: float


def draw_table(rng: random.Random) -> DrawnTable:
    """Draw the next table of a stream."""
    rows = three_digits(lognormal(rng, MEDIAN_ROWS, SIGMA_ROWS, ROWS))
    dim = DIMS[int(rng.random() * len(DIMS))]
    pooling = round(lognormal(rng, MEDIAN_POOLING, SIGMA_POOLING, POOLING), 1)
    alpha = round(ALPHA[0] + rng.random() * (ALPHA[1] - ALPHA[0]), 2)
    return DrawnTable(rows, dim, pooling, alpha)


def lognormal(
    rng: random.Random, median: float, sigma: float, bounds: tuple[float, float]
) -> float:
    """Return a lognormal draw, clipped to ``bounds``."""
    z = NormalDist().inv_cdf(min(max(rng.random(), 1e-12), 1 - 1e-12))
    return min(max(median * math.exp(sigma * z), bounds[0]), bounds[1])


def three_digits(value: float) -> int:
    """Round to three significant digits, for files that people read."""
    scale = 10 ** (len(str(int(value))) - 3)
    return round(value / scale) * scale if scale > 1 else round(value)
