"""Constants that decide: a flip is where predictions say that it is, and no other is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.scaling import scale_group
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan
from predictor.predict import predict
from search.prefer import TOLERANCE
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from shardopt.explain.deciding import (
    ALIKE,
    DecidingConstant,
    deciding_constants,
    deciding_text,
    measuring_command,
    usual_plans,
)
from tests.builders import a_table, a_topology, a_workload, plan_of, table_wise
from tests.search import problems

TABLES = [a_table(f"t{i}", rows=2_000_000, dim=128) for i in range(8)]
WORKLOAD = a_workload(*TABLES, batch_size=32768)
TOPOLOGY = a_topology(4, 4)
MEASURED = load_hardware("h100-sxm")
OF_HOST = MEASURED.overheads.provenance.model_copy(update={"kind": "derived"})
GUESSED = MEASURED.overheads.model_copy(update={"provenance": OF_HOST, "rel_error": 0.8})
HARDWARE = MEASURED.model_copy(update={"overheads": GUESSED})
"""A host that sets the pace, and of which nobody knows more than its order of magnitude."""
PROBLEM = Problem(WORKLOAD, TOPOLOGY, HARDWARE)


def spread(ranks: int) -> ShardingPlan:
    return plan_of(WORKLOAD, TOPOLOGY, [table_wise(t, i % ranks) for i, t in enumerate(TABLES)])


ODD, EVEN = spread(3), spread(4)
"""One rank has three tables of eight, where each may have two."""


def gain(hardware: HardwareProfile) -> float:
    """Return the saving of the even plan."""
    odd, even = (predict(WORKLOAD, TOPOLOGY, hardware, p).iteration_ms for p in (ODD, EVEN))
    return 1 - even / odd


def test_under_a_slow_host_plans_tie_and_below_the_flip_they_do_not() -> None:
    """Two predictions, a per cent before the value that is told and beyond it, agree with it."""
    assert gain(HARDWARE) == pytest.approx(0, abs=1e-3)
    (host,) = [d for d in deciding_constants(PROBLEM, ODD, {"plan 2": EVEN}) if d.side == "below"]
    assert (host.group, host.constant) == ("overheads", "overheads.op_us")
    assert host.value == HARDWARE.overheads.op_us
    assert (host.plan, host.provenance, host.unmeasured) == ("plan 2", "derived", True)
    assert host.flips_at < host.value
    flip = host.flips_at / host.value
    assert gain(scale_group(HARDWARE, "overheads", 0.99 * flip)) > ALIKE
    assert gain(scale_group(HARDWARE, "overheads", 1.01 * flip)) <= ALIKE
    gains = [gain(scale_group(HARDWARE, "overheads", f)) for f in (0.6, 0.5, 0.45)]
    assert host.gain >= max(gains) - 1e-3
    assert 0 < host.worth < host.gain


def test_a_plan_that_is_better_as_stated_flips_nothing_by_that() -> None:
    """A fast host: the even plan is faster whatever the host, and no error makes that worse."""
    fast = scale_group(HARDWARE, "overheads", 0.01)
    deciding = deciding_constants(replace(PROBLEM, hardware=fast), ODD, {"even": EVEN})
    assert "overheads" not in {constant.group for constant in deciding}
    assert deciding_constants(PROBLEM, EVEN, {"same": EVEN}) == []


def test_a_group_without_a_stated_error_decides_nothing() -> None:
    sure = HARDWARE.overheads.model_copy(update={"rel_error": 0.0})
    hardware = HARDWARE.model_copy(update={"overheads": sure})
    deciding = deciding_constants(replace(PROBLEM, hardware=hardware), ODD, {"even": EVEN})
    assert "overheads" not in {constant.group for constant in deciding}


def test_the_usual_plans_are_those_that_somebody_would_run() -> None:
    assert {"torchrec default", "greedy by size"} <= usual_plans(PROBLEM).keys()
    assert "random" not in usual_plans(PROBLEM)


HOST = DecidingConstant(
    *("overheads", "overheads.op_us", "us an op", 8.7, 0.42, "derived", 6.1, "below"),
    *("torchrec default", 0.12, 0.02, "shardopt calibrate --backend nccl --only host"),
)


def test_the_sentence_says_what_decides() -> None:
    text = deciding_text(HOST)
    assert all(part in text for part in ("6.1", "8.7", "12 %", "42 %", "TorchRec", HOST.command))


@pytest.mark.parametrize(
    ("group", "device", "command"),
    [
        ("overheads", "cpu", "shardopt calibrate --only host"),
        ("embedding", "cuda", "shardopt calibrate --backend nccl --only embedding"),
        ("elementwise", "cpu", "shardopt calibrate"),
    ],
)
def test_commands_measure_as_little_as_they_can(group: str, device: str, command: str) -> None:
    assert measuring_command(group, device) == command


def sixteen(tables: int, batch: int, skip: int = 0) -> Problem:
    """Tables on two hosts of eight H100, with a slow host that is a guess."""
    rng = random.Random(0)
    all_tables = [
        problems.a_table(
            f"t{i}", int(10 ** rng.uniform(4, 6.5)), rng.choice([64, 128]), rng.uniform(1, 30)
        )
        for i in range(skip + tables)
    ]
    return Problem(
        a_workload(*all_tables[skip:], batch_size=batch), problems.hosts(16, 8), HARDWARE
    )


@pytest.mark.slow
def test_a_model_that_waits_for_a_guessed_host_gets_a_plan_for_a_fast_one_too() -> None:
    """All plans tie as stated; the tie's rules find what is best if the host is fast, and for the
    plan that ignores them the host's time is named first."""
    problem = sixteen(20, 2048)
    fast = scale_group(HARDWARE, "overheads", 0.2)

    def time(plan: ShardingPlan, hardware: HardwareProfile) -> float:
        return predict(problem.workload, problem.topology, hardware, plan).iteration_ms

    tied, first = (solve(problem, Stop(effort=0.02), 0, tolerance=t) for t in (TOLERANCE, 0.0))
    modern = solve(replace(problem, hardware=fast), Stop(effort=0.02), 0).best.plan
    assert tied.ties is not None
    assert tied.ties.host_bound
    assert tied.ties.plans > 100
    chosen, careless = tied.best.plan, first.best.plan
    assert time(chosen, HARDWARE) <= time(careless, HARDWARE) * (1 + TOLERANCE)
    assert time(chosen, fast) < 1.1 * time(modern, fast) < 0.8 * time(careless, fast)
    host = deciding_constants(problem, careless, {"plan 2": chosen, "plan 3": modern})[0]
    assert (host.group, host.side, host.unmeasured) == ("overheads", "below", True)
    rivals = {"plan 2": careless}
    assert "overheads" not in {
        constant.group for constant in deciding_constants(problem, chosen, rivals)
    }


@pytest.mark.slow
def test_a_plan_of_least_regret_does_not_lose_where_the_host_is_fast() -> None:
    problem = sixteen(40, 2048)
    fast = scale_group(HARDWARE, "overheads", 0.2)
    nominal, hedged = (
        solve(replace(problem, aim=aim), Stop(effort=0.02), 0).best.plan
        for aim in ("nominal", "regret")
    )
    usual, careful = (
        [
            predict(problem.workload, problem.topology, hardware, plan).iteration_ms
            for hardware in (HARDWARE, fast)
        ]
        for plan in (nominal, hedged)
    )
    assert careful[0] < 1.05 * usual[0]
    assert careful[1] <= usual[1] * (1 + 1e-9)
