"""MLPerf Training submissions of DLRM and DLRM-DCNv2: rows, planner knobs and plans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.csv_rows import Row, count, number, read_table
from predictor.errors import InputError
from predictor.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan

ROWS_FILE = "mlperf_dlrm_measured_iteration_time.csv"
CONFIGS_FILE = "mlperf_dlrm_dcnv2_configs.csv"
PLANS_FILE = "mlperf_dlrm_dcnv2_plans.json"
DCNV2 = "dlrm_dcnv2"


@dataclass(frozen=True)
class System:
    """One submission: what ran where, and how long an iteration took."""

    round: str
    org: str
    system: str
    benchmark: str
    nodes: int
    gpus_per_node: int
    accelerator: str
    interconnect: str
    global_batch: int
    measured_ms: float

    @property
    def gpus(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.gpus_per_node

    @property
    def version(self) -> tuple[int, ...]:
        """The round as numbers: ``v3.1`` is (3, 1)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.round))


def parse_system(row: Row) -> System | str:
    """A row as a system, or why no model of a GPU applies to it."""
    name = f"{row['round']} {row['org']} {row['system']}"
    gpus = row["accel_per_node"].strip()
    if "tpu" in row["accelerator"].lower():
        return f"{name}: {row['accelerator']} is a TPU; no profile describes one"
    if gpus in ("", "0"):
        return f"{name}: trained on CPUs ({row['cpu']}); no profile describes such a cluster"
    return System(
        row["round"],
        row["org"],
        row["system"],
        row["benchmark"],
        count(row, "nodes"),
        count(row, "accel_per_node"),
        row["accelerator"],
        row["accel_interconnect"],
        count(row, "global_batch"),
        number(row, "iter_ms_median"),
    )


def read_systems(folder: Path) -> tuple[list[System], list[str]]:
    """GPU systems of the table, and a line of text for every other row."""
    columns = (
        *("round", "org", "system", "benchmark", "nodes", "accel_per_node", "accelerator"),
        *("accel_interconnect", "cpu", "global_batch", "iter_ms_median"),
    )
    table = read_table(folder / ROWS_FILE, columns, parse_system)
    systems = [row for row in table.rows if isinstance(row, System)]
    return systems, [row for row in table.rows if isinstance(row, str)] + table.problems


@dataclass(frozen=True)
class Knobs:
    """What HugeCTR's planner was told."""

    hierarchical: bool
    bandwidth_ratio: float
    replicated_gb: float


@dataclass(frozen=True)
class Matrix:
    """One plan of the public planner: buckets of tables, per GPU or per node."""

    nodes: int
    gpus_per_node: int
    knobs: Knobs
    replicated: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Matrix:
        """From an entry of the plans' file."""
        return cls(
            int(entry["nodes"]),
            int(entry["gpus_per_node"]),
            Knobs(
                entry["plan"] == "hier_auto",
                float(entry["mem_comm_bw_ratio"]),
                float(entry["dp_threshold_gb"]),
            ),
            tuple(int(t) for t in entry["dp_tables"]),
            tuple(tuple(int(t) for t in bucket) for bucket in entry["mp_tables_per_bucket"]),
        )

    def plan(self, names: Sequence[str], rows: Sequence[int], dim: int) -> ShardingPlan:
        """The internal plan: a table in k buckets is split by rows k ways.

        A bucket of a GPU holds a row range and sends its partial sums like any other table's
        outputs, so it is table-wise with several shards. A bucket of a node spreads its range over
        the node's GPUs, which reduce among themselves first: table-row-wise.
        """
        world = self.nodes * self.gpus_per_node
        tables = {}
        for index, (name, size) in enumerate(zip(names, rows, strict=True)):
            ranks = self._ranks(index)
            if index in self.replicated:
                shards = tuple(Shard(r, (0, 0), (size, dim)) for r in range(world))
                kind, kernel = ShardingType.DATA_PARALLEL, ComputeKernel.DENSE
            else:
                kind = ShardingType.TABLE_WISE
                if self.knobs.hierarchical:
                    kind = ShardingType.TABLE_ROW_WISE
                shards, kernel = row_ranges(size, dim, ranks), ComputeKernel.FUSED
            tables[name] = TablePlan(kind, kernel, shards)
        return ShardingPlan(tables, world, self.gpus_per_node)

    def _ranks(self, table: int) -> list[int]:
        held = [i for i, bucket in enumerate(self.buckets) if table in bucket]
        if not self.knobs.hierarchical:
            return held
        local = range(self.gpus_per_node)
        return [node * self.gpus_per_node + gpu for node in held for gpu in local]


def row_ranges(rows: int, dim: int, ranks: Sequence[int]) -> tuple[Shard, ...]:
    """Equal row ranges on the ranks given."""
    edges = [rows * i // len(ranks) for i in range(len(ranks) + 1)]
    return tuple(
        Shard(rank, (first, 0), (last - first, dim))
        for rank, first, last in zip(ranks, edges, edges[1:], strict=False)
    )


@dataclass(frozen=True)
class Planner:
    """Configurations and plans beside the rows.

    Args:
        configs: (round, organisation, nodes, GPUs per node, global batch) -> knobs.
        rows, multi_hot: of the 26 tables.
    """

    configs: Mapping[tuple[str, str, int, int, int], Knobs]
    matrices: tuple[Matrix, ...]
    rows: tuple[int, ...]
    multi_hot: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> tuple[Planner, list[str]]:
        """From the files in ``folder``, and a line of text for every row that is no config."""
        columns = (
            *("round", "org", "global_batch", "nodes", "gpus_per_node", "sharding_plan"),
            *("mem_comm_bw_ratio", "dp_sharding_threshold_gb"),
        )
        table = read_table(folder / CONFIGS_FILE, columns, _config)
        path = folder / PLANS_FILE
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            matrices = tuple(Matrix.of(entry) for entry in held["plans"])
            rows, hot = tuple(held["table_rows"]), tuple(held["multi_hot"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: no plans can be read from it: {error!r}") from error
        # the first config of a shape is the submitter's own before the copies of NVIDIA's
        configs: dict[tuple[str, str, int, int, int], Knobs] = {}
        for key, knobs in table.rows:
            configs.setdefault(key, knobs)
        return cls(configs, matrices, rows, hot), table.problems

    def knobs(self, system: System) -> Knobs:
        """The submission's own, or the commonest of the round for machines of its shape."""
        shape = (system.nodes, system.gpus_per_node, system.global_batch)
        own = self.configs.get((system.round, system.org, *shape))
        if own is not None:
            return own
        near = [
            k
            for key, k in self.configs.items()
            if (key[0], key[2], key[3]) == (system.round, system.nodes, system.gpus_per_node)
        ]
        if near:
            return max(near, key=near.count)
        several = system.nodes > 2
        threshold = 0.0 if system.version < (3, 1) else 0.0125 if several else 0.008
        return Knobs(several, 67.0 if several else 7.0, threshold)

    def matrix(self, system: System) -> Matrix | None:
        """The plan of the system's knobs, or of the nearest knobs for machines of its shape."""
        want = self.knobs(system)
        shape = (system.nodes, system.gpus_per_node)
        found = [m for m in self.matrices if (m.nodes, m.gpus_per_node) == shape]
        return min(found, key=lambda m: _distance(m.knobs, want), default=None)


def _distance(a: Knobs, b: Knobs) -> tuple[bool, float, float]:
    return (
        a.hierarchical != b.hierarchical,
        abs(a.replicated_gb - b.replicated_gb),
        abs(a.bandwidth_ratio - b.bandwidth_ratio),
    )


def _config(row: Row) -> tuple[tuple[str, str, int, int, int], Knobs]:
    threshold = row["dp_sharding_threshold_gb"].split()[0]
    knobs = Knobs(
        row["sharding_plan"] == "hier_auto", number(row, "mem_comm_bw_ratio"), float(threshold)
    )
    shape = (count(row, "nodes"), count(row, "gpus_per_node"), count(row, "global_batch"))
    return (row["round"], row["org"], *shape), knobs
