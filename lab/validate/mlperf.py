"""MLPerf Training submissions of DLRM and DLRM-DCNv2: rows, planner knobs and plans."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from lab.criteo import criteo_tables
from lab.runtimes.hugectr import HugeCtrBuilder, Runtime, runtime_of_round
from lab.validate.report import ComparedRow, Report, data_folder, time_of
from predictor.csv_rows import LARGEST, MOST_RANKS, Row, count, number, read_table
from predictor.errors import InputError
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, Workload

ROWS_FILE = "mlperf_dlrm_measured_iteration_time.csv"
CONFIGS_FILE = "mlperf_dlrm_dcnv2_configs.csv"
PLANS_FILE = "mlperf_dlrm_dcnv2_plans.json"
DCNV2 = "dlrm_dcnv2"

LOGGED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (of["round"], of["system"]): of
    for of in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
}
"""(round, system) -> what its log says beyond the tables; mlperf.yaml has the sources."""


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

    @property
    def software(self) -> tuple[int, ...]:
        """The round whose HugeCTR ran."""
        return tuple(self._logged.get("software", self.version))

    @property
    def switches(self) -> tuple[int, ...]:
        """Cards behind each PCIe switch, if its log says so."""
        return tuple(self._logged.get("switches", ()))

    @property
    def _logged(self) -> Mapping[str, Any]:
        return LOGGED.get((self.round, self.system), {})


def parse_system(row: Row) -> System | str:
    """A row as a system, or why no model of a GPU applies to it."""
    name = f"{row['round']} {row['org']} {row['system']}"
    gpus = row["accel_per_node"].strip()
    if "tpu" in row["accelerator"].lower():
        return f"{name}: {row['accelerator']} is a TPU; no profile describes one"
    if gpus in ("", "0"):
        return f"{name}: trained on CPUs ({row['cpu']}); no profile describes such a cluster"
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
    """Settings of HugeCTR's planner."""

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

    def check(self, tables: int) -> None:
        """Refuse a plan that is none.

        Raises:
            ValueError: its buckets are not those of its machine, or a table is in none.
        """
        wanted = self.nodes if self.knobs.hierarchical else self.nodes * self.gpus_per_node
        if min(self.nodes, self.gpus_per_node) < 1 or len(self.buckets) != wanted:
            raise ValueError(f"{len(self.buckets)} buckets for {self.nodes}x{self.gpus_per_node}")
        held = {*self.replicated, *(t for bucket in self.buckets for t in bucket)}
        if held != set(range(tables)):
            raise ValueError(f"the buckets hold tables {sorted(held)}, not 0 to {tables - 1}")

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
    """Configurations and plans of the submissions.

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
            rows, hot = (tuple(map(int, held[k])) for k in ("table_rows", "multi_hot"))
            if len(rows) != len(hot) or not all(1 <= value <= LARGEST for value in rows + hot):
                raise ValueError("table_rows and multi_hot are no equal lists of numbers above 0")
            for matrix in matrices:
                matrix.check(len(rows))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
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
        """The plan that its log prints, or that of the nearest knobs for machines of its shape."""
        want = self.knobs(system)
        shape = (system.nodes, system.gpus_per_node)
        logged = LOGGED.get((system.round, system.system))
        if logged is not None:
            buckets = tuple(map(tuple, logged["buckets"]))
            return Matrix(*shape, want, tuple(logged["replicated"]), buckets)
        found = [m for m in self.matrices if (m.nodes, m.gpus_per_node) == shape]
        return min(found, key=lambda m: _distance(m.knobs, want), default=None)


def _distance(a: Knobs, b: Knobs) -> tuple[bool, float, float]:
    return (
        a.hierarchical != b.hierarchical,
        abs(a.replicated_gb - b.replicated_gb),
        abs(a.bandwidth_ratio - b.bandwidth_ratio),
    )


def _config(row: Row) -> tuple[tuple[str, str, int, int, int], Knobs]:
    threshold = float((row["dp_sharding_threshold_gb"].split() or [""])[0])
    if not 0 <= threshold < math.inf:
        raise ValueError(f"dp_sharding_threshold_gb is {threshold}; it must be 0 or above")
    hierarchical = row["sharding_plan"] == "hier_auto"
    knobs = Knobs(hierarchical, number(row, "mem_comm_bw_ratio"), threshold)
    shape = (count(row, "nodes"), count(row, "gpus_per_node"), count(row, "global_batch"))
    return (row["round"], row["org"], *shape), knobs


DIM = 128
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
_FORM = r"(?P<form>pcie|sxm|nvl)?"
_PATTERN = re.compile(
    r"(?P<chip>gb300|gb200|b300|b200|h200|h100|a100|v100|a30|a40|l40s|l40|l4)[^a-z0-9]*" + _FORM,
    re.IGNORECASE,
)
PROFILES = {
    ("a100", "pcie"): "a100-pcie-80gb",
    ("a100", ""): "a100-80gb",
    ("h100", "pcie"): "h100-pcie",
    ("h100", ""): "h100-sxm",
    ("h200", "nvl"): "h200-nvl",
    ("h200", ""): "h200-sxm",
    ("v100", ""): "v100-32gb",
}
"""(chip, form) -> profile; other chips have a profile of their own name."""


def profile_of(accelerator: str) -> str | None:
    """Name of the profile for an accelerator as submissions write it; None if there is none."""
    found = _PATTERN.search(accelerator)
    if found is None:
        return None
    chip, form = found["chip"].lower(), (found["form"] or "").lower()
    if (chip, form) == ("a100", "sxm") and "40gb" in accelerator.lower():
        return "a100-40gb"
    name = PROFILES.get((chip, form)) or PROFILES.get((chip, "")) or chip
    return name if name in list_hardware() else None


def family_of(system: System) -> str:
    """Accelerators that share a profile, and how many of them."""
    return f"{profile_of(system.accelerator) or system.accelerator} {system.benchmark}"


@dataclass(frozen=True)
class Case:
    """One submission, ready to be predicted."""

    system: System
    workload: Workload
    topology: Topology
    hardware: HardwareProfile
    plan: ShardingPlan
    runtime: Runtime

    def builder(self) -> HugeCtrBuilder:
        """The graph builder of its iteration."""
        return HugeCtrBuilder(
            self.workload,
            self.topology,
            self.hardware,
            self.plan,
            self.runtime,
            self.system.switches,
        )


def case_of(system: System, planner: Planner, matrix: Matrix | None = None) -> Case | str:
    """A submission as a case, or why it cannot be one.

    Args:
        matrix: a plan to use in place of the submission's own.
    """
    where = f"{system.round} {system.org} {system.system}"
    name = profile_of(system.accelerator)
    if name is None:
        return f"{where}: no profile describes {system.accelerator}"
    hardware = load_hardware(name)
    workload = _dcnv2(system, planner) if system.benchmark == DCNV2 else _dlrm(system, planner)
    names = [table.name for table in workload.tables]
    if system.benchmark == DCNV2:
        matrix = matrix or planner.matrix(system)
        if matrix is None:
            return f"{where}: no plan for {system.nodes} hosts of {system.gpus_per_node} GPUs"
        plan = matrix.plan(names, planner.rows, DIM)
    else:
        plan = _hybrid(system, names, planner.rows)
    runtime = runtime_of_round(system.software, preview="preview" in system.system)
    return Case(system, workload, _topology(system, hardware), hardware, plan, runtime)


def _topology(system: System, hardware: HardwareProfile) -> Topology:
    """NVLink spans hosts only where a rack is sold so."""
    local = system.gpus_per_node
    if hardware.nvlink_domain > hardware.gpus_per_host:
        hosts = max(1, min(hardware.nvlink_domain // local, system.nodes))
        # domains are equal and made of whole hosts
        while system.nodes % hosts:
            hosts -= 1
        domain = hosts * local
    else:
        domain = math.gcd(hardware.nvlink_domain, local)
    return Topology.uniform(
        system.gpus,
        system.gpus_per_node,
        hbm_bytes=hardware.hbm_bytes,
        ddr_bytes=hardware.ddr_bytes,
        nvlink_domain=domain,
    )


def _dcnv2(system: System, planner: Planner) -> Workload:
    tables = criteo_tables(planner.rows, planner.multi_hot, DIM, "exact_adagrad")
    dense = DenseArch(13, BOTTOM, TOP, DcnV2(3, 512), "fp16", "adagrad")
    return Workload(DCNV2, _local(system), tables, dense)


def _dlrm(system: System, planner: Planner) -> Workload:
    tables = criteo_tables(planner.rows, (1,) * len(planner.rows), DIM, "exact_sgd")
    dense = DenseArch(13, BOTTOM, TOP, "dot", "fp16", "sgd")
    return Workload(system.benchmark, _local(system), tables, dense)


def _local(system: System) -> int:
    return max(1, round(system.global_batch / system.gpus))


def _hybrid(system: System, names: list[str], rows: tuple[int, ...]) -> ShardingPlan:
    """Every table somewhere: the hybrid runtime spreads the rows over the ranks itself."""
    tables = {}
    for index, (name, size) in enumerate(zip(names, rows, strict=True)):
        shards = (Shard(index % system.gpus, (0, 0), (size, DIM)),)
        tables[name] = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, shards)
    return ShardingPlan(tables, system.gpus, system.gpus_per_node)


LAST_FIT_ROUND = (3, 1)
FIT_PROFILES = ("a100-40gb", "a100-80gb", "h100-sxm")
FIT, TEST = "fit", "test"
NEVER = "platforms never fitted"
LATER = "fitted families, later rounds"


def validate_mlperf_dlrm(folder: Path) -> Report:
    """Predict every GPU system of the table in ``folder``.

    Raises:
        InputError: the folder or one of the three files is not there.
    """
    data_folder(folder, [ROWS_FILE, CONFIGS_FILE, PLANS_FILE], every=True)
    systems, skipped = read_systems(folder)
    planner, problems = Planner.read(folder)
    skipped += problems
    parts = parts_of(systems)
    times: dict[tuple[object, ...], tuple[float, tuple[float, float]]] = {}
    rows: list[ComparedRow] = []
    for system, part in zip(systems, parts, strict=True):
        case = case_of(system, planner)
        if isinstance(case, str):
            skipped.append(case)
            continue
        key = (case.runtime.name, case.hardware.name, system.nodes, system.gpus_per_node,
               system.global_batch, planner.matrix(system))  # fmt: skip
        if key not in times:
            graph = case.builder().build()
            times[key] = time_of(graph, case.hardware, case.topology)
        rows.append(_compared(case, *times[key], part))
    later = [r for r in rows if r.part == TEST and r.name["profile"] in FIT_PROFILES]
    never = [r for r in rows if r.part == TEST and r.name["profile"] not in FIT_PROFILES]
    parts_of_rows = {
        NEVER: never,
        LATER: later,
        **{
            f"{LATER}, {name}, one row a configuration": by_configuration(found)
            for name, found in by_profile(later).items()
        },
    }
    kept = {name: found for name, found in parts_of_rows.items() if found}
    return Report("mlperf-dlrm", tuple(rows), TEST, tuple(skipped), parts=kept)


def by_profile(rows: Iterable[ComparedRow]) -> dict[str, list[ComparedRow]]:
    """Profile that predicted them -> rows."""
    found: dict[str, list[ComparedRow]] = defaultdict(list)
    for row in rows:
        found[str(row.name["profile"])].append(row)
    return dict(found)


def by_configuration(rows: Iterable[ComparedRow]) -> list[ComparedRow]:
    """One row for all systems that ran the same: the prediction, and their median time."""
    found: dict[tuple[object, ...], list[ComparedRow]] = defaultdict(list)
    for row in rows:
        keys = ("profile", "runtime", "benchmark", "accels", "global_batch")
        found[*(row.name[key] for key in keys), row.predicted_ms].append(row)
    return [
        replace(alike[0], measured_ms=median(row.measured_ms for row in alike))
        for alike in found.values()
    ]


def parts_of(systems: list[System]) -> list[str]:
    """``fit`` or ``test`` for each; what was fitted stays so where a later round repeats it."""
    fitted = [is_fitted(system) for system in systems]
    seen = {(s.org, s.measured_ms) for s, fit in zip(systems, fitted, strict=True) if fit}
    return [
        FIT if fit or (s.org, s.measured_ms) in seen else TEST
        for s, fit in zip(systems, fitted, strict=True)
    ]


def is_fitted(system: System) -> bool:
    """Whether the runtime's constants were fitted on the row."""
    return system.version <= LAST_FIT_ROUND and profile_of(system.accelerator) in FIT_PROFILES


def _compared(
    case: Case, predicted_ms: float, interval_ms: tuple[float, float], part: str
) -> ComparedRow:
    system = case.system
    return ComparedRow(
        {
            "system": system.system,
            "org": system.org,
            "accelerator": system.accelerator,
            "accels": system.gpus,
            "round": system.round,
            "benchmark": system.benchmark,
            "global_batch": system.global_batch,
            "profile": case.hardware.name,
            "runtime": case.runtime.name,
        },
        system.measured_ms,
        predicted_ms,
        family=family_of(system),
        part=part,
        source=f"MLPerf Training {system.round}, {system.org}",
        interval_ms=interval_ms,
    )
