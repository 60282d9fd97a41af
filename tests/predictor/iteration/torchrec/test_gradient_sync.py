"""All-reduces of dense gradients: whose time they take, with a device and without."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.cost.collectives import Collectives
from predictor.cost.fixed_costs import HOST_OPS
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.graph import Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from tests.builders import Candidate, a_table, a_topology, a_workload, hardware, sharded

TW, DP = ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL
TABLE = a_table(rows=20_000, dim=64)
WORKLOAD = a_workload(TABLE)
TOPOLOGY = a_topology(2)
PARAMETERS = 13 * 64 + 64 + 64 * 32 + 32 + (32 + 64) * 64 + 64 + 64 + 1
"""Of the dense part; they fit one bucket."""


def whole(kind: ShardingType, topology: Topology = TOPOLOGY) -> Candidate:
    kernel = ComputeKernel.DENSE if kind is DP else ComputeKernel.FUSED
    return sharded(WORKLOAD, topology, kind, kernel)


def graph(profile: str, topology: Topology = TOPOLOGY) -> Graph:
    """Build the graph of two plans: table-wise, and data-parallel."""
    batch = PlanScorer(WORKLOAD, topology, hardware(profile))
    plans = [whole(kind, topology) for kind in (TW, DP)]
    for plan in plans:
        batch.number(0, plan[0])
    return batch.graph(np.stack([batch.totals(plan) for plan in plans]))


def reduces(iteration: Graph) -> dict[str, int]:
    names = [(i, op.name) for i, op in enumerate(iteration.ops)]
    return {n.removeprefix("all-reduce "): i for i, n in names if n.startswith("all-reduce")}


def sizes(profile: str) -> dict[str, float]:
    """Time of each all-reduce."""
    collectives = Collectives(hardware(profile), TOPOLOGY)
    bytes_of = {"ebc.DP gradients": 4 * 20_000 * 64, "dense gradients": 4 * PARAMETERS}
    return {name: collectives.all_reduce(size).item() for name, size in bytes_of.items()}


def test_a_gpu_sends_beside_its_computation() -> None:
    iteration = graph("h100-sxm")
    sent = reduces(iteration)
    assert set(sent) == set(sizes("h100-sxm"))
    for name, cost_ms in sizes("h100-sxm").items():
        op = iteration.ops[sent[name]]
        assert (op.stream, op.scope) == ("comm", "world")
        assert op.cost_ms.reshape(-1)[-1] == pytest.approx(cost_ms)
        assert op.host_ms > 0


def test_a_cpu_moves_the_bytes_itself_and_then_meets_the_others() -> None:
    iteration = graph("cpu-gloo")
    sent = reduces(iteration)
    bucket_bytes = sizes("cpu-gloo")
    assert set(sent) == {*bucket_bytes, *(f"{name} on the host" for name in bucket_bytes)}
    for name, cost_ms in bucket_bytes.items():
        own, meeting = (iteration.ops[sent[n]] for n in (f"{name} on the host", name))
        assert (own.stream, own.scope, own.host_ms) == ("compute", None, 0.0)
        assert "compute" in iteration.inline_streams
        assert own.cost_ms.reshape(-1)[-1] == pytest.approx(cost_ms)
        assert (meeting.stream, meeting.scope) == ("comm", "world")
        assert not meeting.cost_ms.any()
        cost = hardware("cpu-gloo").overheads
        issued = HOST_OPS["gradient_sync"] * cost.op_us + cost.launch_us + cost.collective_us
        assert meeting.host_ms == pytest.approx(1e-3 * issued), "issued once"
        assert [d.op for d in own.deps] == [d.op for d in meeting.deps][:-1]
        assert sent[name] == sent[f"{name} on the host"] + 1
    step = iteration.ops[-1]
    assert {d.op for d in step.deps} == {sent[name] for name in bucket_bytes}


def slower(profile: HardwareProfile, added_us: float) -> HardwareProfile:
    """Every all-reduce takes so much longer."""
    wires = profile.collectives
    curve = wires.intra.all_reduce
    curve = curve.model_copy(update={"latency_us": curve.latency_us + added_us})
    intra = wires.intra.model_copy(update={"all_reduce": curve})
    return profile.model_copy(update={"collectives": wires.model_copy(update={"intra": intra})})


@pytest.mark.parametrize("kind", [TW, DP])
def test_no_all_reduce_of_a_cpu_is_hidden(kind: ShardingType) -> None:
    """However the ranks overlap: each of them spends it, so the iteration does."""
    count = 2 if kind is DP else 1
    times = [
        iteration_ms(WORKLOAD, slower(hardware("cpu-gloo"), added), whole(kind))
        for added in (0.0, 3000.0)
    ]
    assert times[1] - times[0] == pytest.approx(3.0 * count)


def iteration_ms(workload: Workload, profile: HardwareProfile, plan: Candidate) -> float:
    return float(PlanScorer(workload, TOPOLOGY, profile).score([plan])[0])
