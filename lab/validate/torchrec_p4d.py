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

from lab.planners.reservation import reserve_topology
from lab.validate.report import ComparedRow, Report, data_folder
from predictor.csv_rows import MOST_RANKS, Row, count, number, read_table
from predictor.errors import ShardoptError
from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, Feature, Table, Workload
from predictor.predict import predict
from search.baselines.torchrec_planner import torchrec_plan

FILE = "torchrec_dlrm_p4d_measured.csv"
HARDWARE = "a100-40gb"
HOST_GIB = 1152
"""Of a p4d.24xlarge (facebookresearch/dlrm, torchrec_dlrm/README.MD)."""
GPUS_PER_HOST = 8
DIM = 128
ZIPF_ALPHA = 1.1
"""As in configs/models/dlrm_dcnv2_criteo1tb.yaml."""
UNCAPPED_ROWS = (
    *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
    *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
)
"""mlcommons/training recommendation_v2/torchrec_dlrm/README.MD."""
CAPPED_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
MULTI_HOT = (*(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),)
"""facebookresearch/dlrm torchrec_dlrm: --num_embeddings_per_feature, --multi_hot_sizes."""
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
    measured_ms: float

    @property
    def multi_hot(self) -> bool:
        """Whether it trained on the multi-hot data set."""
        return "adagrad" in self.settings.lower()

    def workload(self) -> Workload:
        """The model and its batch."""
        rows = UNCAPPED_ROWS if self.source.startswith("mlcommons") else CAPPED_ROWS
        hots = MULTI_HOT if self.multi_hot else (1,) * len(rows)
        sparse, dense = ("exact_adagrad", "adagrad") if self.multi_hot else ("exact_sgd", "sgd")
        tables = tuple(
            Table(
                f"t_cat_{i}",
                size,
                DIM,
                (Feature(f"cat_{i}", float(hot), distribution=Zipf(ZIPF_ALPHA, (hot - 1) / 2)),),
                optimizer=sparse,
            )
            for i, (size, hot) in enumerate(zip(rows, hots, strict=True))
        )
        interaction = DcnV2(3, 512) if "dcn" in self.settings.lower() else "dot"
        arch = DenseArch(13, (512, 256, 128), (1024, 1024, 512, 256, 1), interaction, "fp32", dense)
        return Workload("torchrec dlrm", self.local_batch, tables, arch, "sparse_dist")


def validate_torchrec_p4d(folder: Path) -> Report:
    """Predict every row of the table in ``folder``.

    Raises:
        InputError: the folder or the table is not there.
    """
    data_folder(folder, [FILE], every=True)
    columns = ("source", "n_gpus", "local_batch", "interaction_optimizer", "iter_ms_derived")
    table = read_table(folder / FILE, columns, _parse)
    rows, skipped = [], list(table.problems)
    for run in table.rows:
        try:
            rows.append(_compared(run))
        except ShardoptError as error:
            skipped.append(f"{run.gpus}x{run.local_batch} {run.settings}: {error}")
    notes = (
        "measured with TorchRec of 2021 to 2023 and its default planner, while the profile "
        "describes later software; the rows include data loading, which is not modelled",
    )
    return Report("torchrec-p4d", tuple(rows), PUBLISHED, tuple(skipped), notes)


def _parse(row: Row) -> Run:
    return Run(
        row["source"],
        count(row, "n_gpus", MOST_RANKS),
        count(row, "local_batch"),
        row["interaction_optimizer"],
        number(row, "iter_ms_derived"),
    )


def _compared(run: Run) -> ComparedRow:
    iteration_ms, interval_ms = _predicted_ms(run)
    return ComparedRow(
        {
            "gpus": run.gpus,
            "local_batch": run.local_batch,
            "settings": run.settings,
            "ids": "multi-hot" if run.multi_hot else "one-hot",
            "profile": HARDWARE,
        },
        run.measured_ms,
        iteration_ms,
        family="multi-hot" if run.multi_hot else "one-hot",
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
