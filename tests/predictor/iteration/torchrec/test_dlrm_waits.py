"""Who waits for whom in the builder's graph: its structure, with costs set by hand.

Loads are crossed: one rank has more to do before a collective, another after it. What is expected
is counted by hand; without the meeting of the ranks it would be less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from predictor.iteration.graph import Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.steady_state import CompiledTimeline
from predictor.iteration.timeline import simulate
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from tests.builders import Candidate, a_table, a_topology, a_workload, hardware, sharded

T, K = ShardingType, ComputeKernel
CPU, GPU = "cpu-gloo", "h100-sxm"
PIPELINES = ("base", "sparse_dist", "prefetch_sparse_dist")
Costs = Mapping[str, Sequence[float]]


def built(
    kinds: Sequence[ShardingType] = (T.TABLE_WISE,),
    modules: Sequence[str] = ("ebc",),
    pipeline: str = "base",
    profile: str = CPU,
    topology: Topology | None = None,
) -> Graph:
    """A table for each sharding type, of the module at the same place."""
    topology = topology or a_topology(2)
    pairs = list(zip(kinds, modules, strict=True))
    tables = [a_table(f"t{i}", module=module) for i, (_, module) in enumerate(pairs)]
    workload = a_workload(*tables, train_pipeline=pipeline)
    candidate: Candidate = tuple(
        sharded(workload, topology, kind, K.DENSE if kind is T.DATA_PARALLEL else K.FUSED)[i]
        for i, (kind, _) in enumerate(pairs)
    )
    scorer = PlanScorer(workload, topology, hardware(profile))
    return scorer.graph(scorer.totals(candidate)[None])


def period_ms(iteration: Graph, costs: Costs) -> float:
    """The iteration time when the named operations cost so much by rank and all others nothing."""
    assert set(costs) <= {op.name for op in iteration.ops}
    nothing = (0.0,) * iteration.world_size
    ops = [
        replace(op, host_ms=0.0, cost_ms=np.array([costs.get(op.name, nothing)], dtype=float))
        for op in iteration.ops
    ]
    timed = Graph(
        iteration.world_size, iteration.intra_group_size, iteration.inline_streams, ops=ops
    )
    time = float(simulate(timed).iteration_ms[0])
    compiled = CompiledTimeline(timed, whole=True).iteration_ms(timed, 1)
    assert compiled == pytest.approx([time]), "the search's timeline says the same"
    return time


@pytest.mark.parametrize("profile", [CPU, GPU])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ebc.TW permute ids", "ebc.TW read splits"),
        ("ebc.TW read splits", "ebc.TW permute received ids"),
        ("ebc.TW lookup", "unpack embeddings"),
        ("pack gradients", "ebc.TW lookup backward"),
        ("ebc.TW lookup backward", "optimizer step"),
    ],
    ids=["splits", "ids", "outputs", "outputs backward", "gradients"],
)
def test_a_collective_lets_the_last_rank_set_the_time(
    before: str, after: str, profile: str
) -> None:
    """Rank 0 arrives last, after 5, and rank 1 goes on for 7; each alone would need 7 or 8."""
    iteration = built(profile=profile)
    assert period_ms(iteration, {before: (5, 1), after: (2, 7)}) == pytest.approx(5 + 7)
    assert period_ms(iteration, {before: (5, 1), after: (7, 2)}) == pytest.approx(5 + 7)


@pytest.mark.parametrize("profile", [CPU, GPU])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_one_rank_waits_in_the_forward_and_the_other_in_the_backward(
    pipeline: str, profile: str
) -> None:
    """Each rank has 13 ms of work, so an iteration would take 13 ms if nobody waited."""
    iteration = built(pipeline=pipeline, profile=profile)
    costs = {"ebc.TW lookup": (10, 3), "ebc.TW lookup backward": (3, 10)}
    assert period_ms(iteration, costs) == pytest.approx(10 + 10)


@pytest.mark.parametrize("profile", [CPU, GPU])
@pytest.mark.parametrize("kind", [T.TABLE_WISE, T.COLUMN_WISE, T.ROW_WISE])
def test_outputs_of_every_type_are_waited_for(kind: ShardingType, profile: str) -> None:
    iteration = built([kind], profile=profile)
    name = f"ebc.{kind.short}"
    backward = "gather" if kind is T.ROW_WISE else "all_to_all"
    costs = {
        f"{name} lookup": (10, 3),
        "unpack embeddings": (1, 6),
        f"{name}.{backward} backward": (2, 2),
        f"{name} lookup backward": (3, 8),
    }
    assert period_ms(iteration, costs) == pytest.approx(10 + 6 + 2 + 8)


@pytest.mark.parametrize(("pipeline", "forward"), [("base", 10 + 9), ("sparse_dist", 12)])
def test_modules_wait_for_each_others_ids_alone(pipeline: str, forward: float) -> None:
    """Ids of the second module are exchanged after the first one's lookups, unless they came one
    batch ahead; outputs are waited for after both. Backward nothing lies between the lookups."""
    iteration = built([T.TABLE_WISE] * 2, ["one", "two"], pipeline)
    costs = {
        "one.TW lookup": (10, 1),
        "two.TW lookup": (2, 9),
        "two.TW lookup backward": (6, 1),
        "one.TW lookup backward": (1, 7),
    }
    assert period_ms(iteration, costs) == pytest.approx(forward + max(6 + 1, 1 + 7))


def test_row_blocks_meet_within_the_host_and_then_across() -> None:
    """Hosts of ranks 0 and 1, and of 2 and 3; when each rank is ready, from the lookup on.

    ======================  ===============  =================
    work of each rank       ready            met
    ======================  ===============  =================
    lookup 6, 1, 2, 3       6, 1, 2, 3       host 6, 6, 3, 3
    0, 2, 4, 0              6, 8, 7, 3       across 7, 8, 7, 8
    concat 3, 0, 0, 5       10, 8, 7, 13     across 10, 13, 10, 13
    2, 0, 6, 0              12, 13, 16, 13   host 13, 13, 16, 16
    backward 7, 0, 0, 5     20, 13, 16, 21   all 21
    ======================  ===============  =================
    """
    iteration = built([T.TABLE_ROW_WISE], topology=a_topology(4, 2, 2))
    costs = {
        "ebc.TWRW lookup": (6, 1, 2, 3),
        "ebc.TWRW.all_to_all on the host": (0, 2, 4, 0),
        "unpack embeddings": (3, 0, 0, 5),
        "ebc.TWRW.gather backward on the host": (2, 0, 6, 0),
        "ebc.TWRW lookup backward": (7, 0, 0, 5),
    }
    assert period_ms(iteration, costs) == pytest.approx(21)
