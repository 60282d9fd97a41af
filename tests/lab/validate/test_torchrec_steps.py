"""Whole TorchRec steps: what a row says, whose plan it runs, and how rows are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.suites import COLUMNS, ComparedRow, Summary
from lab.validate.torchrec_steps import (
    COLD,
    FILE,
    RULE,
    STATS_FILE,
    STEADY,
    UNLIKE,
    Group,
    Run,
    order_rows,
    parse_group,
    parse_run,
    plan_of,
    validate_torchrec_steps,
)
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Optimizer
from tests.lab.validate.reports import write_table
from tests.public_data import EXCERPTS, FULL, needs_public_data

CELLS = {
    **dict.fromkeys(COLUMNS[FILE], ""),
    "commit": "c1",
    "run": "base",
    "gpu": "H100-96GB HBM2e",
    "world_size": "2",
    "batch_per_rank": "1024",
    "n_batches": "10",
    "num_benchmarks": "1",
    "ms_per_batch": "20",
    "pooling": "30",
    "n_unweighted": "3",
    "n_weighted": "2",
    "dim": "64",
    "rows_per_table": "1000",
    "extra_tables": "big:5000x256:FP16:EBC",
    "default_sharding": "table_wise",
    "constraints": "big:column_wise",
    "model": "test_sparse_nn",
    "pipeline": "sparse",
    "dense_hidden": "128-64",
    "plan_commit": "p1",
    "sparse_optimizer": "EXACT_SGD (no optimizer state)",
}
GROUP = dict.fromkeys(COLUMNS[STATS_FILE], "") | {
    "commit": "p1",
    "date": "2026-01-02",
    "ranks": "2",
}
PRINTED = (
    {"group": "sparse.ebc.table_*", "count": "2", "placed_on": "0:2 1:1", "rows": "1000"},
    {"group": "sparse.ebc.table_*", "count": "2", "placed_on": "0:1 1:1", "rows": "2000"},
    {"group": "sparse.ebc.table_*", "count": "1", "placed_on": "0:1", "rows": "3000"},
    {"group": "sparse.weighted_ebc.weighted_table_*", "count": "1", "placed_on": "1:1"}
    | {"rows": "1000"},
    {"group": "sparse.weighted_ebc.weighted_table_*", "count": "1", "placed_on": "0:1"}
    | {"rows": "2000"},
    {"group": "sparse.ebc.big", "count": "1", "placed_on": "0,1,1,0:1", "rows": "5000"}
    | {"sharding": "CW", "dim": "256 (64)"},
)


def a_run(**cells: str) -> Run:
    return parse_run(CELLS | cells)


def printed(**changed: str) -> list[Group]:
    usual = {"sharding": "TW", "kernel": "fused", "dim": "64"}
    groups = [parse_group(GROUP | usual | dict(row) | changed) for row in PRINTED]
    return [group for group in groups if group is not None]


def test_a_row_is_a_model_with_its_batch_and_pipeline() -> None:
    run = a_run()
    work = run.workload
    assert [t.name for t in work.tables] == [
        *("table_0", "table_1", "table_2", "big", "weighted_table_0", "weighted_table_1")
    ]
    assert [t.num_embeddings for t in work.tables] == [1000, 2000, 3000, 5000, 1000, 2000]
    assert [t.weighted for t in work.tables] == [False] * 4 + [True] * 2
    assert {t.optimizer for t in work.tables} == {Optimizer.EXACT_SGD}
    assert work.tables[3].data_type == "fp16"
    assert work.dense.bottom_mlp == (128, 64, 8)
    assert work.dense.top_mlp == (16,) * 6
    assert work.dense.copies == (2 * (5 * 64 + 256), 0)
    assert (work.train_pipeline, work.training, run.profile) == ("sparse_dist", True, "h100-96gb")
    assert not run.steady
    assert not run.unlike


def test_sequences_are_padded_and_not_pooled() -> None:
    run = a_run(
        model="mixed_embedding", extra_tables="ec:100x32:FP32:EC", constraints="", n_weighted="0"
    )
    *_, last = run.workload.tables
    assert (last.module, last.pooling) == ("ec", "none")
    assert run.workload.dense.linears == ((10, 8), (3 * 64 + 20 * 32 + 8, 16))
    assert min(run.workload.dense.copies) > 0


def test_extra_words_choose_kernel_and_cache() -> None:
    constraints = {"constraints": "big:row_wise/fused_uvm_caching"}
    limits = a_run(**constraints, extra="cache_load_factor 0.4").workload.tables[3].constraints
    assert limits.sharding_types == (ShardingType.ROW_WISE,)
    assert limits.compute_kernels == (ComputeKernel.FUSED_UVM_CACHING,)
    assert limits.cache_load_factor == 0.4
    limits = a_run(**constraints, extra="big fused_uvm").workload.tables[3].constraints
    assert limits.compute_kernels == (ComputeKernel.FUSED_UVM,)


def test_steady_times_and_evaluations() -> None:
    assert a_run(num_benchmarks="5").steady
    run = a_run(steady_ms_per_batch="17", mode="eval", pipeline="eval-sdd")
    assert (run.steady, run.measured_ms, run.workload.training) == (True, 17.0, False)
    assert a_run(run="x_shampoo").unlike == "shampoo"
    assert a_run(run="sparse_data_dist_sync_fwd").unlike == "sync_fwd"


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"gpu": "H900-96GB"}, "no profile describes"),
        ({"gpu": ""}, "gpu is not given"),
        ({"pipeline": "semi_sync"}, "known are base, sparse"),
        ({"extra_tables": "big:5000:FP16"}, "big:5000:FP16"),
        ({"extra_tables": "big:5000x8:INT8:EBC"}, "INT8"),
        ({"default_sharding": "diagonal"}, "diagonal"),
        ({"constraints": "big:row_wise/gpu"}, "gpu"),
        ({"sparse_optimizer": "LION"}, "known are EXACT_SGD"),
        ({"mode": "serve"}, "serve"),
        ({"model": "deepfm"}, "deepfm"),
        ({"ms_per_batch": "fast"}, "not a number"),
        ({"n_unweighted": "0", "n_weighted": "0", "extra_tables": ""}, "no tables"),
    ],
)
def test_cells_that_cannot_be_used_are_said(cells: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        a_run(**cells)


def test_a_printed_plan_is_taken_as_printed() -> None:
    found = plan_of(a_run().workload, 2, "p1", printed(), load_hardware("h100-96gb"))
    source, plan = found
    assert source == "printed in p1"
    tables = plan.tables
    assert tables["weighted_table_0"].ranks == (1,)
    assert tables["table_2"].ranks == (0,)
    assert tables["big"].sharding_type is ShardingType.COLUMN_WISE
    assert [(s.rank, s.offset, s.size) for s in tables["big"].shards] == [
        (rank, (0, 64 * i), (5000, 64)) for i, rank in enumerate((0, 1, 1, 0))
    ]


def test_a_printed_plan_of_other_tables_gives_way_to_the_rule() -> None:
    hardware = load_hardware("h100-96gb")
    for groups in ([], printed()[:-1], printed(ranks="4"), printed(kernel="fused_uvm")):
        source, plan = plan_of(a_run().workload, 2, "p1", groups, hardware)
        assert source == RULE
        assert set(plan.tables) == set(a_run().workload.keys)


def test_the_order_counts_pairs_that_differ_by_more_than_the_noise() -> None:
    def row(measured: float, predicted: float) -> ComparedRow:
        return ComparedRow({}, measured, predicted, "f")

    first, two = a_run(), a_run(n_unweighted="2")
    compared = [(first, row(10, 10)), (two, row(20, 30)), (two, row(20.2, 5))]
    lines = order_rows(compared, Summary(2, 0.05, 0.05, 0.05))
    assert [cells[1:3] for cells in lines] == [(2, 1), (2, 1), (2, 1), (0, 0)]


def test_rows_are_predicted_skipped_and_put_apart(tmp_path: Path) -> None:
    changes = ({}, {"num_benchmarks": "5"}, {"run": "shampoo"}, {"gpu": "TPU v9"})
    write_table(tmp_path, FILE, CELLS, *changes)
    write_table(tmp_path, STATS_FILE, GROUP, {"sharding": "XY"})
    report = validate_torchrec_steps(tmp_path)
    assert [row.part for row in report.rows] == [COLD, STEADY, UNLIKE]
    for row in report.rows:
        assert row.interval_ms is not None
        assert row.interval_ms[0] < row.predicted_ms < row.interval_ms[1]
    assert any(f"{FILE}:6: gpu is 'TPU v9'" in text for text in report.skipped)
    assert any(f"{STATS_FILE}:3: sharding is 'XY'" in text for text in report.skipped)


def test_steady_steps_are_as_good_as_they_were() -> None:
    """Rows with more than 32 ids each, weighted bags, fp32 products: what one step takes."""
    report = validate_torchrec_steps(EXCERPTS)
    assert [row.part for row in report.rows] == [STEADY] * 3
    assert all(abs(row.error) < 0.05 for row in report.rows)
    assert report.summary.covered == 1.0


@needs_public_data
def test_public_rows() -> None:
    report = validate_torchrec_steps(FULL)
    assert not report.skipped
    assert len(report.rows) == 37
    # a cold loop takes longer than steady steps
    cold = [row for row in report.rows if row.part == COLD]
    assert all(row.predicted_ms < row.measured_ms for row in cold)
