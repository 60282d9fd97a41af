"""Kernels of one GPU: lookups of a calibration, and the products of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.suites import SUITES, ComparedRow, Report
from shardopt.calibrate.points import Point
from shardopt.calibrate.rows import CalibrationRows, Origin, row_of_samples
from shardopt.measure.sampling import Samples

LAYER = {"kind": "linear", "dtype": "bf16", "m": 2048, "n": 1024, "k": 512}
TIMES = {"forward_ms": 0.02, "grad_input_ms": 0.03, "grad_weight_ms": 0.04}
TABLE = {"rows": 100000, "dim": 64, "pooling": 10.0, "alpha": 0.0}
FACTS = [100000, 64, 4096, 40960.0, 33600.0]


def machine(root: Path, *lines: object, launches: int = 0) -> Path:
    folder = root / "h100"
    folder.mkdir(exist_ok=True)
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "ops.jsonl").write_text(text + "\n")
    if launches:
        file = CalibrationRows(folder / "calibration.rows.csv", Origin("NVIDIA H100", "v"))
        for kernel in ("fused", "fused_uvm", "fused_uvm_caching")[:launches]:
            params = {"batch": 4096, "dtype": "fp32", "optimizer": "exact_sgd", "tables": [TABLE]}
            if kernel != "fused":
                params["kernel"] = kernel
            family = "lookup_cached" if kernel == "fused_uvm_caching" else "lookup"
            point = Point(family, params)
            for part in ("forward", "backward"):
                row = row_of_samples(point, Samples((1e-3,) * 9), part, tables=[FACTS])
                file.append(row)
    return folder


def run(root: Path) -> Report:
    return SUITES["gpu-kernels"].run(root)


def products(report: Report) -> dict[str, ComparedRow]:
    return {str(row.name["kernel"]): row for row in report.rows}


def test_a_layer_is_three_products(tmp_path: Path) -> None:
    machine(tmp_path, {**LAYER, **TIMES}, {"kind": "bmm", "batch": 3})
    report = run(tmp_path)
    assert not report.skipped
    predicted = products(report)
    assert [row.measured_ms for row in predicted.values()] == [0.02, 0.03, 0.04]
    assert predicted["forward"].name["point"] == "2048x1024x512 bf16"
    assert predicted["gradient of the input"].name["point"] == "2048x512x1024 bf16"
    assert predicted["gradient of the weights"].name["point"] == "1024x512x2048 bf16"
    assert {row.part for row in report.rows} == {"products of 2 GFLOP or more"}
    assert {row.family for row in report.rows} == {"h100, bf16"}


def test_small_products_and_odd_sides_are_told_apart(tmp_path: Path) -> None:
    machine(tmp_path, {**LAYER, "m": 512, "k": 13, **TIMES})
    report = run(tmp_path)
    assert {row.part for row in report.rows} == {"products below 2 GFLOP"}
    assert {row.family for row in report.rows} == {"h100, bf16, odd sides"}


def test_lookups_by_where_the_tables_lie(tmp_path: Path) -> None:
    machine(tmp_path, {**LAYER, **TIMES}, launches=3)
    report = run(tmp_path)
    assert not report.skipped
    lookups = [row for row in report.rows if "lookup" in str(row.name["kernel"])]
    assert {row.part for row in lookups} == {"lookups in HBM", "lookups over UVM", "cached lookups"}
    assert {row.measured_ms for row in lookups} == {1.0}
    by_place = {row.part: row for row in lookups if row.name["kernel"] == "lookup, forward"}
    assert by_place["lookups over UVM"].predicted_ms > by_place["lookups in HBM"].predicted_ms
    assert report.headline == "lookups in HBM"


BAD = {
    "no size": {k: v for k, v in {**LAYER, **TIMES}.items() if k != "n"},
    "no time": LAYER,
    "a size of 0": {**LAYER, **TIMES, "m": 0},
    "an unknown type": {**LAYER, **TIMES, "dtype": "fp3"},
    "no JSON": "{",
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_lines_are_named(tmp_path: Path, bad: object) -> None:
    machine(tmp_path, bad, {**LAYER, **TIMES})
    report = run(tmp_path)
    assert len(report.rows) == 3
    assert report.skipped[0].startswith("h100/ops.jsonl:1: ")


def test_broken_rows_of_a_calibration_are_named(tmp_path: Path) -> None:
    folder = machine(tmp_path, {**LAYER, **TIMES})
    (folder / "calibration.rows.csv").write_text("a,b\n1,2\n")
    report = run(tmp_path)
    assert len(report.rows) == 3
    assert "calibration.rows.csv" in report.skipped[0]
