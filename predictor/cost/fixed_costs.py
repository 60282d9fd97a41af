"""What costs the same under every plan: computed once per workload, topology and profile."""

from __future__ import annotations

from functools import cached_property

from predictor.cost.collectives import Collectives
from predictor.cost.dense import DenseLayers
from predictor.hardware.loader import HardwareProfile
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import us


class FixedCosts:
    """Workload, topology and hardware with the costs that do not depend on the plan."""

    def __init__(self, workload: Workload, topology: Topology, hardware: HardwareProfile) -> None:
        self.workload = workload
        self.topology = topology
        self.hardware = hardware

    @cached_property
    def collectives(self) -> Collectives:
        """Times of collectives."""
        return Collectives(self.hardware, self.topology)

    @cached_property
    def dense(self) -> DenseLayers:
        """Layers of the dense part."""
        return DenseLayers(self.workload, self.hardware)

    def host_ms(self, ops: float, kernels: int = 0, collectives: int = 0) -> float:
        """Host time in ms of so many framework ops, kernel launches and collective launches."""
        cost = self.hardware.overheads
        return us(ops * cost.op_us + kernels * cost.launch_us + collectives * cost.collective_us)

    def layer_host_ms(self, ops: float, kernels: int) -> float:
        """Host time in ms of ops of the dense part, and of their launches."""
        cost = self.hardware.overheads
        each = cost.op_us if cost.layer_op_us is None else cost.layer_op_us
        return us(ops * each + kernels * cost.launch_us)
