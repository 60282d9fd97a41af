"""The suites of kernels: on made-up tables, and on the public ones where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.fit.public_tables import GEMM_FILE, MATMUL_FILE, NCCL_FILE, VTRAIN_FILE
from shardopt.validate.collectives import RANKS, SIZES, validate_collectives
from shardopt.validate.gemm import SEEN, TENSOR, UNSEEN, validate_gemm
from tests.public_data import every_table

NCCL_HEADER = (
    "source,gpu,nodes,n_gpus,network,collective,size_bytes,time_us_out_of_place,algbw_GBps,"
    "busbw_GBps,time_us_in_place,note\n"
)


def nccl_rows(count: int = 20) -> str:
    """10 us and 200 GB/s, an all-to-all over eight ranks."""
    lines = []
    for exponent in range(10, 10 + count):
        size = 2**exponent
        time = 10 + size * 7 / 8 / 200e3
        lines.append(f"log,H100,1,8,NVLink,alltoall,{size},{time:.3f},,,,\n")
    return "".join(lines)


def test_sizes_left_out_of_a_clean_table(tmp_path: Path) -> None:
    (tmp_path / NCCL_FILE).write_text(NCCL_HEADER + nccl_rows())
    report = validate_collectives(tmp_path)
    assert report.summary.n == 10
    assert report.summary.mape < 0.01
    assert {row.part for row in report.rows} == {SIZES}
    assert report.rows[0].name["collective"] == "all_to_all"
    assert report.by_part()["above_64kib"].n + report.by_part()["up_to_64kib"].n == 10


def test_unreadable_rows_are_named_and_in_place_times_count(tmp_path: Path) -> None:
    extra = "log,H100,1,8,NVLink,alltoall,oops,1,,,,\nlog,H100,1,8,NVLink,alltoall,12345,,,,11.0,\n"
    (tmp_path / NCCL_FILE).write_text(NCCL_HEADER + nccl_rows() + extra)
    report = validate_collectives(tmp_path)
    assert report.skipped == (f"{NCCL_FILE}:22: size_bytes is 'oops', not a number",)
    assert report.summary.n == 10


def test_a_table_of_two_large_sizes_is_not_dropped(tmp_path: Path) -> None:
    rows = "".join(
        f"log,GB300,1,4,NVLink,alltoall,{size},{size / 1e6:.0f},,,,\n" for size in (2**33, 2**34)
    )
    lone = "log,H20,1,4,NVLink,alltoall,1000000,50,,,,\n"
    (tmp_path / NCCL_FILE).write_text(NCCL_HEADER + rows + lone)
    report = validate_collectives(tmp_path)
    assert report.summary.n == 1
    assert report.summary.mape < 0.01
    assert "a single size leaves none" in report.skipped[0]


def test_rank_counts_left_out_are_apart(tmp_path: Path) -> None:
    lines = ["gpu,n_gpus,size_bytes,time_us_out_of_place,busbw_GBps,time_us_in_place\n"]
    for n in (2, 4, 6, 8):
        for exponent in range(20, 30):
            size = 2**exponent
            lines.append(f"x,{n},{size},{20 + size * 2 * (n - 1) / n / 200e3:.2f},,\n")
    (tmp_path / VTRAIN_FILE).write_text("".join(lines))
    report = validate_collectives(tmp_path)
    left_out = [row for row in report.rows if row.part == RANKS]
    assert {row.name["ranks"] for row in left_out} == {6}
    assert report.by_part()[RANKS].mape < 0.05


def test_gemm_tells_seen_from_unseen_devices(tmp_path: Path) -> None:
    lines = ["split,device,B,M,N,K,latency_ms,kernel\n"]
    for device in ("NVIDIA A100-PCIE-40GB", "NVIDIA L4", "Abacus"):
        lines.append(f"test,{device},1,4096,4096,4096,9.0,k\n")
    lines.append("test,NVIDIA L4,1,0,4096,4096,9.0,k\n")
    (tmp_path / GEMM_FILE).write_text("".join(lines))
    report = validate_gemm(tmp_path)
    assert {row.part for row in report.rows} == {SEEN, UNSEEN}
    assert report.summary.n == 1
    assert len(report.listed) == 2
    assert f"{GEMM_FILE}:5: M is 0; it must be above 0" in report.skipped
    assert any("device is 'Abacus', which no profile" in text for text in report.skipped)


MATMUL_HEADER = "gpu,b,m,n,k,lhs,rhs,out,time_us,date,flag\n"


def test_products_on_tensor_cores_lead_and_doubtful_ones_are_left_out(tmp_path: Path) -> None:
    lines = [
        "H100,1,512,512,512,bf16,bf16,bf16,6.0,2025-10-21,\n",
        "H100,2,512,512,512,f32,f32,f32,12.0,2025-10-21,\n",
        "H100,1,512,512,512,f32,f32,f32,1.0,2025-10-21,above dense peak: not credible\n",
        "MI300X-class(gfx942),1,512,512,512,bf16,bf16,bf16,6.0,2025-10-21,\n",
        "H100,1,512,512,512,bf16,f32,bf16,6.0,2025-10-21,\n",
        *["H100,1,512,512,512,i8,i8,bf16,6.0,2025-10-21,\n"] * 2,
    ]
    (tmp_path / MATMUL_FILE).write_text(MATMUL_HEADER + "".join(lines))
    report = validate_gemm(tmp_path)
    assert report.headline == TENSOR
    assert [row.family for row in report.counted] == ["H100 bf16", "H100 tf32"]
    assert [text.split(":")[1] for text in report.skipped] == ["4", "5", "6", "7-8"]
    for text, words in zip(
        report.skipped, ("not credible", "nearest is", "rhs is f32", "lhs is 'i8'"), strict=True
    ):
        assert words in text


def test_missing_tables_are_said(tmp_path: Path) -> None:
    for suite in (validate_collectives, validate_gemm):
        with pytest.raises(InputError, match=r"docs/data\.md"):
            suite(tmp_path)


@every_table
def test_the_bar_for_collectives(folder: Path) -> None:
    """4 % above 64 KiB and 8 % below, at sizes left out, over every table; noisy ones included."""
    parts = validate_collectives(folder).by_part()
    assert parts["above_64kib"].geomean < 0.04
    assert parts["up_to_64kib"].geomean < 0.08
    assert parts[RANKS].geomean < 0.08


@every_table
def test_the_bar_for_gemm(folder: Path) -> None:
    report = validate_gemm(folder)
    for (part, family), summary in report.by_family().items():
        assert part != SEEN or summary.geomean < 0.08, family
    assert report.by_family()[UNSEEN, "NVIDIA H100 80GB HBM3"].geomean < 0.1
