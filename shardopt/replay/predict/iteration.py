"""Predicts an iteration of a generated benchmark on CPU cores from the laws of its ops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predictor.cost.collectives import Collectives
from predictor.cost.cpu_ops import VIEW, OpLaws, group_of, name_of
from predictor.errors import InputError, ShardoptError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.graph import COMPUTE, Graph
from predictor.iteration.op_graph import COMM
from predictor.iteration.timeline import simulate
from predictor.model.topology import Topology
from predictor.units import GIB
from shardopt.replay.launch import check_benchmark
from shardopt.replay.predict.fit import read_replays, replay_laws
from shardopt.replay.predict.rows import Calls, RankCalls, rank_calls

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
"""Collective by c10d's name -> its law (`predictor.cost.collectives.Collectives`)."""


@dataclass(frozen=True)
class RankTimes:
    """What one rank computes.

    Args:
        segments_ms: computation before each event and after the last, those without a law included.
        recorded_ms: of `segments_ms`, recorded times of calls without a law.
        without_law: op, count and recorded us of calls without a law; None: not recorded, and
            counts nothing.
    """

    segments_ms: tuple[float, ...]
    recorded_ms: float
    without_law: tuple[tuple[str, int, float | None], ...]


def predict(folder: Path, hardware: str, data: Path) -> dict[str, Any]:
    """Predicted time of an iteration, and what of it rests on recorded times.

    Args:
        hardware: profile of CPU ranks, for its collectives.
        data: what `shardopt bench mystique` wrote, for the laws of ops.

    Raises:
        InputError: no benchmark, a profile of GPUs, or ranks that do not run the same collectives.
        ShardoptError: the program does not go through the dispatcher here.
    """
    common = check_benchmark(folder)
    count = int(common["world_size"])
    profile = cpu_profile(hardware)
    laws = replay_laws(read_replays(data), count)
    lists = [list_rank(folder, rank, count) for rank in range(count)]
    ranks = [rank_calls(of) for of in lists]
    return {
        **predicted(ranks, laws, profile),
        "ops_total": sum(len(of["calls"]) + len(of["left_out"]) for of in lists),
    }


def cpu_profile(hardware: str) -> HardwareProfile:
    """A profile of CPU ranks.

    Raises:
        InputError: there is none of that name, or it is of GPUs.
    """
    profile = load_hardware(hardware)
    if not profile.inline:
        raise InputError(f"--hardware {hardware}: laws of ops are of CPU cores; give cpu-gloo")
    return profile


def predicted(ranks: Sequence[RankCalls], laws: OpLaws, profile: HardwareProfile) -> dict[str, Any]:
    """Predicted time of an iteration of all ranks; see `predict`."""
    times = [rank_times(of, laws) for of in ranks]
    size = round(profile.hbm_gib * GIB)
    count = len(ranks)
    topology = Topology.uniform(
        count, min(count, profile.gpus_per_host), hbm_bytes=size, ddr_bytes=size
    )
    graph, missing = benchmark_graph(times, ranks, Collectives(profile, topology))
    return {
        "predicted_ms": float(simulate(graph).iteration_ms[0]),
        "ranks": count,
        **_sums(times, ranks, missing),
    }


def list_rank(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """What `shardopt.replay.predict.op_list` finds of one rank.

    Raises:
        ShardoptError: the program does not go through the dispatcher here.
    """
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory(prefix="shardopt-predict-") as place:
        out = Path(place) / "ops.json"
        command = [sys.executable, "-m", "shardopt.replay.predict.op_list", str(folder), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise ShardoptError(f"{folder}: rank {rank} cannot be listed: {' '.join(words)}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found


def rank_times(of: RankCalls, laws: OpLaws) -> RankTimes:
    """Prices the calls of a rank.

    A call of the program is priced by the ops that it runs; where one of them has no law, its
    recorded time stands for the call.
    """
    segments = [0.0] * (len(of.events) + 1)
    without = [(op, 1, us) for op, us in of.left_out]
    recorded = 0.0
    for call in of.calls:
        lawless = _lawless(call, laws)
        if lawless is None:
            segments[call.segment] += laws.rows_ms(call.rows)
            continue
        ms = (call.us or 0.0) / 1e3
        segments[call.segment] += ms
        recorded += ms
        without.append((lawless, call.count, call.us))
    return RankTimes(tuple(segments), recorded, tuple(without))


def _lawless(call: Calls, laws: OpLaws) -> str | None:
    """The op without a law in a call, if there is one."""
    if not call.rows:
        return call.op
    for row in call.rows:
        if group_of(row.kind) not in laws.laws and name_of(row.kind) not in laws.laws:
            # a view's kind is that of no op
            name = call.op if name_of(row.kind) == VIEW else row.kind.split()[0]
            return name if "::" in name else f"aten::{name}"
    return None


def benchmark_graph(
    times: Sequence[RankTimes], ranks: Sequence[RankCalls], collectives: Collectives
) -> tuple[Graph, Counter[str]]:
    """The ranks' iteration, and the collectives without a law.

    All ranks start the same collectives in the same order; when they wait is their own affair.
    """
    graph = Graph(len(times), collectives.topology.local_world_size, frozenset({COMPUTE}))
    missing: Counter[str] = Counter()
    started: list[int] = []
    passed = [0] * len(times)
    for kind in [*_kinds(ranks), None]:
        for rank, of in enumerate(ranks):
            segments = times[rank].segments_ms
            passed[rank] = _computed(graph, rank, of, segments, passed[rank], started)
        if kind is None:
            break
        events = [of.events[at - 1] for of, at in zip(ranks, passed, strict=True)]
        _check_world(events, len(ranks))
        ms = _collective_ms(kind, max(float(event["bytes"]) for event in events), collectives)
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


def _computed(
    graph: Graph,
    rank: int,
    of: RankCalls,
    segments_ms: Sequence[float],
    at: int,
    started: Sequence[int],
) -> int:
    """Add a rank's computation and waits up to its next collective; the event after that one."""
    deps: list[int] = []
    while True:
        cost = np.zeros(graph.world_size)
        cost[rank] = segments_ms[at]
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


def _kinds(ranks: Sequence[RankCalls]) -> list[str]:
    """Kinds of the collectives in the order in which all ranks start them."""
    found = [[event["kind"] for event in of.events if "kind" in event] for of in ranks]
    if any(kinds != found[0] for kinds in found):
        raise InputError(
            "the ranks of the benchmark do not run the same collectives in the same order; only "
            "`shardopt bench replay` tells what it takes"
        )
    return found[0]


def _check_world(events: Sequence[Mapping[str, Any]], world: int) -> None:
    for event in events:
        if event["group"] and len(event["group"]) < world:
            raise InputError(
                f"a collective joins ranks {event['group']} alone; only those of all ranks are "
                "predicted"
            )


def _collective_ms(kind: str, sent: float, collectives: Collectives) -> float | None:
    law = LAW_OF.get(kind)
    if law is None:
        return None
    # the law of an all-gather goes by what all ranks have together
    size = sent * collectives.ranks("world") if law == "all_gather" else sent
    return float(getattr(collectives, law)(np.float64(size)))


def _sums(
    times: Sequence[RankTimes], ranks: Sequence[RankCalls], missing: Counter[str]
) -> dict[str, Any]:
    """What has no law, of all ranks together; shares are of the recorded time, if any is."""
    counts, ms = Counter(missing), defaultdict[str, float](float)
    for of in times:
        for name, count, us in of.without_law:
            counts[name] += count
            ms[name] += (us or 0.0) / 1e3
    traced = sum(call.us or 0.0 for of in ranks for call in of.calls)
    traced_ms = (traced + sum(us or 0.0 for of in ranks for _, us in of.left_out)) / 1e3
    spent = sum(sum(of.segments_ms) for of in times)
    return {
        "recorded_share": sum(of.recorded_ms for of in times) / max(spent, 1e-9),
        "untimed": sum(n for of in times for _, n, us in of.without_law if us is None),
        "without_law": {
            name: {"count": counts[name], "share": ms[name] / traced_ms if traced_ms else None}
            for name in sorted(counts, key=lambda name: -ms[name])
        },
    }
