"""Whatever the plan, pipeline and machine: it can be explained, and the page comes out whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.problem import Problem
from search.space.enumerate import enumerate_space
from shardopt.report.html.page import page
from tests.builders import a_topology, hardware, plan_of, random_candidate, random_workload
from tests.shardopt.report.plans import explained, predicted

PIPELINES = ("base", "sparse_dist", "prefetch_sparse_dist")
MACHINES = (("h100-sxm", 1, 1), ("h100-sxm", 4, 4), ("a100-80gb", 8, 4), ("cpu-gloo", 2, 2))


@settings(max_examples=2)
@given(st.integers(0, 10**6), st.sampled_from(PIPELINES), st.sampled_from(MACHINES))
def test_random_plans_are_explained(
    seed: int, pipeline: str, machine: tuple[str, int, int]
) -> None:
    name, world, local = machine
    workload, topology = random_workload(seed, pipeline), a_topology(world, local)
    problem = Problem(workload, topology, hardware(name))
    space = enumerate_space(workload, topology, problem.hardware.device)
    plans = [
        plan_of(workload, topology, random_candidate(space, topology, random.Random(seed + i)))
        for i in range(2)
    ]
    answer = explained(problem, *(predicted(problem, plan) for plan in plans))
    iteration_ms = answer.iteration_ms
    for change in answer.changes.found:
        assert change.change
        assert change.iteration_ms + change.saving_ms == pytest.approx(iteration_ms)
    for item in answer.sensitivity:
        assert item.iteration_ms - item.change_ms == pytest.approx(iteration_ms)
    assert answer.to_dict()["others"][0]["plan"] == "plan.json"
    text = page(answer, {})
    assert text.rstrip().endswith("</html>")
    for key in workload.keys:
        assert f"<td>{key}</td>" in text
