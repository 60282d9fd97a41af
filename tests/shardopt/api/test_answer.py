"""The answer: TorchRec's plan is kept unless another gains something for certain."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest

from predictor.model.workload import Workload
from predictor.predict import Prediction
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import ExpectedGain
from search.params import SearchParams
from search.problem import RankedPlan, Result
from search.solve import solve
from search.stop import Stop
from shardopt.api import answer
from shardopt.api.setting import Setting
from tests.search.problems import H100, Ticks, a_table, a_workload, hosts

TOPOLOGY = hosts(4)


def setting() -> Setting:
    workload: Workload = a_workload(*(a_table(f"t{i}", 10_000, 64, 5.0 + i) for i in range(4)))
    return Setting(workload, TOPOLOGY, TOPOLOGY, H100, "h100-sxm", "default")


@cache
def searched() -> Result:
    return solve(replace(setting().problem(), scenarios=()), Stop(0.002), 0)


@pytest.mark.parametrize(
    ("nominal", "interval", "verdict"),
    [
        (0.10, (0.006, 0.20), "use"),
        (0.01, (0.006, 0.02), "use"),
        (0.10, (0.004, 0.20), "measure"),
        (0.006, (-0.10, 0.08), "measure"),
        (0.004, (0.004, 0.08), "keep"),
        (-0.004, (-0.01, 0.002), "keep"),
    ],
)
def test_one_threshold_decides(
    nominal: float, interval: tuple[float, float], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain = ExpectedGain(TORCHREC, sum(interval) / 2, interval, nominal, 128)
    assert gain.verdict == verdict
    monkeypatch.setattr(answer, "gain_over_baseline", lambda problem, result: gain)
    case, result = setting(), searched()
    torchrec_plan = result.baseline_plans[TORCHREC]
    rival = next(plan for name, plan in result.baseline_plans.items() if plan != torchrec_plan)
    ours = RankedPlan(rival, result.best.iteration_ms, "ours")
    combined = answer.answer_of(case, Result(**{**vars(result), "plans": (ours,)}), {})
    assert (combined.result.best.plan == torchrec_plan) == (verdict == "keep")
    assert combined.best.iteration_ms == case.predict(combined.result.best.plan).iteration_ms
    assert len(combined.predictions) == len(combined.result.plans) == 1
    assert combined.verdict.split()[0] != "Use" or verdict == "use"


def test_a_plan_of_torchrec_that_breaks_constraints_is_never_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gain = ExpectedGain(TORCHREC, 0.0, (0.0, 0.0), 0.0, 128)
    monkeypatch.setattr(answer, "gain_over_baseline", lambda problem, result: gain)
    monkeypatch.setattr(answer, "broken", lambda plan, setting: ["it breaks a constraint"])
    case = setting()
    result = solve(replace(case.problem(), scenarios=()), Stop(0.02), 0)
    combined = answer.answer_of(case, result, {})
    assert combined.result.best == result.best
    assert combined.verdict.split()[0] == "Use"


@pytest.mark.parametrize("given", [False, True])
def test_the_fastest_plan_comes_before_torchrecs_where_only_it_gains(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says that the preferred plan ties with it."""
    sure = ExpectedGain(TORCHREC, 0.02, (0.01, 0.03), 0.02, 128)
    nothing = ExpectedGain(TORCHREC, 0.0, (0.0, 0.0), 0.0, 128)
    monkeypatch.setattr(answer, "gain_over_baseline", lambda problem, result: nothing)
    monkeypatch.setattr(answer, "expected_gain", lambda *_: sure)
    case, result = setting(), searched()
    fastest = result.best
    lean = RankedPlan(result.baseline_plans["random"], 1.01 * fastest.iteration_ms, "lean")
    tied = replace(result, plans=(lean,), fastest=fastest)
    combined = answer.answer_of(case, tied, {}, ties_given=given)
    torchrecs = result.baseline_plans[TORCHREC]
    assert combined.result.best.plan == (torchrecs if given else fastest.plan)
    assert combined.gain == (nothing if given else sure)
    assert (combined.verdict.split()[0] == "Use") is not given
    assert combined.best.iteration_ms == case.predict(combined.result.best.plan).iteration_ms


@pytest.mark.parametrize("mean", [0.3874, 0.1049, 0.0204, 0.0052])
def test_a_gain_lies_in_the_interval_that_is_shown(
    mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gain = ExpectedGain(TORCHREC, mean, (mean - 0.0002, mean + 0.0002), mean, 128)
    monkeypatch.setattr(answer, "gain_over_baseline", lambda problem, result: gain)
    verdict = answer.answer_of(setting(), searched(), {}).verdict
    numbers = re.findall(r"[+-]?\d+\.\d+|[+-]?\d+(?= %)", verdict)
    value, low, high = map(float, numbers[:3])
    assert low <= value <= high


def test_no_step_follows_that_would_end_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction takes ten seconds, and each further step as long as two."""
    clock, case = Ticks(0.0), setting()
    prediction = case.predict(searched().best.plan)

    def ten_seconds_later(*_: object) -> Prediction:
        clock.now += 10.0
        return prediction

    steps = ("gain_over_baseline", "stakes", "deciding_constants", "network_part")
    calls = {name: Mock(return_value=() if name.startswith("d") else None) for name in steps}
    for name, call in calls.items():
        monkeypatch.setattr(answer, name, call)
    monkeypatch.setattr(Setting, "predict", ten_seconds_later)
    for left_s, expected in ((15.0, False), (25.0, True)):
        clock.now = 0.0
        result = replace(searched(), plans=searched().plans[:1])
        answer.answer_of(case, result, {}, Stop(time_limit_s=10.0 + left_s, clock=clock))
        assert [call.called for call in calls.values()] == [expected] * len(steps)


@pytest.mark.parametrize(("left_s", "searches"), [(29.0, False), (31.0, True)])
def test_constraints_of_a_large_model_are_priced_where_there_is_time_for_a_search(
    left_s: float, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    price = Mock(return_value=None)
    monkeypatch.setattr(answer, "price_constraints", price)
    monkeypatch.setattr(SearchParams, "large", 1)
    result = replace(searched(), search_seconds=100.0)
    stop = Stop(time_limit_s=left_s, clock=Ticks(0.0))
    answer.with_constraint_costs(answer.answer_of(setting(), result, {}), stop)
    assert price.called == searches
