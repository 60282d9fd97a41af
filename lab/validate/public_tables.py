"""Reads the public tables of measurements (docs/data.md) into the rows that fits take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from predictor.csv_rows import MOST_RANKS, ParsedRows, Row, count, number, read_table
from shardopt.calibrate.collectives import CollectiveRows
from shardopt.calibrate.products import GemmRows

Key: TypeAlias = tuple[str, str, str]
"""Platform, wiring (hosts x ranks, or a rank range), collective."""

NCCL_FILE = "nccl_collectives_measured.csv"
NCCL_EXTRA_FILE = "nccl_rccl_extra_measured.csv"
VIDUR_FILE = "vidur_collectives_measured.csv"
VTRAIN_FILE = "vtrain_allreduce_measured.csv"
GEMM_FILE = "neusight_linear_gemm_measured.csv"
MATMUL_FILE = "xla_matmul_measured.csv"

OPS = {
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
}


@dataclass(frozen=True)
class CollectiveTables:
    """Tables of collectives by platform, wiring and collective.

    ``problems`` has a line of text for every row that could not be read.
    """

    tables: dict[Key, CollectiveRows]
    problems: list[str]


def read_collectives(folder: Path) -> CollectiveTables:
    """Every table of collectives in ``folder``; files that are not there are left out."""
    found: dict[Key, list[tuple[float, float, float]]] = defaultdict(list)
    problems: list[str] = []
    for name, (columns, parse) in _READERS.items():
        if (folder / name).is_file():
            table = read_table(folder / name, columns, parse)
            problems += table.problems
            for key, row in table.rows:
                found[key].append(row)
    return CollectiveTables(
        {key: CollectiveRows.of(rows) for key, rows in sorted(found.items())}, problems
    )


def _nccl(row: Row) -> tuple[Key, tuple[float, float, float]]:
    timed = "time_us_out_of_place" if row["time_us_out_of_place"] else "time_us_in_place"
    platform = f"{row['gpu']} ({row['source'].split(',')[0]})"
    op = OPS.get(row["collective"], row["collective"])
    ranks, hosts = rank_count(row, "n_gpus"), count(row, "nodes")
    key = (platform, f"{hosts}x{_parts(ranks, hosts)}", op)
    return key, (number(row, "size_bytes"), float(ranks), number(row, timed))


def _vidur(row: Row) -> tuple[Key, tuple[float, float, float]]:
    ranks, local = rank_count(row, "num_workers"), count(row, "devices_per_node")
    op = OPS.get(row["collective"], row["collective"])
    key = (f"{row['platform']} (vidur)", f"{_parts(ranks, local)}x{local}", op)
    # the shortest over ranks and repeats, because kernels that start early wait for the others
    return key, (number(row, "size"), float(ranks), number(row, "us_min"))


def _vtrain(row: Row) -> tuple[Key, tuple[float, float, float]]:
    key = (f"{row['gpu']} (vtrain)", "1x2..8", "all_reduce")
    time = number(row, "time_us_out_of_place")
    return key, (number(row, "size_bytes"), float(rank_count(row, "n_gpus")), time)


def rank_count(row: Row, column: str) -> int:
    """Ranks that exchange something.

    Raises:
        ValueError: it is no such number.
    """
    ranks = count(row, column, MOST_RANKS)
    if ranks == 1:
        raise ValueError(f"{column} is 1; a rank alone exchanges nothing")
    return ranks


def _parts(ranks: int, by: int) -> int:
    if ranks % by:
        raise ValueError(f"{ranks} ranks do not divide by {by}")
    return ranks // by


_NCCL = (
    (
        *("source", "gpu", "nodes", "n_gpus", "collective", "size_bytes"),
        *("time_us_out_of_place", "time_us_in_place"),
    ),
    _nccl,
)
_READERS = {
    NCCL_FILE: _NCCL,
    NCCL_EXTRA_FILE: _NCCL,
    VIDUR_FILE: (
        ("platform", "collective", "num_workers", "devices_per_node", "size", "us_min"),
        _vidur,
    ),
    VTRAIN_FILE: (("gpu", "n_gpus", "size_bytes", "time_us_out_of_place"), _vtrain),
}


GemmKey: TypeAlias = tuple[str, str]
"""Device and split."""
Timing: TypeAlias = tuple[float, float, float, float]
"""m, n, k and ms."""


def read_gemm(path: Path) -> ParsedRows[tuple[GemmKey, Timing]]:
    """Rows of the NeuSight table; a batch multiplies m.

    Raises:
        InputError: the file cannot be read, or lacks a column.
    """
    return read_table(path, ("split", "device", "B", "M", "N", "K", "latency_ms"), _gemm)


def _gemm(row: Row) -> tuple[GemmKey, Timing]:
    m = number(row, "B") * number(row, "M")
    timing = (m, number(row, "N"), number(row, "K"), number(row, "latency_ms"))
    return (row["device"], row["split"]), timing


@dataclass(frozen=True)
class Product:
    """A measured product ``[count, m, k] @ [count, k, n]``.

    Args:
        data_type: of the operands, by the name that profiles use; a float of four bytes is
            multiplied as tf32.
        doubt: why the file does not believe the time; empty if it does.
    """

    gpu: str
    data_type: str
    operands: str
    count: int
    m: int
    n: int
    k: int
    time_ms: float
    date: str
    doubt: str


OPERANDS = {
    **{"f32": "tf32", "bf16": "bf16", "f16": "fp16"},
    **{"f8e4m3fn": "fp8", "f8e5m2": "fp8", "f8e4m3fnuz": "fp8"},
}
"""Type of an operand in XLA -> name in a profile."""


def read_matmul(path: Path, usable: Callable[[Product], str]) -> ParsedRows[Product]:
    """Rows of XLA's table of products.

    Args:
        usable: why a row cannot be used, with its column; empty if it can.

    Raises:
        InputError: the file cannot be read, or lacks a column.
    """
    columns = ("gpu", "b", "m", "n", "k", "lhs", "rhs", "out", "time_us", "date", "flag")

    def parse(row: Row) -> Product:
        product = _product(row)
        problem = usable(product)
        if problem:
            raise ValueError(problem)
        return product

    return read_table(path, columns, parse)


def _product(row: Row) -> Product:
    types = []
    for side in ("lhs", "rhs"):
        if row[side] not in OPERANDS:
            raise ValueError(f"{side} is '{row[side]}'; known are {', '.join(OPERANDS)}")
        types.append(OPERANDS[row[side]])
    if types[0] != types[1]:
        raise ValueError(f"lhs is {row['lhs']} and rhs is {row['rhs']}; no kernel multiplies them")
    return Product(
        gpu=row["gpu"],
        data_type=types[0],
        operands=f"{row['lhs']} x {row['rhs']} -> {row['out']}",
        count=count(row, "b"),
        m=count(row, "m"),
        n=count(row, "n"),
        k=count(row, "k"),
        time_ms=number(row, "time_us") * 1e-3,
        date=row["date"],
        doubt=row["flag"],
    )


def by_split(rows: Iterable[tuple[GemmKey, Timing]]) -> dict[GemmKey, GemmRows]:
    """(device, split) -> its rows, in the order of the table."""
    found: dict[GemmKey, list[Timing]] = {}
    for key, timing in rows:
        found.setdefault(key, []).append(timing)
    return {key: GemmRows.of(timings) for key, timings in found.items()}
