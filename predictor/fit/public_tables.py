"""Reading the public tables of measurements into rows that `predictor.fit.collectives` takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from predictor.csv_rows import MOST_RANKS, Row, count, number, read_table, skipped_lines
from predictor.fit.collectives import Rows, Score, fit_curve, score_every_second, score_ranks
from predictor.fit.gemm import report_gemm
from predictor.hardware.schema import Curve

Key: TypeAlias = tuple[str, str, str]
"""Platform, wiring (hosts x ranks, or a rank range), collective."""

NCCL_FILE = "nccl_collectives_measured.csv"
VIDUR_FILE = "vidur_collectives_measured.csv"
VTRAIN_FILE = "vtrain_allreduce_measured.csv"
GEMM_FILE = "neusight_linear_gemm_measured.csv"

OPS = {
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
}
FEWEST_ROWS = 8
"""Fewer sizes than this are not worth a fit."""


@dataclass(frozen=True)
class Collectives:
    """Tables of collectives by platform, wiring and collective.

    ``problems`` has a line of text for every row that could not be read.
    """

    tables: dict[Key, Rows]
    problems: list[str]


def collective_rows(folder: Path) -> dict[Key, Rows]:
    """Every table of collectives in ``folder``; files that are not there are left out."""
    return read_collectives(folder).tables


def read_collectives(folder: Path) -> Collectives:
    """`collective_rows`, and what could not be read."""
    found: dict[Key, list[tuple[float, float, float]]] = defaultdict(list)
    problems: list[str] = []
    for name, (columns, parse) in _READERS.items():
        if (folder / name).is_file():
            table = read_table(folder / name, columns, parse)
            problems += table.problems
            for key, row in table.rows:
                found[key].append(row)
    return Collectives({key: Rows.of(rows) for key, rows in sorted(found.items())}, problems)


def _nccl(row: Row) -> tuple[Key, tuple[float, float, float]]:
    timed = "time_us_out_of_place" if row["time_us_out_of_place"] else "time_us_in_place"
    platform = f"{row['gpu']} ({row['source'].split(',')[0]})"
    op = OPS.get(row["collective"], row["collective"])
    ranks, hosts = _ranks(row, "n_gpus"), count(row, "nodes")
    key = (platform, f"{hosts}x{_parts(ranks, hosts)}", op)
    return key, (number(row, "size_bytes"), float(ranks), number(row, timed))


def _vidur(row: Row) -> tuple[Key, tuple[float, float, float]]:
    ranks, local = _ranks(row, "num_workers"), count(row, "devices_per_node")
    op = OPS.get(row["collective"], row["collective"])
    key = (f"{row['platform']} (vidur)", f"{_parts(ranks, local)}x{local}", op)
    # the shortest over ranks and repeats: a kernel that starts early only waits for the others
    return key, (number(row, "size"), float(ranks), number(row, "us_min"))


def _vtrain(row: Row) -> tuple[Key, tuple[float, float, float]]:
    key = (f"{row['gpu']} (vtrain)", "1x2..8", "all_reduce")
    time = number(row, "time_us_out_of_place")
    return key, (number(row, "size_bytes"), float(_ranks(row, "n_gpus")), time)


def _ranks(row: Row, column: str) -> int:
    ranks = count(row, column, MOST_RANKS)
    if ranks == 1:
        raise ValueError(f"{column} is 1; a rank alone exchanges nothing")
    return ranks


def _parts(ranks: int, by: int) -> int:
    if ranks % by:
        raise ValueError(f"{ranks} ranks do not divide by {by}")
    return ranks // by


_READERS = {
    NCCL_FILE: (
        (
            *("source", "gpu", "nodes", "n_gpus", "collective", "size_bytes"),
            *("time_us_out_of_place", "time_us_in_place"),
        ),
        _nccl,
    ),
    VIDUR_FILE: (
        ("platform", "collective", "num_workers", "devices_per_node", "size", "us_min"),
        _vidur,
    ),
    VTRAIN_FILE: (("gpu", "n_gpus", "size_bytes", "time_us_out_of_place"), _vtrain),
}
COLLECTIVE_FILES = tuple(_READERS)


def report(folder: Path) -> Iterator[str]:
    """Lines of text: fitted constants and held-out errors of everything in ``folder``."""
    found = read_collectives(folder)
    for (platform, wiring, op), rows in found.tables.items():
        if len(set(rows.size_bytes)) < FEWEST_ROWS:
            continue
        yield f"{platform} {wiring} {op}: {_shown(score_every_second(rows, op))}"
        yield f"    {_constants(fit_curve(rows, op))}"
        if len(set(rows.ranks)) > 3:
            held_out = score_ranks(rows, op, (2, 4, 8))
            yield f"    fitted at 2, 4, 8 ranks, other rank counts: {_shown(held_out)}"
    yield from skipped_lines(found.problems)
    yield from report_gemm(folder / GEMM_FILE)


def _shown(score: Score) -> str:
    return (
        f"{score.n} rows held out, above 64 KiB GMAE {score.gmae:.1%}, MAPE {score.mape:.1%}; "
        f"up to 64 KiB GMAE {score.gmae_small:.1%}"
    )


def _constants(curve: Curve) -> str:
    costs = ", ".join(f"{c:.4g}" for c in curve.us_per_mib)
    edges = ", ".join(f"{e:g}" for e in curve.edge_mib)
    return (
        f"latency_us: {curve.latency_us:.4g}, "
        f"latency_per_doubling_us: {curve.latency_per_doubling_us:.4g}, "
        f"edge_mib: [{edges}], us_per_mib: [{costs}]"
    )
