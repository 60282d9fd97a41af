"""Near-empty iterations of a machine whose constants are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from predictor import units
from predictor.hardware.loader import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from shardopt.calibrate.design.near_empty import iteration_points, near_empty
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.timing import Samples

NO_TABLES = {"forward_table_us": 0.0, "backward_table_us": 0.0}
"""A table with next to no ids takes less than the constant that other tables were fitted on."""


def busy_us(profile: HardwareProfile, params: dict[str, object]) -> float:
    """What the main thread of the busier rank computes in one iteration, as the graph has it."""
    workload, plan = near_empty(params)
    topology = Topology.uniform(2, plan.local_world_size, hbm_bytes=2**33, ddr_bytes=2**33)
    batch = PlanScorer(workload, topology, profile)
    graph = batch.graph(batch.totals(match_plan(workload, topology, plan))[None])
    own = [op for op in graph.ops if op.resource != "collectives"]
    spent = sum(op.host_ms for op in graph.ops) + sum(op.cost_ms.max() for op in own)
    return float(spent / units.us(1.0))


@pytest.fixture(scope="session")
def iteration_rows() -> Callable[..., list[Measurement]]:
    """Rows of a profile's overheads; parts ``wall``, ``cpu`` and ``process`` of every point.

    A message takes ``message_us`` beyond the main thread; where ids travel ahead, all is hidden.
    """

    def made(profile: HardwareProfile, message_us: float, **among: object) -> list[Measurement]:
        embedding = profile.embedding.model_copy(update=NO_TABLES)
        profiles = [
            profile.model_copy(
                update={
                    "embedding": embedding,
                    "overheads": profile.overheads.model_copy(update={"collective_us": us}),
                }
            )
            for us in (0.0, message_us)
        ]
        rows = []
        for point in iteration_points(2, **among):
            main, whole = (busy_us(p, point.params) for p in profiles)
            hidden = point.params["pipeline"] != "base"
            times = {"wall": main if hidden else whole, "cpu": main, "process": 1.5 * main}
            for part, us in times.items():
                row = row_of_samples(point, Samples((us * 1e-6,) * 3), part)
                row.__dict__["date"] = "2026-01-02T03:04:05Z"
                rows.append(row)
        return rows

    return made
