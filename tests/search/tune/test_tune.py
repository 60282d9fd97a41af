"""The study: what it finds, what it rules out, that it repeats, that it goes on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from predictor.errors import InfeasibleError, InputError
from predictor.model.workload import Constraints
from predictor.predict import predict
from predictor.units import GIB, MIB
from search.solve import solve
from search.space.enumerate import whole_space
from search.stop import Stop
from search.tune import tune
from search.tune.goals import GOALS, covers, values_of
from search.tune.knobs import PARAMETERS, Case, changes, grid_of, turned
from search.tune.study import new_study
from search.tune.trial import (
    WORTH,
    pack_plan,
    root_bound,
    try_setting,
    unpack_plan,
)
from search.tune.tune import Budget, Tuning
from tests.quick import quick_first
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    every_plan,
    hosts,
    objective_of,
)
from tests.search.problems import random_plan as any_plan
from tests.search.tune.worker import a_tuning

BATCHES = (256, 512, 1024, 2048, 4096, 8192)
LOOPS = ("base", "sparse_dist")


def a_study(
    case: Case,
    knobs: dict[str, Any],
    goals: Sequence[str] = ("time",),
    trials: int = 6,
    seed: int = 0,
) -> Tuning:
    grid, chosen = grid_of(case, knobs), [GOALS[name] for name in goals]
    budget = Budget(trials, effort=0.002, seed=seed)
    return Tuning(case, grid, chosen, budget, new_study(grid, chosen, seed, {}))


def small(**more: Any) -> Case:
    tables = (a_table("t0", alpha=1.05), a_table("t1", 3000, 32))
    return Case(a_workload(*tables, **more), hosts(2), H100)


@pytest.mark.slow
def test_all_settings_are_tried_once_and_the_first_is_the_case_as_given() -> None:
    tuning = a_study(small(), {"batch_size": BATCHES, "pipeline": LOOPS}, trials=99)
    result = tuning.run()
    assert result.stopped_by == "exhausted"
    assert len({tuple(t.setting.items()) for t in result.trials}) == len(result.trials) == 12
    assert changes(tuning.case, result.trials[0].setting) == {}
    searched = [t.values for t in result.trials if t.values is not None]
    assert result.best.values == min(searched)
    assert result.best.setting["batch_size"] == 8192  # launches are shared by more samples


@pytest.mark.slow
def test_the_same_seed_tries_the_same_settings_with_the_same_outcome() -> None:
    knobs = {"batch_size": None, "qcomm": None, "bucket": None}
    first, again, of_seed_4 = (a_study(small(), knobs, trials=4, seed=s).run() for s in (3, 3, 4))
    assert first == again
    assert [t.setting for t in first.trials] != [t.setting for t in of_seed_4.trials]


@pytest.mark.slow
def test_a_study_on_a_journal_goes_on_as_if_it_had_not_ended(tmp_path: Path) -> None:
    broken, unbroken = str(tmp_path / "a.journal"), str(tmp_path / "b.log")
    for trials in (2, 5):
        result = a_tuning(broken, "s", trials).run()
    tuning = a_tuning(unbroken, "s", 5)
    assert result == tuning.run()
    assert len(result.trials) == 5
    study = new_study(tuning.grid, tuning.goals, 0, {})
    assert result == Tuning(tuning.case, tuning.grid, tuning.goals, tuning.budget, study).run()


# --- what the bound rules out ------------------------------------------------------------------


def tiny(seed: int) -> Case:
    """Few enough plans to try them all, under costs of many kinds."""
    rng = random.Random(seed)
    tables = tuple(
        a_table(
            f"t{i}",
            int(10 ** rng.uniform(2, 5.5)),
            rng.choice([32, 64]),
            rng.choice([1.0, 20.0]),
            rng.choice([None, 1.1]),
            constraints=Constraints(compute_kernels=rng.choice([None, ("fused", "dense")])),
        )
        for i in range(2)
    )
    cap = rng.choice([80 * GIB, 2 * GIB, 160 * MIB])
    return Case(
        a_workload(*tables, batch_size=1024), hosts(2, hbm=cap), H100, rng.choice([0, 0.15])
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick_first(1, range(6)))
def test_no_plan_of_a_setting_that_is_ruled_out_beats_the_incumbent(seed: int) -> None:
    goals = [GOALS[n] for n in ([["time"], ["time", "memory"], ["gpu_hours"]][seed % 3])]
    case = tiny(seed)
    grid = grid_of(case, {"batch_size": (128, 1024, 4096), "pipeline": ("base", "sparse_dist")})
    budget = Budget(99, effort=0.002)
    try:
        result = Tuning(case, grid, goals, budget, new_study(grid, goals, 0, {})).run()
    except InfeasibleError:
        pytest.skip("nothing fits")
    measured = [t.values for t in result.trials if t.values is not None]
    for trial in result.trials:
        problem = turned(case, trial.setting).problem()
        if trial.state == "infeasible":
            objective, _ = objective_of(problem, whole_space(problem))
            assert not any(True for _ in every_plan(objective))
            continue
        for values in every_value(problem, goals):
            assert trial.bound is not None
            assert covers(tuple(b * (1 - 1e-9) for b in trial.bound), values)
            if trial.state == "ruled out":
                nearly = tuple(x * (1 + WORTH) * (1 + 1e-9) for x in values)
                assert any(covers(v, nearly) for v in measured)


def every_value(problem: Any, goals: Sequence[Any]) -> list[tuple[float, ...]]:
    """Return the values of all plans of the whole space that fit."""
    objective, _ = objective_of(problem, whole_space(problem))
    plans = list(every_plan(objective))
    times = objective.score(plans).tolist() if plans else []
    fullest = [float(objective.memory(plan)[0].max()) for plan in plans]
    pairs = zip(times, fullest, strict=True)
    return [values_of(goals, problem, ms, size) for ms, size in pairs]


def test_settings_are_ruled_out_without_a_search() -> None:
    result = a_study(small(batch_size=8192), {"batch_size": (16, 32, 8192)}, trials=9).run()
    states = {t.setting["batch_size"]: t.state for t in result.trials}
    assert states == {8192: "searched", 16: "ruled out", 32: "ruled out"}


def test_settings_that_the_prediction_cannot_tell_apart_are_searched_once() -> None:
    tuning = a_study(small(), {"qcomm": ("bf16", "fp16")}, trials=9)
    result = tuning.run()
    assert len({t.values for t in result.trials}) == 1
    assert len(result.trials) == 4
    assert [t.evaluations > 0 for t in result.trials] == [True, False, False, False]
    assert {t.state for t in result.trials} == {"searched"}
    problems = [turned(tuning.case, t.setting).problem() for t in result.trials]
    plan = result.best.plan
    assert plan is not None
    times = {predict(p.workload, p.topology, p.hardware, plan).iteration_ms for p in problems}
    assert len(times) == 1


def test_a_bound_that_known_values_reach_rules_out() -> None:
    problem, goals = small().problem(), [GOALS["time"]]
    bound_ms, _ = root_bound(problem)
    at = values_of(goals, problem, bound_ms, 0.0)
    stop = Stop(effort=0.002)
    ruled = try_setting(problem, goals, [at], [], stop, 0, ())
    assert ruled.state == "ruled out"
    assert ruled.bound is not None
    assert ruled.bound[0] <= at[0], "it ends as soon as it rules out"
    near, above = (
        try_setting(problem, goals, [(at[0] * f,)], [], stop, 0, ()) for f in (1.009, 1.011)
    )
    assert (near.state, above.state) == ("ruled out", "searched")
    assert above.values is not None
    assert above.values[0] >= at[0]


# --- plans ---------------------------------------------------------------------------------------


def test_a_plan_is_carried_over_where_it_fits() -> None:
    case = small()
    objective, _ = objective_of(case.problem())
    rng = random.Random(0)
    plan = next(p for p in iter(lambda: any_plan(objective, rng), None) if objective.fits(p))
    of_99_samples, _ = objective_of(
        replace(case, workload=case.workload.with_batch_size(99)).problem()
    )
    again = of_99_samples.assignment_of(objective.sharding_plan(plan))
    assert again is not None
    assert [ranks for _, ranks in again] == [ranks for _, ranks in plan]
    assert [o.label for o, _ in again] == [o.label for o, _ in plan]
    more, _ = objective_of(replace(case, installed=hosts(4)).problem())
    assert more.assignment_of(objective.sharding_plan(plan)) is None
    cap = int(objective.memory(plan)[0].max()) - 1
    full, _ = objective_of(a_problem(case.workload, hosts(2, hbm=cap)))
    assert full.assignment_of(objective.sharding_plan(plan)) is None


def test_a_search_is_no_worse_than_the_plan_it_starts_from() -> None:
    problem = small().problem()
    good = solve(problem, Stop(effort=0.05), 0).best
    least = Stop(effort=1e-4)
    again = solve(problem, least, 1, searchers=(), starts=[good.plan])
    assert again.best.iteration_ms <= good.iteration_ms * (1 + 1e-9)


@pytest.mark.slow
def test_the_last_search_is_no_worse_than_the_trial() -> None:
    tuning = a_study(small(), {"batch_size": None})
    result = tuning.run()
    (member,), interrupted = tuning.finish(result)
    assert (interrupted, member.values <= (result.best.values or ())) == (False, True)


@pytest.mark.slow
def test_what_each_change_is_worth_alone() -> None:
    tuning = a_study(small(), {"batch_size": (8192,), "bucket": (50.0,), "hosts": (2,)}, trials=1)
    members, _ = tuning.finish(tuning.run())
    assert all(member.result.evaluations > 0 for member in members)
    worth = tuning.undone(members[0])
    assert set(worth) == {"batch_size", "bucket"}  # two hosts' plan is none for one
    assert worth["batch_size"] > 0
    assert worth["bucket"] == pytest.approx(0.0, abs=1e-12)  # all gradients fit into one


def test_a_change_that_gains_nothing_is_not_proposed() -> None:
    """All gradients fit into either bucket, while more samples share the launches."""
    case = small()
    buckets = PARAMETERS["bucket"].read(case), 50.0
    tuning = a_study(case, {"batch_size": (case.workload.batch_size, 8192), "bucket": buckets})
    result = tuning.run()
    both = replace(result.best, setting={"batch_size": 8192, "bucket": 50.0})
    (member,), _ = tuning.finish(replace(result, front=(both,)))
    assert changes(case, member.trial.setting) == {"batch_size": 8192}
    assert result.best.values is not None
    assert member.values[0] <= result.best.values[0] * (1 + 1e-9)


@pytest.mark.slow
def test_a_front_trades_memory_for_time() -> None:
    tables = tuple(a_table(f"t{i}", 400_000, 64, 8.0) for i in range(4))
    case = Case(a_workload(*tables), hosts(2, hbm=4 * GIB), H100)
    tuning = a_study(case, {"hbm": (0.9, 1.0), "batch_size": (512, 4096)}, ("time", "memory"))
    members, _ = tuning.finish(tuning.run())
    assert all(member.result.evaluations > 0 for member in members)
    assert len(members) > 1
    values = [m.values for m in members]
    assert values == sorted(values)
    assert [v[1] for v in values] == sorted((v[1] for v in values), reverse=True)


def test_a_plan_survives_being_packed() -> None:
    problem = small().problem()
    plan = solve(problem, Stop(effort=0.002), 0, searchers=()).best.plan
    packed = pack_plan(plan)
    assert unpack_plan(packed).tables == plan.tables
    assert pack_plan(unpack_plan(packed)) == packed


# --- bad input, interruptions --------------------------------------------------------------------


def test_nothing_fits_under_any_setting() -> None:
    case = replace(small(), installed=hosts(2, hbm=300 * MIB, ddr=1))
    big = replace(case, workload=a_workload(a_table("big", 40_000_000)))
    with pytest.raises(InfeasibleError, match="trial 0"):
        a_study(big, {"batch_size": (16, 32)}).run()


def test_a_study_of_something_else_is_refused_with_what_differs(tmp_path: Path) -> None:
    there = a_tuning(str(tmp_path / "a.journal"), "s", 2)
    there.run()
    grid = grid_of(there.case, {"batch_size": (16, 32)})
    with pytest.raises(InputError) as error:
        new_study(grid, there.goals, 7, {}, name="s", shared=there.shared)
    message = str(error.value)
    assert "[1024, 2048, 4096, 8192, 16384] there, [16, 32] here" in message
    assert "seed is 0 there, 7 here" in message
    assert "objectives" not in message


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_known_and_leaves_the_trial_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning, count = a_tuning(str(tmp_path / "a.journal"), "s", 3), 0
    real = tune.try_setting

    def interrupted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(tune, "try_setting", interrupted)
    result = tuning.run()
    assert result.stopped_by == "interrupted"
    assert [t.state for t in result.trials][1:] == ["failed"]
    assert result.best.plan is not None
    members, stopped = tuning.finish(result)
    assert all(member.result.evaluations > 0 for member in members)
    assert stopped
    assert members[0].result.best.plan == result.best.plan
    assert members[0].result.stopped_by == "interrupted"
    again = a_tuning(str(tmp_path / "a.journal"), "s", 3).run()
    assert again.stopped_by == "trials"
    assert [t.state == "failed" for t in again.trials] == [n == 1 for n in range(4)]
    uninterrupted = a_tuning(str(tmp_path / "b.journal"), "s", 3).run()
    tried = [t for t in again.trials if t.state != "failed"]
    assert list(uninterrupted.trials) == [replace(t, number=n) for n, t in enumerate(tried)]


@pytest.mark.slow
def test_a_trial_that_counted_as_dead_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker was held up so long that another one failed it."""
    tuning, real, count = a_tuning(f"sqlite:///{tmp_path}/a.db", "s", 3), tune.try_setting, 0

    def held_up(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            running = tuning.study.get_trials()[-1]
            assert tuning.shared is not None
            tuning.shared.storage.set_trial_state_values(running._trial_id, TrialState.FAIL)
        return real(*arguments)

    monkeypatch.setattr(tune, "try_setting", held_up)
    result = tuning.run()
    assert result.stopped_by == "trials"
    assert [t.state == "failed" for t in result.trials] == [False, True, False, False]
    assert result.trials[2].setting == result.trials[1].setting
