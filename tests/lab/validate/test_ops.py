"""The suite of memory-bound ops, on a made-up table."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.suites import COLUMNS
from lab.validate.ops import FILE, validate_ops
from predictor.cost.elementwise import columns_ms, decode_ms, memory_ms
from predictor.hardware.loader import load_hardware
from predictor.units import us

DEVICE = "H100 96GB HBM2e"


def write(folder: Path, *lines: str) -> None:
    (folder / FILE).write_text("\n".join((",".join(COLUMNS[FILE]), *lines, "")))


def test_bytes_are_shared_by_the_kernels(tmp_path: Path) -> None:
    write(
        tmp_path,
        f"r,#1,{DEVICE},pooled regroup,triton,see PR,fp32,fwd+bwd,900,2.0",
        f"r,#1,{DEVICE},batch_index_select,torch,T16 R1 B256,fp16,fwd,120,0.002",
        f"r,#1,{DEVICE},batch_index_select,fbgemm,T16 R1 B256,fp16,fwd+bwd,120,0.00504",
        f"r,#1,{DEVICE},batch_index_select,torch,T16 R1 B256,fp16,fwd,900,2.0",
        f"r,#1,{DEVICE},mx4 dequantize,triton,out 1000000 group 16,fp32 out,fwd,9,",
    )
    hw = load_hardware("h100-96gb")
    join, select, lookup, large, unpack = (row.predicted_ms for row in validate_ops(tmp_path).rows)
    assert join == pytest.approx(2 * float(columns_ms(hw, 1e9)))
    launch = us(hw.overheads.launch_us)
    assert 16 * launch > 16 * float(memory_ms(hw, 2e6 / 16)), "the host is slower"
    assert select == pytest.approx(16 * launch)
    kernels = hw.embedding.forward_kernels + hw.embedding.backward_kernels
    assert lookup == pytest.approx(kernels * launch)
    assert large == pytest.approx(16 * float(memory_ms(hw, 2e9 / 16)))
    assert unpack == pytest.approx(float(decode_ms(hw, 1e6 * (4 + 0.5 + 1 / 16))))


def test_rows_that_cannot_be_predicted_are_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        f"r,#1,{DEVICE},gather,fbgemm,peak,bf16,fwd,,",
        "r,#1,,pooled regroup,triton,see PR,fp32,fwd,900,2.0",
        f"r,#1,{DEVICE},pooled regroup,triton,see PR,fp32,sideways,900,2.0",
        f"r,#1,{DEVICE},pooled regroup,triton,see PR,fp32,fwd,900,",
        f"r,#1,{DEVICE},mx4 dequantize,triton,out 1000 group 0,fp32 out,fwd,9,",
    )
    report = validate_ops(tmp_path)
    assert not report.rows
    words = ("time_us is ''", "gpu is not given", "mode is 'sideways'")
    words += ("ideal_bytes_GB is ''",) * 2
    for line, (text, word) in enumerate(zip(report.skipped, words, strict=True), start=2):
        assert text.startswith(f"{FILE}:{line}: {word}")
