"""The plan behind a run: as TorchRec's planner printed it, or by TorchRec's rule.

The planner's statistics are grouped over equal tables. A printed plan is a run's own if it is of
the commit that the row names and holds every table of the run, or of any other commit that does,
the latest first. Where none does, TorchRec's planner as `search.baselines.torchrec_planner`
re-derives it makes the plan under the row's constraints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lab.planners.reservation import reserve_topology
from predictor.csv_rows import MOST_RANKS, Row, count
from predictor.errors import ShardoptError
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.baselines.torchrec_planner import torchrec_plan

FILE = "torchrec_planner_stats.csv"
COLUMNS = (
    "commit",
    "date",
    "ranks",
    "group",
    "count",
    "sharding",
    "kernel",
    "dim",
    "rows",
    "placed_on",
)
RULE = "TorchRec's rule"
TYPES = {kind.short: kind for kind in ShardingType}


@dataclass(frozen=True)
class Group:
    """Equal tables of one printed plan.

    Args:
        name: the module's path and the tables' name, ``*`` for a number.
        width: columns of a shard.
        placed: (ranks of one table's shards, number of tables placed so).
    """

    commit: str
    date: str
    ranks: int
    name: str
    tables: int
    sharding_type: ShardingType
    kernel: ComputeKernel
    dim: int
    width: int
    rows: int
    placed: tuple[tuple[tuple[int, ...], int], ...]

    def holds(self, table: Table) -> bool:
        """Whether a table may be one of these, by module, name and size."""
        module, _, name = self.name.rpartition(".")
        alike = (table.num_embeddings, table.embedding_dim) == (self.rows, self.dim)
        return alike and module.split(".")[-1] == table.module and _named(name, table.name)


def _named(pattern: str, name: str) -> bool:
    """Whether a name is ``prefix_*``, or one that ends so, as statistics of equal tables merge."""
    if not pattern.endswith("*"):
        return pattern == name
    return name.rstrip("0123456789").endswith(pattern[:-1])


def parse_group(row: Row) -> Group | None:
    """The group of a row; None for the totals of a rank.

    Raises:
        ValueError: says which cell cannot be used, and why.
    """
    if not row["sharding"].strip():
        return None
    if row["sharding"] not in TYPES:
        raise ValueError(f"sharding is '{row['sharding']}'; known are {', '.join(TYPES)}")
    try:
        kernel = ComputeKernel(row["kernel"])
    except ValueError:
        raise ValueError(
            f"kernel is '{row['kernel']}', none of {', '.join(ComputeKernel)}"
        ) from None
    dim, _, width = row["dim"].partition(" ")
    columns = count({"dim": dim}, "dim")
    return Group(
        row["commit"],
        row["date"],
        count(row, "ranks", MOST_RANKS),
        row["group"],
        count(row, "count"),
        TYPES[row["sharding"]],
        kernel,
        columns,
        count({"dim": width.strip("()")}, "dim") if width else columns,
        count(row, "rows"),
        tuple(_placed(row["placed_on"])),
    )


def _placed(text: str) -> Iterator[tuple[tuple[int, ...], int]]:
    """``0:45 1:45``: 45 tables on either; ``0,0,1,1:1``: shards of one; ``0-1:10``: on each."""
    for part in text.split():
        ranks, _, tables = part.partition(":")
        first, _, last = ranks.partition("-")
        try:
            where = (
                tuple(range(int(first), int(last) + 1))
                if last
                else tuple(int(rank) for rank in ranks.split(","))
            )
            yield where, int(tables)
        except ValueError:
            raise ValueError(f"placed_on has '{part}'; it is ranks:number of tables") from None


@dataclass(frozen=True)
class StepPlan:
    """A plan, and the commit that printed it or `RULE`."""

    plan: ShardingPlan
    source: str


def plan_of(
    workload: Workload, ranks: int, commit: str, groups: Sequence[Group], hardware: HardwareProfile
) -> StepPlan:
    """The plan of a run.

    Args:
        commit: whose plan is looked at first.
        groups: of all printed plans.

    Raises:
        ShardoptError: none was printed, and none fits by the rule.
    """
    latest = sorted(groups, key=lambda g: g.date, reverse=True)
    printed = [(name, [*found]) for name, found in groupby(latest, key=lambda g: g.commit)]
    for name, found in sorted(printed, key=lambda item: item[0] != commit):
        tables = _from_groups(workload, ranks, found)
        if tables is not None:
            return StepPlan(ShardingPlan(tables, ranks, ranks), f"printed in {name}")
    machine = Topology.uniform(
        ranks, ranks, hbm_bytes=hardware.hbm_bytes, ddr_bytes=hardware.ddr_bytes
    )
    topology = reserve_topology(workload, machine, device=hardware.device)
    made = torchrec_plan(workload, topology, hardware.device)
    if made is None:
        raise ShardoptError("no plan was printed, and TorchRec's planner finds none that fits")
    return StepPlan(
        ShardingPlan(dict(zip(workload.keys, made.tables, strict=True)), ranks, ranks), RULE
    )


def _from_groups(
    workload: Workload, ranks: int, groups: Sequence[Group]
) -> dict[str, TablePlan] | None:
    """Every table's sharding, None where the groups do not hold them all as the run asks."""
    places = {group: [where for where, n in _dealt(group) for _ in range(n)] for group in groups}
    found = {}
    for key, table in zip(workload.keys, workload.tables, strict=True):
        group = next((g for g in groups if g.ranks == ranks and g.holds(table) and places[g]), None)
        if group is None or not _allowed(table, group):
            return None
        where = places[group].pop(0)
        found[key] = TablePlan(
            group.sharding_type, group.kernel, tuple(_shards(table, group, where)), table.module
        )
    return found


def _dealt(group: Group) -> Iterator[tuple[tuple[int, ...], int]]:
    """Places one table at a time, in turn: the tables are alike, and a run may have fewer."""
    left = dict(group.placed)
    while any(left.values()):
        for where in left:
            if left[where]:
                left[where] -= 1
                yield where, 1


def _allowed(table: Table, group: Group) -> bool:
    limits = table.constraints
    return (limits.sharding_types is None or group.sharding_type in limits.sharding_types) and (
        limits.compute_kernels is None or group.kernel in limits.compute_kernels
    )


def _shards(table: Table, group: Group, where: tuple[int, ...]) -> Iterator[Shard]:
    rows, dim = table.num_embeddings, table.embedding_dim
    if group.sharding_type is ShardingType.ROW_WISE:
        block = -(-rows // len(where))
        for i, rank in enumerate(where):
            start = min(i * block, rows)
            yield Shard(rank, (start, 0), (min(block, rows - start), dim))
    elif group.sharding_type is ShardingType.DATA_PARALLEL:
        for rank in where:
            yield Shard(rank, (0, 0), (rows, dim))
    else:
        for i, rank in enumerate(where):
            start = i * group.width
            yield Shard(rank, (0, start), (rows, min(group.width, dim - start)))
