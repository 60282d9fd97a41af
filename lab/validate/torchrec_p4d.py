"""TorchRec's own published throughput on p4d hosts (A100-40GB): whole iterations under TorchRec.

The rows say which interaction, optimizer and batch; the plan is what TorchRec's default planner
makes (`search.baselines.torchrec_planner`). Rows of mlcommons/training are DLRM with one id a
feature. Rows of facebookresearch/dlrm use tables capped at 40 million rows; those with Adagrad are
taken to have trained on the multi-hot data set of DLRM-DCNv2, which that README names beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.criteo import CAPPED_ROWS, MULTI_HOT, UNCAPPED_ROWS, criteo_tables
from lab.planners.reservation import reserve_topology
from lab.validate.report import ComparedRow, Report, compare_tables
from predictor.csv_rows import MOST_RANKS, Row, count, number
from predictor.errors import ShardoptError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, Workload
from predictor.predict import predict
from search.baselines.torchrec_planner import torchrec_plan

FILE = "torchrec_dlrm_p4d_measured.csv"
COLUMNS = ("source", "n_gpus", "local_batch", "interaction_optimizer", "iter_ms_derived")
HARDWARE = "a100-40gb"
HOST_GIB = 1152
"""Of a p4d.24xlarge (facebookresearch/dlrm, torchrec_dlrm/README.MD)."""
GPUS_PER_HOST = 8
DIM = 128
PUBLISHED = "published throughput"
GAVE = "gave the cost of the host"
"""Rows of so few samples that the host sets their time: the profile's overheads saw them."""
HOST_BOUND_BATCH = 256


@dataclass(frozen=True)
class Run:
    """One row of the table."""

    source: str
    gpus: int
    local_batch: int
    settings: str

    @property
    def multi_hot(self) -> bool:
        """Whether it trained on the multi-hot data set."""
        return "adagrad" in self.settings.lower()

    def workload(self) -> Workload:
        """The model and its batch."""
        rows = UNCAPPED_ROWS if self.source.startswith("mlcommons") else CAPPED_ROWS
        hots = MULTI_HOT if self.multi_hot else (1,) * len(rows)
        sparse, dense = ("exact_adagrad", "adagrad") if self.multi_hot else ("exact_sgd", "sgd")
        tables = criteo_tables(rows, hots, DIM, sparse)
        interaction = DcnV2(3, 512) if "dcn" in self.settings.lower() else "dot"
        arch = DenseArch(13, (512, 256, 128), (1024, 1024, 512, 256, 1), interaction, "fp32", dense)
        return Workload("torchrec dlrm", self.local_batch, tables, arch, "sparse_dist")


def validate_torchrec_p4d(folder: Path) -> Report:
    """Predict every row of the table in ``folder``.

    Raises:
        InputError: the folder or the table is not there.
    """
    rows, skipped = compare_tables(folder, {FILE: (COLUMNS, _compared)})
    notes = (
        "measured with TorchRec of 2021 to 2023 and its default planner, while the profile "
        "describes later software; the rows include data loading, which is not modelled",
    )
    return Report("torchrec-p4d", tuple(rows), PUBLISHED, tuple(skipped), notes)


def _compared(row: Row) -> ComparedRow:
    run = Run(
        row["source"],
        count(row, "n_gpus", MOST_RANKS),
        count(row, "local_batch"),
        row["interaction_optimizer"],
    )
    measured_ms = number(row, "iter_ms_derived")
    iteration_ms, interval_ms = _predicted_ms(run)
    ids = "multi-hot" if run.multi_hot else "one-hot"
    return ComparedRow(
        {
            "gpus": run.gpus,
            "local_batch": run.local_batch,
            "settings": run.settings,
            "ids": ids,
            "profile": HARDWARE,
        },
        measured_ms,
        iteration_ms,
        family=ids,
        part=GAVE if run.local_batch <= HOST_BOUND_BATCH else PUBLISHED,
        source=run.source,
        interval_ms=interval_ms,
    )


@cache
def _predicted_ms(run: Run) -> tuple[float, tuple[float, float]]:
    hw, workload = load_hardware(HARDWARE), run.workload()
    machine = Topology.uniform(
        run.gpus,
        min(run.gpus, GPUS_PER_HOST),
        hbm_bytes=hw.hbm_bytes,
        ddr_bytes=HOST_GIB * 2**30 // GPUS_PER_HOST if run.gpus > 1 else HOST_GIB * 2**30,
    )
    topology = reserve_topology(workload, machine, device=hw.device)
    found = torchrec_plan(workload, topology, hw.device)
    if found is None:
        raise ShardoptError("TorchRec's planner finds no plan that fits")
    tables = dict(zip(workload.keys, found.tables, strict=True))
    plan = ShardingPlan(tables, run.gpus, min(run.gpus, GPUS_PER_HOST))
    prediction = predict(workload, topology, hw, plan)
    return prediction.iteration_ms, prediction.interval_ms
