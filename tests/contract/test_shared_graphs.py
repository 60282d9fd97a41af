"""Plans that share a graph score as each does alone, on the models that are shipped."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from predictor.iteration.plan_scorer import PlanScorer
from predictor.predict import predict
from search.space.enumerate import enumerate_space
from shardopt.config import load_model
from tests.builders import a_topology, hardware, plan_of, random_plan
from tests.quick import quick_only

MODELS = Path(__file__).parents[2] / "configs" / "models"
NAMES = ["ranker", "dlrm_criteo_kaggle"]
PIPELINES = ["base", "sparse_dist", "prefetch_sparse_dist", "semi_sync"]


@pytest.mark.parametrize(
    ("name", "pipeline"),
    quick_only(zip(NAMES * 2, PIPELINES, strict=True), list(product(NAMES, PIPELINES))),
)
def test_plans_score_together_as_alone(name: str, pipeline: str) -> None:
    """Some plans have few exchanges, so that the graph has many operations they are without."""
    workload = replace(load_model(MODELS / f"{name}.yaml"), train_pipeline=pipeline)
    topology, profile, pick = a_topology(8), hardware(), random.Random(0)
    space = enumerate_space(workload, topology)
    candidates = []
    for _ in range(6):
        order = pick.sample(range(9), 9)  # of sharding types, the first that a table can have
        kinds = sorted({o.sharding_type for options in space.options for o in options})
        rank = {kind: order[at] for at, kind in enumerate(kinds)}
        best = [min(options, key=lambda o: rank[o.sharding_type]) for options in space.options]
        candidates.append(tuple(random_plan(option, topology, pick) for option in best))
    alone = [
        predict(workload, topology, profile, plan_of(workload, topology, c)).iteration_ms
        for c in candidates
    ]
    together = PlanScorer(workload, topology, profile).score(candidates)
    assert together == pytest.approx(alone, rel=1e-9)
