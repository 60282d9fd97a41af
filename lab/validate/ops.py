"""Memory-bound ops of a TorchRec step beside its lookups: regroup, index select and the like.

Each is predicted as the equivalent op of a dense part (`OpTimes`): a concatenation of columns for a
regroup, a decoding pass for quantised values, a copy for all else. Implementations divide the bytes
among their kernels: PyTorch runs one a tensor, FBGEMM's batched index select those of its lookups.
The file gives the bytes: one read and one write a direction.
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.suites import SUITES, ComparedRow, Report
from lab.validate.tables import compare_tables, kernel_interval, known, profile_of_row
from predictor.cost.ops.op_time import OpTimes
from predictor.csv_rows import Row, number
from predictor.hardware.schema import HardwareProfile
from predictor.model.op_calls import OpCall, Operand
from predictor.units import us

FILE = "membound_ops_measured.csv"
SUITE = SUITES["ops"]
LOOKUP = "batch_index_select"
"""Op that FBGEMM runs with the kernels of its lookups."""
OPS = {
    **dict.fromkeys(("regroup", "concat", "permute"), "cat"),
    "dequantize": "dequantize",
    LOOKUP: "index_select",
}
"""Word in the name of an op -> PyTorch's op of that kind; all others copy."""
ONE_BY_ONE = "torch"
"""Implementation that runs one kernel for each tensor."""
DIRECTIONS = {mode: mode.split("+") for mode in ("fwd", "bwd", "fwd+bwd")}
CODE_BYTES = {"mx4": 0.5}
"""Format of quantised values -> bytes of one; each group of them has a scale of one byte."""


def validate_ops(folder: Path) -> Report:
    return SUITE.report(*compare_tables(folder, {FILE: _compared}))


def _compared(row: Row) -> ComparedRow:
    time_ms = number(row, "time_us") * 1e-3
    hardware = profile_of_row(row)
    kernels = _kernels(row, known(row, "mode", DIRECTIONS), hardware)
    call = _call(row["op"], _bytes(row) / kernels)
    # the clock is that of a loop in which the host launches kernel after kernel
    launching_ms = kernels * us(hardware.overheads.launch_us) if LOOKUP in row["op"] else 0.0
    predicted_ms = max(launching_ms, kernels * OpTimes(hardware, "fp32").cost(call).ms)
    return ComparedRow(
        {name: row[name] for name in ("gpu", "op", "impl", "shape", "dtype", "mode")}
        | {"profile": hardware.name},
        time_ms,
        predicted_ms,
        family=f"{hardware.name} {row['op']}",
        part=SUITE.part_of(row, SUITE.headline),
        source=f"{row['source']} {row['pr']}",
        interval_ms=kernel_interval(hardware, ["elementwise", "memory"], predicted_ms),
    )


def _call(name: str, bytes_moved: float) -> OpCall:
    """Return a call that reads half of the bytes and writes half; a `cat` has two inputs."""
    op = next((op for word, op in OPS.items() if word in name), "clone")
    rows = round(bytes_moved / 4)
    parts, width = (2, 1) if op == "cat" else (1, 2)
    inputs = [Operand(i, rows * width, 0, (rows, width), (width, 1), 1) for i in range(parts)]
    return OpCall(op, tuple(inputs), (Operand(parts, 2 * rows, 0, (rows, 2), (2, 1), 1),))


def _kernels(row: Row, directions: list[str], hardware: HardwareProfile) -> int:
    """Return the number of kernels that share the bytes."""
    tensors = re.match(r"T([1-9]\d{0,5})\b", row["shape"])
    if row["impl"] == ONE_BY_ONE and tensors:
        return int(tensors[1]) * len(directions)
    if row["impl"] == "fbgemm" and LOOKUP in row["op"]:
        lookups = hardware.embedding
        counts = {"fwd": lookups.forward_kernels, "bwd": lookups.backward_kernels}
        return sum(counts[direction] for direction in directions)
    return len(directions)


def _bytes(row: Row) -> float:
    if row["ideal_bytes_GB"].strip():
        return number(row, "ideal_bytes_GB") * 1e9
    unpacked = re.fullmatch(r"out ([1-9]\d{0,14}) group ([1-9]\d{0,8})", row["shape"])
    code = next((size for name, size in CODE_BYTES.items() if name in row["op"]), None)
    if unpacked is None or code is None:
        raise ValueError(
            f"ideal_bytes_GB is '', and shape '{row['shape']}' does not give the bytes"
        )
    return int(unpacked[1]) * (4 + code + 1 / int(unpacked[2]))
