"""Answers that are kept are those of the same question, and a search is asked what was asked."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from predictor.hardware.loader import load_hardware
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from shardopt.api.answer import find_plans
from shardopt.api.cache import ResultCache
from shardopt.api.scenarios import ScenarioSource
from shardopt.cli.app import main
from tests.builders import a_table, a_topology, a_workload
from tests.shardopt.conftest import MODEL


def a_problem(name: str = "h100-sxm", rows: int = 1000, ranks: int = 2) -> Problem:
    tables = a_table("a", rows), a_table("b", 50)
    return Problem(a_workload(*tables), a_topology(ranks), load_hardware(name))


@cache
def a_result() -> Result:
    return solve(a_problem(), Stop(0.001), 0)


ASKED: dict[str, Any] = {
    "problem": a_problem(),
    "stop": Stop(0.001),
    "seed": 0,
    "scenarios": ScenarioSource(),
    "top_k": 3,
}
OTHERS: dict[str, Any] = {
    "seed": {"seed": 1},
    "effort": {"stop": Stop(0.002)},
    "scenarios": {"scenarios": ScenarioSource(draws=4)},
    "aim": {"problem": replace(a_problem(), aim="mean")},
    "plans": {"top_k": 1},
    "rows": {"problem": a_problem(rows=1001)},
    "ranks": {"problem": a_problem(ranks=4)},
    "hardware": {"problem": a_problem("a100-80gb")},
}


@pytest.mark.parametrize("changed", OTHERS)
def test_another_question_is_searched_anew(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[tuple[Any, ...]] = []

    def search(problem: Problem, stop: Stop, seed: int, **options: Any) -> Result:
        searches.append((seed, stop.effort, problem.aim, len(problem.scenarios or ())))
        return a_result()

    monkeypatch.setattr("search.solve.solve", search)
    cache = ResultCache(tmp_path)
    assert not find_plans(cache=cache, **ASKED)[1]
    assert find_plans(cache=cache, **ASKED)[1]
    assert not find_plans(cache=cache, **{**ASKED, **OTHERS[changed]})[1]
    assert len(searches) == 2
    decides = changed in ("seed", "effort", "aim", "scenarios")
    assert (searches[0] != searches[1]) == decides


def test_the_command_searches_with_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    words = ["plan", "model.yaml", "--gpus", "2", "--effort", "0.002", "--seed", "7", "--json"]
    seeds: list[int] = []

    def search(problem: Problem, stop: Stop, seed: int, **options: Any) -> Result:
        seeds.append(seed)
        return solve(problem, stop, seed, **options)

    monkeypatch.setattr("search.solve.solve", search)
    assert main([*words, "-o", "plan.json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert seeds == [7]
    assert shown["seed"] == json.loads(Path("plan.json").read_text())["seed"] == 7
    assert shown["gap"] == pytest.approx(shown["iteration_ms"] / shown["lower_bound_ms"] - 1)
    assert shown["gap"] >= 0
