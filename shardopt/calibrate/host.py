"""The host: framework ops, launches, waiting, and near-empty iterations of real TorchRec.

Iterations of models with next to no data consist of the host's work and its waiting. The main
thread computes framework code: ops of the iteration graph times one cost, beside a few kernels at
their floors. The rest of the iteration is the latency of its collectives: the time of other
threads, their scheduling and the wires for a small message among ranks that arrive as in training.

They give the overheads group. Why: decisions 0010 and 0021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.collectives import OPS, Op
from predictor.cost.fixed_costs import HOST_OPS
from predictor.hardware.schema import CpuEmbedding, Curve, HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import (
    ComputeKernel,
    Shard,
    ShardingPlan,
    ShardingType,
    TablePlan,
)
from predictor.model.plan_check import match_plan, row_blocks
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.calibrate import Group
from shardopt.calibrate.fitting import (
    FEWEST,
    Array,
    CalibratedProfile,
    HeldOut,
    after_call,
    non_negative,
)
from shardopt.calibrate.points import (
    Coordinates,
    Family,
    Point,
    Size,
    sobol_points,
    whole,
)
from shardopt.calibrate.rows import key_of

CPU_LOOPS = ("op",)
GPU_LOOPS = ("op", "op_on_host", "round_trip", "sync")
"""See `measure_host`."""
MIX, MIX_LAUNCHES = 5, 3
"""Small ops in a mix, and the number of them that launch a kernel on a GPU."""
OPTIMIZERS = ("sgd", "adagrad", "adam")
LAYERS, WIDTH = (2, 16), (16, 1024)
DEPTHS = (2, 32)
"""Numbers of tiny layers; the difference of their times is the host's time of the layers."""
LAYER_KERNELS, LAYER_OPS = 6, 6 * HOST_OPS["op"] + 6 * HOST_OPS["view"]
"""Kernels and ops of a linear layer with its ReLU, forward and backward."""

ROWS, NARROW, WIDE = 64, 4, 8
"""Rows and widths of tables. Column-wise tables are wide; their halves are as narrow as FBGEMM's
fused kernels allow."""
BATCH = 8
"""Samples a rank."""
DEEPER = 8
"""Additional layers in the top MLP, to measure the time of a dense layer."""
SHARDING = {kind.short.lower(): kind for kind in ShardingType}
PLANS = ("dp", "tw", "rw", "cw", "tw+rw", "tw+dp", "tw+rw+cw", "tw+rw+cw+dp")
MANY = ("tw", "rw")
PREFETCHED = ("tw", "tw+rw+dp")
TABLES, MANY_TABLES = 8, 24
LATENCIES: tuple[tuple[Op, ...], ...] = (
    ("all_to_all",),
    ("all_reduce",),
    ("reduce_scatter", "all_gather"),
)
"""Collectives with a latency of their own; a row split's forward and backward come together."""
FEWEST_WALLS = 2 * len(LATENCIES)
"""Fewest iterations with a wall time for a fit of latencies."""
WHOLE_STEPS_ERROR = 0.09
"""1-sigma relative error of steps of real models on a GPU's host whose near-empty iterations were
measured: 18 steps on one H100 and one H200 (TorchRec 1.7, 2026-11), one of ten 14 % off or more."""
OP_COSTS = ("op_us", "layer_op_us", "iteration_us")
"""Main thread's time of one op of TorchRec's stages in the iteration graph, of one op around a
dense layer, and of the work outside all stages."""
OVERHEADS = (*OP_COSTS, "launch_us", "sync_us", "collective_us")
"""The same, and the host's time of a launch, of reading from the device, and of a collective."""
COUNTED = (*OVERHEADS, "launch_latency_us", "batch_us")
"""Constants of the overheads that add to an iteration."""


# Points.


def _loops(loops: Sequence[str]) -> list[Point]:
    return [Point("host", {"what": loop}) for loop in loops]


def _step_points(size: Size) -> list[Point]:
    """Return the steps of dense optimizers."""

    def step(op: str, u: Coordinates, _: int) -> dict[str, Any]:
        return {"op": op, "layers": whole(u[0], LAYERS), "width": whole(u[1], WIDTH)}

    return [
        point
        for op in OPTIMIZERS
        for point in sobol_points("optimizer", size.ops, 2, partial(step, op))
    ]


def iteration_points(ranks: int, **among: Any) -> list[Point]:
    """Return the points of near-empty iterations, by sharding types, tables, layers and pipeline.

    Args:
        among: further params of every point.
    """

    def point(plan: str, tables: int = TABLES, layers: int = 0, pipeline: str = "base") -> Point:
        shape = {"plan": plan, "tables": tables, "layers": layers, "pipeline": pipeline}
        return Point("iteration", {**shape, "ranks": ranks, **among})

    return [
        *(point(plan) for plan in PLANS),
        *(point(plan, tables=MANY_TABLES) for plan in MANY),
        *(point(plan, layers=DEEPER) for plan in ("dp", "tw")),
        *(point(plan, pipeline="sparse_dist") for plan in PREFETCHED),
    ]


def near_empty(params: dict[str, Any]) -> tuple[Workload, ShardingPlan]:
    """Make model and plan of an iteration point; the types of its plan take tables in turn."""
    types = params["plan"].split("+")
    kinds = [types[i % len(types)] for i in range(params["tables"])]
    ranks = params["ranks"]
    tables = tuple(
        Table(
            name=f"t{i}",
            num_embeddings=ROWS,
            embedding_dim=WIDE if kind == "cw" else NARROW,
            features=(Feature(f"f{i}", pooling_factor=1.0),),
        )
        for i, kind in enumerate(kinds)
    )
    dense = DenseArch(
        in_features=WIDE,
        bottom_mlp=(WIDE, NARROW),
        top_mlp=(*[WIDE] * params["layers"], WIDE, 1),
        interaction="concat",
    )
    workload = Workload("near empty", BATCH, tables, dense, train_pipeline=params["pipeline"])
    plans = {
        table.name: _table_plan(kind, i // len(types), ranks)
        for i, (kind, table) in enumerate(zip(kinds, tables, strict=True))
    }
    # ranks joined by a link are hosts of their own
    local = 1 if "link_gbit_s" in params else ranks // params.get("hosts", 1)
    return workload, ShardingPlan(plans, ranks, local)


def _table_plan(kind: str, index: int, ranks: int) -> TablePlan:
    """Make the plan of the table with this index among those of its type."""
    first, narrow = index % ranks, (ROWS, NARROW)
    shards = {
        "dp": [Shard(r, (0, 0), narrow) for r in range(ranks)],
        "tw": [Shard(first, (0, 0), narrow)],
        "cw": [Shard((first + c) % ranks, (0, c * NARROW), narrow) for c in range(WIDE // NARROW)],
        "rw": [
            Shard(r, (start, 0), (rows, NARROW))
            for r, (start, rows) in enumerate(row_blocks(ROWS, ranks))
        ],
    }
    kernel = ComputeKernel.DENSE if kind == "dp" else ComputeKernel.FUSED
    return TablePlan(SHARDING[kind], kernel, tuple(shards[kind]))


FAMILIES = (
    Family("clock", (Group.EMBEDDING, Group.GEMM), gpu=lambda *_: [Point("clock", {})]),
    Family(
        "host",
        (Group.HOST,),
        cpu=lambda _: _loops(CPU_LOOPS),
        gpu=lambda *_: _loops(GPU_LOOPS),
    ),
    Family("layers", cpu=lambda _: [Point("layers", {"depth": depth}) for depth in DEPTHS]),
    Family("optimizer", cpu=_step_points),
)


# Fit of CPU ranks.


def fit_cpu(draft: CalibratedProfile) -> tuple[CalibratedProfile, dict[str, float] | None]:
    """Fit the steps of dense optimizers, and the host's time of an op of the graph.

    The errors are of the main thread's time of each row, fitted on all others.

    Returns:
        The profile, and for each collective the microseconds of a message beyond the main thread's
        time; None for these with too few iterations.
    """
    draft = _fit_steps(draft)
    cpu, wall = (draft.of("iteration", part) for part in ("cpu", "wall"))
    if len(cpu) < FEWEST:
        return (draft.kept("iteration") if cpu else draft), None
    layer_op_us = _layer_op_us(draft)
    counts = np.array([_cpu_counts(row.point.params, draft.profile) for row in cpu])
    ops, kernels_us, messages = counts[:, :3], counts[:, 3], counts[:, 4:]
    main_us = np.array([row.median_us for row in cpu])

    def fit(chosen: Any) -> Array:
        return _op_costs(ops[chosen], (main_us - kernels_us)[chosen], layer_op_us)

    draft, held_out = _fit_op_costs(draft, fit, ops, kernels_us, main_us)
    draft = draft.measured("overheads", cpu, held_out)
    wholes = {key_of(row.point): row.median_us for row in wall}
    # other pipelines hide part of the latency
    usable = [row.point.params["pipeline"] == "base" and key_of(row.point) in wholes for row in cpu]
    messages = messages[usable]
    if len(messages) < FEWEST_WALLS or not messages.any(axis=0).all():
        return draft, None
    whole_us = np.array([wholes.get(key_of(row.point), 0.0) for row in cpu])
    latency_us = non_negative(messages, np.maximum((whole_us - main_us)[usable], 1.0))
    latencies = zip(LATENCIES, latency_us.tolist(), strict=True)
    return draft, {op: us for alike, us in latencies for op in alike}


def _fit_op_costs(
    draft: CalibratedProfile, fit: Callable[[Any], Array], ops: Array, rest_us: Array, us: Array
) -> tuple[CalibratedProfile, HeldOut]:
    """Put the fitted `OP_COSTS` into the profile; the error of each row is of a fit on all others.

    Args:
        fit: costs by the rows of an index.
        ops: ``[rows, costs]``.
        rest_us: time of other work in each row.
        us: measured.
    """
    every = np.arange(len(us))
    predicted = [ops[i] @ fit(every != i) + rest_us[i] for i in every]
    held_out = HeldOut(np.array(predicted) / us - 1.0, len(us) - 1)
    costs = dict(zip(OP_COSTS, fit(every).tolist(), strict=True))
    return draft.constants("overheads", **costs).error("host", held_out), held_out


def _fit_steps(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit the step of a dense optimizer by its tensors.

    Older files have rows of steps and none of layers; they give no constants.
    """
    steps: dict[str, float] = {}
    for op in OPTIMIZERS if draft.of("layers") else ():
        rows = [row for row in draft.of("optimizer") if row.point.params["op"] == op]
        shapes = [(float(r.facts["tensors"]), float(r.facts["elements"])) for r in rows]
        draft, costs = after_call(draft, f"step of {op}", rows, shapes)
        if costs is not None:
            steps[op] = float(costs[0]) / units.us(1.0)
    return draft.constants("overheads", step_us=steps)


def _layer_op_us(draft: CalibratedProfile) -> float | None:
    """Return the time of one op around a dense layer, from deep and shallow stacks."""
    times = {row.point.params["depth"]: row.median_us for row in draft.of("layers")}
    if len(times) < 2:
        return None
    layer = (times[max(times)] - times[min(times)]) / (max(times) - min(times))
    floors = LAYER_KERNELS * draft.profile.elementwise.floor_us
    return max(0.0, (layer - floors) / LAYER_OPS)


def _op_costs(ops: Array, times_us: Array, layer_op_us: float | None) -> Array:
    """Fit `OP_COSTS`; rows of layers may give ``layer_op_us``, which few iterations determine."""
    if layer_op_us is None:
        return non_negative(ops, np.maximum(times_us, 1.0))
    rest = np.maximum(times_us - layer_op_us * ops[:, 1], 1.0)
    op_us, iteration_us = non_negative(ops[:, [0, 2]], rest)
    return np.array([op_us, layer_op_us, iteration_us])


def _work_us(
    params: dict[str, Any], profile: HardwareProfile, **costs: float
) -> tuple[float, float, float, float]:
    """Count the work of the busiest rank in one iteration, in microseconds.

    Args:
        costs: constants of the overheads; all others are 0.

    Returns:
        The host's work; kernels, which on a CPU run in the host's thread; messages; and the host's
        waiting for the device.
    """
    nothing: dict[str, Any] = {**dict.fromkeys(COUNTED, 0.0), "step_us": {}}
    overheads = profile.overheads.model_copy(update={**nothing, **costs})
    profile = profile.model_copy(update={"overheads": overheads})
    workload, plan = near_empty(params)
    memory = {"hbm_bytes": profile.hbm_bytes, "ddr_bytes": profile.ddr_bytes}
    topology = Topology.uniform(plan.world_size, plan.local_world_size, **memory)
    scorer = PlanScorer(workload, topology, profile)
    graph = scorer.graph(scorer.totals(match_plan(workload, topology, plan))[None])
    there = [op for op in graph.ops if op.active is None or op.active.all()]
    sums = [
        sum(float(np.max(op.cost_ms)) for op in there if chosen(op))
        for chosen in (
            lambda op: op.resource != "collectives",
            lambda op: op.resource == "collectives",
            lambda op: op.stream == "host",
        )
    ]
    host, kernels, messages, waiting = (
        ms / units.us(1.0) for ms in (sum(op.host_ms for op in there), *sums)
    )
    return host, kernels, messages, waiting


def _cpu_counts(params: dict[str, Any], profile: HardwareProfile) -> list[float]:
    """Count ops of each of `OP_COSTS`, the time of kernels in us, and messages of `LATENCIES`."""
    links, changed = profile.collectives, dict[str, Any]()
    if isinstance(profile.embedding, CpuEmbedding):
        # the constants of a table were not fitted on tables with next to no ids
        no_tables = {"forward_table_us": 0.0, "backward_table_us": 0.0}
        changed["embedding"] = profile.embedding.model_copy(update=no_tables)

    def with_latency(ops: Sequence[str] = ()) -> HardwareProfile:
        """Return the profile with messages of a microsecond for these collectives alone."""
        curves = {
            op: Curve(latency_us=float(op in ops), edge_mib=(0.0,), us_per_mib=(1e-9,))
            for op in OPS
        }
        wires = {n: getattr(links, n).model_copy(update=curves) for n in ("intra", "inter")}
        return profile.model_copy(update={**changed, "collectives": links.model_copy(update=wires)})

    hosts, kernels, _, _ = zip(
        *(_work_us(params, with_latency(), **{cost: 1.0}) for cost in OP_COSTS), strict=True
    )
    messages = [_work_us(params, with_latency(alike))[2] for alike in LATENCIES]
    return [*hosts, kernels[0], *messages]


# Fit of a GPU.


def fit_device(draft: CalibratedProfile) -> CalibratedProfile:
    """Take the device's own properties; the base may be a smaller one of its kind."""
    about = next((r.facts["device"] for r in draft.of("host") if "device" in r.facts), None)
    if about is None:
        return draft
    draft = draft.update(sms=about["sms"], hbm_gib=about["memory_gib"])
    return draft.constants("memory", l2_mib=about["l2_mib"] or draft.profile.memory.l2_mib)


def fit_gpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit launches and waiting to loops of small ops, and TorchRec's ops to near-empty iterations.

    The same ops on host tensors run the same framework code and launch nothing, so the difference
    is the launches. A round trip is an op, its launch, the latency to the device, the kernel, and
    the latency back.
    """
    loop_us = {row.point.params["what"]: row.median_us for row in draft.of("host")}
    if not set(GPU_LOOPS) <= set(loop_us):
        return draft
    launch = max(0.0, (loop_us["op"] - loop_us["op_on_host"]) * MIX / MIX_LAUNCHES)
    ways = loop_us["round_trip"] - loop_us["op_on_host"] - launch
    latency = (ways - draft.profile.elementwise.floor_us) / 2
    draft = draft.constants(
        "overheads",
        launch_us=launch,
        launch_latency_us=max(0.0, latency),
        sync_us=loop_us["sync"],
    )
    rows = draft.of("iteration", "wall")
    if len(rows) < 2 * FEWEST:
        note = "; ops of the host as in the base profile: no iterations were run"
        return draft.measured("overheads", draft.of("host"), HeldOut(np.zeros(0), 0), also=note)
    # near-empty iterations wait for the host alone, whose costs add up
    counts = np.array([_gpu_counts(row.point.params, draft.profile) for row in rows])
    whole_us = np.array([row.median_us for row in rows])
    overheads = draft.profile.overheads
    known_us = counts[:, 3:] @ [overheads.launch_us, overheads.sync_us, overheads.collective_us]

    def fit(chosen: Any) -> Array:
        rest = np.maximum(whole_us[chosen] - known_us[chosen], 1.0)
        return non_negative(counts[chosen, :3] / whole_us[chosen, None], rest / whole_us[chosen])

    draft, held_out = _fit_op_costs(draft, fit, counts[:, :3], known_us, whole_us)
    threads = next((r.facts["threads"] for r in draft.of("host") if "threads" in r.facts), None)
    draft = draft.constants("overheads", threads=threads)
    note = "" if threads is None else f"; a process of {threads} OpenMP threads"
    draft = draft.measured("overheads", [*draft.of("host"), *rows], held_out, also=note)
    error = math.hypot(draft.profile.overheads.rel_error, WHOLE_STEPS_ERROR)
    return draft.constants("overheads", rel_error=round(error, 4))


def _gpu_counts(params: dict[str, Any], profile: HardwareProfile) -> list[float]:
    """Count an iteration's ops of each of `OP_COSTS`, launches, syncs and collectives."""
    spent = {cost: _work_us(params, profile, **{cost: 1.0}) for cost in OVERHEADS}
    return [spent[cost][3 if cost == "sync_us" else 0] for cost in OVERHEADS]
