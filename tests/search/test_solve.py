"""The whole search: what it returns, when it stops, that it repeats, that it finds what fits."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.errors import InfeasibleError, InputError
from predictor.model.memory.ranks import UVM_KERNELS
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.plan_check import find_mean_problem
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, Workload
from predictor.predict import predict
from predictor.units import GIB, MIB
from search.bound.lower_bound import LowerBound
from search.objective import Assignment, Objective
from search.params import SearchParams
from search.problem import PlanInUse, Problem, Result
from search.propose.rescue import rescue
from search.solve import solve
from search.space.enumerate import reduced_space, whole_space
from search.space.option import Space
from search.stages import GIVEN, with_bound, with_proposals
from search.state import State
from search.stop import Stop
from tests.search.problems import (
    H100,
    Ticks,
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    copying,
    hosts,
    objective_of,
    random_problem,
    several_lookups,
    some_plan,
    tools_of,
)

QUICK = 0.01
TABLE_WISE = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))


def several(count: int = 8, **more: str) -> Workload:
    rng = random.Random(count)
    return a_workload(
        *(
            a_table(f"t{i}", int(10 ** rng.uniform(4, 6.5)), 64, rng.choice([1.0, 8.0, 30.0]), 1.05)
            for i in range(count)
        ),
        batch_size=16384,
        **more,
    )


def layout(plan: ShardingPlan) -> dict[str, object]:
    return {k: (t.sharding_type, t.compute_kernel, t.shards) for k, t in plan.tables.items()}


def test_a_result_is_ranked_bounded_and_repeatable_by_predict() -> None:
    problem = a_problem(several().with_batch_size(65_536), hosts(4), copying(H100))  # device-bound
    progress: list[tuple[str, float]] = []
    result = solve(
        problem,
        Stop(effort=QUICK),
        0,
        top_k=4,
        progress=lambda stage, fraction, best, bound: progress.append((stage, fraction)),
    )
    times = [p.iteration_ms for p in result.plans]
    assert times == sorted(times)
    assert len(times) == 4
    assert result.lower_bound_ms <= times[0] <= min(result.baselines.values())
    assert result.stopped_by == "work"
    assert set(result.baseline_plans) == set(result.baselines) >= {"torchrec default", "random"}
    fractions = [f for _, f in progress]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    for ranked in result.plans:
        again = predict(problem.workload, problem.topology, problem.hardware, ranked.plan)
        assert again.iteration_ms == pytest.approx(ranked.iteration_ms, rel=1e-9)
    assert all(p.found_by for p in result.plans)


def contents(plan: ShardingPlan) -> list[list[tuple[object, ...]]]:
    """Return the contents of the ranks, whatever their order."""
    ranks: list[list[tuple[object, ...]]] = [[] for _ in range(plan.world_size)]
    for key, table in plan.tables.items():
        for shard in table.shards:
            ranks[shard.rank].append(
                (key, str(table.sharding_type), str(table.compute_kernel), shard.size)
            )
    return sorted(sorted(r) for r in ranks)


@pytest.mark.slow
def test_top_plans_differ_by_more_than_names_of_ranks() -> None:
    problem = a_problem(several(5), hosts(4, 2))
    plans = solve(problem, Stop(effort=QUICK), 0, top_k=8).plans
    assert len(plans) > 3
    different = [contents(p.plan) for p in plans]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])


@pytest.mark.slow
@pytest.mark.parametrize("world", [(4, 4), (4, 2)])
def test_the_same_seed_gives_the_same_result(world: tuple[int, int]) -> None:
    def run() -> Result:
        return solve(random_problem(6, world=world), Stop(effort=QUICK), 7)

    first, second = run(), run()
    assert [layout(p.plan) for p in first.plans] == [layout(p.plan) for p in second.plans]
    assert first.lower_bound_ms == second.lower_bound_ms
    assert first.evaluations == second.evaluations


@pytest.mark.slow
def test_hash_randomisation_changes_nothing() -> None:
    script = (
        "from tests.search.problems import random_problem\n"
        "from search.solve import solve\n"
        "from search.stop import Stop\n"
        "r = solve(random_problem(5, world=(4, 2)), Stop(effort=0.05), 3)\n"
        "print([(p.plan.tables, p.iteration_ms, p.found_by) for p in r.plans], r.lower_bound_ms)"
    )
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(Path(__file__).parent)])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1


def test_bound_and_proposals_begin_with_every_plan_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A searcher that starts before the bound, or without the plan in use, only finds less."""
    begun: list[State] = []

    def bound(state: State) -> State:
        begun.append(state)
        return with_bound(state)

    def proposals(state: State, searchers: Sequence[str]) -> State:
        begun.append(state)
        return with_proposals(state, searchers)

    monkeypatch.setattr("search.solve.with_bound", bound)
    monkeypatch.setattr("search.solve.with_proposals", proposals)
    problem = a_problem(several(4), hosts(2))
    near = replace(problem, in_use=PlanInUse(some_plan(problem, 0)))
    solve(near, Stop(effort=QUICK), 0, starts=[some_plan(problem, 1)])
    first, second = begun
    assert first.baselines
    assert {"given plan", GIVEN} < {candidate.found_by for candidate in first.incumbents}
    assert second.incumbents == first.incumbents
    assert first.proven_ms == 0 < second.proven_ms


@pytest.mark.parametrize("hardware", ["cpu-gloo", "h100-sxm"])
def test_the_time_limit_is_a_ceiling(hardware: str) -> None:
    """The host sets the pace on the H100: the bound is soon met, and thousands of plans tie."""
    problem = a_problem(several(24), hosts(8), hardware)
    result = solve(problem, Stop(effort=50, time_limit_s=0.3), 0)  # of minutes without it
    assert result.stopped_by == "time" or hardware == "h100-sxm"
    assert 0 < result.lower_bound_ms <= result.best.iteration_ms


@pytest.mark.slow
@pytest.mark.parametrize("ticks", [150, 300])
def test_every_stage_looks_at_the_clock_and_leaves_time_for_the_next(
    ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that counts how often it is looked at: no loop goes on for long after the limit."""
    monkeypatch.setattr("search.side_by_side.usable_cores", lambda: 1)  # who would share the clock
    problem = a_problem(several(24).with_batch_size(65_536), hosts(8))
    stages: list[tuple[str, float]] = []

    def run() -> Result:
        clock = Ticks(1.0)
        stop = Stop(effort=50, time_limit_s=float(ticks), clock=clock)
        stages.clear()
        result = solve(
            problem,
            stop,
            0,
            params=SearchParams(large=1),
            progress=lambda stage, *_: stages.append((stage, clock.now)),
        )
        assert clock.now <= 1.05 * ticks + 5
        return result

    result = run()
    assert result.stopped_by == "time"
    assert layout(result.best.plan) == layout(run().best.plan)
    began = dict(reversed(stages))
    assert began["lower bound"] < began["annealing"] < ticks
    assert 0 < result.lower_bound_ms <= result.best.iteration_ms
    assert result.best.iteration_ms < min(result.baselines.values())


def test_time_that_is_over_before_a_first_plan_is_said() -> None:
    over = Stop(time_limit_s=1.0, started=time.monotonic() - 10.0)
    with pytest.raises(InputError, match="passed before a first plan") as caught:
        solve(a_problem(several(2), hosts(2)), over, 0)
    assert "time_limit" in caught.value.inputs


def test_a_large_problem_out_of_time_has_a_baseline_and_no_bound() -> None:
    problem, stop = a_problem(several(2), hosts(2)), Stop(time_limit_s=1e-6)
    result = solve(problem, stop, 0, params=SearchParams(large=1))
    assert len(result.baselines) == 1
    assert (result.lower_bound_ms, result.stopped_by) == (0.0, "time")
    assert result.gap == float("inf")


def test_garbage_is_collected_rarely_while_a_search_runs() -> None:
    before, within = gc.get_threshold(), set[int]()

    def interrupted(*_: object) -> None:
        within.add(gc.get_threshold()[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        solve(a_problem(several(2), hosts(2)), Stop(effort=QUICK), 0, progress=interrupted)
    assert min(within) > before[0]
    assert gc.get_threshold() == before


def test_a_large_problem_without_a_baseline_gets_its_plans_from_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Ticks(0.0)

    def nothing_fits(*_: object) -> dict[str, Assignment]:
        clock.now = 6.0
        return {}

    monkeypatch.setattr("search.stages.plan_baselines", nothing_fits)
    result = solve(
        a_problem(several(6), hosts(4)),
        Stop(effort=QUICK, time_limit_s=10.0, clock=clock),
        0,
        tolerance=0.0,
        params=SearchParams(large=1),
    )
    assert result.best.found_by == "annealing"


@pytest.mark.slow
def test_time_that_is_not_used_up_changes_nothing() -> None:
    problem = a_problem(several().with_batch_size(65_536), hosts(4), copying(H100))  # device-bound
    free, limited = (
        solve(problem, Stop(effort=QUICK, time_limit_s=limit), 0) for limit in (None, 500.0)
    )
    assert layout(free.best.plan) == layout(limited.best.plan)
    assert limited.stopped_by == "work"


def test_a_gap_that_is_reached_ends_the_search() -> None:
    result = solve(a_problem(several(4), hosts(2)), Stop(effort=QUICK, gap=2.0), 0)
    assert result.stopped_by == "gap"
    assert result.gap <= 2.0


def test_the_least_effort_still_gives_a_plan_and_a_bound() -> None:
    result = solve(a_problem(several(6), hosts(4)), Stop(effort=1e-4), 0)
    assert 0 < result.lower_bound_ms <= result.best.iteration_ms
    assert result.gap >= 0


def test_one_searcher_alone() -> None:
    problem = a_problem(several(4), hosts(2))
    for name in ("cpsat", "optuna"):
        plans = solve(
            problem, Stop(effort=QUICK), 0, searchers=[name], top_k=20, tolerance=0.0
        ).plans
        assert {p.found_by for p in plans} <= {
            name,
            *("torchrec default", "random", "row_wise all"),
            *(f"greedy by {w}" for w in ("size", "dim", "lookups", "size and lookups")),
        }


def test_pinned_ranks_bind_torchrecs_plan_too() -> None:
    """TorchRec's planner knows no ranks: its plan must not come back where it breaks them."""
    tables = [a_table(f"t{i}", constraints=Constraints(ranks=(3,))) for i in range(4)]
    problem = a_problem(a_workload(*tables), hosts(4))
    result = solve(problem, Stop(effort=QUICK), 0, top_k=10)
    for ranked in result.plans:
        assert {s.rank for t in ranked.plan.tables.values() for s in t.shards} == {3}
    assert "torchrec default" not in result.baselines


@pytest.mark.parametrize("kinds", [None, (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)])
def test_means_that_torchrec_would_miscompute_are_not_chosen(
    kinds: tuple[ShardingType, ...] | None,
) -> None:
    """Rows of means are split where those of all tables of the module are: of the types named,
    that is the fastest."""
    mean = a_table("mean", 400, 192, 45.0, pooling="mean")
    wants = Constraints(sharding_types=kinds)
    tables = [replace(mean, constraints=wants), a_table("sum", 20_000, 128, 35.0)]
    problem = a_problem(a_workload(*tables, batch_size=32768), hosts(4, 2), copying(H100))
    result = solve(problem, Stop(effort=0.1), 0, top_k=10, tolerance=0.0)
    for ranked in result.plans:
        types = [ranked.plan.tables[name].sharding_type for name in ("mean", "sum")]
        assert find_mean_problem({"mean": (types[0], "mean"), "sum": (types[1], "sum")}) is None
    if kinds is not None:
        by_row = {ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE}
        assert {t.sharding_type for t in result.best.plan.tables.values()} <= by_row
    assert 0.95 * result.best.iteration_ms < result.lower_bound_ms


def test_a_mean_that_only_fits_by_rows_has_others_beside_it_by_rows() -> None:
    wants = Constraints(sharding_types=(ShardingType.ROW_WISE,))
    tables = [
        a_table("mean", 4_000, 64, pooling="mean", constraints=wants),
        a_table("sum", 4_000, 64),
    ]
    space = whole_space(a_problem(a_workload(*tables), hosts(2)))
    assert all(option.by_row for option in space.every_option)


# --- memory ------------------------------------------------------------------------------------


def packed(seed: int, ranks: int, fill: float, *, per_rank: int = 4) -> Problem:
    """Tables that may not be split, cut so that they fill every rank to the given share."""
    rng = random.Random(seed)
    tables = []
    for rank in range(ranks):
        cuts = np.sort([rng.uniform(0.1, 0.9) for _ in range(per_rank - 1)])
        shares = np.diff([0.0, *cuts, 1.0])
        for i, share in enumerate(shares):
            rows = max(100, int(4_000_000 * share))
            tables.append(a_table(f"t{rank}_{i}", rows, 32, constraints=TABLE_WISE))
    random.Random(seed + 1).shuffle(tables)
    workload = a_workload(*tables, batch_size=256)
    objective, _ = objective_of(a_problem(workload, hosts(ranks)))
    used = dict.fromkeys(range(ranks), 0)
    for table, options in zip(tables, objective.space.options, strict=True):
        used[int(table.name[1:].split("_")[0])] += options[0].memory[0].hbm_bytes
    return a_problem(workload, hosts(ranks, hbm=int(max(used.values()) / fill)))


@pytest.mark.parametrize(
    ("seed", "ranks", "fill"),
    [
        (0, 4, 0.95),
        pytest.param(1, 4, 0.99, marks=pytest.mark.slow),
        (2, 8, 0.97),
        pytest.param(3, 8, 0.99, marks=pytest.mark.slow),
        pytest.param(5, 16, 0.99, marks=pytest.mark.slow),
    ],
)
def test_tight_but_feasible_is_solved(seed: int, ranks: int, fill: float) -> None:
    problem = packed(seed, ranks, fill)
    result = solve(problem, Stop(effort=QUICK), 0)
    assert result.plans
    tools = tools_of(problem)
    for candidate in rescue(tools)[0]:
        assert_valid(tools.objective, candidate.assignment)


def test_memory_in_all_but_not_for_the_shards() -> None:
    """60 % of all memory, but a table fills more than half a rank: one more than there are ranks.
    With host memory allowed there is a plan, although memory looks ample."""
    free = Constraints(sharding_types=(ShardingType.TABLE_WISE,))
    cap = 300 * MIB
    rows = int(0.52 * cap / 4 / 64)
    tables = [a_table(f"t{i}", rows, 64, constraints=free) for i in range(4)]
    topology = Topology(3, 3, (cap,) * 3, (GIB,) * 3)
    problem = a_problem(a_workload(*tables, batch_size=64), topology)
    result = solve(problem, Stop(effort=QUICK), 0)
    kernels = [str(t.compute_kernel) for t in result.best.plan.tables.values()]
    assert any("uvm" in k for k in kernels)

    fused = [replace(t, constraints=replace(free, compute_kernels=("fused",))) for t in tables]
    with pytest.raises(InfeasibleError) as raised:
        solve(replace(problem, workload=a_workload(*fused, batch_size=64)), Stop(effort=QUICK), 0)
    text = str(raised.value)
    assert "no plan fits; in the plan that comes nearest" in text
    assert "is short of" in text
    assert "HBM" in text
    assert "gpus" in raised.value.inputs


@pytest.mark.parametrize(("share", "left_out"), [(0.95, True), (0.7, False)])
def test_host_memory_must_gain_more_than_lookups_may_be_wrong_by(
    share: float, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables fit tightly; with host memory the plan is made to take a share of the time."""
    only = Constraints(sharding_types=(ShardingType.TABLE_WISE,))
    tables = [a_table(f"t{i}", 1_000_000, 64, constraints=only) for i in range(4)]
    workload = a_workload(*tables, batch_size=65_536)
    need = Objective(a_problem(workload, hosts(2)), reduced_space(a_problem(workload, hosts(2))))
    needed = sum(o[0].memory[0].hbm_bytes for o in need.space.options)
    problem = a_problem(workload, hosts(2, hbm=int(needed / 2 / 0.9)))

    def faster(state: State, searchers: Sequence[str]) -> State:
        state = with_proposals(state, searchers)
        kernels = {o.compute_kernel for o in state.tools.objective.space.every_option}
        if not kernels & set(UVM_KERNELS):
            return state
        plans = [replace(c, iteration_ms=share * c.iteration_ms) for c in state.incumbents]
        return replace(state, incumbents=tuple(plans))

    monkeypatch.setattr("search.solve.with_proposals", faster)
    monkeypatch.setattr(LowerBound, "solve", lambda *_: 0.0)
    monkeypatch.setattr(LowerBound, "tighten", lambda *_: 1.0)
    result = solve(problem, Stop(effort=QUICK), 0)
    assert problem.hardware.embedding.rel_error == 0.12
    assert ("not validated" in result.bound_notes[0]) is not left_out


def test_spaces_hold_each_option_once() -> None:
    """Options are compared by identity."""
    space: Space = Objective(*_problem_and_space()).space
    for options in space.options:
        assert len({id(o) for o in options}) == len({(o.label, o.sizes) for o in options})


def _problem_and_space() -> tuple[Problem, Space]:
    objective, _ = objective_of(a_problem(several(3), hosts(4, 2)))
    return objective.problem, objective.space


@pytest.mark.slow
def test_the_hot_shard_of_a_row_split_is_seen() -> None:
    """Ids in order of frequency make the first row shard the hot one, which sets the time."""
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE, ShardingType.ROW_WISE))
    chosen = {}
    for order in ("random", "frequency"):
        table = a_table("t", 4_000_000, 128, 40.0, 1.2, order, constraints=wants)
        problem = a_problem(a_workload(table, batch_size=16384), hosts(4), copying(H100, 10.0))
        best = solve(problem, Stop(effort=QUICK), 0).best
        chosen[order] = best.plan.tables["t"].sharding_type, best.iteration_ms
    assert chosen["random"][0] is ShardingType.ROW_WISE
    assert chosen["frequency"][1] > chosen["random"][1] * 1.05


@pytest.mark.slow
def test_the_bound_is_refined_in_full_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work: list[float] = []

    def tighten(self: LowerBound, steps: int, upper_ms: float, *_: object) -> float:
        work.append(self._params.branching)
        return self.solve(steps, upper_ms)

    monkeypatch.setattr(LowerBound, "tighten", tighten)
    for prove in (False, True):
        solve(replace(several_lookups(1, 4), scenarios=()), Stop(effort=0.01), 0, prove=prove)
    assert work[1] > 5 * work[0]
