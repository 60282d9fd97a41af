"""DLRM of NVIDIA's DeepLearningExamples: published throughput on V100 and A100 hosts.

Embeddings are model-parallel, whole tables on ranks, and MLPs data-parallel; batches are global;
one id a feature, SGD. No row comes from TorchRec: PyTorch and TensorFlow ran their own embeddings,
and the table says that from 2021 on CUDA graphs launch the kernels and fused kernels run the MLPs.
Rows are apart by that and by precision, and the headline is of those that fuse nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from predictor import units
from predictor.csv_rows import MOST_RANKS, Row, count, number, read_table
from predictor.errors import ShardoptError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import HardwareProfile, load_hardware
from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.reservation import reserve_topology
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DcnV2, DenseArch, Feature, QComm, Table, Workload
from predictor.predict import Prediction, predict
from search.baselines.torchrec_planner import torchrec_plan
from shardopt.validate.report import ComparedRow, Report, data_folder
from shardopt.validate.torchrec_p4d import UNCAPPED_ROWS, ZIPF_ALPHA

FILE = "dlrm_published_throughput.csv"
COLUMNS = (
    *("date", "model", "gpu", "gpu_mem", "gpus", "model_size", "emb_gb", "tables", "dim"),
    *("global_batch", "precision", "phase", "iter_ms"),
)
SMALL_ROWS = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209),
    *(10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
"""Criteo 1 TB with ids that occur fewer than 15 times as one: the head of the table."""
LARGE_FROM = 100_000
"""Tables of so many rows grow as rarer ids are kept; smaller ones have all their ids already."""
FUSED_FROM = date(2021, 1, 1)
"""From then on CUDA graphs and fused MLPs ran: the head of the table."""
PRECISIONS = {"fp32": "fp32", "tf32": "tf32", "mixed precision": "fp16", "amp": "fp16"}
UNFUSED, FUSED, MIXED = PARTS = (
    "unfused fp32 and TF32",
    "graphs and fused MLP, fp32 and TF32",
    "mixed precision",
)


@dataclass(frozen=True)
class Run:
    """One row of the table.

    Args:
        model: framework and interaction, in words.
        embedding_gib: of all tables; None where the row does not say.
    """

    date: date
    model: str
    gpu: str
    gpu_gib: int
    gpus: int
    size: str
    embedding_gib: float | None
    dim: int
    global_batch: int
    precision: str
    measured_ms: float

    @property
    def part(self) -> str:
        """Which part of the report it counts in."""
        if PRECISIONS[self.precision.lower()] == "fp16":
            return MIXED
        return FUSED if self.date >= FUSED_FROM else UNFUSED

    def rows(self) -> tuple[int, ...]:
        """Rows of every table: those of the nearest published list, grown to the bytes given."""
        known = SMALL_ROWS if self.size in ("small", "") else UNCAPPED_ROWS
        if self.embedding_gib is None or self.size in ("small", ""):
            return known
        row_bytes = 4 * self.dim
        large = sum(size for size in known if size >= LARGE_FROM)
        others = sum(known) - large
        factor = (units.gib(self.embedding_gib) / row_bytes - others) / large
        return tuple(round(size * factor) if size >= LARGE_FROM else size for size in known)

    def workload(self) -> Workload:
        """The model and its batch per rank; whole tables, or column shards of the largest."""
        kinds = (ShardingType.TABLE_WISE,)
        tables = tuple(
            Table(
                f"t_cat_{i}",
                size,
                self.dim,
                (Feature(f"cat_{i}", 1.0, distribution=Zipf(ZIPF_ALPHA, 0.0)),),
                optimizer="exact_sgd",
                constraints=Constraints(sharding_types=kinds, compute_kernels=("fused",)),
            )
            for i, size in enumerate(self.rows())
        )
        dtype = PRECISIONS[self.precision.lower()]
        wire = "fp16" if dtype == "fp16" else "fp32"
        interaction = DcnV2(3, 512) if "dcn" in self.model.lower() else "dot"
        bottom, top = (512, 256, self.dim), (1024, 1024, 512, 256, 1)
        arch = DenseArch(13, bottom, top, interaction, dtype, "sgd")
        batch = max(1, self.global_batch // self.gpus)
        return Workload("DLRM", batch, tables, arch, "sparse_dist", QComm(wire, wire))


def validate_dlrm_published(folder: Path) -> Report:
    """Predict every training row of the table in ``folder``.

    Raises:
        InputError: the folder or the table is not there.
    """
    data_folder(folder, [FILE], every=True)
    table = read_table(folder / FILE, COLUMNS, _parse)
    rows, skipped = [], list(table.problems)
    for run in table.rows:
        try:
            rows.append(_compared(run))
        except ShardoptError as error:
            skipped.append(f"{run.gpus} {run.gpu} {run.size} {run.precision}: {error}")
    return Report("dlrm-published", tuple(rows), UNFUSED, tuple(skipped))


def _parse(row: Row) -> Run:
    text = row["emb_gb"].strip()
    return Run(
        date.fromisoformat(row["date"]),
        row["model"],
        row["gpu"],
        count(row, "gpu_mem"),
        count(row, "gpus", MOST_RANKS),
        row["model_size"].strip(),
        number(row, "emb_gb") if text else None,
        count(row, "dim"),
        count(row, "global_batch"),
        row["precision"].strip(),
        number(row, "iter_ms"),
    )


def _compared(run: Run) -> ComparedRow:
    name = profile_of_device(f"{run.gpu} {run.gpu_gib}GB")
    assert name is not None
    found = _prediction(run)
    return ComparedRow(
        {
            "date": run.date.isoformat(),
            "model": run.model,
            "gpu": run.gpu,
            "gpus": run.gpus,
            "model_size": run.size,
            "global_batch": run.global_batch,
            "precision": run.precision,
            "profile": name,
        },
        run.measured_ms,
        found.iteration_ms,
        family=f"{run.gpu} x{run.gpus} {run.precision}",
        part=run.part,
    )


@cache
def _prediction(run: Run) -> Prediction:
    hw = load_hardware(profile_of_device(f"{run.gpu} {run.gpu_gib}GB"))
    workload = run.workload()
    machine = Topology.uniform(
        run.gpus,
        min(run.gpus, hw.gpus_per_host),
        hbm_bytes=units.gib(run.gpu_gib),
        ddr_bytes=hw.ddr_bytes,
    )
    topology = reserve_topology(workload, machine, device=hw.device)
    found = torchrec_plan(workload, topology, hw.device)
    if found is None:
        raise ShardoptError("TorchRec's planner finds no plan that fits")
    tables = dict(zip(workload.keys, found.tables, strict=True))
    plan = ShardingPlan(tables, run.gpus, min(run.gpus, hw.gpus_per_host))
    return predict(workload, topology, hw, plan)
