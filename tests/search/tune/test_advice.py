"""Advice: what helps most comes first, and its times are those of a prediction."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from predictor.errors import InputError
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.topology import NetworkLevel
from predictor.model.workload import Constraints, QComm, Table
from predictor.predict import predict
from predictor.units import GIB
from search.prefer import TOLERANCE
from search.tune.advice import EACH_VALUE, JOINED, Advice, Advised, Advisor, _one_a_name
from search.tune.knobs import Case, Step
from tests.builders import cut, plan_of, table_wise
from tests.quick import quick_only
from tests.search.problems import (
    CPU,
    H100,
    Ticks,
    a_table,
    a_workload,
    copying,
    hosts,
    some_plan,
)


def planned(case: Case) -> tuple[ShardingPlan, float]:
    problem = case.problem()
    plan = some_plan(problem, 0)
    prediction = predict(problem.workload, problem.topology, problem.hardware, plan)
    return plan, prediction.iteration_ms


def sequences(profile: HardwareProfile) -> Case:
    row_wise = Constraints((ShardingType.ROW_WISE,), ("fused",))
    hot = a_table("t_item", 2_000_000, 128, 100.0, 1.3, pooling="none", module="ec")
    hot = replace(hot, constraints=row_wise)
    workload = a_workload(hot, a_table("t_user", 500_000, 64, 1.0), batch_size=2048)
    workload = replace(workload, train_pipeline="sparse_dist", qcomm=QComm("bf16", "bf16"))
    return Case(workload, hosts(4, 2), profile)


def check_times(case: Case, advised: Advised, plan: ShardingPlan) -> None:
    gains = [advice.gain for advice in advised.advice]
    assert gains == sorted(gains, reverse=True)
    assert advised.together is None or advised.together.gain > gains[0] + TOLERANCE
    for priced in (*advised.advice, *filter(None, [advised.together])):
        problem = priced.case.problem()
        again = predict(problem.workload, problem.topology, problem.hardware, priced.plan)
        assert priced.iteration_ms == pytest.approx(again.iteration_ms)
        per_sample = priced.iteration_ms / problem.workload.batch_size
        assert priced.gain > 0
        assert priced.same_plan == (priced.plan == plan)
        before = predict(
            case.problem().workload, case.problem().topology, case.hardware, plan
        ).iteration_ms
        assert priced.gain == pytest.approx(1 - per_sample / (before / case.workload.batch_size))


def test_dedup_of_a_hot_sequence_is_the_first_advice() -> None:
    case = sequences(copying(H100))
    plan, ms = planned(case)
    advised = Advisor(case, plan, ms, effort=0.1).advise()
    (step,) = advised.advice[0].steps
    assert (step.name, step.target, step.value) == ("index_dedup", "t_item", True)
    assert advised.advice[0].gain > 0.1
    check_times(case, advised, plan)
    advisor = Advisor(case, plan, ms)
    assert advisor.choose(advised, [1]) is advised.advice[0]
    two = advisor.choose(advised, [1, 2])
    assert {step.name for step in two.steps} == {a.steps[0].name for a in advised.advice[:2]}
    with pytest.raises(InputError, match="no advice 99"):
        advisor.choose(advised, [99])
    done = replace(case, workload=advised.advice[0].case.workload)
    assert "index_dedup" not in {a.steps[0].name for a in Advisor(done, plan, ms).advise().advice}


def test_the_best_value_of_every_setting_is_listed_once() -> None:
    tables = (
        a_table(f"t{i}", 2_000_000, 128, 50.0, 1.3, pooling="none", module="ec") for i in range(2)
    )
    case = Case(a_workload(*tables, batch_size=2048), hosts(4, 2), copying(H100))
    plan, ms = planned(case)
    advisor = Advisor(case, plan, ms, effort=0.0)
    gains: dict[str, list[float]] = {}
    for step in advisor.steps():
        priced = advisor.found([step], plan)
        gains.setdefault(step.name, []).append(priced.gain if priced else 0.0)
    listed = {a.steps[0].name: a.gain for a in advisor.advise().advice}
    assert sum(gain > TOLERANCE for gain in gains["index_dedup"]) > 1
    for name in gains.keys() - EACH_VALUE:
        best = max(gains[name])
        assert listed.get(name, 0.0) == pytest.approx(
            best if best > TOLERANCE else 0.0, abs=2 * TOLERANCE
        )


def test_a_plan_for_a_setting_has_fewer_exchanges_where_that_is_faster() -> None:
    """Launches of the second exchange take as long as those of the first, whatever is looked up."""
    tables = [a_table(f"t{i}", 20_000_000, 64, 1.0) for i in range(4)]
    case = Case(a_workload(*tables, batch_size=64), hosts(2), H100)
    problem = case.problem()
    columns = [cut(table, ShardingType.COLUMN_WISE, [i % 2]) for i, table in enumerate(tables)]
    rows = [table_wise(table, i % 2) for i, table in enumerate(tables)]
    plan = plan_of(case.workload, problem.topology, [*rows[:2], *columns[2:]])
    ms = predict(problem.workload, problem.topology, problem.hardware, plan).iteration_ms
    best = Advisor(case, plan, ms, effort=0.1).advise().advice[0]
    assert not best.same_plan
    assert len({table.sharding_type for table in best.plan.tables.values()}) == 1


@pytest.mark.parametrize("seed", quick_only((1, 2), range(6)))
def test_advice_on_any_model(seed: int) -> None:
    rng = random.Random(seed)

    def table(i: int) -> Table:
        pooled = rng.random() < 0.6
        return a_table(
            f"t{i}",
            int(10 ** rng.uniform(1, 6)),
            rng.choice([8, 64, 128]),
            rng.uniform(0.5, 40),
            rng.choice([None, 0.8, 1.2]),
            rng.choice(["random", "frequency"]),
            pooling="sum" if pooled else "none",
            module="ebc" if pooled else "ec",
            data_type=rng.choice(["fp32", "fp16"]),
            index_dedup=not pooled and rng.random() < 0.5,
        )

    workload = a_workload(
        *(table(i) for i in range(rng.randint(1, 5))), batch_size=2 ** rng.randint(0, 12)
    )
    pipeline = rng.choice(["base", "sparse_dist"])
    qcomm = QComm(rng.choice(["fp32", "bf16"]), rng.choice(["fp32", "fp16"]))
    world = rng.choice([1, 2, 4])
    hardware = rng.choice([H100, CPU])
    case = Case(
        replace(workload, train_pipeline=pipeline, qcomm=qcomm),
        hosts(world, min(world, 8)),
        hardware,
    )
    plan, ms = planned(case)
    first, again = (Advisor(case, plan, ms, effort=0.1).advise() for _ in range(2))
    assert [a.iteration_ms for a in first.advice] == [a.iteration_ms for a in again.advice]
    check_times(case, first, plan)
    for machine in first.machines:
        assert machine.iteration_ms > 0


def test_a_faster_network_and_more_hosts_have_the_links_of_the_cluster() -> None:
    """Links of 1 Gbit/s a rank set the pace; twice that rate halves the time."""
    slow = NetworkLevel.of("spine", ["a", "b"], 2, gbit_s=1.0)
    installed = replace(hosts(4, 2), network=(slow,))
    tables = [a_table(f"t{i}", 200_000, 64, 20.0) for i in range(4)]
    case = Case(a_workload(*tables, batch_size=8192), installed, H100)
    plan = plan_of(case.workload, installed, [table_wise(t, i) for i, t in enumerate(tables)])
    ms = predict(case.workload, installed, case.hardware, plan).iteration_ms
    machines = {(m.name, m.value): m for m in Advisor(case, plan, ms)._machines()}
    assert 0.5 < machines["network", 2.0].iteration_ms / ms < 0.6
    assert machines["gpus", 8].iteration_ms > 0.8 * ms
    assert machines["gpus", 2].iteration_ms < 0.1 * ms


def test_the_list_of_advice_does_not_depend_on_the_time_left() -> None:
    case = sequences(copying(H100))
    plan, ms = planned(case)
    in_time = Advisor(case, plan, ms, effort=0.1).advise()
    out_of_time = Advisor(case, plan, ms, effort=0.1, left_s=lambda: 0.0).advise()

    def listed(advised: Advised) -> list[tuple[list[str], float, ShardingPlan]]:
        return [([step.label for step in a.steps], a.gain, a.plan) for a in advised.advice]

    assert listed(out_of_time) == listed(in_time)
    assert (out_of_time.tried, out_of_time.not_tried) == (in_time.tried, in_time.not_tried)


def test_no_step_is_begun_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes ten seconds; with twenty-five left, there is time for two."""
    case = sequences(copying(H100))
    plan, ms = planned(case)
    clock = Ticks(10.0)

    def ten_seconds_later(*_: object) -> float:
        clock()
        return 2 * ms

    monkeypatch.setattr("search.tune.advice.ALWAYS_PRICED", 0)
    monkeypatch.setattr("search.tune.advice.usable_cores", lambda: 1)
    monkeypatch.setattr("search.side_by_side.usable_cores", lambda: 1)  # who would share the clock
    monkeypatch.setattr("search.tune.advice._time", ten_seconds_later)
    advised = Advisor(case, plan, ms, left_s=lambda: 25.0 - clock.now).advise()
    assert (advised.tried, clock.now) == (2, 20.0)


def test_without_effort_steps_are_priced_at_the_plan_alone() -> None:
    case = sequences(copying(H100))
    plan, ms = planned(case)
    advised = Advisor(case, plan, ms, effort=0.0).advise()
    assert advised.advice
    assert all(advice.same_plan for advice in advised.advice)
    check_times(case, advised, plan)


def test_settings_without_a_price_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = sequences(copying(H100))
    plan, ms = planned(case)
    monkeypatch.setattr("search.tune.advice.ALWAYS_PRICED", 0)
    out_of_time = Advisor(case, plan, ms, left_s=lambda: 0.0)
    advised = out_of_time.advise()
    assert advised.tried == 0
    assert {skipped.name for skipped in advised.not_tried} >= {
        step.label for step in out_of_time.steps()
    }
    on_cpus = Advisor(replace(case, hardware=CPU), *planned(replace(case, hardware=CPU))).advise()
    assert "index_dedup" in {skipped.name for skipped in on_cpus.not_tried}
    assert all(skipped.why for skipped in on_cpus.not_tried)


class GivenGains(Advisor):
    """Advisor that takes the gain of steps together from a function, None if they exclude each
    other; every combination has a plan of its own."""

    def __init__(self, gain: Callable[[frozenset[str]], float | None], *, late: bool = False):
        self.case = Case(a_workload(a_table("t")), hosts(2), H100)
        self.gain = gain
        self.left_s, self._longest_s = (lambda: 0.0 if late else math.inf), 0.0
        self.priced: list[tuple[Advice, ShardingPlan]] = []

    def found(self, chosen: Sequence[Step], plan: ShardingPlan) -> Advice | None:
        gain = self.gain(labels(chosen))
        if gain is None:
            return None
        own = ShardingPlan({}, 2, 2)
        advice = Advice(tuple(chosen), self.case, own, 1 - gain, gain, (), same_plan=False)
        self.priced.append((advice, plan))
        return advice

    def single(self, *names: str) -> list[Advice]:
        """Return the advice ``name=value`` of single steps, best first."""
        steps = (Step(*name.split("=")[:1], None, name[-1], lambda case: case) for name in names)
        singles = [self.found([step], ShardingPlan({}, 2, 2)) for step in steps]
        self.priced.clear()
        return sorted(filter(None, singles), key=lambda advice: -advice.gain)


def labels(steps: Sequence[Step]) -> frozenset[str]:
    return frozenset(f"{step.name}={step.value}" for step in steps)


ALL = ("a=1", "a=2", "b=1", "c=1", "c=2", "d=1")


@pytest.mark.parametrize("seed", range(8))
def test_settings_that_do_not_interact_are_all_combined_at_their_best_values(seed: int) -> None:
    rng = random.Random(seed)
    gains = {name: rng.uniform(2 * TOLERANCE, 0.15) for name in ALL}
    advisor = GivenGains(lambda chosen: sum(gains[name] for name in chosen))
    best = advisor.single(*ALL)
    joined = advisor._together(best)
    assert joined is not None
    by_name = {name: max(g for n, g in gains.items() if n[0] == name) for name in "abcd"}
    assert len(joined.steps) == len({step.name for step in joined.steps}) == len(by_name)
    # a value that is better by less than a tie may stay
    assert joined.gain == pytest.approx(sum(by_name.values()), abs=4 * TOLERANCE)


@pytest.mark.parametrize("seed", range(12))
def test_no_pair_of_the_best_steps_gains_more_than_the_combination(seed: int) -> None:
    rng = random.Random(seed)
    table: dict[frozenset[str], float | None] = {}

    def gain(chosen: frozenset[str]) -> float | None:
        excluded = len(chosen) > 1 and rng.random() < 0.3
        return table.setdefault(chosen, None if excluded else rng.uniform(TOLERANCE, 0.2))

    advisor = GivenGains(gain)
    best = advisor.single(*ALL)
    joined = advisor._together(best)
    pairs = [
        table[labels([*one.steps, *other.steps])]
        for one, other in combinations(best[:JOINED], 2)
        if one.steps[0].name != other.steps[0].name
    ]
    most = max((gain for gain in pairs if gain is not None), default=0.0)
    if joined is None:
        assert most <= best[0].gain + TOLERANCE
        return
    assert joined.gain >= most > best[0].gain + TOLERANCE
    assert joined.gain == table[labels(joined.steps)]
    assert len({step.name for step in joined.steps}) == len(joined.steps)
    possible = sum(gain is not None for gain in pairs)
    incumbent = max(advisor.priced[:possible], key=lambda entry: entry[0].gain)[0]
    for tried, plan in advisor.priced[possible:]:
        assert plan is incumbent.plan
        if tried.gain > incumbent.gain + TOLERANCE:
            incumbent = tried
    assert joined is incumbent


def test_nothing_is_combined_without_time() -> None:
    advisor = GivenGains(lambda chosen: 0.1 * len(chosen), late=True)
    assert advisor._together(advisor.single(*ALL)) is None
    assert advisor.priced == []


def test_advice_by_number_is_combined_from_the_plan_of_the_first() -> None:
    advisor = GivenGains(lambda chosen: 0.1 * len(chosen))
    best = advisor.single("a=1", "b=1", "c=1")
    joined = advisor._together(best)
    assert joined is not None
    advised = Advised(tuple(best), joined)
    assert len(joined.steps) == 3
    assert advisor.choose(advised, [2, 1, 3, 1]) is joined
    assert advisor.choose(advised, [2, 2]) is best[1]
    advisor.priced.clear()
    two = advisor.choose(advised, [3, 1, 3])
    assert [step.name for step in two.steps] == ["c", "a"]
    assert advisor.priced[0][1] is best[2].plan


def test_one_value_of_a_setting_is_listed_for_one_table_if_all_gain_no_more() -> None:
    def priced(name: str, target: str | None, value: int, gain: float) -> Advice:
        step = Step(name, target, value, lambda case: case)
        case = Case(a_workload(a_table("t")), hosts(2), H100)
        return Advice((step,), case, ShardingPlan({}, 2, 2), 1 - gain, gain, (), same_plan=True)

    each = next(iter(EACH_VALUE))
    table, every = priced("x", "t", 1, 0.1), priced("x", None, 1, 0.1 + TOLERANCE / 3)
    low, high = priced("y", None, 1, 0.03), priced("y", "t", 2, 0.2)
    first, second = priced(each, None, 1, 0.3), priced(each, None, 2, 0.04)
    listed = _one_a_name([low, second, every, table, high, first])
    assert listed == [first, high, table, second]
    assert _one_a_name([table, priced("x", None, 1, 0.2)])[0].steps[0].target is None


def test_plans_that_are_searched_again_change_the_order_of_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advisor = GivenGains(lambda chosen: {"a=1": 0.1, "b=1": 0.09, "c=1": 0.08}.get(min(chosen)))
    single = advisor.single("a=1", "b=1", "c=1")
    better = {"a": 0.11, "b": 0.2}
    monkeypatch.setattr(advisor, "steps", list)
    monkeypatch.setattr(advisor, "_single", lambda steps: single[::-1])
    monkeypatch.setattr(advisor, "_again", lambda a: replace(a, gain=better[a.steps[0].name]))
    monkeypatch.setattr(advisor, "_machines", list)
    advised = advisor.advise()
    assert [(a.steps[0].name, a.gain) for a in advised.advice] == [
        ("b", 0.2),
        ("a", 0.11),
        ("c", 0.08),
    ]
    assert advised.tried == 3


@pytest.mark.parametrize(("gib", "fits"), [(80, True), (6, True), (4, False)])
def test_a_step_that_takes_more_memory_names_it_or_takes_another_plan(gib: int, fits: bool) -> None:
    """Adam's states treble the bytes of two tables of 1 GiB on one rank."""
    tables = [a_table(f"t{i}", 4_000_000, 64) for i in range(2)]
    case = Case(a_workload(*tables, batch_size=1024), hosts(2, hbm=gib * GIB, ddr=0), H100)
    plan = plan_of(case.workload, case.installed, [table_wise(table, 0) for table in tables])
    ms = predict(case.workload, case.installed, case.hardware, plan).iteration_ms

    def turn(case: Case) -> Case:
        adam = tuple(replace(table, optimizer="adam") for table in case.workload.tables)
        return replace(case, workload=replace(case.workload, tables=adam, batch_size=4096))

    advice = Advisor(case, plan, ms).found([Step("adam", None, True, turn)], plan)
    assert (advice is not None) == fits
    if advice is not None:
        assert advice.gain > TOLERANCE
        assert advice.case.problem().fits(advice.plan)
        assert (advice.same_plan, len(advice.costs)) == ((True, 1) if gib == 80 else (False, 1))


def test_steps_that_help_beside_a_pair_come_before_those_that_replace_a_part_of_it() -> None:
    gains = {"a=1": 0.2, "b=1": 0.1, "c=1": 0.05, "d=1": 0.04, "a=2": 0.03}
    together = {"a=1 b=1": 0.3, "a=2 b=1": 0.35, "a=1 b=1 c=1": 0.4}

    def gain(chosen: frozenset[str]) -> float | None:
        return {**gains, **together}.get(" ".join(sorted(chosen)))

    advisor = GivenGains(gain)
    joined = advisor._together(advisor.single(*gains))
    assert joined is not None
    assert labels(joined.steps) == {"a=1", "b=1", "c=1"}
