"""Near-empty iterations of a machine whose constants are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from predictor import units
from predictor.cost.collectives import OPS
from predictor.hardware.schema import Curve, HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from shardopt.calibrate.host import iteration_points, near_empty
from shardopt.calibrate.rows import Measurement
from tests.shardopt.calibrate.synthetic import row

NO_TABLES = {"forward_table_us": 0.0, "backward_table_us": 0.0}
"""A table with next to no ids takes less than the constant that other tables were fitted on."""


def spent_us(profile: HardwareProfile, params: dict[str, object]) -> tuple[float, float]:
    """What the main thread of the busier rank computes in one iteration, as the graph has it, and
    what its collectives take."""
    workload, plan = near_empty(params)
    topology = Topology.uniform(2, plan.local_world_size, hbm_bytes=2**33, ddr_bytes=2**33)
    batch = PlanScorer(workload, topology, profile)
    graph = batch.graph(batch.totals(match_plan(workload, topology, plan))[None])
    spent = {True: 0.0, False: sum(op.host_ms for op in graph.ops)}
    for op in graph.ops:
        spent[op.resource == "collectives"] += float(op.cost_ms.max())
    return spent[False] / units.us(1.0), spent[True] / units.us(1.0)


def with_latency(profile: HardwareProfile, latency_us: Mapping[str, float]) -> HardwareProfile:
    """Messages take their latency, whatever their size."""
    curves = {
        op: Curve(latency_us=latency_us[op], edge_mib=(0.0,), us_per_mib=(1e-9,)) for op in OPS
    }
    links = profile.collectives
    wires = {n: getattr(links, n).model_copy(update=curves) for n in ("intra", "inter")}
    return profile.model_copy(update={"collectives": links.model_copy(update=wires)})


@pytest.fixture(scope="session")
def iteration_rows() -> Callable[..., list[Measurement]]:
    """Rows of a profile's overheads; parts ``wall`` and ``cpu`` of every point.

    A message takes ``latency_us`` beyond the main thread, of its collective or of all alike; where
    ids travel ahead, all is hidden.
    """

    def made(
        profile: HardwareProfile, latency_us: float | Mapping[str, float], **among: object
    ) -> list[Measurement]:
        of = latency_us if isinstance(latency_us, Mapping) else dict.fromkeys(OPS, latency_us)
        overheads = profile.overheads.model_copy(update={"collective_us": 0.0})
        embedding = profile.embedding.model_copy(update=NO_TABLES)
        known = {"embedding": embedding, "overheads": overheads}
        profile = with_latency(profile.model_copy(update=known), of)
        rows = []
        for point in iteration_points(2, **among):
            main, messages = spent_us(profile, point.params)
            hidden = point.params["pipeline"] != "base"
            whole = main if hidden else main + messages
            times = {"wall": whole, "cpu": main}
            for part, us in times.items():
                rows.append(row(point, us * 1e-3, part))
        return rows

    return made
