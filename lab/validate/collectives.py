"""Collectives: every public row predicted with the shipped profile of its GPU.

Nothing is fitted to the table under test. Rows that gave the profile a constant are a part of
their own, and so is the form of the curve, fitted to every second size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from lab.statistics import geomean, grouped
from lab.suites import GAVE, SUITES, ComparedRow, Report, noise_of
from lab.validate.curves import FINE_EDGES_MIB, ROBUST, every_second, predict_ranks
from lab.validate.links import (
    Key,
    LinkRow,
    Wiring,
    gave_constants,
    read_collectives,
    read_links,
)
from lab.validate.tables import kernel_interval, ranks_of
from predictor.cost.collectives import Collectives
from predictor.cost.errors import resource_groups
from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from predictor.hardware.schema import Curve
from predictor.units import mib, us
from shardopt.calibrate.collectives import CollectiveRows, fit_curve, predict_us
from shardopt.calibrate.fitting import Array, mape

FIT_RANKS = (2, 4, 8)
FEWEST_SIZES = 2
FEWEST_FOR_LATENCY = 3
LARGE_BYTES = 2**24
FEWEST_FOR_SCATTER = 8
BAR = 0.04
"""Limit on the geometric mean error of a table."""
SIZES = "form of the curve: sizes left out"
RANKS = "form of the curve: rank counts left out"

WITHIN_LARGE = "within a domain, from 16 MiB"
WITHIN_MEDIUM = "within a domain, 1 to 16 MiB"
WITHIN_SMALL = "within a domain, below 1 MiB"
WITHIN_SKEWED = "within a domain, below 128 MiB, with the skew of hosts in its time"
ACROSS_LARGE = "across hosts, from 8 MiB"
ACROSS_SMALL = "across hosts, below 8 MiB"
BAD_NETWORK = "across hosts, network said to be poorly configured"
BADLY_JOINED = ("poorly configured", "without EFA or slow")
"""Notes of rows whose network differs from that of hosts on sale."""
UNSTATED = "across hosts, line rate of the network not stated"
PAIRED = "cards with NVLink bridges in pairs, which no shipped profile is of"


def validate_collectives(folder: Path) -> Report:
    measured, problems = read_links(folder)
    rows = [compare_link(row) for row in measured]
    form, skipped, notes = form_of_the_curve(folder)
    by_gpu = grouped(rows, lambda row: (row.part, str(row.name["profile"])))
    sizes = {
        "repeats from 16 MiB": (mib(16), float("inf")),
        "repeats of 1 to 16 MiB": (mib(1), mib(16)),
        "repeats below 1 MiB": (0, mib(1)),
    }
    return SUITES["collectives"].report(
        [*rows, *form],
        dict.fromkeys([*problems, *skipped]),
        parts={
            f"{profile} {part}": part_rows
            for headed in (WITHIN_LARGE, ACROSS_LARGE)
            for (part, profile), part_rows in by_gpu.items()
            if part == headed
        },
        noise={
            name: noise_of((r.key, r.time_us) for r in measured if low <= r.size_bytes < high)
            for name, (low, high) in sizes.items()
        },
        notes=notes,
    )


@cache
def _collectives(wiring: Wiring) -> Collectives:
    hardware = load_hardware(wiring.profile)
    if wiring.kind is not None:
        hardware = Network(wiring.kind, wiring.nic_gbit_s).joins(hardware)
    elif wiring.nic_gbit_s is not None:
        hardware = hardware.with_nic(wiring.nic_gbit_s)
    whole = wiring.ranks % wiring.hosts == 0
    local = wiring.ranks // wiring.hosts if whole else wiring.ranks
    return Collectives(hardware, ranks_of(hardware, wiring.ranks, local, wiring.domain))


def compare_link(row: LinkRow) -> ComparedRow:
    """Predict a row with the shipped profile of its GPU, with the copy that its timer counts."""
    wiring, engine = row.wiring, _collectives(row.wiring)
    copied = 2 * row.copied_bytes / engine.hardware.streaming
    time = float(getattr(engine, row.op)(row.size_bytes)) + copied
    groups = resource_groups("collectives", engine.topology)
    return ComparedRow(
        {
            "profile": wiring.profile,
            "hosts": wiring.hosts,
            "file": row.file,
            **row.cells,
            "collective": row.op,
            "ranks": wiring.ranks,
            "size_bytes": int(row.size_bytes),
        },
        us(row.time_us),
        time,
        family=f"{wiring.profile} {row.op}",
        part=_part(row),
        source=row.cells.get("source", row.file),
        interval_ms=kernel_interval(engine.hardware, groups, time, row.size_bytes),
    )


def _part(row: LinkRow) -> str:
    wiring, size = row.wiring, row.size_bytes
    if gave_constants(row):
        return GAVE
    if wiring.across:
        if any(words in row.cells.get("note", "") for words in BADLY_JOINED):
            return BAD_NETWORK
        if not wiring.rate_known:
            return UNSTATED
        return ACROSS_LARGE if size >= mib(8) else ACROSS_SMALL
    if wiring.pairs:
        return PAIRED
    if row.skewed and size < mib(128):
        return WITHIN_SKEWED
    if size < mib(1):
        return WITHIN_SMALL
    return WITHIN_LARGE if size >= mib(16) else WITHIN_MEDIUM


def form_of_the_curve(folder: Path) -> tuple[list[ComparedRow], list[str], list[str]]:
    """Fit and test the curve on every table of collectives in ``folder``.

    Returns:
        Rows, left-out rows, and notes on tables that miss the bar.
    """
    tables, skipped = read_collectives(folder)
    rows: list[ComparedRow] = []
    notes: list[str] = []
    for key, table in _one_rank_count(tables).items():
        if len(set(table.size_bytes)) < FEWEST_SIZES:
            skipped.append(f"{' '.join(key)}: a single size leaves none to test the form on")
            continue
        chosen = every_second(table)
        curve, test_rows = _fitted(table.where(chosen), key[2]), table.where(~chosen)
        compared = _predicted(key, predict_us(curve, test_rows, key[2]), test_rows, SIZES)
        rows += compared
        missed = geomean([row.error for row in compared])
        if len(compared) >= FEWEST_FOR_SCATTER and missed > BAR:
            ordered = sorted(compared, key=lambda row: row.name["size_bytes"])
            scatter = mape(never_falling([row.measured_ms for row in ordered]))
            notes.append(
                f"{' '.join(key)}: geomean {missed:.1%}; its rows scatter by {scatter:.1%} (mean) "
                "around even the best monotone curve through them"
            )
    return [*rows, *_ranks_left_out(tables)], skipped, notes


def never_falling(times: Sequence[float]) -> Array:
    """Return the relative errors of the best rising step curve through times in order of size.

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
    """Split tables that span rank counts into one for each."""
    by_ranks = {}
    for (platform, wiring, op), rows in tables.items():
        for n in np.unique(rows.ranks):
            hosts = wiring.split("x")[0]
            wires = wiring if ".." not in wiring else f"{hosts}x{int(n) // int(hosts)}"
            by_ranks[platform, wires, op] = rows.where(rows.ranks == n)
    return by_ranks


def _fitted(rows: CollectiveRows, op: str) -> Curve:
    """Fit a curve; one or two large messages are all transfer and give no latency."""
    blind = len(rows.size_bytes) < FEWEST_FOR_LATENCY and rows.size_bytes.min() > LARGE_BYTES
    latency_us = 0.0 if blind else None
    return fit_curve(rows, op, FINE_EDGES_MIB, latency_us=latency_us, reweightings=ROBUST)


def _ranks_left_out(tables: dict[Key, CollectiveRows]) -> Iterator[ComparedRow]:
    """Fit tables that differ only in a host's ranks at 2, 4 and 8, and predict the rest."""
    families = grouped(
        tables.items(), lambda member: (member[0][0], member[0][1].split("x")[0], member[0][2])
    )
    for (platform, hosts, op), members in families.items():
        rows = CollectiveRows.of(
            [
                row
                for _, member in members
                for row in zip(member.size_bytes, member.ranks, member.time_us, strict=True)
            ]
        )
        fitted = np.isin(rows.ranks, FIT_RANKS)
        if len(np.unique(rows.ranks[fitted])) > 1 and not fitted.all():
            test_rows = rows.where(~fitted)
            predicted = predict_ranks(rows.where(fitted), test_rows, op, platform)
            yield from _predicted((platform, f"{hosts}x..", op), predicted, test_rows, RANKS)


def _predicted(key: Key, predicted: Array, rows: CollectiveRows, part: str) -> list[ComparedRow]:
    platform, wiring, op = key
    named = {"platform": platform, "wiring": wiring, "collective": op}
    return [
        ComparedRow(
            {**named, "ranks": int(ranks), "size_bytes": int(size)},
            us(float(measured)),
            us(float(time)),
            family=" ".join(key),
            part=part,
            source=platform,
        )
        for size, ranks, measured, time in zip(
            rows.size_bytes, rows.ranks, rows.time_us, predicted, strict=True
        )
    ]
