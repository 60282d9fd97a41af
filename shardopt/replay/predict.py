"""Predicts an iteration of a generated benchmark on CPU cores from kernel models of its ops.

It reads the benchmark's data files: which ops, on which shapes, in which order. The program is
neither parsed nor run, so that whoever is sent a benchmark can predict it before trusting it.

Why: docs/decisions/0020-benchmarks-from-traces.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from predictor.cost.collectives import Collectives
from predictor.cost.ops.cpu_ops import OpModels, OpRow
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware, load_op_models
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.op_graph import (
    CallGroup,
    CollectiveStart,
    CollectiveWait,
    Event,
    RankCalls,
    RankTimes,
    op_graph,
    rank_times,
)
from predictor.iteration.timeline import simulate
from predictor.model.topology import Topology
from predictor.units import GIB
from shardopt.extras import require_packages
from shardopt.ranks.launch import python_path
from shardopt.ranks.scratch import scratch_folder
from shardopt.replay.launch import check_benchmark

Fit = Callable[[int], OpModels]
OP_MODELS = "cpu-gloo"
"""The profile whose kernel models price ops."""
COLLECTIVES = {
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
}
"""Collective by c10d's name -> method of `predictor.cost.collectives.Collectives`."""


def predict(folder: Path, hardware: str, fit: Fit | None = None) -> dict[str, Any]:
    """Predicted time of an iteration, and what of it rests on recorded times.

    Args:
        hardware: profile of CPU ranks, for its collectives.
        fit: kernel models of ops by number of ranks. None: those stored with the profile
            `OP_MODELS`.

    Raises:
        InputError: no data of a benchmark, a profile of GPUs, or ranks that do not run the same
            collectives.
        ShardoptError: a library is missing.
    """
    count = int(check_benchmark(folder, program=False)["world_size"])
    profile = load_hardware(hardware)
    if not profile.inline:
        raise InputError(
            f"hardware '{hardware}' is of GPUs, and benchmarks are predicted on CPU cores; give "
            "cpu-gloo"
        )
    models = (fit or stored_models)(count)
    lists = list_ranks(folder)
    ranks = [group_calls(of) for of in lists]
    return {
        **predict_ranks(ranks, models, profile),
        "ops_total": sum(len(of["calls"]) + len(of["left_out"]) for of in lists),
    }


def stored_models(ranks: int) -> OpModels:
    """Kernel models of ops that come with shardopt."""
    return OpModels.of_group(load_op_models(OP_MODELS), ranks)


def predict_ranks(
    ranks: Sequence[RankCalls], models: OpModels, profile: HardwareProfile
) -> dict[str, Any]:
    """Predicted time of an iteration of all ranks; see `predict`."""
    times = [rank_times(of, models) for of in ranks]
    size = round(profile.hbm_gib * GIB)
    count = len(ranks)
    topology = Topology.uniform(
        count, min(count, profile.gpus_per_host), hbm_bytes=size, ddr_bytes=size
    )
    collectives = Collectives(profile, topology)
    graph, missing = op_graph(
        times, ranks, lambda starts: collective_ms(starts, collectives), topology.local_world_size
    )
    return {
        "predicted_ms": float(simulate(graph).iteration_ms[0]),
        "ranks": count,
        **_sums(times, ranks, missing),
    }


def list_ranks(folder: Path) -> list[dict[str, Any]]:
    """What `shardopt.replay.op_list` finds of each rank.

    It has a process of its own: a kernel that PyTorch runs on odd sizes may end it.

    Raises:
        InputError: the data are not those of a benchmark, or no ops of this PyTorch.
        ShardoptError: torch is missing.
    """
    require_packages("torch")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    with scratch_folder() as place:
        out = place / "ops.json"
        module = "shardopt.replay.op_list"
        command = [sys.executable, "-P", "-m", module, str(folder), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise InputError(f"{folder}: its ops cannot be listed: {' '.join(words)}")
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
        return found


def group_calls(of: Mapping[str, Any], calls_us: Sequence[float] | None = None) -> RankCalls:
    """Group the equal calls of a rank.

    Args:
        of: what `shardopt.replay.op_list` finds of the rank.
        calls_us: of each call of the program, its time in a replay.
    """
    found = defaultdict[Any, list[CallGroup]](list)
    for at, (segment, op, us, ops) in enumerate(of["calls"]):
        if ops is None:  # a collective
            continue
        rows = tuple(OpRow(kind, tuple(sizes), tuple(reuse)) for kind, sizes, reuse in ops)
        ms = None if calls_us is None else calls_us[at] / 1e3
        key = (segment, op, tuple((row.kind, row.sizes) for row in rows), us is None)
        found[key].append(CallGroup(segment, op, rows, 1, us, ms))
    left_out = tuple((op, us) for op, us in of["left_out"])
    return RankCalls(tuple(map(_as_one, found.values())), events_of(of["events"]), left_out)


def events_of(listed: Iterable[Mapping[str, Any]]) -> tuple[Event, ...]:
    """Collectives, and the waits for them, as `shardopt.replay.op_list` lists them."""
    return tuple(
        CollectiveStart(str(event["kind"]), int(event["bytes"]), tuple(map(int, event["group"])))
        if "kind" in event
        else CollectiveWait(int(event["waits_for"]))
        for event in listed
    )


def _as_one(calls: Sequence[CallGroup]) -> CallGroup:
    """Equal calls together; times are known of all of them or of none."""
    first, count = calls[0], len(calls)
    rows = tuple(
        replace(
            of[0], reuse=tuple(map(sum, zip(*(row.reuse for row in of), strict=True))), count=count
        )
        for of in zip(*(call.rows for call in calls), strict=True)
    )
    us = None if first.us is None else sum(call.us or 0.0 for call in calls)
    ms = None if first.ms is None else sum(call.ms or 0.0 for call in calls)
    return replace(first, rows=rows, count=count, us=us, ms=ms)


def collective_ms(starts: Sequence[CollectiveStart], collectives: Collectives) -> float | None:
    """Time of a collective by the profile; None for a kind that it has no model of.

    Args:
        starts: the collective as each rank starts it; the largest share counts.
    """
    model = COLLECTIVES.get(starts[0].kind)
    if model is None:
        return None
    sent = max(float(start.bytes) for start in starts)
    # the model of an all-gather goes by what all ranks have together
    size = sent * collectives.ranks("world") if model == "all_gather" else sent
    return float(getattr(collectives, model)(np.float64(size)))


def _sums(
    times: Sequence[RankTimes], ranks: Sequence[RankCalls], missing: Counter[str]
) -> dict[str, Any]:
    """What has no kernel model, of all ranks together, with its share of the recorded time.

    The key ``without_law`` is part of the documented JSON.
    """
    counts = Counter({f"c10d::{kind}": count for kind, count in missing.items()})
    ms = defaultdict[str, float](float)
    for of in times:
        for name, count, us in of.without_model:
            counts[name] += count
            ms[name] += (us or 0.0) / 1e3
    traced = sum(call.us or 0.0 for of in ranks for call in of.calls)
    traced_ms = (traced + sum(us or 0.0 for of in ranks for _, us in of.left_out)) / 1e3
    spent = sum(sum(of.segments_ms) for of in times)
    return {
        "recorded_share": sum(of.recorded_ms for of in times) / max(spent, 1e-9),
        "untimed": sum(n for of in times for _, n, us in of.without_model if us is None),
        "without_law": {
            name: {"count": counts[name], "share": ms[name] / traced_ms if traced_ms else None}
            for name in sorted(counts, key=lambda name: -ms[name])
        },
    }
