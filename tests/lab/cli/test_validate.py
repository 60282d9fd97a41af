"""`python -m lab validate`: JSON, console, the page, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.cli import main
from lab.fit.public_tables import GEMM_FILE, NCCL_FILE
from lab.validate.torchrec_p4d import FILE as P4D_FILE

GEMM = (
    "split,device,B,M,N,K,latency_ms,kernel\n"
    "test,NVIDIA A100-PCIE-40GB,1,4096,4096,4096,9.0,k\n"
    "test,NVIDIA L4,1,4096,4096,4096,20.0,k\n"
    "test,NVIDIA L4,1,4096,4096,x,20.0,k\n"
)
P4D = (
    "source,gpu,n_gpus,local_batch,global_batch,interaction_optimizer,epoch_time,samples_per_s,"
    "iter_ms_derived\n"
    'mlcommons README,A100,8,2048,16384,"dot, SGD",1h,1,9.8\n'
)


def test_json_of_one_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / GEMM_FILE).write_text(GEMM)
    assert main(["validate", "gemm", "--data", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n"] == len(found["rows"]) == 2
    assert {"measured_ms", "predicted_ms", "device", "source"} <= set(found["rows"][0])
    first = found["rows"][0]
    error = abs(first["predicted_ms"] / first["measured_ms"] - 1)
    assert found["mape"] == pytest.approx(error)
    assert found["geomean"] == pytest.approx(error)
    assert found["unseen_geomean"] > 0
    assert found["skipped"]["count"] == 1
    assert f"{GEMM_FILE}:4" in found["skipped"]["rows"][0]


def test_the_console_shows_platforms_and_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / GEMM_FILE).write_text(GEMM)
    assert main(["validate", "gemm", "--data", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA A100-PCIE-40GB" in text
    assert "1 row left out" in text


def test_torchrec_rows_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / P4D_FILE).write_text(P4D)
    page = tmp_path / "accuracy.md"
    words = ["validate", "torchrec-p4d", "--data", str(tmp_path), "--write-docs", str(page)]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["local_batch"] == 2048
    text = (tmp_path / "accuracy" / "torchrec-p4d.csv").read_text()
    assert "## torchrec-p4d" in page.read_text()
    assert "mlcommons README" in text
    assert f"{row['predicted_ms']:.4g}" in text


def test_missing_data_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "collectives", "--data", str(tmp_path / "none")]) == 2
    assert "docs/data.md" in capsys.readouterr().err
    assert main(["validate", "mlperf-dlrm", "--data", str(tmp_path)]) == 2
    assert "holds no mlperf_dlrm" in capsys.readouterr().err
    assert main(["validate", "gemm"]) == 2
    assert "flags: --data" in capsys.readouterr().err
    assert main(["validate", "nonsense", "--data", str(tmp_path)]) == 2


def test_a_table_without_a_column_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / NCCL_FILE).write_text("source,gpu\na,b\n")
    assert main(["validate", "collectives", "--data", str(tmp_path)]) == 2
    assert "no column 'nodes'" in capsys.readouterr().err
