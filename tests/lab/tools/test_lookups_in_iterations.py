"""The clock around lookups adds up what it times; predictions are split into the same parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.tasks.task_set import load_task_set
from lab.tools.lookups_in_iterations import PARTS, Clock, predicted_parts
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan_check import match_plan

TASKS = Path(__file__).parents[3] / "configs" / "bench" / "against-torchrec" / "2026-11-21"


def test_forward_and_backward_are_timed_apart() -> None:
    torch = pytest.importorskip("torch")
    clock = Clock({})
    clock.start()
    weight = torch.ones(200, 200, requires_grad=True)
    out = clock.wrap(lambda w: w @ w)(weight)
    forward = dict(clock.spent)
    out.sum().backward()
    assert forward["forward"] > 0 == forward["backward"]
    assert clock.spent["forward"] == forward["forward"]
    assert clock.spent["backward"] > 0


def test_parts_of_a_prediction_add_up_to_it() -> None:
    tasks = load_task_set(TASKS)
    task = tasks.tasks[0]
    plan = next(iter(task.plans.values()))
    parts = predicted_parts(tasks, task, plan)
    scorer = PlanScorer(task.workload, tasks.ranks, tasks.made.profile)
    whole = scorer.score([match_plan(task.workload, tasks.ranks, plan)])[0]
    assert set(parts) == set(PARTS)
    assert all((part > 0).all() for part in parts.values())
    assert np.sum(list(parts.values()), axis=0) == pytest.approx([whole, whole])
