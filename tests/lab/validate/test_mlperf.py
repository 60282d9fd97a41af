"""MLPerf systems: from a row to a machine, a plan and a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.criteo import criteo_tables
from lab.runtimes.hugectr import runtime_of_round
from lab.suites import Summary
from lab.validate.mlperf import (
    CONFIGS_FILE,
    FIT,
    LATER,
    LOGGED,
    NEVER,
    PLANS_FILE,
    ROWS_FILE,
    TEST,
    Knobs,
    Matrix,
    Planner,
    System,
    builder_of,
    by_configuration,
    parts_of,
    validate_mlperf_dlrm,
)
from predictor.model.plan import ShardingType
from predictor.model.plan_check import table_problem
from tests.public_data import every_table

ROWS = (100_000, 400_000, 50, 2_000_000)
HOT = (3, 20, 1, 10)
HEADER = (
    "round,org,system,benchmark,nodes,accel_per_node,accels,accelerator,accel_interconnect,cpu,"
    "global_batch,iter_ms_median\n"
)
CONFIG_HEADER = (
    "round,org,config,global_batch,nodes,gpus_per_node,sharding_plan,mem_comm_bw_ratio,"
    "dp_sharding_threshold_gb\n"
)
MATRICES = (
    Matrix(1, 4, Knobs(False, 7.0, 0.008), (2,), ((0, 1), (1,), (3,), (3,))),
    Matrix(2, 4, Knobs(True, 67.0, 0.0125), (2,), ((0, 1), (1, 3))),
)
TABLES = criteo_tables(ROWS, HOT, 128, "exact_sgd")
PLANNER = Planner({}, MATRICES, ROWS, HOT)


def system(**changes: object) -> System:
    values: dict[str, object] = {
        "round": "v4.0",
        "org": "org",
        "system": "box",
        "benchmark": "dlrm_dcnv2",
        "nodes": 1,
        "gpus_per_node": 4,
        "accelerator": "NVIDIA H100-SXM5-80GB",
        "profile": "h100-sxm",
        "global_batch": 16384,
        "measured_ms": 2.0,
    }
    return System(**(values | changes))  # type: ignore[arg-type]


def test_runtimes_by_round() -> None:
    usual, preview = runtime_of_round((2, 1)), runtime_of_round((2, 1), preview=True)
    assert usual.name == "hugectr v2.0"
    assert preview.hybrid != usual.hybrid
    assert preview.update_factor == usual.update_factor
    assert runtime_of_round((3, 0)).name == "hugectr v3.0"
    assert runtime_of_round((3, 1)).name == runtime_of_round((5, 0)).name == "hugectr v3.1+"


def test_a_plan_in_a_log_goes_before_one_of_the_planner() -> None:
    for (round_, name), logged in LOGGED.items():
        box = system(round=round_, system=name, gpus_per_node=8)
        matrix = PLANNER.matrix(box)
        assert matrix is not None
        assert [list(bucket) for bucket in matrix.buckets] == logged["buckets"]
        assert len(matrix.buckets) == 8
        placed = {*matrix.replicated, *(t for bucket in matrix.buckets for t in bucket)}
        assert placed == set(range(26))
    assert PLANNER.matrix(system()) is MATRICES[0]


def test_the_software_of_a_round_may_be_older_than_the_round() -> None:
    old = system(round="v3.1", system="G5500V7x8L40")
    assert (old.version, old.runtime) == ((3, 1), runtime_of_round((3, 0)))
    assert system(round="v3.1").runtime == runtime_of_round((3, 1))


@pytest.mark.parametrize("matrix", MATRICES)
def test_plans_tile_every_table(matrix: Matrix) -> None:
    plan = matrix.plan(TABLES)
    for table, rows in zip(plan.tables.values(), ROWS, strict=True):
        cells = sum(s.size[0] * s.size[1] for s in table.shards)
        copies = plan.world_size if table.sharding_type is ShardingType.DATA_PARALLEL else 1
        assert cells == copies * rows * 128
        if copies > 1:
            assert table_problem(table, (rows, 128), plan.world_size) is None
    assert {s.rank for s in plan.tables["t_cat_1"].shards} == set(
        range(8 if matrix.nodes > 1 else 2)
    )


def test_a_bucket_of_a_node_spreads_over_its_gpus_and_reduces_there() -> None:
    plan = MATRICES[1].plan(TABLES)
    assert plan.tables["t_cat_3"].sharding_type is ShardingType.TABLE_ROW_WISE
    assert {s.rank for s in plan.tables["t_cat_3"].shards} == {4, 5, 6, 7}


def test_a_machine_without_a_plan_is_said() -> None:
    with pytest.raises(ValueError, match="no plan for 3 hosts"):
        builder_of(system(nodes=3), PLANNER)


def test_a_repeated_submission_is_no_test() -> None:
    old = system(round="v3.1", measured_ms=3.701)
    again = system(measured_ms=3.701)
    fresh = system(measured_ms=3.6)
    unseen = system(round="v3.1", profile="l40s")
    assert parts_of([old, again, fresh, unseen]) == [FIT, FIT, TEST, TEST]


def write(folder: Path, rows: str, configs: str = "") -> None:
    entry = {
        "nodes": 1,
        "gpus_per_node": 4,
        "plan": "auto",
        "mem_comm_bw_ratio": 7.0,
        "dp_threshold_gb": 0.008,
        "dp_tables": [2],
        "mp_tables_per_bucket": [[0, 1], [1], [3], [3]],
    }
    plans = {"table_rows": ROWS, "multi_hot": HOT, "plans": [entry]}
    (folder / ROWS_FILE).write_text(HEADER + rows)
    (folder / CONFIGS_FILE).write_text(CONFIG_HEADER + configs)
    (folder / PLANS_FILE).write_text(json.dumps(plans))


def test_a_table_with_every_kind_of_row(tmp_path: Path) -> None:
    gpu = "v4.0,Org,box,dlrm_dcnv2,1,4,4,NVIDIA H100-SXM5-80GB,NVLink,cpu,16384,2.0\n"
    tpu = "v4.0,Org,pod,dlrm_dcnv2,1,4,4,TPU-v4,,cpu,16384,2.0\n"
    cpu = "v4.0,Org,rack,dlrm_dcnv2,4,0,0,N/A,,Xeon,16384,200\n"
    bad = "v4.0,Org,box,dlrm_dcnv2,1,4,4,NVIDIA H100-SXM5-80GB,NVLink,cpu,16384,?\n"
    unknown = gpu.replace("NVIDIA H100-SXM5-80GB", "NVIDIA Z1")
    write(
        tmp_path,
        gpu + tpu + cpu + bad + unknown,
        "v4.0,Org,c.sh,16384,1,4,auto,7,0 (flag absent)\n",
    )
    report = validate_mlperf_dlrm(tmp_path)
    assert [row.name["system"] for row in report.rows] == ["box"]
    assert [row.name["accels"] for row in report.rows] == [4]
    text = "\n".join(report.skipped)
    assert "TPU" in text
    assert "NVIDIA Z1" in text
    assert "CPUs (Xeon)" in text
    assert f"{ROWS_FILE}:5: iter_ms_median is '?', not a number" in text


def test_systems_that_ran_the_same_count_once(tmp_path: Path) -> None:
    gpu = "v4.0,{},box,dlrm_dcnv2,1,4,4,NVIDIA H100-SXM5-80GB,NVLink,cpu,{},{}\n"
    runs = (("a", 16384, 2.0), ("b", 16384, 2.4), ("c", 32768, 5.0))
    write(tmp_path, "".join(gpu.format(*run) for run in runs), "")
    rows = by_configuration(validate_mlperf_dlrm(tmp_path).rows)
    assert [row.measured_ms for row in rows] == [2.2, 5.0]


@every_table
def test_later_rounds_on_the_fitted_accelerators(folder: Path) -> None:
    """The bar on H100-SXM at 4 to 128 GPUs from v4.0 on: 5 % mean absolute error.

    Eight of eleven systems are the same configuration, so it counts once beside them.
    """
    report = validate_mlperf_dlrm(folder)
    rows = {
        name: [r for r in report.counted if r.name["profile"] == name]
        for name in ("h100-sxm", "h200-sxm")
    }
    assert len(rows["h100-sxm"]) == 11
    assert Summary.of(rows["h100-sxm"]).mape < 0.05
    assert Summary.of(rows["h200-sxm"]).mape < 0.12
    once = report.by_part()[f"{LATER}, h100-sxm, one row a configuration"]
    assert once.n == 4
    assert once.mape < 0.08
    assert report.by_part()[LATER].n + report.by_part()[NEVER].n == report.summary.n


@every_table
def test_cards_without_nvlink_that_were_never_fitted(folder: Path) -> None:
    rows = validate_mlperf_dlrm(folder).rows
    errors = [abs(r.error) for r in rows if r.name["profile"] in ("l40", "l40s")]
    assert max(errors) < 0.12
