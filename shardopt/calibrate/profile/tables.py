"""Rows of a file as the arrays that the fits take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.cost.lookup.shard import LookupShard
from predictor.fit.collectives import CollectiveRows
from predictor.fit.collectives import errors as relative_errors
from predictor.fit.cpu import MemoryRows, TableCounts, TbeRows
from predictor.fit.cuda import LaunchRows, cache_bins, counted_bins
from predictor.fit.gemm import GemmRows
from predictor.hardware.schema import Curve
from predictor.model.distribution import Zipf
from predictor.model.memory.ranks import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.plan import ComputeKernel
from predictor.model.workload import DATA_TYPE_BYTES
from shardopt.calibrate.design.points import DTYPE, OPTIMIZER
from shardopt.calibrate.rows import Measurement

Array = NDArray[np.float64]


def span(values: Iterable[float]) -> tuple[float, float]:
    """Lowest and highest."""
    known = [float(v) for v in values]
    return min(known), max(known)


def memory_rows(rows: Sequence[Measurement]) -> MemoryRows:
    """Of elementwise points, and of copies."""
    moved = (r.facts.get("bytes_moved", r.point.params["bytes"]) for r in rows)
    times = (r.median_us * 1e-3 for r in rows)
    table = np.array(list(zip(moved, times, strict=True))).reshape(-1, 2)
    return MemoryRows(table[:, 0], table[:, 1])


def gemm_rows(rows: Sequence[Measurement]) -> GemmRows:
    """Of gemm points of one data type."""
    return GemmRows.of(
        [(p["m"], p["n"], p["k"], r.median_us * 1e-3) for r in rows for p in (r.point.params,)]
    )


def tbe_rows(rows: Sequence[Measurement]) -> TbeRows:
    """Of one pass of lookup points."""
    return TbeRows(
        [[TableCounts(*table) for table in r.facts["tables"]] for r in rows],
        np.array([r.median_us * 1e-3 for r in rows]),
    )


def launch_rows(rows: Sequence[Measurement]) -> LaunchRows:
    """Of lookups on a GPU: points of several tables, with skews, and tables of a model.

    The distribution of ids is the one that they were drawn from; where only the model has that, the
    Zipf distribution with as many distinct rows.
    """
    return LaunchRows(
        [_shards(row) for row in rows],
        [row.part for row in rows],
        np.array([row.median_us * 1e-3 for row in rows]),
    )


def _shards(row: Measurement) -> list[LookupShard]:
    said = row.point.params | row.facts
    drawn = row.point.params.get("tables", [])
    pooled, shards = said.get("pooled", True), []
    for i, (rows, dim, bags, ids, distinct) in enumerate(row.facts["tables"]):
        known = Zipf(drawn[i]["alpha"]).bins(int(rows)) if drawn else None
        shard = LookupShard(
            cache_bins(known or counted_bins(rows, ids, distinct)),
            ids,
            bags if pooled else ids,
            int(rows),
            int(dim),
            DATA_TYPE_BYTES[said.get("dtype", DTYPE)],
            optimizer=said.get("optimizer", OPTIMIZER),
            weighted=said.get("weighted", False),
            pooled=pooled,
            mean=said.get("mean", False),
            lengths=bags,
            kernel=ComputeKernel(said.get("kernel", ComputeKernel.FUSED)),
            cache_load_factor=said.get("cache_load_factor", DEFAULT_CACHE_LOAD_FACTOR),
        )
        shards.append(shard)
    return shards


def by_tables(rows: Sequence[Measurement]) -> list[tuple[str, NDArray[np.bool_]]]:
    """Masks of the rows of one table and of several."""
    many = np.array([len(r.facts["tables"]) > 1 for r in rows], dtype=bool)
    return [("one table", ~many), ("several tables", many)]


def curve_rows(rows: Sequence[Measurement], *, rings: bool = False) -> CollectiveRows:
    """Of points of one collective; trimmed means, which is what many of them in an iteration add up
    to without the hiccups of other work.

    Over a link a message takes once or twice its time on the wire: acknowledgements of one
    direction wait behind the data of the other, or do not. Among ranks of several hosts sizes and
    ranks are those that the link between hosts sees.

    Args:
        rings: the backend runs rings and trees over all ranks, as NCCL does.
    """
    return CollectiveRows.of([(*_on_the_link(r.point.params, rings), r.trimmed_us) for r in rows])


def _on_the_link(params: dict[str, Any], rings: bool) -> tuple[float, float]:
    """Bytes and ranks with which a curve of one link gives this collective.

    As `predictor.cost.collectives` joins levels: an all-to-all sends the link what is for other
    hosts, to each of whose ranks it is one peer more; a reduction sends one share of what a host
    holds, or over rings and trees the bytes of all ranks.
    """
    size, ranks, hosts = float(params["bytes"]), params["ranks"], params.get("hosts", 1)
    local = ranks // hosts
    if hosts == 1 or local == 1:
        return size, float(ranks)
    if params["op"].startswith("all_to_all"):
        parties = ranks - local + 1
        return size * parties / ranks, float(parties)
    if rings and (hosts > 2 or params["op"] != "all_reduce"):
        # the curve counts (hosts - 1) / hosts of what it is given, all-reduces twice
        passed = 1.0 if params["op"] == "all_reduce" else (ranks - 1) / ranks
        size *= passed * hosts / (hosts - 1)
    return size / local, float(hosts)


def subtract(rows: CollectiveRows, issued_us: float) -> CollectiveRows:
    """Times without the host's issuing, which the iteration graph charges by itself."""
    return CollectiveRows(rows.size_bytes, rows.ranks, np.maximum(rows.time_us - issued_us, 1.0))


def curve_errors(curve: Curve, rows: CollectiveRows, op: str, issued_us: float) -> Array:
    """Errors of the whole time, issuing included."""
    if not len(rows.size_bytes):
        return np.zeros(0)
    without = relative_errors(curve, subtract(rows, issued_us), op)
    predicted = (1 + without) * subtract(rows, issued_us).time_us + issued_us
    return np.asarray(predicted / rows.time_us - 1.0)
