"""The software of NVIDIA's DeepLearningExamples by date: its profile, and its iteration.

`predictor/hardware/runtimes/examples.yaml` holds the facts with their sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from itertools import pairwise

from predictor import units
from predictor.cost.dense import Bucket, DenseSegment, DenseStep, LookupCall, TableUpdate
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import Load
from predictor.hardware.loader import load_runtime
from predictor.hardware.schema import HardwareProfile, Overheads
from predictor.iteration.graph import Dep, Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.torchrec.dlrm import DlrmBuilder
from predictor.iteration.torchrec.sparse import Collective, Exchange, Transfer
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.workload import Workload

MESH_RANKS = 8
"""Cards of a DGX-1's cube mesh: two sockets of four, each card with one neighbour across."""
ACROSS = 12
"""Pairs of cards on different sockets that no NVLink joins."""

OWN_KERNELS = {"index_add_ns": 0.0, "column_sum_us": 0.0}
"""Constants of the aten kernels that fusing replaced: the interaction and its backward are one
kernel each, and a fused MLP sums the gradients of its biases itself."""


@dataclass(frozen=True)
class ExamplesRuntime:
    """Behaviour of the releases, by date.

    Args:
        graph_node_us: time from one kernel to the next inside a CUDA graph.
        graphs_from: first day of CUDA graphs and fused MLPs.
        one_hop_from: first day of an NCCL that sends over a neighbour's NVLink.
        first_gpu_until: framework -> last day of a bottom MLP on the first GPU only.
        socket_link_gb_s: bandwidth between the sockets of a DGX-1.
        software_error: 1-sigma relative error of iterations, from releases that differ.
    """

    graph_node_us: float
    graphs_from: date
    one_hop_from: date
    first_gpu_until: Mapping[str, date]
    socket_link_gb_s: float
    software_error: float

    def fuses(self, day: date) -> bool:
        """Return true if graphs launch the kernels and MLPs are fused."""
        return day >= self.graphs_from

    def on_first_gpu(self, framework: str, day: date) -> bool:
        """Return true if one rank runs the bottom MLP of all samples."""
        return day <= self.first_gpu_until.get(framework, date.min)

    def crosses_sockets(self, ranks: int, day: date) -> bool:
        """Return true if all-to-alls of a DGX-1 use the link between its sockets."""
        return ranks == MESH_RANKS and day < self.one_hop_from

    def profile(
        self, hardware: HardwareProfile, day: date, *, through_host: bool = False
    ) -> HardwareProfile:
        """Return the profile with the host costs and the all-to-all of that day's software.

        Args:
            through_host: all-to-alls use the link between the sockets of a DGX-1.
        """
        changed: dict[str, object] = {"overheads": self._overheads(hardware, day)}
        if self.fuses(day):
            changed["elementwise"] = hardware.elementwise.model_copy(update=OWN_KERNELS)
        profile = hardware.model_copy(update=changed)
        if through_host:
            intra = profile.collectives.intra
            curve = intra.all_to_all.model_copy(
                update={"edge_mib": (0.0,), "us_per_mib": (self._mesh_us_per_mib(),)}
            )
            links = profile.collectives.model_copy(
                update={"intra": intra.model_copy(update={"all_to_all": curve})}
            )
            profile = profile.model_copy(update={"collectives": links})
        return profile

    def _overheads(self, hardware: HardwareProfile, day: date) -> Overheads:
        """Return host costs without TorchRec: all ops cost as in dense layers, none is fixed."""
        cost = hardware.overheads
        if not self.fuses(day):
            each = cost.op_us if cost.layer_op_us is None else cost.layer_op_us
            return cost.model_copy(update={"op_us": each, "iteration_us": 0.0})
        free = {"op_us": 0.0, "layer_op_us": 0.0, "iteration_us": 0.0, "collective_us": 0.0}
        node = {"launch_us": self.graph_node_us, "launch_latency_us": 0.0}
        return cost.model_copy(update=free | node)

    def _mesh_us_per_mib(self) -> float:
        """Return the cost of a MiB of a rank's bus bytes, an eighth of which goes to each rank."""
        crossing = units.MIB * ACROSS / (MESH_RANKS - 1)
        return float(crossing / units.gb_per_s(self.socket_link_gb_s) / units.us(1.0))


@cache
def load_examples() -> ExamplesRuntime:
    constants = {
        key: value for key, value in load_runtime("examples").items() if key != "provenance"
    }
    return ExamplesRuntime(**constants)


class SharedLinkExchange(Exchange):
    """Exchange whose outputs all cross one link: their sum counts, not the busiest rank."""

    def _transfer(self, name: str, scope: str, collective: Collective, width: float) -> Transfer:
        cost = self.cost(
            partial(collective, scope=scope),
            lambda load: width * load[..., Load.OUTPUTS].mean(axis=-1, keepdims=True),
        )
        return Transfer(f"{self.name}.{name}", scope, cost)


class ExamplesBuilder(DlrmBuilder):
    """Builder of the graph of one iteration.

    Args:
        scorer: of the workload, its topology and hardware.
        first_gpu: run the bottom MLP of all samples on the first rank.
        shared_link: let one link carry the exchange of all ranks.
    """

    def __init__(
        self,
        scorer: PlanScorer,
        plan: ShardingPlan,
        *,
        first_gpu: bool,
        shared_link: bool = False,
    ) -> None:
        loads = scorer.totals(match_plan(scorer.workload, scorer.topology, plan))[None]
        make = SharedLinkExchange if shared_link else Exchange
        super().__init__(scorer.costs, scorer.groups, loads, make)
        ranks = scorer.topology.world_size
        self.bottom_ranks: tuple[int, ...] | None = None
        self.bottom = self.dense
        if first_gpu and ranks > 1:
            whole = replace(scorer.workload, batch_size=ranks * scorer.workload.batch_size)
            self.bottom_ranks = (0,)
            self.bottom = FixedCosts(whole, scorer.topology, scorer.hardware).dense

    def build(self) -> Graph:
        """Build bottom MLP and lookups, exchange and top MLP, the backward, and the step."""
        copy = self._copy_input()  # of the next batch
        steps = self.bottom.forward
        for segment in _segments(steps[: _place(steps, LookupCall)]):
            self._bottom_segment(segment, backward=False, deps=[Dep(copy, lag=1)])
        for module in self.modules.values():
            self._lookups(module, {})
        self._unpack([*self.modules])
        steps = self.dense.forward
        for segment in _segments(steps[_place(steps, LookupCall) :]):
            self._segment(segment, backward=False)
        self._backward()
        self._optimizer_step()
        return self.graph

    def _backward(self) -> None:
        """Add the backward; gradients of the top MLP leave while those of embeddings return."""
        at = _place(self.dense.backward, TableUpdate)
        for step in self.dense.backward[:at]:
            if isinstance(step, DenseSegment):
                self._segment(step, backward=True)
            elif isinstance(step, Bucket):
                self._reduce_bucket(step.bytes)
        split = self._copies("pack gradients", [*self.modules], [], backward=True)
        if self.bottom_ranks is not None:
            remaining_bytes = sum(
                step.bytes for step in self.dense.backward[at:] if isinstance(step, Bucket)
            )
            self._reduce_bucket(remaining_bytes - _bottom_gradient_bytes(self.workload))
        arrived = {e.name: self._outputs(e, [split], backward=True) for e in self.exchanges}
        waits = [Dep(op) for ops in arrived.values() for op in ops] or [Dep(split)]
        for exchange in self.exchanges:
            for group in exchange.members:
                self._lookup(exchange, group, waits, backward=True)
        steps = self.bottom.backward
        for step in steps[_place(steps, TableUpdate) :]:
            if isinstance(step, DenseSegment):
                self._bottom_segment(step, backward=True, deps=waits)
            elif isinstance(step, Bucket) and self.bottom_ranks is None:
                self._reduce_bucket(step.bytes)

    def _bottom_segment(
        self, segment: DenseSegment, *, backward: bool, deps: Sequence[Dep]
    ) -> None:
        op = self._segment(segment, backward=backward)
        self.graph.wait(op, *deps)
        self.graph.ops[op] = replace(self.graph.ops[op], ranks=self.bottom_ranks)


def _place(steps: Sequence[DenseStep], kind: type[LookupCall | TableUpdate]) -> int:
    """Return the position of the first step of a kind."""
    return next((i for i, step in enumerate(steps) if isinstance(step, kind)), len(steps))


def _segments(steps: Sequence[DenseStep]) -> Iterator[DenseSegment]:
    return (step for step in steps if isinstance(step, DenseSegment))


def _bottom_gradient_bytes(workload: Workload) -> int:
    dense = workload.dlrm
    return 4 * sum((a + 1) * b for a, b in pairwise((dense.in_features, *dense.bottom_mlp)))
