"""Memory-bound ops of a TorchRec step beside its lookups: regroup, index select and the like.

Each is predicted by what the predictor charges for such an op: joined columns for a regroup, one
pass over the bytes for all else. An implementation that runs one kernel a tensor pays a kernel for
each. Bytes are those that the file counts: one read and one write a direction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from predictor.cost.elementwise import columns_ms, memory_ms
from predictor.cost.errors import kernel_interval
from predictor.csv_rows import Row, merged_lines, number, read_table
from predictor.hardware.device_names import no_profile, profile_of_device
from predictor.hardware.loader import load_hardware
from shardopt.validate.report import ComparedRow, Report, data_folder

FILE = "membound_ops_measured.csv"
COLUMNS = (
    *("source", "pr", "gpu", "op", "impl", "shape", "dtype", "mode", "time_us"),
    "ideal_bytes_GB",
)
PART = "memory-bound ops"
JOINS = ("regroup", "concat", "permute")
"""Words in the names of ops that copy columns."""
ONE_BY_ONE = "torch"
"""Implementation that runs a kernel a tensor."""
DIRECTIONS = {"fwd": 1, "bwd": 1, "fwd+bwd": 2}
CODE_BYTES = {"mx4": 0.5}
"""Format of quantised values -> bytes of one; each group of them has a scale of one byte."""


@dataclass(frozen=True)
class MeasuredOp:
    """One row of the file.

    Args:
        name: what names it, by the file's columns.
        kernels: that share the bytes.
    """

    name: dict[str, str | int | float]
    profile: str
    bytes_moved: float
    kernels: int
    joins: bool
    time_ms: float
    source: str

    @property
    def predicted_ms(self) -> float:
        """With the shipped constants."""
        cost = columns_ms if self.joins else memory_ms
        each = cost(load_hardware(self.profile), self.bytes_moved / self.kernels)
        return self.kernels * float(each)


def validate_ops(folder: Path) -> Report:
    """Predict every op in ``folder`` with the shipped constants.

    Raises:
        InputError: the folder or the file is not there, or cannot be read.
    """
    data_folder(folder, [FILE], every=True)
    table = read_table(folder / FILE, COLUMNS, _parse)
    rows = tuple(
        ComparedRow(
            {**op.name, "profile": op.profile},
            op.time_ms,
            op.predicted_ms,
            family=f"{op.profile} {op.name['op']}",
            part=PART,
            source=op.source,
            interval_ms=kernel_interval(
                load_hardware(op.profile), ["elementwise", "memory"], op.predicted_ms
            ),
        )
        for op in table.rows
    )
    return Report("ops", rows, PART, tuple(merged_lines(table.problems)))


def _parse(row: Row) -> MeasuredOp:
    time_ms = number(row, "time_us") * 1e-3
    profile = profile_of_device(row["gpu"])
    if profile is None:
        raise ValueError(no_profile(row["gpu"]))
    if row["mode"] not in DIRECTIONS:
        raise ValueError(f"mode is '{row['mode']}'; known are {', '.join(DIRECTIONS)}")
    tensors = re.match(r"T(\d+)\b", row["shape"])
    each = int(tensors[1]) if tensors and row["impl"] == ONE_BY_ONE else 1
    return MeasuredOp(
        {column: row[column] for column in ("gpu", "op", "impl", "shape", "dtype", "mode")},
        profile,
        _bytes(row),
        each * DIRECTIONS[row["mode"]],
        any(word in row["op"] for word in JOINS),
        time_ms,
        f"{row['source']} {row['pr']}",
    )


def _bytes(row: Row) -> float:
    """Bytes that the op reads and writes."""
    if row["ideal_bytes_GB"].strip():
        return number(row, "ideal_bytes_GB") * 1e9
    unpacked = re.fullmatch(r"out (\d+) group (\d+)", row["shape"])
    code = next((size for name, size in CODE_BYTES.items() if name in row["op"]), None)
    if unpacked is None or code is None:
        raise ValueError(
            f"ideal_bytes_GB is '', and shape '{row['shape']}' does not give the bytes"
        )
    return int(unpacked[1]) * (4 + code + 1 / int(unpacked[2]))
