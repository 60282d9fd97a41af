"""TorchRec's own published throughput on p4d hosts (A100-40GB): whole iterations under TorchRec.

The rows give interaction, optimizer and batch; the plan is that of TorchRec's default planner
(`search.baselines.torchrec_planner`). Rows of mlcommons/training are DLRM with one id a feature.
Rows of facebookresearch/dlrm use tables capped at 40 million rows; those with Adagrad are assumed
to use the multi-hot data set of DLRM-DCNv2, which that README names beside them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lab.criteo import CAPPED_ROWS, MULTI_HOT, UNCAPPED_ROWS, criteo_tables
from lab.planners.reservation import torchrec_default_plan
from lab.suites import SUITES, ComparedRow, Report
from lab.validate.tables import compare_tables
from predictor.csv_rows import MOST_RANKS, Row, count, number
from predictor.hardware.loader import load_hardware
from predictor.model.topology import Topology
from predictor.model.workload import DcnV2, DenseArch, Workload
from predictor.predict import predict

FILE = "torchrec_dlrm_p4d_measured.csv"
HARDWARE = "a100-40gb"
HOST_GIB = 1152
"""Host memory of a p4d.24xlarge (facebookresearch/dlrm, torchrec_dlrm/README.MD)."""
GPUS_PER_HOST = 8
DIM = 128
PUBLISHED = "published throughput"
GAVE = "gave the cost of the host"
"""Part of host-bound rows of few samples, which the profile's overheads were fitted to."""
HOST_BOUND_BATCH = 256


def validate_torchrec_p4d(folder: Path) -> Report:
    return SUITES["torchrec-p4d"].report(*compare_tables(folder, {FILE: _compared}))


def _compared(row: Row) -> ComparedRow:
    gpus, batch = count(row, "n_gpus", MOST_RANKS), count(row, "local_batch")
    settings = row["interaction_optimizer"]
    measured_ms = number(row, "iter_ms_derived")
    iteration_ms, interval_ms = _predicted_ms(workload_of(row["source"], settings, batch), gpus)
    ids = "multi-hot" if "adagrad" in settings.lower() else "one-hot"
    return ComparedRow(
        {
            **{"gpus": gpus, "local_batch": batch, "settings": settings},
            **{"ids": ids, "profile": HARDWARE},
        },
        measured_ms,
        iteration_ms,
        family=ids,
        part=GAVE if batch <= HOST_BOUND_BATCH else PUBLISHED,
        source=row["source"],
        interval_ms=interval_ms,
    )


def workload_of(source: str, settings: str, local_batch: int) -> Workload:
    """Return the model of a row with its batch.

    Args:
        settings: such as ``dot, SGD`` or ``DCNv2, Adagrad``.
    """
    multi_hot = "adagrad" in settings.lower()
    rows = UNCAPPED_ROWS if source.startswith("mlcommons") else CAPPED_ROWS
    hots = MULTI_HOT if multi_hot else (1,) * len(rows)
    sparse, dense = ("exact_adagrad", "adagrad") if multi_hot else ("exact_sgd", "sgd")
    tables = criteo_tables(rows, hots, DIM, sparse)
    interaction = DcnV2(3, 512) if "dcn" in settings.lower() else "dot"
    arch = DenseArch(13, (512, 256, 128), (1024, 1024, 512, 256, 1), interaction, "fp32", dense)
    return Workload("torchrec dlrm", local_batch, tables, arch, "sparse_dist")


@cache
def _predicted_ms(workload: Workload, gpus: int) -> tuple[float, tuple[float, float]]:
    hw = load_hardware(HARDWARE)
    machine = Topology.uniform(
        gpus,
        min(gpus, GPUS_PER_HOST),
        hbm_bytes=hw.hbm_bytes,
        ddr_bytes=HOST_GIB * 2**30 // GPUS_PER_HOST if gpus > 1 else HOST_GIB * 2**30,
    )
    topology, plan = torchrec_default_plan(workload, machine, hw.device)
    prediction = predict(workload, topology, hw, plan)
    return prediction.iteration_ms, prediction.interval_ms
