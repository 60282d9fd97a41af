"""Crossed tasks: one for a seed, of two kinds of tables, with plans that wait and plans that do
not."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lab.cli import main
from lab.tasks import crossed, measure
from lab.tasks.crossed import (
    BALANCED,
    CROSSED,
    CROSSED_IN_PART,
    CROSSED_MODULES,
    RANDOM,
    SAME_RANK,
    draw_crossed_task,
)
from lab.tasks.draw import MAX_TABLES_BYTES, PROFILE, Task, task_topology
from lab.tasks.measure import TaskSetSettings
from lab.tasks.models import CROSSED as CROSSED_FAMILY
from lab.validate.tasks.ablations import FULL, busiest_ms
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.plan_check import check_plan
from predictor.predict import predict
from tests.quick import quick_first

SEEDS = quick_first(1, (0, 2, 1, 3))
HARDWARE = load_hardware(PROFILE)
RANKS = task_topology(HARDWARE, 2, 2)
PER_ID = ("forward_ns_per_lookup", "forward_ns_per_lookup_dim", "backward_ns_per_lookup_dim")


@cache
def task(seed: int, local: int = 2) -> Task:
    return draw_crossed_task(seed, local_world_size=local)


def waiting(made: Task, plan: str) -> float:
    """Share of the predicted iteration that the largest sum of a rank leaves."""
    found = predict(made.workload, RANKS, HARDWARE, made.plans[plan])
    return 1 - busiest_ms(found.graph) / found.iteration_ms


@pytest.mark.parametrize("seed", SEEDS)
def test_the_crossed_plan_waits_and_others_do_not(seed: int) -> None:
    made = task(seed)
    assert waiting(made, CROSSED) >= 0.08
    assert waiting(made, CROSSED_IN_PART) < waiting(made, CROSSED)
    assert abs(waiting(made, BALANCED)) < 0.02
    assert abs(waiting(made, SAME_RANK)) < 0.02


@pytest.mark.parametrize("seed", SEEDS)
def test_times_and_sizes_suit_two_cores(seed: int) -> None:
    made = task(seed)
    plans = list(made.plans.values())
    times = FULL.times(made.workload, RANKS, HARDWARE, plans)
    assert times.argmin() == 0, "the best is the first"
    assert times.min() >= crossed.MIN_MS
    named = [name != RANDOM for name in made.plans]
    assert times[named].max() <= crossed.MAX_MS
    assert made.workload.embedding_bytes <= MAX_TABLES_BYTES
    ids = [t.lookups_per_sample * 2 * made.workload.batch_size for t in made.workload.tables]
    assert max(ids) <= 1.01 * crossed.MAX_IDS
    for name, plan in made.plans.items():
        check_plan(plan, made.workload, where=name)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_seed_says_pipeline_and_modules(seed: int) -> None:
    made = task(seed)
    assert made.name == made.workload.name == f"task-{seed:03d}"
    assert made.workload.train_pipeline == ("base", "sparse_dist")[seed % 2]
    assert len(made.workload.modules) == (1, 1, 2, 2)[seed % 4]
    assert (CROSSED_MODULES in made.plans) == (seed % 4 >= 2)
    assert {CROSSED, CROSSED_IN_PART, SAME_RANK, BALANCED, RANDOM} <= set(made.plans)


def test_kinds_of_tables_are_apart_in_the_crossed_plan() -> None:
    made = task(0)
    for key, plan in made.plans[CROSSED].tables.items():
        assert plan.ranks == ((0,) if key.startswith("f") else (1,))
    by_rank = predict(made.workload, RANKS, HARDWARE, made.plans[CROSSED]).per_rank
    forward, backward = (
        [load.busy_ms[phase] for load in by_rank]
        for phase in ("embedding_forward", "embedding_backward")
    )
    assert forward[0] > 2 * forward[1]
    assert backward[1] > backward[0]
    assert np.sum([forward, backward], axis=0) == pytest.approx(
        np.sum([forward, backward]) / 2, rel=0.1
    )


@pytest.mark.slow
def test_a_seed_is_one_task_and_two_hosts_have_its_model() -> None:
    made = task(0)
    assert task.__wrapped__(0) == made
    apart = task(0, 1)
    assert apart.workload == made.workload
    assert {plan.local_world_size for plan in apart.plans.values()} == {1}


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1; it must be at least 0"):
        task(-1)


def test_a_task_set_sizes_them_by_its_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose ids cost twice as much, crossed plans cross all the same."""
    slower = {name: 2 * getattr(HARDWARE.embedding, name) for name in PER_ID}
    embedding = HARDWARE.embedding.model_copy(update=slower)
    found = HARDWARE.model_copy(update={"embedding": embedding})
    made = SimpleNamespace(made=SimpleNamespace(profile=found))
    monkeypatch.setattr(measure, "load_task_set", lambda folder: made)
    settings = TaskSetSettings(Path("unused"), (0,), models=CROSSED_FAMILY)
    drawn = measure.draw_random_task(settings, 0)
    assert drawn.workload != task(0).workload
    plan = predict(drawn.workload, RANKS, found, drawn.plans[CROSSED])
    assert 1 - busiest_ms(plan.graph) / plan.iteration_ms >= 0.08


def test_planners_are_not_compared_on_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["against", "unused", "--tasks", "0", "--models", "crossed"]) == 2
    assert "plans of their own" in capsys.readouterr().err
