"""Peak bytes of tensors on real CPU ranks under several plans, against the predictions.

``python -m lab rank-memory`` trains small DLRMs with TorchRec on two gloo ranks and prints a row
a plan: model, plan, rank, measured and predicted MB, error. What a rank has is what malloc has
mapped since before the module was built, looked at after every op; batches are made before.

Why: docs/decisions/0053.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from predictor.model.memory.peak import memory_of_plan
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, Feature, Table, Workload
from search.space.enumerate import shard_sizes_and_offsets
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import Rank, join_group, prepare
from shardopt.ranks.realtime import Runtime

RANKS, STEPS, WARM_UP = 2, 3, 2
COLUMN_WIDTH = 32
TIMEOUT_S = 170
M_MMAP_THRESHOLD, M_MMAP_MAX = -3, -4
MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
"""Fields of glibc's `mallinfo2`; hblkhd are the bytes of mapped blocks."""
MAPPED = 1 << 14
"""Blocks from here on are mapped one by one, and so counted; what is smaller is not of note."""


@dataclass(frozen=True)
class Case:
    """A model and the sharding types of its tables, which take turns."""

    name: str
    workload: Workload
    kinds: tuple[ShardingType, ...]

    @property
    def plan(self) -> ShardingPlan:
        """Whole tables lie on the ranks in turn."""
        topology = Topology.uniform(RANKS, RANKS, hbm_bytes=0, ddr_bytes=0)
        tables = {}
        for i, table in enumerate(self.workload.tables):
            kind = self.kinds[i % len(self.kinds)]
            sizes, offsets = shard_sizes_and_offsets(table, topology, kind, COLUMN_WIDTH)
            ranks = range(RANKS) if len(sizes) == RANKS else [i % RANKS]
            dense = kind is ShardingType.DATA_PARALLEL
            kernel = ComputeKernel.DENSE if dense else ComputeKernel.FUSED
            shards = (Shard(*one) for one in zip(ranks, offsets, sizes, strict=True))
            tables[table.name] = TablePlan(kind, kernel, tuple(shards), table.module)
        return ShardingPlan(tables, RANKS, RANKS)


def cases() -> Iterator[Case]:
    """Sharding types, pipelines, interactions and sequences."""
    table, row, column, replica = (
        ShardingType.TABLE_WISE,
        ShardingType.ROW_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.DATA_PARALLEL,
    )
    concat = DenseArch(16, (128, 64), (256, 128, 1), "concat")
    for name, kinds in {
        "table_wise": (table,),
        "row_wise": (row,),
        "column_wise": (column,),
        "mixed": (table, row, column, replica),
    }.items():
        for pipeline in ("base", "sparse_dist"):
            yield Case(f"concat {name} {pipeline}", a_workload(concat, pipeline), kinds)
    dot = DenseArch(16, (128, 64), (256, 128, 1), "dot", optimizer="adam")
    yield Case("dot mixed base", a_workload(dot, "base"), (table, row, replica))
    cross = DenseArch(16, (128, 64), (256, 1), DcnV2(2, 32), optimizer="adagrad")
    yield Case("dcn_v2 row_wise sparse_dist", a_workload(cross, "sparse_dist"), (row,))
    sequences = a_workload(concat, "sparse_dist", tables=4, pooling="none", batch=512)
    yield Case("sequences table_wise sparse_dist", sequences, (table,))


def a_workload(
    dense: DenseArch, pipeline: str, *, tables: int = 8, pooling: str = "sum", batch: int = 2048
) -> Workload:
    """Tables of 64 columns with one feature of eight ids each."""
    made = (
        Table(f"t{i}", 20_000, 64, (Feature(f"f{i}", 8.0),), pooling=pooling) for i in range(tables)
    )
    return Workload("rank_memory", batch, tuple(made), dense, pipeline)


def measured_bytes(case: Case) -> list[int]:
    """Most bytes of tensors at once in a steady iteration, per rank."""
    found: dict[int, int] = {}

    def note(rank: int, report: Any) -> None:
        found[rank] = report

    run_ranks(_rank, RANKS, case, on_report=note, silence_s=TIMEOUT_S)
    return [found[rank] for rank in range(RANKS)]


def predicted_bytes(case: Case) -> list[int]:
    """The same by the predictor."""
    topology = Topology.uniform(RANKS, RANKS, hbm_bytes=0, ddr_bytes=2**50)
    memory = memory_of_plan(case.workload, topology, case.plan, "cpu")
    return [rank.peak.allocated_bytes for rank in memory if rank.peak is not None]


def _rank(rank: Rank, report: Callable[[object], None], case: Case) -> None:
    device = prepare(rank, "gloo", Runtime.PLAIN)
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardopt.training.batch import batch_ring
    from shardopt.training.loop import Training

    class Watch(TorchDispatchMode):
        """Looks at the memory after every op, also in the backward."""

        most = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            self.most = max(self.most, taken())
            return found

    taken = mapped_bytes()
    join_group(rank, "gloo")
    ring = batch_ring(case.workload, rank=rank.index)
    gc.collect()
    before = taken()
    training = Training(case.workload, case.plan, device, ring)
    for _ in range(WARM_UP):
        training.step()
    gc.collect()
    gc.disable()
    peaks = []
    for _ in range(STEPS):
        dist.barrier()
        with Watch() as watch:
            training.step()
        peaks.append(watch.most - before)
    report(int(median(peaks)))
    dist.barrier()


def mapped_bytes() -> Callable[[], int]:
    """What tells how many bytes glibc's malloc has in blocks of at least `MAPPED`, whichever
    thread took them."""

    class Info(ctypes.Structure):
        _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO)

    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_THRESHOLD, MAPPED)
    libc.mallopt(M_MMAP_MAX, 1 << 20)
    libc.mallinfo2.restype = Info
    return lambda: int(libc.mallinfo2().hblkhd)


def rows() -> Iterator[dict[str, Any]]:
    """One per case and rank."""
    for case in cases():
        pairs = zip(measured_bytes(case), predicted_bytes(case), strict=True)
        for rank, (measured, predicted) in enumerate(pairs):
            yield {
                "case": case.name,
                "rank": rank,
                "measured_mb": measured / 1e6,
                "predicted_mb": predicted / 1e6,
                "error": predicted / measured - 1,
            }


def main() -> None:
    """Print the rows and the mean absolute error."""
    errors = []
    for row in rows():
        errors.append(abs(row["error"]))
        figures = f"{row['measured_mb']:9.2f} {row['predicted_mb']:9.2f} {row['error']:+7.1%}"
        sys.stdout.write(f"{row['case']:34} {row['rank']} {figures}\n")
        sys.stdout.flush()
    sys.stdout.write(f"mean absolute error {sum(errors) / len(errors):.1%}, n = {len(errors)}\n")


if __name__ == "__main__":
    from lab.tools.rank_memory import main as as_module  # ranks import what they run by its name

    as_module()
