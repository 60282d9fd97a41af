"""DLRM of NVIDIA's DeepLearningExamples: published throughput on V100 and A100 hosts.

Tables are whole on ranks; MLPs are data-parallel, but the bottom one may run on the first rank.
Batches are global, with one id a feature, and SGD. PyTorch and TensorFlow ran their own embeddings,
not TorchRec's; `lab.runtimes.examples` describes the software by date. Parts are split by precision
and by fusing: from 2021 on, CUDA graphs launch the kernels and fused kernels run the MLPs. Nothing
was fitted on any row.

Why: docs/decisions/0017-megatron-and-examples.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from lab.criteo import RARE_AS_ONE_ROWS, UNCAPPED_ROWS, criteo_tables
from lab.runtimes.examples import ExamplesBuilder, load_examples
from lab.suites import SUITES, ComparedRow, Report, noise_of
from lab.validate.tables import compare_tables, known, profile_of_row, time_of
from predictor import units
from predictor.csv_rows import MOST_RANKS, Row, count, number
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, QComm, Table, Workload

FILE = "dlrm_published_throughput.csv"
LARGE_FROM = 100_000
"""Rows from which a table grows as rarer ids are kept; smaller ones already have all ids."""
PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "mixed precision": "fp16", "amp": "fp16"}
WEIGHTS_SHARE = 0.9
"""Share of a card's memory for a whole table; larger ones are cut into columns."""
ROOMY_RANKS = 4
"""Most ranks with which the rank of the bottom MLP also has tables."""
MESH = "dgx-1"
"""Host whose cards are joined by a cube mesh."""
UNFUSED, FUSED, MIXED, MIXED_FUSED = PARTS = (
    "fp32 and TF32, unfused",
    "fp32 and TF32, CUDA graphs and fused MLPs",
    "mixed precision, fused interaction at most",
    "mixed precision, CUDA graphs and fused MLPs",
)


@dataclass(frozen=True)
class Run:
    """Run of a row of the table.

    Args:
        tensorflow: the framework, in place of PyTorch.
        embedding_gib: size of all tables; None where the row does not give it.
        data_type: data type of the multiplications.
        mesh: true on a host whose cards form a cube mesh.
    """

    day: date
    tensorflow: bool
    cross_net: bool
    profile: str
    gpu_gib: int
    gpus: int
    small: bool
    embedding_gib: float | None
    dim: int
    global_batch: int
    data_type: str
    mesh: bool

    @property
    def part(self) -> str:
        fused = load_examples().fuses(self.day)
        return PARTS[2 * (self.data_type == "fp16") + fused]

    @property
    def first_gpu(self) -> bool:
        """True if the first rank ran the bottom MLP of all samples."""
        framework = "tensorflow" if self.tensorflow else "pytorch"
        return load_examples().on_first_gpu(framework, self.day)

    @property
    def local_gpus(self) -> int:
        """Ranks of a host."""
        return min(self.gpus, load_hardware(self.profile).gpus_per_host)

    def rows(self) -> tuple[int, ...]:
        """Return the rows of every table: the nearest published list, grown to the given bytes."""
        listed = RARE_AS_ONE_ROWS if self.small else UNCAPPED_ROWS
        if self.small or self.embedding_gib is None:
            return listed
        large = sum(size for size in listed if size >= LARGE_FROM)
        large_rows = units.gib(self.embedding_gib) / (4 * self.dim) - (sum(listed) - large)
        factor = max(large_rows / large, 0.01)
        return tuple(round(size * factor) if size >= LARGE_FROM else size for size in listed)

    def workload(self) -> Workload:
        rows = self.rows()
        tables = criteo_tables(rows, (1,) * len(rows), self.dim, "exact_sgd")
        wire = "fp16" if self.data_type == "fp16" else "fp32"
        interaction = DcnV2(3, 512) if self.cross_net else "dot"
        bottom, top = (512, 256, self.dim), (1024, 1024, 512, 256, 1)
        arch = DenseArch(13, bottom, top, interaction, self.data_type, "sgd")
        batch = max(1, self.global_batch // self.gpus)
        return Workload("DLRM", batch, tables, arch, "base", QComm(wire, wire))

    def plan(self) -> ShardingPlan:
        """Return the plan of the run.

        Raises:
            InputError: the tables do not fit.
        """
        hbm_bytes = units.gib(self.gpu_gib)
        tables = self.workload().tables
        return place(tables, self.gpus, self.local_gpus, hbm_bytes, first_gpu=self.first_gpu)


def validate_dlrm_published(folder: Path) -> Report:
    rows, skipped = compare_tables(folder, {FILE: _compared})
    rows.sort(key=lambda row: PARTS.index(row.part))
    repeats = [(tuple(v for k, v in r.name.items() if k != "date"), r.measured_ms) for r in rows]
    return SUITES["dlrm-published"].report(
        rows,
        skipped,
        noise={"the same on other dates, with other software": noise_of(repeats)},
    )


def _run(row: Row) -> Run:
    if row["phase"].strip() != "training":
        raise ValueError(f"phase is '{row['phase']}'; only training is predicted")
    precision = {"precision": row["precision"].lower()}
    if count(row, "tables") != len(RARE_AS_ONE_ROWS):
        raise ValueError(
            f"tables is {row['tables']}; the rows of {len(RARE_AS_ONE_ROWS)} are known"
        )
    try:
        day = date.fromisoformat(row["date"].strip())
    except ValueError:
        raise ValueError(f"date is '{row['date']}'; it must be year-month-day") from None
    gpus, batch = count(row, "gpus", MOST_RANKS), count(row, "global_batch")
    if batch < gpus:
        raise ValueError(f"global_batch is {batch}, fewer than the {gpus} gpus")
    gpu, memory = row["gpu"].strip(), count(row, "gpu_mem")
    name = {"gpu": f"{gpu.replace('(', '').replace(')', '')} {memory}GB"}
    run = Run(
        day,
        "tf2" in row["model"].lower(),
        "dcn" in row["model"].lower(),
        profile_of_row(name).name,
        memory,
        gpus,
        row["model_size"].strip() in ("small", ""),
        number(row, "emb_gb") if row["emb_gb"].strip() else None,
        count(row, "dim"),
        batch,
        known(precision, "precision", PRECISIONS),
        MESH in gpu.lower(),
    )
    if gpus % run.local_gpus:
        raise ValueError(f"gpus is {gpus}; hosts of {run.profile} have {run.local_gpus}")
    try:
        run.plan()
    except InputError as error:
        raise ValueError(f"gpu_mem is {memory}: {error}") from error
    return run


def _compared(row: Row) -> ComparedRow:
    run, measured_ms = _run(row), number(row, "iter_ms")
    predicted, interval = _predicted(run)
    return ComparedRow(
        {
            "date": run.day.isoformat(),
            "model": row["model"].strip(),
            "gpu": row["gpu"].strip(),
            "gpus": run.gpus,
            "model_size": row["model_size"].strip(),
            "global_batch": run.global_batch,
            "precision": row["precision"].strip(),
            "profile": run.profile,
        },
        measured_ms,
        predicted,
        family=f"{run.profile} x{run.gpus} {'tensorflow' if run.tensorflow else 'pytorch'}",
        part=run.part,
        source="NVIDIA/DeepLearningExamples",
        interval_ms=interval,
    )


@cache
def _predicted(run: Run) -> tuple[float, tuple[float, float]]:
    """Return the time of an iteration in ms and its 90 % interval."""
    runtime, workload = load_examples(), run.workload()
    through_host = run.mesh and runtime.crosses_sockets(run.gpus, run.day)
    hardware = load_hardware(run.profile)
    hardware = runtime.profile(hardware, run.day, through_host=through_host)
    topology = Topology.uniform(
        run.gpus,
        run.local_gpus,
        hbm_bytes=units.gib(run.gpu_gib),
        ddr_bytes=hardware.ddr_bytes,
    )
    scorer = PlanScorer(workload, topology, hardware)
    builder = ExamplesBuilder(scorer, run.plan(), first_gpu=run.first_gpu, shared_link=through_host)
    return time_of(builder.build(), hardware, topology, runtime.software_error)


def place(
    tables: Sequence[Table], gpus: int, local: int, hbm_bytes: int, *, first_gpu: bool
) -> ShardingPlan:
    """Place tables by falling size, each on the rank with the fewest bytes.

    Ranks get equal numbers of tables as far as possible; a table too large for one card is cut into
    columns.

    Args:
        local: ranks of a host.
        hbm_bytes: of one rank.
        first_gpu: the first rank has the bottom MLP, and no tables if there are many ranks.

    Raises:
        InputError: the tables do not fit the cards.
    """
    ranks = range(1 if first_gpu and gpus > ROOMY_RANKS else 0, gpus)
    cap = WEIGHTS_SHARE * hbm_bytes
    pieces = {t.name: max(1, math.ceil(t.weight_bytes / cap)) for t in tables}
    most = math.ceil(sum(pieces.values()) / len(ranks))
    bytes_on, count_of = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0)
    plans = {}
    for table in sorted(tables, key=lambda t: -t.weight_bytes / pieces[t.name]):
        parts, first, shards = pieces[table.name], 0, []
        for part in range(parts):
            rank = min((r for r in ranks if count_of[r] < most), key=lambda r: bytes_on[r])
            end = table.embedding_dim * (part + 1) // parts
            shards.append(Shard(rank, (0, first), (table.num_embeddings, end - first)))
            bytes_on[rank] += table.weight_bytes / parts
            count_of[rank] += 1
            first = end
        kind = ShardingType.TABLE_WISE if parts == 1 else ShardingType.COLUMN_WISE
        plans[table.name] = TablePlan(kind, ComputeKernel.FUSED, tuple(shards))
    worst = max(bytes_on.values())
    if worst > hbm_bytes:
        need, have = (size / units.gib(1) for size in (worst, hbm_bytes))
        raise InputError(f"a card needs {need:.0f} GiB for its tables and has {have:.0f}")
    return ShardingPlan(plans, gpus, local)
