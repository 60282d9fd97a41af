"""The experiment on selection: wrong costs are wrong everywhere, and the table is whole."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from predictor.cost.errors import CostErrors, ErrorSize, known_errors
from predictor.hardware.loader import load_hardware
from search.objective import Objective
from search.problem import Problem
from search.space.build import reduced_space
from shardopt.bench.tasks.draw import task_topology
from tools import selection_effect
from tools.selection_effect import BothErrors, WrongProblem, draw_model

CPU = load_hardware("cpu-gloo")
RANKS = task_topology(CPU, 2, 2)


def test_models_are_drawn_by_seed() -> None:
    assert draw_model(3, 5, 512) == draw_model(3, 5, 512) != draw_model(4, 5, 512)
    assert len(draw_model(0, 7, 512).tables) == 7


def test_a_wrong_problem_scores_plans_and_neighbours_alike() -> None:
    problem = Problem(draw_model(0, 5, 512), RANKS, CPU)
    sizes = known_errors(CPU, RANKS)
    wrong = WrongProblem(problem.workload, RANKS, CPU, CostErrors(sizes, 1, 3))
    objective = Objective(wrong, reduced_space(problem))
    plan = tuple(
        (next(o for o in options if o.sharding_type == "table_wise"), (i % 2,))
        for i, options in enumerate(objective.space.options)
    )
    changes = [{0: (plan[0][0], (1,))}, {1: (plan[1][0], (0,)), 2: (plan[2][0], (1,))}]
    changed = [tuple(c.get(t, choice) for t, choice in enumerate(plan)) for c in changes]
    assert objective.score_neighbours(plan, changes) == pytest.approx(objective.score(changed))
    right = Objective(problem, objective.space).score([plan])
    assert objective.score([plan]) != pytest.approx(right, rel=1e-3)
    none = CostErrors({name: ErrorSize(0.0, 0.0) for name in sizes}, 4, 0)
    drawn = objective.score_draws([plan], none)[0]
    assert drawn == pytest.approx(np.repeat(objective.score([plan]), 4))


def test_errors_on_top_of_errors_are_products() -> None:
    sizes = known_errors(CPU, RANKS)
    one, draws = CostErrors(sizes, 1, 1), CostErrors(sizes, 6, 2)
    both = BothErrors(one, draws)
    assert both.shared("gemm") == pytest.approx(one.shared("gemm") * draws.shared("gemm"))
    assert both.op("gemm", "x") == pytest.approx(one.op("gemm", "x") * draws.op("gemm", "x"))


@pytest.mark.slow
def test_the_table_has_a_line_for_both_experiments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--tables 4 --models 1 --worlds 1 --effort 0.01"
    monkeypatch.setattr(sys, "argv", ["tool", *words.split()])
    selection_effect.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["around", "behind"]
    assert all(line.count("|") == 9 for line in lines)
