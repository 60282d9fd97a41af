"""The predictor without one of its ideas, to measure each one's worth. None predicts in earnest.

Each ablation changes the predictor's workload, profile or graph, or the sum over the graph's costs;
the predictor itself has no switch for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.collectives import OPS, latency_ms, transfer_ms
from predictor.hardware.schema import Curve, HardwareProfile, LinkCurves
from predictor.iteration.graph import Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.timeline import simulate
from predictor.model.distribution import Bins, Distribution, Uniform
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from predictor.model.workload import Feature, Workload

Array = NDArray[np.float64]

COMMUNICATION = (
    "input_copy",
    "input_dist",
    "output_dist_forward",
    "output_dist_backward",
    "all_reduce",
)
"""Phases of collectives and of the copies that serve them."""
LARGEST_BYTES = 64 * units.MIB
"""Largest measured message where a link's provenance does not state it."""


@dataclass(frozen=True, eq=False)
class EveryIdDistinct(Bins):
    """Bins in which no two ids of a batch share a row."""

    def unique(self, draws: float) -> float:
        return max(draws, 0.0) * self.mass

    def slice(self, first: float, last: float) -> EveryIdDistinct:
        return _all_distinct(super().slice(first, last))

    def scaled(self, share: float) -> EveryIdDistinct:
        return _all_distinct(super().scaled(share))


def _all_distinct(bins: Bins) -> EveryIdDistinct:
    return EveryIdDistinct(bins.counts, bins.probs)


@dataclass(frozen=True)
class WithoutRepeats:
    """Distribution whose ids are all counted as distinct rows."""

    base: Distribution

    def bins(self, num_embeddings: int) -> Bins:
        return _all_distinct(self.base.bins(num_embeddings))


def uniform_indices(workload: Workload) -> Workload:
    """Make every id equally likely, as TorchRec and the literature assume."""
    return _features(workload, lambda f: replace(f, distribution=Uniform(), id_order="random"))


def lookups_for_rows(workload: Workload) -> Workload:
    """Make every lookup cost as much as the first of its row."""
    return _features(workload, lambda f: replace(f, distribution=WithoutRepeats(f.distribution)))


def _features(workload: Workload, change: Callable[[Feature], Feature]) -> Workload:
    tables = (replace(t, features=tuple(map(change, t.features))) for t in workload.tables)
    return replace(workload, tables=tuple(tables))


def constant_bandwidth(hardware: HardwareProfile) -> HardwareProfile:
    """Remove latency; collectives run at the rate of the largest measured message."""
    links = hardware.collectives
    flat = {"intra": _flat(links.intra, hardware), "inter": _flat(links.inter, hardware)}
    return hardware.model_copy(update={"collectives": links.model_copy(update=flat)})


def _flat(link: LinkCurves, hardware: HardwareProfile) -> LinkCurves:
    largest = link.provenance.range.get("size_bytes", (0.0, LARGEST_BYTES))[1]
    ranks = max(2, hardware.nvlink_domain)
    flat: dict[str, Curve] = {op: _at_rate_of(getattr(link, op), largest, ranks) for op in OPS}
    return link.model_copy(update=flat | {"in_switch": None})


def _at_rate_of(curve: Curve, bus_bytes: float, ranks: int) -> Curve:
    time = latency_ms(curve, ranks) + float(transfer_ms(curve, np.array([bus_bytes]), ranks)[0])
    cost = time / units.us(1.0) / (bus_bytes / units.MIB)
    return Curve(latency_us=0.0, edge_mib=(0.0,), us_per_mib=(cost,))


def without_communication(graph: Graph) -> Graph:
    """Make collectives and their copies free; ranks still wait for the last one."""
    ops = [
        replace(op, cost_ms=np.zeros_like(op.cost_ms)) if op.phase in COMMUNICATION else op
        for op in graph.ops
    ]
    return Graph(
        graph.world_size,
        graph.intra_group_size,
        graph.inline_streams,
        graph.launch_latency_ms,
        ops,
    )


def period_ms(graph: Graph) -> float:
    """Return the iteration time of one plan's graph, as `predictor.predict` does."""
    return float(simulate(graph).iteration_ms[0])


def busiest_ms(graph: Graph) -> float:
    """Return the largest sum of a rank's own operations, on host and streams in sequence."""
    spent = np.zeros(graph.world_size)
    for op in graph.ops:
        if op.active is None or op.active.all():
            spent += op.cost_ms.reshape(-1) + op.host_ms
    return float(spent.max())


@dataclass(frozen=True)
class Ablation:
    """Predictor without one idea."""

    name: str
    workload: Callable[[Workload], Workload] = lambda w: w
    hardware: Callable[[HardwareProfile], HardwareProfile] = lambda h: h
    graph: Callable[[Graph], Graph] = lambda g: g
    time_ms: Callable[[Graph], float] = period_ms

    def times(
        self,
        workload: Workload,
        topology: Topology,
        hardware: HardwareProfile,
        plans: Sequence[ShardingPlan],
    ) -> Array:
        """Return the ms of every plan, ``[plans]``."""
        changed = self.workload(workload)
        batch = PlanScorer(changed, topology, self.hardware(hardware))
        candidates = [match_plan(changed, topology, plan) for plan in plans]
        graphs = (batch.graph(batch.totals(candidate)[None]) for candidate in candidates)
        return np.array([self.time_ms(self.graph(graph)) for graph in graphs])


SUMS = "sums in place of synchronisation"
FULL = Ablation("everything")
"""The complete predictor, `predictor.predict` itself."""
ABLATIONS = (
    Ablation("uniform indices assumed", workload=uniform_indices),
    Ablation("lookups in place of distinct rows", workload=lookups_for_rows),
    Ablation("without collectives and their copies", graph=without_communication),
    Ablation(SUMS, time_ms=busiest_ms),
    Ablation("constant bandwidth of collectives", hardware=constant_bandwidth),
)
