"""MLPerf Training submissions of DLRM and DLRM-DCNv2: rows, planner knobs and plans."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from lab.criteo import criteo_tables
from lab.runtimes.hugectr import HugeCtrBuilder, Runtime, runtime_of_round
from lab.statistics import grouped
from lab.suites import SUITES, ComparedRow, Report
from lab.tasks.plans import data_parallel, table_wise
from lab.validate.tables import joined_ranks, profile_of_row, ranks_of, read, time_of
from predictor.csv_rows import LARGEST, MOST_RANKS, ParsedRows, Row, count, number
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DcnV2, DenseArch, Table, Workload

ROWS_FILE = "mlperf_dlrm_measured_iteration_time.csv"
CONFIGS_FILE = "mlperf_dlrm_dcnv2_configs.csv"
PLANS_FILE = "mlperf_dlrm_dcnv2_plans.json"
DCNV2 = "dlrm_dcnv2"
DIM = 128
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)

LAST_FIT_ROUND = (3, 1)
FIT_PROFILES = ("a100-40gb", "a100-80gb", "h100-sxm")
FIT, TEST = "fit", "test"
NEVER = "platforms never fitted"
LATER = "fitted families, later rounds"

LOGGED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (entry["round"], entry["system"]): entry
    for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
}
"""(round, system) -> facts from its log beyond the tables; mlperf.yaml has the sources."""


@dataclass(frozen=True)
class System:
    """Submission: model, system, and time of an iteration.

    Args:
        profile: profile of its accelerators.
    """

    round: str
    org: str
    system: str
    benchmark: str
    nodes: int
    gpus_per_node: int
    accelerator: str
    profile: str
    global_batch: int
    measured_ms: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def version(self) -> tuple[int, ...]:
        """The round as numbers: ``v3.1`` is (3, 1)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.round))

    @property
    def logged(self) -> Mapping[str, Any]:
        return LOGGED.get((self.round, self.system), {})

    @property
    def runtime(self) -> Runtime:
        """Release of HugeCTR that ran; it may be older than the round."""
        version = tuple(self.logged.get("software", self.version))
        return runtime_of_round(version, preview="preview" in self.system)

    @property
    def is_fitted(self) -> bool:
        """True if the runtime's constants were fitted on the row."""
        return self.version <= LAST_FIT_ROUND and self.profile in FIT_PROFILES


def _system(row: Row) -> System:
    gpus = row["accel_per_node"].strip()
    if "tpu" in row["accelerator"].lower():
        raise ValueError(f"accelerator is {row['accelerator']}, a TPU; no profile describes one")
    if gpus in ("", "0"):
        raise ValueError(f"trained on CPUs ({row['cpu']}); no profile describes such a cluster")
    if not re.fullmatch(r"v\d+\.\d+", row["round"]):
        raise ValueError(f"round is '{row['round']}'; rounds read like v4.0")
    nodes, per_node = (count(row, column, MOST_RANKS) for column in ("nodes", "accel_per_node"))
    if nodes * per_node > MOST_RANKS:
        raise ValueError(f"has {nodes * per_node:,} accelerators; at most {MOST_RANKS:,} are read")
    return System(
        row["round"],
        row["org"],
        row["system"],
        row["benchmark"],
        nodes,
        per_node,
        row["accelerator"],
        profile_of_row(row, "accelerator").name,
        count(row, "global_batch"),
        number(row, "iter_ms_median"),
    )


def read_systems(folder: Path) -> ParsedRows[System]:
    return read(folder, ROWS_FILE, _system)


@dataclass(frozen=True)
class Knobs:
    """Settings of HugeCTR's planner."""

    hierarchical: bool
    bandwidth_ratio: float
    replicated_gb: float


@dataclass(frozen=True)
class Matrix:
    """Plan of the public planner: buckets of tables, per GPU or per node."""

    nodes: int
    gpus_per_node: int
    knobs: Knobs
    replicated: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, entry: Mapping[str, Any], tables: int) -> Matrix:
        """Parse an entry of the plans' file.

        Raises:
            ValueError: its buckets do not match its machine, or a table is in none.
        """
        threshold = float(entry["dp_threshold_gb"])
        knobs = Knobs(entry["plan"] == "hier_auto", float(entry["mem_comm_bw_ratio"]), threshold)
        nodes, gpus = int(entry["nodes"]), int(entry["gpus_per_node"])
        replicated = tuple(map(int, entry["dp_tables"]))
        buckets = tuple(tuple(map(int, bucket)) for bucket in entry["mp_tables_per_bucket"])
        if min(nodes, gpus) < 1 or len(buckets) != (nodes if knobs.hierarchical else nodes * gpus):
            raise ValueError(f"{len(buckets)} buckets for {nodes}x{gpus}")
        bucketed = {*replicated, *(t for bucket in buckets for t in bucket)}
        if bucketed != set(range(tables)):
            raise ValueError(f"the buckets hold tables {sorted(bucketed)}, not 0 to {tables - 1}")
        return cls(nodes, gpus, knobs, replicated, buckets)

    def plan(self, tables: Sequence[Table]) -> ShardingPlan:
        """Return the plan: a table in k buckets is split by rows k ways.

        A GPU's bucket has a row range and sends its partial sums like any other table's outputs, so
        it is table-wise with several shards. A node's bucket spreads its range over the node's
        GPUs, which first reduce among themselves, so it is table-row-wise.
        """
        world = self.nodes * self.gpus_per_node
        kind = ShardingType.TABLE_ROW_WISE if self.knobs.hierarchical else ShardingType.TABLE_WISE
        plans = {}
        for index, table in enumerate(tables):
            if index in self.replicated:
                plans[table.name] = data_parallel(table, world)
                continue
            ranks, rows, dim = self._ranks(index), table.num_embeddings, table.embedding_dim
            edges = [rows * i // len(ranks) for i in range(len(ranks) + 1)]
            ranges = zip(ranks, edges, edges[1:], strict=False)
            shards = tuple(Shard(r, (low, 0), (high - low, dim)) for r, low, high in ranges)
            plans[table.name] = TablePlan(kind, ComputeKernel.FUSED, shards)
        return ShardingPlan(plans, world, self.gpus_per_node)

    def _ranks(self, table: int) -> list[int]:
        buckets = [i for i, bucket in enumerate(self.buckets) if table in bucket]
        if not self.knobs.hierarchical:
            return buckets
        local = range(self.gpus_per_node)
        return [node * self.gpus_per_node + gpu for node in buckets for gpu in local]


@dataclass(frozen=True)
class Planner:
    """Configurations and plans of the submissions.

    Args:
        configs: (round, organisation, nodes, GPUs per node, global batch) -> knobs.
        rows, multi_hot: rows and ids per sample of the 26 tables.
    """

    configs: Mapping[tuple[str, str, int, int, int], Knobs]
    matrices: tuple[Matrix, ...]
    rows: tuple[int, ...]
    multi_hot: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> tuple[Planner, list[str]]:
        """Read the files in ``folder``; also return a message for every row that is no config."""
        table = read(folder, CONFIGS_FILE, _config)
        path = folder / PLANS_FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            rows, hot = (tuple(map(int, document[k])) for k in ("table_rows", "multi_hot"))
            matrices = tuple(Matrix.of(entry, len(rows)) for entry in document["plans"])
            if len(rows) != len(hot) or not all(1 <= value <= LARGEST for value in rows + hot):
                raise ValueError("table_rows and multi_hot are no equal lists of numbers above 0")
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(f"{path}: no plans can be read from it: {error!r}") from error
        configs: dict[tuple[str, str, int, int, int], Knobs] = {}
        for key, knobs in table.rows:
            # the first config of a shape is the submitter's own; later ones copy NVIDIA's
            configs.setdefault(key, knobs)
        return cls(configs, matrices, rows, hot), table.problems

    def knobs(self, system: System) -> Knobs:
        """Return the submission's knobs, or the round's most common ones for its machine shape."""
        shape = (system.nodes, system.gpus_per_node, system.global_batch)
        own = self.configs.get((system.round, system.org, *shape))
        if own is not None:
            return own
        alike = (system.round, system.nodes, system.gpus_per_node)
        near = [k for key, k in self.configs.items() if (key[0], key[2], key[3]) == alike]
        if near:
            return max(near, key=near.count)
        several = system.nodes > 2
        threshold = 0.0 if system.version < (3, 1) else 0.0125 if several else 0.008
        return Knobs(several, 67.0 if several else 7.0, threshold)

    def matrix(self, system: System) -> Matrix | None:
        """Return the plan of its log, or that of the nearest knobs for its machine shape."""
        knobs, logged = self.knobs(system), system.logged
        shape = (system.nodes, system.gpus_per_node)
        if logged:
            buckets = tuple(map(tuple, logged["buckets"]))
            return Matrix(*shape, knobs, tuple(logged["replicated"]), buckets)

        def distance(matrix: Matrix) -> tuple[bool, float, float]:
            return (
                matrix.knobs.hierarchical != knobs.hierarchical,
                abs(matrix.knobs.replicated_gb - knobs.replicated_gb),
                abs(matrix.knobs.bandwidth_ratio - knobs.bandwidth_ratio),
            )

        candidates = [m for m in self.matrices if (m.nodes, m.gpus_per_node) == shape]
        return min(candidates, key=distance, default=None)


def _config(row: Row) -> tuple[tuple[str, str, int, int, int], Knobs]:
    threshold = float((row["dp_sharding_threshold_gb"].split() or [""])[0])
    if not 0 <= threshold < math.inf:
        raise ValueError(f"dp_sharding_threshold_gb is {threshold}; it must be 0 or above")
    hierarchical = row["sharding_plan"] == "hier_auto"
    knobs = Knobs(hierarchical, number(row, "mem_comm_bw_ratio"), threshold)
    shape = (count(row, "nodes"), count(row, "gpus_per_node"), count(row, "global_batch"))
    return (row["round"], row["org"], *shape), knobs


def builder_of(system: System, planner: Planner) -> HugeCtrBuilder:
    """Return the builder of a submission's iteration.

    Raises:
        ValueError: no plan is known for its machine.
    """
    hardware, local = load_hardware(system.profile), system.gpus_per_node
    batch = max(1, round(system.global_batch / system.gpus))
    if system.benchmark == DCNV2:
        matrix = planner.matrix(system)
        if matrix is None:
            hosts = f"{system.nodes} hosts of {system.gpus_per_node} GPUs"
            raise ValueError(f"{system.round} {system.org} {system.system}: no plan for {hosts}")
        tables = criteo_tables(planner.rows, planner.multi_hot, DIM, "exact_adagrad")
        dense = DenseArch(13, BOTTOM, TOP, DcnV2(3, 512), "fp16", "adagrad")
        plan = matrix.plan(tables)
    else:
        tables = criteo_tables(planner.rows, (1,) * len(planner.rows), DIM, "exact_sgd")
        dense = DenseArch(13, BOTTOM, TOP, "dot", "fp16", "sgd")
        # the placement is arbitrary: the hybrid runtime spreads the rows over the ranks itself
        whole = {t.name: table_wise(t, at % system.gpus) for at, t in enumerate(tables)}
        plan = ShardingPlan(whole, system.gpus, system.gpus_per_node)
    return HugeCtrBuilder(
        Workload(system.benchmark, batch, tables, dense),
        ranks_of(hardware, system.gpus, local, joined_ranks(hardware, system.nodes, local)),
        hardware,
        plan,
        system.runtime,
        tuple(system.logged.get("switches", ())),
    )


def validate_mlperf_dlrm(folder: Path) -> Report:
    table = read_systems(folder)
    planner, problems = Planner.read(folder)
    skipped = [*table.problems, *problems]
    times: dict[tuple[object, ...], tuple[float, tuple[float, float]]] = {}
    rows: list[ComparedRow] = []
    for system, part in zip(table.rows, parts_of(table.rows), strict=True):
        key = (system.runtime.name, system.profile, system.nodes, system.gpus_per_node,
               system.global_batch, planner.matrix(system))  # fmt: skip
        if key not in times:
            try:
                builder = builder_of(system, planner)
            except ValueError as error:
                skipped.append(str(error))
                continue
            times[key] = time_of(builder.build(), builder.hardware, builder.topology)
        rows.append(_compared(system, *times[key], part))
    tests = [row for row in rows if row.part == TEST]
    later = [row for row in tests if row.name["profile"] in FIT_PROFILES]
    parts = {
        NEVER: [row for row in tests if row.name["profile"] not in FIT_PROFILES],
        LATER: later,
        **{
            f"{LATER}, {name}, one row a configuration": by_configuration(part_rows)
            for name, part_rows in grouped(later, lambda row: row.name["profile"]).items()
        },
    }
    filled = {name: part_rows for name, part_rows in parts.items() if part_rows}
    return SUITES["mlperf-dlrm"].report(rows, skipped, parts=filled)


def by_configuration(rows: Iterable[ComparedRow]) -> list[ComparedRow]:
    """Merge systems of one configuration into a row: the prediction, and their median time."""
    keys = ("profile", "runtime", "benchmark", "accels", "global_batch")
    alike = grouped(rows, lambda row: (*(row.name[key] for key in keys), row.predicted_ms))
    return [
        replace(systems[0], measured_ms=median(row.measured_ms for row in systems))
        for systems in alike.values()
    ]


def parts_of(systems: Sequence[System]) -> list[str]:
    """Return ``fit`` or ``test`` for each; a later round's repeat of a fitted row is ``fit``."""
    fitted = {(s.org, s.measured_ms) for s in systems if s.is_fitted}
    return [FIT if s.is_fitted or (s.org, s.measured_ms) in fitted else TEST for s in systems]


def _compared(
    system: System, predicted_ms: float, interval_ms: tuple[float, float], part: str
) -> ComparedRow:
    return ComparedRow(
        {
            "system": system.system,
            "org": system.org,
            "accelerator": system.accelerator,
            "accels": system.gpus,
            "round": system.round,
            "benchmark": system.benchmark,
            "global_batch": system.global_batch,
            "profile": system.profile,
            "runtime": system.runtime.name,
        },
        system.measured_ms,
        predicted_ms,
        family=f"{system.profile} {system.benchmark}",
        part=part,
        source=f"MLPerf Training {system.round}, {system.org}",
        interval_ms=interval_ms,
    )
