"""Steps of one GPU: each is predicted without its measurement, and bad lines are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.pages.scores import report_object
from lab.suites import SUITES, ComparedRow, Report
from lab.validate.gpu_steps import order_lines

MODEL = """schema: 1
name: {name}
batch_size: 4096
tables:
- {{name: a, num_embeddings: 100000, embedding_dim: 64,
   features: [{{name: x, pooling_factor: 10}}]}}
- {{name: b, num_embeddings: 400000, embedding_dim: 64, features: [{{name: y, pooling_factor: 1}}]}}
dense: {{in_features: 13, bottom_mlp: [64], interaction: dot, top_mlp: [128, 1]}}
"""
STEP = {"name": "m", "plan": "", "omp": 16, "ms": 4.0, "gpu_busy_ms": 0.8, "peak_allocated": 4e8}


def cached(share: float) -> dict[str, Any]:
    def table(rows: int) -> dict[str, Any]:
        return {
            "sharding_type": "table_wise",
            "compute_kernel": "fused_uvm_caching",
            "cache_params": {"load_factor": share},
            "shards": [{"rank": 0, "offset": [0, 0], "size": [rows, 64]}],
        }

    tables = {"a": table(100000), "b": table(400000)}
    return {"schema": "shardopt.plan/1", "world_size": 1, "tables": tables}


def host_rows() -> str:
    """Operations of 50 us on the host, which is slow."""
    head = "schema,machine,versions,settings,date,load,family,split,point,facts,"
    head += "median_us,mean_us,p10_us,p25_us,p75_us,p90_us,n,stable"
    times = {"op": 60, "op_on_host": 50, "round_trip": 60, "sync": 30}
    lines = [
        f'shardopt.calibration/2,"NVIDIA H100, CPU, 16 cores, 126 GiB, Linux",v,'
        f'plain runtime,2026-11-27T03:09:27Z,0.1,host,fit,"{{""what"":""{op}""}}",{{}},'
        + ",".join([str(us)] * 6)
        + ",100,yes"
        for op, us in times.items()
    ]
    return "\n".join([head, *lines]) + "\n"


def machine(root: Path, name: str = "h100", **files: list[object]) -> Path:
    folder = root / name
    for place in ("models", "plans"):
        (folder / place).mkdir(parents=True)
    (folder / "models" / "m.yaml").write_text(MODEL.format(name="m"))
    (folder / "plans" / "m.cached.json").write_text(json.dumps(cached(0.1)))
    (folder / "host.rows.csv").write_text(host_rows())
    for file, lines in files.items():
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (folder / f"{file}.jsonl").write_text(text + "\n")
    return folder


def run(folder: Path) -> Report:
    return SUITES["gpu-steps"].run(folder)


def by_time(report: Report) -> dict[str, ComparedRow]:
    return {str(row.name["time"]): row for row in report.rows}


def test_a_step_is_predicted_on_the_shipped_and_on_its_own_host(tmp_path: Path) -> None:
    machine(tmp_path, steps=[STEP])
    report = run(tmp_path)
    assert not report.skipped
    times = by_time(report)
    assert set(times) == {"GPU time", "wall time", "wall time, calibrated host"}
    assert times["GPU time"].measured_ms == 0.8
    assert times["GPU time"].interval_ms is None
    wall, own = times["wall time"], times["wall time, calibrated host"]
    assert wall.measured_ms == own.measured_ms == 4.0
    assert own.predicted_ms > wall.predicted_ms, "its host is slower"
    assert report.headline == times["GPU time"].part
    json.dumps(report_object(report), allow_nan=False)


def test_predictions_do_not_see_the_measurements(tmp_path: Path) -> None:
    slow = {**STEP, "ms": 40.0, "gpu_busy_ms": 8.0, "peak_allocated": 4e9}
    machine(tmp_path / "one", steps=[STEP])
    machine(tmp_path / "two", steps=[slow])
    first, two = (run(tmp_path / name).rows for name in ("one", "two"))
    assert [row.predicted_ms for row in first] == [row.predicted_ms for row in two]
    assert [row.measured_ms for row in two] == [10 * row.measured_ms for row in first]


def test_placements_and_steps_of_one_thread_are_parts_of_their_own(tmp_path: Path) -> None:
    placement = {**STEP, "plan": "m.cached", "ms": 6.0, "gpu_busy_ms": 2.0, "peak_allocated": 1e8}
    machine(
        tmp_path, steps=[STEP], placements=[placement], one_thread=[{**STEP, "omp": 1, "ms": 3.0}]
    )
    report = run(tmp_path)
    parts = set(report.by_part())
    assert {"GPU time, whole steps", "GPU time, placements", "wall time, placements"} <= parts
    assert "wall time, calibrated host, one OpenMP thread" in parts
    assert "GPU time, one OpenMP thread" not in parts, "the same kernels as in the other steps"
    assert {*parts} == {report.headline, *report.held_out}
    tables = {table.name: table for table in report.scores}
    first, *_ = tables["order of plans of one model"].rows
    assert first[:5] == ("GPU time", 0.02, 1, 1, 1.0), "the cached plan is slower, as predicted"
    kinds = [row[0] for row in tables["peak memory"].rows]
    assert kinds == ["without caches, below 1.5 GiB", "with UVM caches"]


def compared(plan: str, measured: float, predicted: float, model: str = "m") -> ComparedRow:
    name = {"gpu": "h100", "model": model, "plan": plan, "time": "GPU time"}
    part = "GPU time, whole steps" if plan == "fused" else "GPU time, placements"
    return ComparedRow(name, measured, predicted, "h100", part)


def test_order_counts_pairs_that_differ_and_what_the_choice_costs() -> None:
    rows = [
        compared("fused", 10.0, 12.0),
        compared("a", 10.1, 11.0),
        compared("b", 11.0, 13.0),
        compared("fused", 1.0, 1.0, "without another plan"),
    ]
    two, three = order_lines(rows)
    # fused and a differ by 1 %, which counts for nothing; both are right about b
    assert two == ("GPU time", 0.02, 2, 2, 1.0, 1, 0, pytest.approx(0.01), pytest.approx(0.01))
    assert three[1:5] == (0.03, 2, 2, 1.0)
    worse = [*rows[:2], compared("b", 11.0, 10.0), rows[3]]
    assert next(order_lines(worse))[2:5] == (2, 0, 0.0)


BAD = {
    "no JSON": "{",
    "a list": "[1]",
    "no time": {k: v for k, v in STEP.items() if k != "ms"},
    "a negative time": {**STEP, "gpu_busy_ms": -1},
    "a time that is none": {**STEP, "ms": True},
    "a model that is not there": {**STEP, "name": "other"},
    "a path": {**STEP, "name": "../m"},
    "a plan that is not there": {**STEP, "plan": "m.none"},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_lines_are_left_out_and_named(tmp_path: Path, bad: object) -> None:
    machine(tmp_path, steps=[bad, STEP])
    report = run(tmp_path)
    assert len(report.rows) == 3
    (line,) = report.skipped
    assert line.startswith("h100/steps.jsonl:1: ")


def test_a_host_that_was_not_measured_is_said(tmp_path: Path) -> None:
    folder = machine(tmp_path, steps=[STEP])
    (folder / "host.rows.csv").unlink()
    report = run(tmp_path)
    assert set(by_time(report)) == {"GPU time", "wall time"}
    assert "calibrated host" in report.skipped[0]


def test_a_machine_without_a_profile_is_said(tmp_path: Path) -> None:
    machine(tmp_path, steps=[STEP])
    machine(tmp_path, "abacus", steps=[STEP])
    report = run(tmp_path)
    assert {row.family for row in report.rows} == {"h100"}
    assert report.skipped[0].startswith("abacus: ")
