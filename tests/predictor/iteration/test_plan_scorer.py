"""Many plans at once score as each alone; neighbours score as plans built from nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.topology import Topology
from predictor.predict import predict
from search.space.enumerate import enumerate_space
from tests.builders import (
    Candidate,
    a_table,
    a_topology,
    a_workload,
    device_bound,
    hardware,
    neighbours_ms,
    plan_of,
    random_candidate,
    random_plan,
    random_workload,
)
from tests.quick import quick_first, quick_only

PIPELINES = ["base", "sparse_dist", "prefetch_sparse_dist"]
TOPOLOGIES = [
    a_topology(1),
    a_topology(2),
    a_topology(4, 1),
    a_topology(8, 4),
    a_topology(4, 2, domain=4),
]


def random_plans(
    seed: int, pipeline: str, topology: Topology, count: int, profile: HardwareProfile | None = None
) -> tuple[PlanScorer, list[Candidate]]:
    workload, pick = random_workload(seed, pipeline), random.Random(seed)
    space = enumerate_space(workload, topology)
    candidates = [random_candidate(space, topology, pick) for _ in range(count)]
    return PlanScorer(workload, topology, profile or device_bound()), candidates


def shape_of(value: object) -> str | None:
    """A name for parameters that are topologies."""
    if not isinstance(value, Topology):
        return None
    return f"{value.world_size}x{value.local_world_size}x{value.nvlink_domain}"


@pytest.mark.parametrize(
    ("pipeline", "topology"),
    quick_only(zip(PIPELINES, TOPOLOGIES[1:], strict=False), product(PIPELINES, TOPOLOGIES)),
    ids=shape_of,
)
@pytest.mark.parametrize("plans", [5, pytest.param(70, marks=pytest.mark.slow)])
def test_a_batch_equals_its_plans_one_by_one(pipeline: str, topology: Topology, plans: int) -> None:
    for seed, profile in enumerate((device_bound(), hardware(), device_bound())):
        batch, candidates = random_plans(seed, pipeline, topology, plans, profile)
        workload = batch.workload
        together = batch.score(candidates)
        alone = [
            predict(workload, topology, profile, plan_of(workload, topology, c)).iteration_ms
            for c in candidates
        ]
        assert together == pytest.approx(alone, rel=1e-9)
        assert len(set(together.round(9))) > 1 or profile is hardware()


@pytest.mark.parametrize(
    ("pipeline", "topology"),
    quick_only(zip(PIPELINES, TOPOLOGIES[1:4], strict=True), product(PIPELINES, TOPOLOGIES[1:4])),
    ids=shape_of,
)
@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_neighbours_equal_plans_scored_anew(pipeline: str, topology: Topology, seeds: int) -> None:
    for seed in range(seeds):
        batch, candidates = random_plans(seed, pipeline, topology, 12)
        base, neighbours = candidates[0], candidates[1:]
        pick = random.Random(seed)
        changes = []
        for neighbour in neighbours:
            tables = pick.sample(range(len(base)), pick.randint(1, len(base)))
            changes.append({t: neighbour[t] for t in tables})
        times = neighbours_ms(batch, base, changes)
        full = [tuple(c.get(t, p) for t, p in enumerate(base)) for c in changes]
        fresh = PlanScorer(batch.workload, topology, device_bound())
        assert times == pytest.approx(fresh.score(full), rel=1e-9)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, candidates = random_plans(3, "sparse_dist", a_topology(2), 9)
    at_once = batch.score(candidates)
    monkeypatch.setattr("predictor.iteration.plan_scorer.CHUNK_ELEMENTS", 4)
    assert batch.score(candidates) == pytest.approx(at_once, rel=1e-9)
    assert batch.score([]).shape == (0,)
    assert neighbours_ms(batch, candidates[0], []).shape == (0,)


@pytest.mark.parametrize("pipeline", quick_first(1, PIPELINES))
def test_a_graph_of_their_own_does_not_matter(
    pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that use just the same lookup groups score as in the graph of all groups."""
    for seed in range(3):
        batch, candidates = random_plans(seed, pipeline, a_topology(4, 2), 20)
        changes = [dict(enumerate(candidate)) for candidate in candidates]
        monkeypatch.setattr("predictor.iteration.plan_scorer.OWN_GRAPH", 10**6)
        together = batch.score(candidates)
        monkeypatch.setattr("predictor.iteration.plan_scorer.OWN_GRAPH", 1)
        assert batch.score(candidates) == pytest.approx(together, rel=1e-9)
        assert neighbours_ms(batch, candidates[0], changes) == pytest.approx(together, rel=1e-9)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_whichever_op_comes_first_waits_for_the_batch(pipeline: str) -> None:
    """Plans with one sharding type each share a graph but have different first ops."""
    profile, topology = hardware(), a_topology(4)
    slow = profile.memory.model_copy(update={"host_link_gb_s": 0.02})
    profile = profile.model_copy(update={"memory": slow})
    workload = a_workload(a_table("a", 100_000, 64), a_table("b", 100_000, 64), batch_size=8192)
    dense = replace(workload.dlrm, linears=((128, 1),))  # nothing computes before the lookups
    workload = replace(workload, train_pipeline=pipeline, dense=dense)
    space, pick = enumerate_space(workload, topology), random.Random(0)
    kinds = [{o.sharding_type for o in options} for options in space.options]
    candidates = [
        tuple(
            random_plan(next(o for o in options if o.sharding_type == kind), topology, pick)
            for options in space.options
        )
        for kind in sorted(set.intersection(*kinds))
    ]
    alone = [
        predict(workload, topology, profile, plan_of(workload, topology, c)).iteration_ms
        for c in candidates
    ]
    together = PlanScorer(workload, topology, profile).score(candidates)
    assert together == pytest.approx(alone, rel=1e-9)


def test_renaming_ranks_does_not_change_the_time() -> None:
    """Hosts may be exchanged, and positions within all hosts alike."""
    topology = a_topology(4, 2)
    for seed in range(5):
        batch, candidates = random_plans(seed, "sparse_dist", topology, 8)
        for name in ([2, 3, 0, 1], [1, 0, 3, 2]):
            renamed = [
                tuple(
                    replace(plan, shards=tuple(replace(s, rank=name[s.rank]) for s in plan.shards))
                    for plan in candidate
                )
                for candidate in candidates
            ]
            assert batch.score(renamed) == pytest.approx(batch.score(candidates), rel=1e-9)
