"""The form of the curve: fitted on every second size of every table, held against the others.

Beside that, rank counts left out: where a table has 2, 4 or 8 ranks and others, the curve is fitted
on those and held against the rest. It says how well the form can follow a machine that someone
calibrates, and nothing of a shipped profile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.fit.collectives import FINE_EDGES_MIB, ROBUST, every_second, predict_ranks
from lab.fit.public_tables import Key, read_collectives
from lab.fit.scores import geomean
from lab.validate.report import ComparedRow, Report
from predictor.hardware.schema import Curve
from predictor.units import us
from shardopt.calibrate.collectives import CollectiveRows, fit_curve, predict_us
from shardopt.calibrate.fitting import mape

Array = NDArray[np.float64]

FIT_RANKS = (2, 4, 8)
FEWEST_SIZES = 2
FEWEST_FOR_LATENCY = 3
LARGE_BYTES = 2**24
FEWEST_FOR_SCATTER = 8
BAR = 0.04
"""Geometric mean error that a table should stay within."""
SIZES = "form of the curve: sizes left out"
RANKS = "form of the curve: rank counts left out"


def form_of_the_curve(folder: Path) -> Report:
    """Fit and test every table of collectives in ``folder``."""
    found = read_collectives(folder)
    skipped = list(found.problems)
    rows: list[ComparedRow] = []
    notes = ["form of the curve: fitted on every second size and tested on the others"]
    for key, table in _one_rank_count(found.tables).items():
        if len(set(table.size_bytes)) < FEWEST_SIZES:
            skipped.append(f"{' '.join(key)}: a single size leaves none to test the form on")
            continue
        chosen = every_second(table)
        curve, asked = _fitted(table.where(chosen), key[2]), table.where(~chosen)
        found_rows = list(_compare(key, predict_us(curve, asked, key[2]), asked, SIZES))
        rows += found_rows
        notes += _scatter_note(key, found_rows)
    rows += _ranks_left_out(found.tables)
    return Report("collectives", tuple(rows), SIZES, tuple(skipped), tuple(notes))


def _scatter_note(key: Key, rows: list[ComparedRow]) -> Iterator[str]:
    """Of a table that misses the bar: how far its rows lie from any curve that never falls."""
    missed = geomean([row.error for row in rows])
    if len(rows) < FEWEST_FOR_SCATTER or missed <= BAR:
        return
    ordered = sorted(rows, key=lambda row: row.name["size_bytes"])
    scatter = mape(never_falling([row.measured_ms for row in ordered]))
    yield (
        f"{' '.join(key)}: geomean {missed:.1%}; its rows scatter by {scatter:.1%} (mean) around "
        "even the best monotone curve through them"
    )


def never_falling(times: Sequence[float]) -> Array:
    """Relative errors of the best rising step curve through times in order of size.

    Neighbours that fall are pooled at their median (isotonic regression of absolute log errors).
    """
    pools: list[list[float]] = []
    for time in times:
        pools.append([time])
        while len(pools) > 1 and np.median(pools[-2]) > np.median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    steps = np.concatenate([np.full(len(pool), np.median(pool)) for pool in pools])
    return np.asarray(steps / np.asarray(times) - 1.0)


def _one_rank_count(tables: dict[Key, CollectiveRows]) -> dict[Key, CollectiveRows]:
    """A table that spans rank counts becomes one for each."""
    found = {}
    for (platform, wiring, op), rows in tables.items():
        for n in np.unique(rows.ranks):
            hosts = wiring.split("x")[0]
            wires = wiring if ".." not in wiring else f"{hosts}x{int(n) // int(hosts)}"
            found[platform, wires, op] = rows.where(rows.ranks == n)
    return found


def _fitted(rows: CollectiveRows, op: str) -> Curve:
    """One or two large messages do not tell the latency: their time is all transfer."""
    blind = len(rows.size_bytes) < FEWEST_FOR_LATENCY and rows.size_bytes.min() > LARGE_BYTES
    latency_us = 0.0 if blind else None
    return fit_curve(rows, op, FINE_EDGES_MIB, latency_us=latency_us, reweightings=ROBUST)


def _ranks_left_out(tables: dict[Key, CollectiveRows]) -> Iterator[ComparedRow]:
    """Families of tables that differ in the ranks of a host alone: fit 2, 4, 8, test the rest."""
    families: dict[Key, list[tuple[float, float, float]]] = defaultdict(list)
    for (platform, wiring, op), rows in tables.items():
        key = (platform, f"{wiring.split('x')[0]}x..", op)
        families[key] += zip(rows.size_bytes, rows.ranks, rows.time_us, strict=True)
    for key, members in families.items():
        rows = CollectiveRows.of(members)
        known = np.isin(rows.ranks, FIT_RANKS)
        if len(np.unique(rows.ranks[known])) > 1 and not known.all():
            asked = rows.where(~known)
            predicted = predict_ranks(rows.where(known), asked, key[2], key[0])
            yield from _compare(key, predicted, asked, RANKS)


def _compare(key: Key, predicted: Array, rows: CollectiveRows, part: str) -> Iterator[ComparedRow]:
    platform, wiring, op = key
    for size, ranks, measured, time in zip(
        rows.size_bytes, rows.ranks, rows.time_us, predicted, strict=True
    ):
        yield ComparedRow(
            {
                "platform": platform,
                "wiring": wiring,
                "collective": op,
                "ranks": int(ranks),
                "size_bytes": int(size),
            },
            us(float(measured)),
            us(float(time)),
            family=f"{platform} {wiring} {op}",
            part=part,
            source=platform,
        )
