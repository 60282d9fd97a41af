"""What a traced job would take on other hardware, links or batch sizes.

The structure and the host's times stay; kernels, copies and collectives are scaled. Multiplications
whose shapes the trace carries and collectives whose sizes it carries take the ratio of the models
of both devices; everything else keeps its measured time, scaled by the resource that it uses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from predictor.cost.collectives import OPS, Collectives
from predictor.cost.levels import Op
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import Topology
from predictor.trace.events import CollectiveCall, DeviceEvent, RankTrace
from predictor.trace.simulate.kernels import GEMM_KERNEL, GemmCall, gemm_calls
from predictor.trace.simulate.plan_swap import PlanSwap
from predictor.trace.simulate.step import SimulatedTrace, simulate_trace
from predictor.units import us

ARITHMETIC = re.compile(r"conv|winograd|cudnn|wgrad|dgrad", re.IGNORECASE)
GPUS_OF_A_HOST = 8
"""Ranks per host, where the trace does not say."""
BATCH_WISE = ("all_to_all", "send_recv")
"""Collectives whose size grows with the batch; the others carry gradients or parameters."""
MODEL = "by a model of both devices"
PREDICTED = "by the prediction of both plans"
RESOURCE = "by the ratio of a resource"
KEPT = "as traced"


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

    Raises:
        InputError: a scale that is not above 0, or a device that no profile describes.
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
        self.batch = batch
        self.links = links
        self.plans = plans
        self.gemms: dict[int, GemmCall] = {}
        self.basis: dict[int, tuple[str, float, float]] = {}
        self.old: dict[int, HardwareProfile | None] = {}
        self.new: dict[int, HardwareProfile | None] = {}
        for trace in traces:
            self.old[trace.rank] = old = traced_profile(trace)
            self.new[trace.rank] = hardware or old
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
        old, new = self.old[trace.rank], self.new[trace.rank]
        if event.collective is not None:
            basis, factor = self._collective(trace, event, event.collective, old, new)
        elif id(event) in self.gemms and old is not None and new is not None:
            basis, factor = self._gemm(self.gemms[id(event)], old, new)
        else:
            basis, factor = self._by_resource(event, old, new)
        swapped = None if self.plans is None else self.plans.factor(trace.rank, event)
        if swapped is not None:
            basis, factor = PREDICTED, factor * swapped
        traced = event.end_us - event.start_us
        self.basis[id(event)] = (basis, traced, traced * factor)
        return factor

    def _gemm(
        self, call: GemmCall, old: HardwareProfile, new: HardwareProfile
    ) -> tuple[str, float]:
        if call.data_type not in new.gemm.tflops or call.data_type not in old.gemm.tflops:
            return self._by_resource(call.kernels[0], old, new)
        if new is old and self.batch == 1:
            return KEPT, 1.0
        before, after = call.predicted_ms(old), call.predicted_ms(new)
        floor = us(new.gemm.floor_of(call.data_type))
        return MODEL, (floor + (after - floor) * self.batch) / before

    def _by_resource(
        self, event: DeviceEvent, old: HardwareProfile | None, new: HardwareProfile | None
    ) -> tuple[str, float]:
        if old is None or new is None:
            return RESOURCE if self.batch != 1 else KEPT, self.batch
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
        basis = KEPT if new is old and self.batch == 1 else RESOURCE
        fixed = min(floors[0], traced)
        after = fixed * floors[1] / floors[0] if floors[0] > 0 else fixed
        return basis, (after + (traced - fixed) * ratio * self.batch) / traced if traced else 1.0

    def _collective(
        self,
        trace: RankTrace,
        event: DeviceEvent,
        call: CollectiveCall,
        old: HardwareProfile | None,
        new: HardwareProfile | None,
    ) -> tuple[str, float]:
        batch = self.batch if call.op in BATCH_WISE else 1.0
        ranks = len(call.group) if call.group else trace.world_size or 1
        if old is None or new is None or call.size_bytes is None or call.op not in OPS:
            factor = batch / self.links
            return KEPT if factor == 1 else RESOURCE, factor
        if ranks == 1:
            return KEPT, 1.0
        before = _transfer(old, ranks, call.op, call.size_bytes)
        fixed, moving = _transfer(new, ranks, call.op, batch * call.size_bytes)
        basis = KEPT if new is old and batch == self.links == 1 else MODEL
        return basis, (fixed + moving / self.links) / sum(before)

    def notes(self) -> tuple[str, ...]:
        """How much of the device's time was scaled by what, after a simulation."""
        before = sum(traced for _, traced, _ in self.basis.values()) or 1.0
        shares: dict[str, float] = {}
        for basis, traced, _ in self.basis.values():
            shares[basis] = shares.get(basis, 0.0) + traced / before
        shown = ", ".join(f"{100 * share:.0f} % {basis}" for basis, share in shares.items())
        after = sum(scaled for _, _, scaled in self.basis.values())
        return (
            f"device time scaled: {shown}; {us(before):.1f} ms of kernels, copies and collectives "
            f"become {us(after):.1f} ms; host times are as traced",
        )


def _transfer(hw: HardwareProfile, ranks: int, op: Op, size_bytes: float) -> tuple[float, float]:
    """Fixed time and time per byte of a collective, in ms."""
    local = ranks if ranks <= GPUS_OF_A_HOST else GPUS_OF_A_HOST
    if ranks % local:
        raise InputError(f"{ranks} ranks do not fill hosts of {local}")
    topology = Topology(ranks, local, (0,) * ranks, (0,) * ranks)
    collectives = Collectives(hw, topology)
    total = float(getattr(collectives, op)(size_bytes))
    fixed = collectives.floor_ms(op)
    return fixed, total - fixed
