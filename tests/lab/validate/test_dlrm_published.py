"""Published throughput of DLRM in NVIDIA's DeepLearningExamples."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.suites import Report
from lab.validate.dlrm_published import (
    FILE,
    FUSED,
    MIXED,
    MIXED_FUSED,
    UNFUSED,
    place,
    validate_dlrm_published,
)
from predictor.model.plan import ShardingType
from predictor.model.workload import Feature, Table
from predictor.units import gib
from tests.lab.validate.reports import write_table

ROW = {
    "source": "README",
    "date": "2020-07-04",
    "model": "DLRM PyTorch",
    "gpu": "V100 (DGX-1)",
    "gpu_mem": "32",
    "gpus": "1",
    "model_size": "small",
    "emb_gb": "15",
    "tables": "26",
    "dim": "128",
    "global_batch": "32768",
    "precision": "FP32",
    "phase": "training",
    "iter_ms": "50",
}


def report_of(tmp_path: Path, *changes: dict[str, str]) -> Report:
    """The report on rows that differ from `ROW`."""
    write_table(tmp_path, FILE, ROW, *changes)
    return validate_dlrm_published(tmp_path)


def test_rows_are_apart_by_what_they_fuse(tmp_path: Path) -> None:
    mixed = {"precision": "mixed precision"}
    report = report_of(tmp_path, mixed | {"date": "2021-03-24"}, mixed, {"date": "2022-01-10"}, {})
    assert [row.part for row in report.rows] == [UNFUSED, FUSED, MIXED, MIXED_FUSED]
    assert report.summary.n == 1
    for row in report.rows:
        assert row.interval_ms is not None
        assert row.interval_ms[0] < row.predicted_ms < row.interval_ms[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"iter_ms": "fast"}, "iter_ms is 'fast', not a number"),
        ({"phase": "inference"}, "phase is 'inference'"),
        ({"precision": "int8"}, "precision is 'int8'"),
        ({"date": "spring"}, "date is 'spring'"),
        ({"tables": "8"}, "tables is 8"),
        ({"gpus": "0"}, "gpus is 0"),
        ({"gpus": "12"}, "gpus is 12; hosts of v100-32gb have 8"),
        ({"global_batch": "4", "gpus": "8"}, "global_batch is 4"),
        ({"gpu": "A101"}, "gpu is 'A101 32GB', which no profile describes"),
        ({"model_size": "large", "emb_gb": "82"}, "gpu_mem is 32: a card needs "),
    ],
)
def test_bad_rows_are_named_and_left_out(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    report = report_of(tmp_path, change, {})
    assert len(report.rows) == 1
    assert len(report.skipped) == 1
    assert report.skipped[0].startswith(f"{FILE}:3: {words}")


def test_one_hop_over_nvlink_made_the_mesh_faster(tmp_path: Path) -> None:
    """From NCCL 2.8 on no card sends through the other socket's memory."""
    size = {"model_size": "large", "emb_gb": "82", "gpus": "8", "global_batch": "65536"}
    report = report_of(tmp_path, size, size | {"date": "2020-12-01"})
    before, after = (row.predicted_ms for row in report.rows)
    assert after < 0.7 * before


def tables_of(rows: list[int]) -> list[Table]:
    return [Table(f"t{i}", n, 128, (Feature(f"f{i}", 1.0),)) for i, n in enumerate(rows)]


def test_the_first_of_many_ranks_has_no_table() -> None:
    plan = place(tables_of([10**6] * 14), 8, 8, gib(32), first_gpu=True)
    ranks = [shard.rank for table in plan.tables.values() for shard in table.shards]
    assert sorted(ranks) == [rank for rank in range(1, 8) for _ in range(2)]


def test_a_table_larger_than_a_card_is_cut_into_columns() -> None:
    plan = place(tables_of([100 * 10**6, 10**3]), 4, 4, gib(32), first_gpu=False)
    large = plan.tables["t0"]
    assert large.sharding_type is ShardingType.COLUMN_WISE
    assert sum(shard.size[1] for shard in large.shards) == 128
    assert plan.tables["t1"].sharding_type is ShardingType.TABLE_WISE
