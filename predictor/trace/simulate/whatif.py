"""What a traced job would take on other hardware, links or batch sizes, or under another plan.

The structure and the host's times stay; kernels, copies and collectives are scaled (docs/model.md,
chapter 19). Of another sharding plan, the lookups and exchanges change rank by rank, by the ratio
of the same phases that `predictor.predict` gives for both plans. Work that only the new plan has,
such as a reduce-scatter, is not in the trace and is not added; `PlanSwap.notes` lists it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.cost.collectives import OPS, Collectives, Op
from predictor.cost.gemm import batched_ms
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import Prediction, predict
from predictor.trace.events import CollectiveCall, DeviceEvent, HostEvent, RankTrace, said_around
from predictor.trace.simulate.step import SimulatedTrace, simulate_trace
from predictor.units import us

FORWARD = re.compile(r"split_embedding\w*_forward|batch_index_select|bounds_check_indices")
BACKWARD = re.compile(
    r"split_embedding_backward_codegen_(?!dense)|linearize_index|RadixSort|find_long_segments"
)
"""Kernels of FBGEMM's fused TBE (codegen/training); those of dense tables stay with each rank."""
EXCHANGES = ("input_dist", "output_dist_forward", "output_dist_backward")


@dataclass(frozen=True)
class PlanSwap:
    """Times under the new plan over those under the old one, by rank.

    Args:
        forward, backward: of fused lookups; None on ranks that had none.
        exchange: of all-to-alls, which end together on all ranks.
    """

    forward: tuple[float | None, ...]
    backward: tuple[float | None, ...]
    exchange: float
    notes: tuple[str, ...]

    def factor(self, rank: int, event: DeviceEvent) -> float | None:
        """Factor for one kernel or collective of a rank; None if it does not depend on the plan."""
        if event.collective is not None:
            return self.exchange if event.collective.op in ("all_to_all", "send_recv") else None
        if BACKWARD.search(event.name):
            return self.backward[rank]
        return self.forward[rank] if FORWARD.search(event.name) else None


def plan_swap(
    traces: Sequence[RankTrace],
    workload: Workload,
    topology: Topology,
    hardware: HardwareProfile,
    before: ShardingPlan,
    after: ShardingPlan,
) -> PlanSwap:
    """Compare two plans of the traced model.

    Args:
        topology: of the traced job.
        hardware: of the device that the trace was taken on.
        before: the plan that it was taken with.
    """
    outside = sorted({t.rank for t in traces} - set(range(topology.world_size)))
    if outside:
        raise InputError(
            f"the trace has rank {outside[0]}, the plans have ranks 0 to {topology.world_size - 1}"
        )
    old, new = (predict(workload, topology, hardware, plan) for plan in (before, after))
    # exchanges take as long on every rank
    was, will = (max(_busy(of, *EXCHANGES)) for of in (old, new))
    exchange = will / was if was else 1.0
    forward, backward = (_ratios(old, new, f"embedding_{way}") for way in ("forward", "backward"))
    notes = [
        f"lookups and all-to-alls scaled by the predicted ratio of both plans, which take "
        f"{old.iteration_ms:.3g} and {new.iteration_ms:.3g} ms when predicted as a whole"
    ]
    busy = zip(*(_busy(of, "embedding_forward") for of in (old, new)), strict=True)
    idle = [str(rank) for rank, (before_ms, ms) in enumerate(busy) if ms and not before_ms]
    if idle:
        notes.append(
            f"rank {', '.join(idle)} ran no lookups in the trace, so those that the new plan gives "
            "it are left out"
        )
    types = [{table.sharding_type for table in plan.tables.values()} for plan in (before, after)]
    if types[1] - types[0]:
        notes.append(
            f"{', '.join(sorted(types[1] - types[0]))} was not used when traced; collectives and "
            "kernels that only it needs are left out"
        )
    return PlanSwap(forward, backward, exchange, tuple(notes))


def _busy(prediction: Prediction, *phases: str) -> list[float]:
    """Time of some phases, by rank."""
    return [sum(load.busy_ms.get(p, 0.0) for p in phases) for load in prediction.per_rank]


def _ratios(old: Prediction, new: Prediction, phase: str) -> tuple[float | None, ...]:
    pairs = zip(_busy(old, phase), _busy(new, phase), strict=True)
    return tuple(after / before if before > 0 else None for before, after in pairs)


GEMM_KERNEL = re.compile(r"gemm|splitKreduce|cutlass|s884|s1688|gemv", re.IGNORECASE)
TENSOR_FLOAT = re.compile(r"tf32|s1688gemm(?!_f?16)", re.IGNORECASE)
DATA_TYPES = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}
FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator -> position of the left factor among its inputs (PyTorch native_functions.yaml)."""


@dataclass(frozen=True)
class GemmCall:
    """``count`` products ``[m, k] @ [k, n]`` and the kernels that ran them."""

    count: int
    m: int
    n: int
    k: int
    data_type: str
    kernels: tuple[DeviceEvent, ...]

    def predicted_ms(self, hw: HardwareProfile) -> float:
        return batched_ms(hw, self.count, self.m, self.n, self.k, self.data_type)


def gemm_calls(trace: RankTrace) -> list[GemmCall]:
    """Multiplications with shapes and kernels, in the order of the program."""
    found = {id(op): (op, shape) for op in trace.host if (shape := _shape(op)) is not None}
    kernels: dict[int, list[DeviceEvent]] = defaultdict(list)
    for correlation, ops in said_around(trace.host, {at: at for at in found}).items():
        for event in trace.launched.get(correlation, ()):
            if GEMM_KERNEL.search(event.name):
                for around in ops:
                    kernels[around].append(event)
    calls = []
    for at, (op, shape) in found.items():
        ran = tuple(kernels[at])
        data_type = _data_type(op, ran)
        if ran and data_type is not None:
            calls.append(GemmCall(*shape, data_type, ran))
    return calls


def _shape(op: HostEvent) -> tuple[int, int, int, int] | None:
    first = FIRST_FACTOR.get(op.name)
    if op.kind != "op" or first is None or op.shapes is None or len(op.shapes) < first + 2:
        return None
    left, right = op.shapes[first], op.shapes[first + 1]
    if len(left) != len(right) or len(left) not in (2, 3) or not all((*left, *right)):
        return None
    count = left[0] if len(left) == 3 else 1
    return count, left[-2], right[-1], left[-1]


def _data_type(op: HostEvent, kernels: tuple[DeviceEvent, ...]) -> str | None:
    first = FIRST_FACTOR[op.name]
    data_type = DATA_TYPES.get(op.dtypes[first]) if op.dtypes else None
    if data_type == "fp32" and any(TENSOR_FLOAT.search(kernel.name) for kernel in kernels):
        return "tf32"
    return data_type


ARITHMETIC = re.compile(r"conv|winograd|cudnn|wgrad|dgrad", re.IGNORECASE)
GPUS_OF_A_HOST = 8
"""Ranks per host, where the trace does not say."""
BATCH_WISE = ("all_to_all", "send_recv")
"""Collectives whose size grows with the batch; the others carry gradients or parameters."""
MODEL = "by a model of both devices"
PREDICTED = "by the prediction of both plans"
RESOURCE = "by the ratio of a resource"
KEPT = "as traced"
Devices = tuple[HardwareProfile, HardwareProfile]
"""That of the trace, and that of the question."""


def what_if(
    traces: Sequence[RankTrace],
    *,
    hardware: HardwareProfile | None = None,
    batch_scale: float | None = None,
    link_scale: float | None = None,
    plans: PlanSwap | None = None,
) -> SimulatedTrace:
    """Simulate traced steps with something changed; ``measured_ms`` stays what was traced.

    Host times are those of the steps. The wait of a collective for ranks that were not traced is
    part of its time.

    Args:
        hardware: the profile of the device to run on instead.
        batch_scale: factor on the batch; kernels, copies and all-to-alls scale beyond a fixed time.
        link_scale: factor on the bandwidth of the links among ranks; 0.5: half as fast.
        plans: another sharding plan in place of the traced one.

    Returns:
        The simulation; its notes say how much of the device's time was scaled by what.
    """
    for name, scale in (("batch_scale", batch_scale), ("link_scale", link_scale)):
        if scale is not None and not 0 < scale < float("inf"):
            raise InputError(f"{name} is {scale:g}; give a factor above 0, such as 0.5 or 2")
    scaling = Scaling(traces, hardware, batch_scale or 1.0, link_scale or 1.0, plans)
    found = simulate_trace(traces, own_host=True, factor=scaling.factor)
    said = () if plans is None else plans.notes
    return replace(found, notes=(*found.notes, *scaling.notes(), *said))


def traced_profile(trace: RankTrace) -> HardwareProfile | None:
    """The profile of the device that a trace was taken on, None if no profile describes it."""
    name = profile_of_device(trace.device_name or "")
    return None if name is None else load_hardware(name)


class Scaling:
    """Factors of kernels, copies and collectives, and how much time went by which rule."""

    def __init__(
        self,
        traces: Sequence[RankTrace],
        hardware: HardwareProfile | None,
        batch: float,
        links: float,
        plans: PlanSwap | None = None,
    ) -> None:
        self.batch, self.links, self.plans = batch, links, plans
        self.gemms: dict[int, GemmCall] = {}
        self.basis: dict[int, tuple[str, float, float]] = {}
        self.devices: dict[int, Devices | None] = {}
        for trace in traces:
            old = traced_profile(trace)
            self.devices[trace.rank] = None if old is None else (old, hardware or old)
            if old is None and hardware is not None:
                raise InputError(
                    f"{trace.source}: no profile describes the device it was taken on "
                    f"({trace.device_name or 'not named'}), so there is nothing to compare "
                    f"{hardware.name} with; shardopt hardware lists them"
                )
            for call in gemm_calls(trace):
                self.gemms.update({id(kernel): call for kernel in call.kernels})

    def factor(self, trace: RankTrace, event: DeviceEvent) -> float:
        """Predicted over traced time of a kernel, copy or collective."""
        devices, call = self.devices[trace.rank], self.gemms.get(id(event))
        if event.collective is not None:
            basis, factor = self._collective(trace, event.collective, devices)
        elif devices is None:
            basis, factor = RESOURCE if self.batch != 1 else KEPT, self.batch
        elif devices[0] is devices[1] and self.batch == 1:
            basis, factor = KEPT, 1.0
        elif call is not None and all(call.data_type in hw.gemm.tflops for hw in devices):
            old, new = devices
            floor = us(new.gemm.floor_of(call.data_type))
            after = floor + (call.predicted_ms(new) - floor) * self.batch
            basis, factor = MODEL, after / call.predicted_ms(old)
        else:
            basis, factor = RESOURCE, self._by_resource(event, *devices)
        swapped = None if self.plans is None else self.plans.factor(trace.rank, event)
        if swapped is not None:
            basis, factor = PREDICTED, factor * swapped
        traced = event.end_us - event.start_us
        self.basis[id(event)] = (basis, traced, traced * factor)
        return factor

    def _by_resource(self, event: DeviceEvent, old: HardwareProfile, new: HardwareProfile) -> float:
        """A floor, and time in proportion to what the kernel is bound by."""
        traced = us(event.end_us - event.start_us)
        if event.kind == "memcpy" and ("HtoD" in event.name or "DtoH" in event.name):
            floors = us(old.memory.host_link_latency_us), us(new.memory.host_link_latency_us)
            ratio = old.memory.host_link / new.memory.host_link
        elif GEMM_KERNEL.search(event.name) or ARITHMETIC.search(event.name):
            floors = us(old.gemm.floor_us), us(new.gemm.floor_us)
            ratio = old.gemm.tflops["fp32"] / new.gemm.tflops["fp32"]
        else:
            floors = us(old.elementwise.floor_us), us(new.elementwise.floor_us)
            ratio = old.streaming / new.streaming
        fixed = min(floors[0], traced)
        after = fixed * floors[1] / floors[0] if floors[0] > 0 else fixed
        return (after + (traced - fixed) * ratio * self.batch) / traced if traced else 1.0

    def _collective(
        self, trace: RankTrace, call: CollectiveCall, devices: Devices | None
    ) -> tuple[str, float]:
        batch = self.batch if call.op in BATCH_WISE else 1.0
        ranks = len(call.group) if call.group else trace.world_size or 1
        if devices is None or call.size_bytes is None or call.op not in OPS:
            factor = batch / self.links
            return KEPT if factor == 1 else RESOURCE, factor
        if ranks == 1:
            return KEPT, 1.0
        old, new = devices
        before = _transfer(old, ranks, call.op, call.size_bytes)
        fixed, moving = _transfer(new, ranks, call.op, batch * call.size_bytes)
        basis = KEPT if new is old and batch == self.links == 1 else MODEL
        return basis, (fixed + moving / self.links) / sum(before)

    def notes(self) -> tuple[str, ...]:
        """How much of the device's time was scaled by what, after a simulation."""
        before = sum(traced for _, traced, _ in self.basis.values()) or 1.0
        after = sum(scaled for _, _, scaled in self.basis.values())
        shares: dict[str, float] = defaultdict(float)
        for basis, traced, _ in self.basis.values():
            shares[basis] += traced / before
        shown = ", ".join(f"{100 * share:.0f} % {basis}" for basis, share in shares.items())
        return (
            f"device time scaled: {shown}; {us(before):.1f} ms of kernels, copies and collectives "
            f"become {us(after):.1f} ms; host times are as traced",
        )


def _transfer(hw: HardwareProfile, ranks: int, op: Op, size_bytes: float) -> tuple[float, float]:
    """Fixed time and time per byte of a collective, in ms."""
    local = min(ranks, GPUS_OF_A_HOST)
    collectives = Collectives(hw, Topology(ranks, local, (0,) * ranks, (0,) * ranks))
    total, fixed = float(getattr(collectives, op)(size_bytes)), collectives.floor_ms(op)
    return fixed, total - fixed
