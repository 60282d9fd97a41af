"""What the software of NVIDIA's DeepLearningExamples did, by date, and a profile as it used it.

`predictor/hardware/runtimes/examples.yaml` holds the facts with their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache

from predictor import units
from predictor.hardware.loader import load_runtime
from predictor.hardware.schema import HardwareProfile, Overheads

MESH_RANKS = 8
"""Cards of a DGX-1's cube mesh: two sockets of four, each card with one neighbour across."""
ACROSS = 12
"""Pairs of cards on different sockets that no NVLink joins."""


@dataclass(frozen=True)
class ExamplesRuntime:
    """How a release runs the work of a plan.

    Args:
        graph_node_us: from one kernel to the next inside a CUDA graph.
        graphs_from: first day of CUDA graphs and fused MLPs.
        one_hop_from: first day of an NCCL that sends through a neighbour's NVLink.
        first_gpu_until: framework -> last day of a bottom MLP on the first GPU alone.
        socket_link_gb_s: from one socket of a DGX-1 to the other.
        software_error: 1-sigma relative error of iterations from releases that did other things.
    """

    graph_node_us: float
    graphs_from: date
    one_hop_from: date
    first_gpu_until: Mapping[str, date]
    socket_link_gb_s: float
    software_error: float

    def fuses(self, day: date) -> bool:
        """Whether graphs launched the kernels and MLPs were fused."""
        return day >= self.graphs_from

    def on_first_gpu(self, framework: str, day: date) -> bool:
        """Whether one rank ran the bottom MLP of all samples."""
        return day <= self.first_gpu_until.get(framework, date.min)

    def crosses_sockets(self, ranks: int, day: date) -> bool:
        """Whether all-to-alls of a DGX-1 went through the link between its sockets."""
        return ranks == MESH_RANKS and day < self.one_hop_from

    def profile(
        self, hardware: HardwareProfile, day: date, *, through_host: bool = False
    ) -> HardwareProfile:
        """The profile with the host and the all-to-all of that day's software.

        Args:
            through_host: all-to-alls go through the link between the sockets of a DGX-1.
        """
        found = hardware.model_copy(update={"overheads": self._overheads(hardware, day)})
        if through_host:
            intra = found.collectives.intra
            curve = intra.all_to_all.model_copy(
                update={"edge_mib": (0.0,), "us_per_mib": (self._mesh_us_per_mib(),)}
            )
            links = found.collectives.model_copy(
                update={"intra": intra.model_copy(update={"all_to_all": curve})}
            )
            found = found.model_copy(update={"collectives": links})
        return found

    def _overheads(self, hardware: HardwareProfile, day: date) -> Overheads:
        """No TorchRec runs: every op costs what those of dense layers do, and nothing is fixed."""
        cost = hardware.overheads
        if not self.fuses(day):
            each = cost.op_us if cost.layer_op_us is None else cost.layer_op_us
            return cost.model_copy(update={"op_us": each, "iteration_us": 0.0})
        free = {"op_us": 0.0, "layer_op_us": 0.0, "iteration_us": 0.0, "collective_us": 0.0}
        node = {"launch_us": self.graph_node_us, "launch_latency_us": 0.0}
        return cost.model_copy(update=free | node)

    def _mesh_us_per_mib(self) -> float:
        """Of a rank's bus bytes, all but its own eighth: an eighth goes to each other rank."""
        crossing = units.MIB * ACROSS / (MESH_RANKS - 1)
        return float(crossing / units.gb_per_s(self.socket_link_gb_s) / units.us(1.0))


@cache
def load_examples() -> ExamplesRuntime:
    """The facts that are shipped."""
    found = {key: value for key, value in load_runtime("examples").items() if key != "provenance"}
    return ExamplesRuntime(**found)
