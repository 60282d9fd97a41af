"""Predicts an iteration of a generated benchmark on CPU cores from the laws of its ops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predictor.collectives import Collectives
from predictor.errors import InputError, ShardoptError
from predictor.graph import COMPUTE, Graph
from predictor.hardware import load_hardware
from predictor.kernels.cpu_ops import VIEW, OpLaws, OpRow, group_of, name_of
from predictor.op_graph import COMM
from predictor.timeline import simulate
from predictor.topology import Topology
from predictor.units import GIB
from shardopt.replay.launch import check_benchmark

MEASURED_RANKS = 2
"""Laws of ops are measured with up to so many ranks that share a memory."""
LAW_OF = {
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
}
"""Collective by c10d's name -> its law (`predictor.collectives.Collectives`)."""


@dataclass(frozen=True)
class RankTimes:
    """What one rank computes.

    Args:
        segments_ms: computation before each event and after the last, those without a law included.
        events: collectives and waits for them, in order (`shardopt.replay.op_list`).
        recorded_ms: of `segments_ms`, recorded times of calls without a law.
        without_law: op and recorded us of each call without a law; None: not recorded, and counts
            nothing.
    """

    segments_ms: tuple[float, ...]
    events: tuple[dict[str, Any], ...]
    recorded_ms: float
    without_law: tuple[tuple[str, float | None], ...]


def predict(folder: Path, hardware: str, data: Path) -> dict[str, Any]:
    """Predicted time of an iteration, and what of it rests on recorded times.

    Args:
        hardware: profile of CPU ranks, for its collectives.
        data: what `shardopt bench transformers` wrote, for the laws of ops.

    Raises:
        InputError: no benchmark, a profile of GPUs, or ranks that do not run the same collectives.
        ShardoptError: the program does not go through the dispatcher here.
    """
    from shardopt.suites.transformers_cpu import cpu_op_laws

    common = check_benchmark(folder)
    ranks = int(common["world_size"])
    profile = load_hardware(hardware)
    if not profile.inline:
        raise InputError(f"--hardware {hardware}: laws of ops are of CPU cores; give cpu-gloo")
    laws = cpu_op_laws(data, min(ranks, MEASURED_RANKS))
    lists = [_list_of(folder, rank, ranks) for rank in range(ranks)]
    times = [rank_times(of, laws) for of in lists]
    size = round(profile.hbm_gib * GIB)
    topology = Topology.uniform(
        ranks, min(ranks, profile.gpus_per_host), hbm_bytes=size, ddr_bytes=size
    )
    graph, missing = benchmark_graph(times, lists, Collectives(profile, topology))
    found = _sums(times, lists, missing)
    return {
        "predicted_ms": float(simulate(graph).iteration_ms[0]),
        "ranks": ranks,
        "ops_total": sum(len(of["calls"]) + len(of["left_out"]) for of in lists),
        **found,
    }


def _list_of(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory(prefix="shardopt-predict-") as place:
        out = Path(place) / "ops.json"
        command = [sys.executable, "-m", "shardopt.replay.op_list", str(folder), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ShardoptError(f"{folder}: rank {rank} cannot be listed: {' '.join(words)}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def rank_times(of: dict[str, Any], laws: OpLaws) -> RankTimes:
    """Prices the calls of a rank.

    A call of the program is priced by the ops that it runs; where one of them has no law, its
    recorded time stands for the call.
    """
    calls = of["calls"]
    rows: dict[int, list[OpRow]] = defaultdict(list)
    for op in of["ops"]:
        row = OpRow(op["kind"], tuple(op["sizes"]), tuple(op["reuse"]))
        rows[op["call"]].append(row)
    lawless = {int(at): name for at, name in of["foreign"]}
    for at, inside in rows.items():
        for row in inside:
            if not _has_law(row, laws):
                lawless.setdefault(at, f"aten::{row.kind.split()[0]}")
    segments = [0.0] * (len(of["events"]) + 1)
    without = [(item["op"], item["us"]) for item in of["left_out"]]
    recorded = 0.0
    for at, segment in enumerate(_segments(of, len(calls))):
        if at not in lawless:
            segments[segment] += laws.rows_ms(rows.get(at, ()))
            continue
        us = calls[at][1]
        segments[segment] += (us or 0.0) / 1e3
        recorded += (us or 0.0) / 1e3
        without.append((lawless[at], us))
    return RankTimes(tuple(segments), tuple(of["events"]), recorded, tuple(without))


def _has_law(row: OpRow, laws: OpLaws) -> bool:
    kind = row.kind
    return kind == VIEW or group_of(kind) in laws.laws or name_of(kind) in laws.laws


def _segments(of: dict[str, Any], count: int) -> list[int]:
    """Of each call, how many events come before it."""
    found, passed = [], 0
    events = of["events"]
    for at in range(count):
        while passed < len(events) and events[passed]["after"] < at:
            passed += 1
        found.append(passed)
    return found


def benchmark_graph(
    times: Sequence[RankTimes], lists: Sequence[dict[str, Any]], collectives: Collectives
) -> tuple[Graph, Counter[str]]:
    """The ranks' iteration, and the collectives without a law.

    All ranks start the same collectives in the same order; when they wait is their own affair.
    """
    graph = Graph(len(times), collectives.topology.local_world_size, frozenset({COMPUTE}))
    missing: Counter[str] = Counter()
    started: list[int] = []
    passed = [0] * len(times)
    kinds = _kinds(times)
    for kind in [*kinds, None]:
        for rank, of in enumerate(times):
            passed[rank] = _computed(graph, rank, of, passed[rank], started)
        if kind is None:
            break
        events = [of.events[at - 1] for of, at in zip(times, passed, strict=True)]
        _check_world(events, lists)
        sizes = [
            float(of["calls"][event["call"]][2] or 0)
            for of, event in zip(lists, events, strict=True)
        ]
        ms = _collective_ms(kind, max(sizes), collectives)
        missing[f"c10d::{kind}"] += ms is None
        started.append(
            graph.add(
                kind,
                phase="collectives",
                resource="collectives",
                stream=COMM,
                cost_ms=np.full(len(times), ms or 0.0),
                scope="world",
            )
        )
    return graph, +missing


def _computed(graph: Graph, rank: int, of: RankTimes, at: int, started: Sequence[int]) -> int:
    """Add a rank's computation and waits up to its next collective; the event after that one."""
    deps: list[int] = []
    while True:
        cost = np.zeros(graph.world_size)
        cost[rank] = of.segments_ms[at]
        graph.add(
            f"ops {at}",
            phase="ops",
            resource="ops",
            stream=COMPUTE,
            cost_ms=cost,
            deps=deps,
            ranks=(rank,),
        )
        if at == len(of.events):
            return at
        event = of.events[at]
        at += 1
        if "kind" in event:
            return at
        deps = [started[event["waits_for"]]]


def _kinds(times: Sequence[RankTimes]) -> list[str]:
    """Kinds of the collectives in the order in which all ranks start them."""
    found = [[event["kind"] for event in of.events if "kind" in event] for of in times]
    if any(kinds != found[0] for kinds in found):
        raise InputError(
            "the ranks of the benchmark do not run the same collectives in the same order; only "
            "`shardopt bench replay` tells what it takes"
        )
    return found[0]


def _check_world(events: Sequence[dict[str, Any]], lists: Sequence[dict[str, Any]]) -> None:
    for of, event in zip(lists, events, strict=True):
        group = of["groups"][event["group"]]
        if group and len(group) < len(lists):
            raise InputError(
                f"a collective joins ranks {group} alone; only those of all ranks are predicted"
            )


def _collective_ms(kind: str, sent: float, collectives: Collectives) -> float | None:
    law = LAW_OF.get(kind)
    if law is None:
        return None
    # the law of an all-gather goes by what all ranks have together
    size = sent * collectives.ranks("world") if law == "all_gather" else sent
    return float(getattr(collectives, law)(np.float64(size)))


def _sums(
    times: Sequence[RankTimes], lists: Sequence[dict[str, Any]], missing: Counter[str]
) -> dict[str, Any]:
    """What has no law, of all ranks together; shares are of the recorded time, if any is."""
    counts, ms = Counter(missing), defaultdict[str, float](float)
    for of in times:
        for name, us in of.without_law:
            counts[name] += 1
            ms[name] += (us or 0.0) / 1e3
    traced = sum(call[1] or 0.0 for of in lists for call in of["calls"])
    traced_ms = (traced + sum(item["us"] or 0.0 for of in lists for item in of["left_out"])) / 1e3
    predicted = sum(sum(of.segments_ms) for of in times)
    return {
        "recorded_share": sum(of.recorded_ms for of in times) / max(predicted, 1e-9),
        "untimed": sum(us is None for of in times for _, us in of.without_law),
        "without_law": {
            name: {"count": counts[name], "share": ms[name] / traced_ms if traced_ms else None}
            for name in sorted(counts, key=lambda name: -ms[name])
        },
    }
