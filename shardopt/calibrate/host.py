"""The host: framework ops, launches, waiting, and near-empty iterations of real TorchRec.

Models with next to no data: what their iterations take is the host's work and its waiting. What the
main thread computes in one is framework code: ops of the iteration graph times one cost, after the
few kernels that run at their floors. What the iteration lasts beyond that is the latency of its
collectives: what other threads, their scheduling and the wires take of a small message among ranks
that arrive as they do in training.

A sample is one iteration of one rank: its period, and what its main thread computed (on a CPU that
includes the backward). Where a real model looks up rows and multiplies matrices, these displace
what the caches hold, and are not charged for it: framework code runs slower after a lookup than
after more framework code.

They give the overheads group. Why: decisions 0010 and 0021.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
    TablePlans,
)
from predictor.model.plan_check import match_plan, row_blocks
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from predictor.units import GIB, MIB
from shardopt.calibrate.fitting import (
    FEWEST,
    Array,
    CalibratedProfile,
    HeldOut,
    after_call,
    non_negative,
)
from shardopt.calibrate.points import (
    CalibrationSettings,
    Coordinates,
    Device,
    Point,
    Size,
    sobol_points,
    whole,
)
from shardopt.calibrate.rows import Measurement, key_of, row_of_samples
from shardopt.measure.sampling import BRIEF_FLUSH_BYTES, CpuTimer, Samples, Timer
from shardopt.ranks.realtime import Runtime, hasten_gloo

CPU_LOOPS = ("op",)
GPU_LOOPS = ("op", "op_on_host", "round_trip", "sync")
"""See `measure_host`."""
MIX, MIX_LAUNCHES = 5, 3
"""Small ops timed as one, and those of them that launch a kernel on a GPU."""
OPS_PER_SAMPLE = 200
"""Small ops are timed many at once: one is shorter than the clock is good for."""
TRIPS_PER_SAMPLE = 20
OPTIMIZERS = ("sgd", "adagrad", "adam")
LAYERS, WIDTH = (2, 16), (16, 1024)
CLOCK_BYTES, CLOCK_KERNELS = 4096, 40
"""Of a kernel that takes next to nothing, and how often it runs; see `measure_clock`."""
DEPTHS = (2, 32)
"""Layers of next to nothing, whose difference is the host's time of one."""
TINY_WIDTH, TINY_BATCH = 8, 8
LAYER_KERNELS, LAYER_OPS = 6, 6 * HOST_OPS["op"] + 6 * HOST_OPS["view"]
"""Of a linear layer with its ReLU, forward and backward."""

ROWS, NARROW, WIDE = 64, 4, 8
"""Column-wise tables are wide, and each half as narrow as FBGEMM's fused kernels allow."""
BATCH = 8
"""Samples a rank."""
DEEPER = 8
"""Layers more in the top MLP, to tell what a dense layer takes."""
SHARDING = {
    "dp": ShardingType.DATA_PARALLEL,
    "tw": ShardingType.TABLE_WISE,
    "rw": ShardingType.ROW_WISE,
    "cw": ShardingType.COLUMN_WISE,
}
PLANS = ("dp", "tw", "rw", "cw", "tw+rw", "tw+dp", "tw+rw+cw", "tw+rw+cw+dp")
MANY = ("tw", "rw")
PREFETCHED = ("tw", "tw+rw+dp")
TABLES, MANY_TABLES = 8, 24
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
BLOCK = 6
"""Iterations a model in a round, after one that lines the ranks up."""
WARM_UP_ROUNDS = 3
FEWEST_ROUNDS = 3
"""Measured of every model, also where the time is over."""
LATENCIES: tuple[tuple[Op, ...], ...] = (
    ("all_to_all",),
    ("all_reduce",),
    ("reduce_scatter", "all_gather"),
)
"""Collectives with a latency of their own; a row split's forward and backward come together."""
FEWEST_WALLS = 2 * len(LATENCIES)
"""Iterations whose wall time is known below which no latency is fitted."""
WHOLE_STEPS_ERROR = 0.09
"""1-sigma relative error of steps of real models on a GPU's host whose near-empty iterations were
measured: 18 steps on one H100 and one H200 (TorchRec 1.7, 2026-11), one of ten 14 % off or more."""
OP_COSTS = ("op_us", "layer_op_us", "iteration_us")
"""Main thread's time of one op of TorchRec's stages in the iteration graph, of one around a dense
layer, and of all that belongs to no stage."""


# What is measured.


def cpu_points(size: Size) -> list[Point]:
    """Of one core: small ops, deep and shallow layers, steps of dense optimizers."""

    def step(op: str, u: Coordinates, _: int) -> dict[str, Any]:
        return {"op": op, "layers": whole(u[0], LAYERS), "width": whole(u[1], WIDTH)}

    return [
        *(Point("host", {"what": what}) for what in CPU_LOOPS),
        *(Point("layers", {"depth": depth}) for depth in DEPTHS),
        *(
            p
            for op in OPTIMIZERS
            for p in sobol_points("optimizer", size.ops, 2, partial(step, op))
        ),
    ]


def gpu_points(size: Size, device: Device) -> list[Point]:
    """Of the host of a GPU, whatever the size."""
    return [Point("host", {"what": what}) for what in GPU_LOOPS]


def clock_points() -> list[Point]:
    """Of a GPU, before its kernels."""
    return [Point("clock", {})]


def iteration_points(ranks: int, **among: Any) -> list[Point]:
    """Every sharding type alone and with others, more tables, more layers, another pipeline.

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
    """Model and plan of an iteration point; the types of its plan take tables in turn."""
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
    """The plan of the table that is number ``index`` of its type."""
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


# How it is measured.


def measure_host(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Mean time of one of many, on the host's clock.

    ``op``: a small op recorded for the backward, over a mix of five; ``op_on_host``: the same on
    tensors of the host, which run the same framework code and launch nothing; ``round_trip``: an op
    and waiting until the device has done it; ``sync``: reading a value from an idle device.
    """
    import torch

    what = point.params["what"]
    device = "cpu" if what == "op_on_host" else timer.device
    x = torch.ones(8, device=device, requires_grad=what in ("op", "op_on_host"))

    def trips() -> None:
        for _ in range(TRIPS_PER_SAMPLE):
            torch.add(x, 1.0)
            timer.synchronize()

    def reads() -> None:
        for _ in range(TRIPS_PER_SAMPLE):
            x[0].item()

    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "op": (OPS_PER_SAMPLE, lambda: _mix(x)),
        "op_on_host": (OPS_PER_SAMPLE, lambda: _mix(x)),
        "round_trip": (TRIPS_PER_SAMPLE, trips),
        "sync": (TRIPS_PER_SAMPLE, reads),
    }
    repeats, call = calls[what]
    clock = timer if timer.device == "cpu" else HostTimer(timer)
    taken = clock.samples(call, seconds).seconds
    facts: dict[str, Any] = {}
    if what == "op" and timer.device == "cuda":
        facts |= {"device": _device(), "threads": torch.get_num_threads()}
    return [row_of_samples(point, Samples(tuple(t / repeats for t in taken)), **facts)]


def measure_clock(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Time of a tiny kernel between two events; its fact is what the kernel takes by itself.

    Events see the start of a kernel and its end from the queue, some 2.4 us apart on an H200 (a
    kernel of 1.2 us measures 3.6); in a step the next kernel starts meanwhile.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    kind = timer.device.upper()
    x = torch.ones(CLOCK_BYTES // 4, device=timer.device)
    taken = timer.samples(lambda: torch.add(x, 1.0), seconds)
    with profile(activities=[getattr(ProfilerActivity, kind)]) as recorded:
        for _ in range(CLOCK_KERNELS):
            torch.add(x, 1.0)
        timer.synchronize()
    # launches by the host are recorded as well
    kernels = [
        event.time_range.elapsed_us()
        for event in recorded.events()
        if event.device_type == getattr(DeviceType, kind)
    ]
    facts = {"kernel_us": round(statistics.median(kernels), 3)} if kernels else {}
    return [row_of_samples(point, taken, **facts)]


def _device() -> dict[str, float]:
    """What the current GPU says of itself; of an unknown L2 nothing."""
    import torch

    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "sms": about.multi_processor_count,
        "memory_gib": round(about.total_memory / GIB, 2),
        "l2_mib": getattr(about, "L2_cache_size", 0) / MIB,
    }


class HostTimer(CpuTimer):
    """Times what the host does while a device works on behind it."""

    def __init__(self, device: Timer) -> None:
        super().__init__(flush_bytes=0)
        self._device = device

    def flush(self) -> None:
        """Let the device finish, so that no full queue stops the host."""
        self._device.synchronize()


def _mix(x: Any) -> None:
    import torch

    for _ in range(OPS_PER_SAMPLE // MIX):
        y = torch.add(x, 1.0)
        z = torch.cat((y, y))
        a, _ = torch.split(z, 8)
        torch.relu(a)
        a.view(2, 4)


def measure_layers(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Forward and backward of linear layers with ReLU that compute next to nothing."""
    import torch

    layers: list[Any] = []
    for _ in range(point.params["depth"]):
        layers += [torch.nn.Linear(TINY_WIDTH, TINY_WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).to(timer.device)
    x = torch.ones(TINY_BATCH, TINY_WIDTH, device=timer.device, requires_grad=True)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return [row_of_samples(point, timer.samples(step, seconds))]


def measure_optimizer(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """A step over the weights and biases of square layers; facts: tensors and their elements."""
    import torch

    from shardopt.torchrec.capture.step import DENSE_OPTIMIZERS

    width = point.params["width"]
    shapes = [(width, width), (width,)] * point.params["layers"]
    weights = [torch.nn.Parameter(torch.ones(shape, device=timer.device)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = DENSE_OPTIMIZERS[point.params["op"]](weights, lr=0.01)
    elements = sum(weight.numel() for weight in weights)
    samples = timer.samples(optimizer.step, seconds)
    return [row_of_samples(point, samples, tensors=len(weights), elements=elements)]


def measure_iterations(
    points: Sequence[Point],
    device: Any,
    settings: CalibrationSettings,
    go_on: Callable[[], bool] = lambda: True,
    later: bool = False,
) -> Iterator[Measurement]:
    """Rows ``wall`` and ``cpu`` of every point; all ranks have to call it.

    Models alternate in one process group.

    Args:
        go_on: whether there is time for another round; the same on every rank.
        later: without time for the fewest rounds there are no rows; else they are measured anyway.
    """
    import torch.distributed as dist

    from shardopt.training.batch import batch_ring
    from shardopt.training.loop import Training

    trainings = []
    for point in points:
        if later and not go_on():
            return
        workload, plan = near_empty(point.params)
        ring = batch_ring(workload, rank=dist.get_rank())
        if device.type == "cuda":
            ring = [batch.pin_memory() for batch in ring]
        trainings.append(Training(workload, plan, device, ring))
    flush = _Flush(CpuTimer(BRIEF_FLUSH_BYTES))
    if device.type == "cpu":
        # the host of a GPU runs nothing but framework code
        for training in trainings:
            flush.between(training.model)
    if settings.runtime is Runtime.TUNED:
        hasten_gloo()
        gc.collect()
        gc.freeze()
    spent: list[list[Array]] = [[] for _ in points]
    for round_ in range(WARM_UP_ROUNDS + settings.size.iteration_rounds):
        enough = round_ >= WARM_UP_ROUNDS + FEWEST_ROUNDS
        if (enough or later) and not go_on():
            if not enough:
                return
            break
        gc.collect()
        order = list(range(len(points)))
        # the same on every rank
        random.Random(round_).shuffle(order)
        for i in order:
            found = _block(trainings[i], device, flush)
            if round_ >= WARM_UP_ROUNDS:
                spent[i].append(found)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, spent)
    for i, point in enumerate(points):
        facts = {"types": len(point.params["plan"].split("+")), "block": BLOCK}
        seconds = np.concatenate([block for rank in ranks for block in rank[i]])
        for clock, samples in zip(CLOCKS, seconds.T.tolist(), strict=True):
            yield row_of_samples(point, Samples(tuple(samples)), clock, **facts)


def _now() -> Array:
    return np.array([clock() for clock in CLOCKS.values()])


class _Flush:
    """Empties the caches in the middle of an iteration, and counts the time that this takes."""

    def __init__(self, timer: CpuTimer) -> None:
        self.timer = timer
        self.spent = np.zeros(len(CLOCKS))

    def between(self, model: Any) -> None:
        """Before the lookups, after them, and between the backwards of dense part and lookups."""
        model.register_forward_pre_hook(self._run)
        model.top.register_forward_pre_hook(self._run)
        model.top.register_full_backward_hook(self._run)

    def _run(self, *_: object) -> None:
        before = _now()
        self.timer.flush()
        self.spent += _now() - before


def _block(training: Any, device: Any, flush: _Flush) -> Array:
    """Seconds ``[iterations, clocks]``, without a barrier in between and without the flushes.

    The first is left out: ranks enter it together, all later ones wait for the one before. A GPU
    works on behind the host, so that only the whole block has a length.
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    training.step()
    marks = [_now() - flush.spent]
    each = BLOCK if device.type == "cuda" else 1
    for i in range(BLOCK):
        training.step()
        if (i + 1) % each:
            continue
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(_now() - flush.spent)
    return np.diff(marks, axis=0) / each


# What the rows of CPU ranks say.


def fit_cpu(made: CalibratedProfile) -> tuple[CalibratedProfile, dict[str, float] | None]:
    """Steps of dense optimizers, and the host's time of an op of the graph.

    The errors are of the main thread's time of each row, fitted on all others.

    Returns:
        Beside the profile, microseconds of one message of each collective beyond the main thread's
        time; None where too few iterations say it.
    """
    made = _fit_steps(made)
    cpu, wall = (made.of("iteration", part) for part in ("cpu", "wall"))
    if len(cpu) < FEWEST:
        return (made.kept("iteration") if cpu else made), None
    layer_op_us = _layer_op_us(made)
    counts = np.array([_counts(row.point.params, made.profile) for row in cpu])
    ops, kernels_us, messages = counts[:, :3], counts[:, 3], counts[:, 4:]
    main_us = np.array([row.median_us for row in cpu])
    errors = []
    for i in range(len(cpu)):
        others = np.arange(len(cpu)) != i
        costs = _op_costs(ops[others], (main_us - kernels_us)[others], layer_op_us)
        errors.append((ops[i] @ costs + kernels_us[i]) / main_us[i] - 1.0)
    costs = _op_costs(ops, main_us - kernels_us, layer_op_us)
    held_out = HeldOut(np.array(errors), len(cpu) - 1)
    made = made.constants("overheads", **dict(zip(OP_COSTS, costs.tolist(), strict=True)))
    made = made.error("host", held_out).measured("overheads", cpu, held_out)
    wholes = {key_of(row.point): row.median_us for row in wall}
    # other pipelines hide some of it
    seen = [row.point.params["pipeline"] == "base" and key_of(row.point) in wholes for row in cpu]
    messages = messages[seen]
    if len(messages) < FEWEST_WALLS or not messages.any(axis=0).all():
        return made, None
    whole_us = np.array([wholes.get(key_of(row.point), 0.0) for row in cpu])
    found = non_negative(messages, np.maximum((whole_us - main_us)[seen], 1.0))
    latencies = zip(LATENCIES, found.tolist(), strict=True)
    return made, {op: us for alike, us in latencies for op in alike}


def _fit_steps(made: CalibratedProfile) -> CalibratedProfile:
    """A step of a dense optimizer by its tensors; older files hold rows of steps and no layers,
    and were fitted without."""
    steps: dict[str, float] = {}
    for op in OPTIMIZERS if made.of("layers") else ():
        rows = [row for row in made.of("optimizer") if row.point.params["op"] == op]
        shapes = [(float(r.facts["tensors"]), float(r.facts["elements"])) for r in rows]
        made, costs = after_call(made, f"step of {op}", rows, shapes)
        if costs is not None:
            steps[op] = float(costs[0]) / units.us(1.0)
    return made.constants("overheads", step_us=steps)


def _layer_op_us(made: CalibratedProfile) -> float | None:
    """Of one op around a dense layer, from the difference of deep and shallow ones."""
    times = {row.point.params["depth"]: row.median_us for row in made.of("layers")}
    if len(times) < 2:
        return None
    layer = (times[max(times)] - times[min(times)]) / (max(times) - min(times))
    floors = LAYER_KERNELS * made.profile.elementwise.floor_us
    return max(0.0, (layer - floors) / LAYER_OPS)


def _op_costs(ops: Array, times_us: Array, layer_op_us: float | None) -> Array:
    """`OP_COSTS`; few of these iterations tell ``layer_op_us``, which rows of layers may give."""
    if layer_op_us is None:
        return non_negative(ops, np.maximum(times_us, 1.0))
    rest = np.maximum(times_us - layer_op_us * ops[:, 1], 1.0)
    op_us, iteration_us = non_negative(ops[:, [0, 2]], rest)
    return np.array([op_us, layer_op_us, iteration_us])


def _counts(params: dict[str, Any], profile: HardwareProfile) -> list[float]:
    """Ops of each of `OP_COSTS`, the time of kernels in microseconds, and messages of each of
    `LATENCIES`, of the busiest rank in one iteration."""
    embedding = profile.embedding
    if isinstance(embedding, CpuEmbedding):
        # a table with next to no ids is not what its constant was fitted on
        embedding = embedding.model_copy(update={"forward_table_us": 0.0, "backward_table_us": 0.0})
    nothing = {**dict.fromkeys((*OP_COSTS, "collective_us"), 0.0), "step_us": {}}
    workload, plan = near_empty(params)

    def spent_us(*costs: str, messages: Sequence[Op] = ()) -> tuple[float, float, float]:
        """Host, kernels and collectives, where these costs and messages take a microsecond each."""
        overheads = profile.overheads.model_copy(update={**nothing, **dict.fromkeys(costs, 1.0)})
        curves = {
            op: Curve(latency_us=float(op in messages), edge_mib=(0.0,), us_per_mib=(1e-9,))
            for op in OPS
        }
        links = profile.collectives
        wires = {n: getattr(links, n).model_copy(update=curves) for n in ("intra", "inter")}
        changed = {
            "overheads": overheads,
            "embedding": embedding,
            "collectives": links.model_copy(update=wires),
        }
        scorer, candidate = _scorer(workload, plan, profile.model_copy(update=changed))
        graph = scorer.graph(scorer.totals(candidate)[None])
        there = [op for op in graph.ops if op.active is None or op.active.all()]
        spent = {True: 0.0, False: 0.0}
        for op in there:
            spent[op.resource == "collectives"] += float(np.max(op.cost_ms))
        host, us = sum(op.host_ms for op in there), units.us(1.0)
        return host / us, spent[False] / us, spent[True] / us

    host = [spent_us(cost) for cost in OP_COSTS]
    messages = [spent_us(messages=ops)[2] for ops in LATENCIES]
    return [*(of[0] for of in host), host[0][1], *messages]


def _scorer(
    workload: Workload, plan: ShardingPlan, profile: HardwareProfile
) -> tuple[PlanScorer, TablePlans]:
    """What predicts an iteration of a model and plan on a device, and the plan as it takes it."""
    topology = Topology.uniform(
        plan.world_size,
        plan.local_world_size,
        hbm_bytes=profile.hbm_bytes,
        ddr_bytes=profile.ddr_bytes,
    )
    return PlanScorer(workload, topology, profile), match_plan(workload, topology, plan)


# What the rows of a GPU say.


def fit_device(made: CalibratedProfile) -> CalibratedProfile:
    """What the device says of itself; the base may be a smaller one of its kind."""
    said = next((r.facts["device"] for r in made.of("host") if "device" in r.facts), None)
    if said is None:
        return made
    made = made.update(sms=said["sms"], hbm_gib=said["memory_gib"])
    return made.constants("memory", l2_mib=said["l2_mib"] or made.profile.memory.l2_mib)


def fit_gpu(made: CalibratedProfile) -> CalibratedProfile:
    """Launches and waiting from loops of small ops, ops of TorchRec from near-empty iterations.

    The same ops on host tensors run the same framework code and launch nothing, so the difference
    is the launches'. A round trip is an op, its launch, the way to the device, the kernel, and the
    way back.
    """
    known = {row.point.params["what"]: row.median_us for row in made.of("host")}
    if not set(GPU_LOOPS) <= set(known):
        return made
    launch = max(0.0, (known["op"] - known["op_on_host"]) * MIX / MIX_LAUNCHES)
    ways = known["round_trip"] - known["op_on_host"] - launch
    latency = (ways - made.profile.elementwise.floor_us) / 2
    made = made.constants(
        "overheads",
        launch_us=launch,
        launch_latency_us=max(0.0, latency),
        sync_us=known["sync"],
    )
    rows = made.of("iteration", "wall")
    if len(rows) < 2 * FEWEST:
        said = "; ops of the host as in the base profile: no iterations were run"
        return made.measured("overheads", made.of("host"), HeldOut(np.zeros(0), 0), also=said)
    # near-empty iterations wait for the host alone, whose costs add up
    counts = np.array([_host_counts(row.point.params, made.profile) for row in rows])
    whole_us = np.array([row.median_us for row in rows])
    overheads = made.profile.overheads
    known_us = counts[:, 3:] @ [overheads.launch_us, overheads.sync_us, overheads.collective_us]

    def costs_of(some: Array) -> Array:
        rest = np.maximum(whole_us[some] - known_us[some], 1.0)
        return non_negative(counts[some, :3] / whole_us[some, None], rest / whole_us[some])

    errors = []
    for i in range(len(rows)):
        predicted = counts[i, :3] @ costs_of(np.arange(len(rows)) != i) + known_us[i]
        errors.append(predicted / whole_us[i] - 1.0)
    costs = dict(zip(OP_COSTS, costs_of(np.full(len(rows), True)).tolist(), strict=True))
    held_out = HeldOut(np.array(errors), len(rows) - 1)
    threads = next((r.facts["threads"] for r in made.of("host") if "threads" in r.facts), None)
    made = made.constants("overheads", **costs, threads=threads).error("host", held_out)
    said = "" if threads is None else f"; a process of {threads} OpenMP threads"
    made = made.measured("overheads", [*made.of("host"), *rows], held_out, also=said)
    error = math.hypot(made.profile.overheads.rel_error, WHOLE_STEPS_ERROR)
    return made.constants("overheads", rel_error=round(error, 4))


def _host_counts(params: dict[str, Any], profile: HardwareProfile) -> list[float]:
    """Ops of each of `OP_COSTS`, launches, synchronisations and collectives of an iteration."""
    nothing = dict.fromkeys(
        (*OP_COSTS, "launch_us", "launch_latency_us", "sync_us", "collective_us", "batch_us"), 0.0
    )
    workload, plan = near_empty(params)
    found = []
    for cost in (*OP_COSTS, "launch_us", "sync_us", "collective_us"):
        overheads = profile.overheads.model_copy(update={**nothing, "step_us": {}, cost: 1.0})
        changed = profile.model_copy(update={"overheads": overheads})
        scorer, candidate = _scorer(workload, plan, changed)
        graph = scorer.graph(scorer.totals(candidate)[None])
        there = [op for op in graph.ops if op.active is None or op.active.all()]
        waiting = sum(float(np.max(op.cost_ms)) for op in there if op.stream == "host")
        host = sum(op.host_ms for op in there)
        found.append((waiting if cost == "sync_us" else host) / units.us(1.0))
    return found
