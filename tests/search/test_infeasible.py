"""Infeasible problems: the set is infeasible, nothing in it can be spared, remedies mend it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.errors import InfeasibleError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.units import MIB
from search import infeasible as remedy
from search.infeasible import DDR, HBM, Oracle, drop_demands, find_conflict, list_demands
from search.objective import Objective
from search.params import DEFAULT, SearchParams
from search.problem import Problem
from search.solve import solve
from search.space.enumerate import enumerate_space
from search.space.filters import deduplicate, prune
from search.stop import Stop
from tests.search.problems import a_problem, a_table, a_workload, hosts, placements

TABLE_WISE = (ShardingType.TABLE_WISE,)
FUSED = ("fused",)


def some_plan_fits(problem: Problem) -> bool:
    """By trying all: independent of CP-SAT. Of a table's placements, those that need least."""
    topology = problem.topology
    try:
        space = enumerate_space(problem.workload, topology)
        space = prune(deduplicate(space, topology), topology)
    except InfeasibleError:
        return False
    objective = Objective(problem, space)
    tables = []
    for options in space.options:
        ways: dict[bytes, np.ndarray] = {}
        for option in options:
            for ranks in placements(option, topology):
                need = objective.footprint(option, ranks)
                name = (need.tobytes(), frozenset(ranks) if space.co_locate else None)
                ways[repr(name).encode()] = (option, ranks, need)
        tables.append(list(ways.values()))
    return any(
        bool((sum(need for _, _, need in plan) <= objective.caps).all())
        and space.co_located([ranks for _, ranks, _ in plan])
        for plan in itertools.product(*tables)
    )


MEMORY = st.sampled_from([0, 20, 60, 200])
WANTS = st.builds(
    Constraints,
    sharding_types=st.sampled_from([None, TABLE_WISE, (ShardingType.ROW_WISE,)]),
    compute_kernels=st.sampled_from([None, FUSED, ("fused_uvm",)]),
    ranks=st.sampled_from([None, None, (0,), (1,)]),
    co_locate=st.sampled_from([None, None, "both"]),
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Two or three tables on two ranks with little memory and constraints at random."""
    wants = draw(st.lists(WANTS, min_size=2, max_size=3))
    tables = [
        a_table(f"t{i}", draw(st.sampled_from([40_000, 200_000])), 64, constraints=w)
        for i, w in enumerate(wants)
    ]
    caps = [tuple(draw(MEMORY) * MIB for _ in range(2)) for _ in range(2)]
    return a_problem(a_workload(*tables, batch_size=16), Topology(2, 2, caps[0], caps[1]))


@given(problems())
@settings(max_examples=25, deadline=None)
def test_a_set_is_infeasible_and_every_member_of_it_is_needed(problem: Problem) -> None:
    conflict = find_conflict(Oracle(problem, 5.0, 200))
    if some_plan_fits(problem):
        assert conflict is None
        return
    assert conflict is not None
    outside = set(list_demands(problem)) - set(conflict)
    assert not some_plan_fits(drop_demands(problem, outside))
    for member in conflict:
        assert some_plan_fits(drop_demands(problem, outside | {member})), member


@given(problems())
@settings(max_examples=10, deadline=None)
def test_everything_told_would_do(problem: Problem) -> None:
    if some_plan_fits(problem):
        return
    oracle = Oracle(problem, 5.0, 200)
    conflict = find_conflict(oracle)
    assert conflict is not None
    remedies = [r.words for r in remedy.find_remedies(oracle, conflict)]
    for demand in conflict:
        dropped = f"dropping {demand.words}"
        if demand.what not in (HBM, DDR):
            assert (dropped in remedies) == some_plan_fits(drop_demands(problem, [demand]))
    extra = [line for line in remedies if "on every rank" in line]
    for line in extra:
        number, unit = line.removeprefix("at most ").split()[:2]
        # rounded up to a tenth, so a tenth less does not do
        tenth = 1024 ** ("B", "KiB", "MiB", "GiB").index(unit) / 10
        more = round(10 * float(number))
        kind = "hbm_cap_bytes" if " HBM " in line else "ddr_cap_bytes"
        for size, fits in ((int(more * tenth), True), (int((more - 1) * tenth), False)):
            caps = tuple(cap + size for cap in getattr(problem.topology, kind))
            mended = replace(problem, topology=replace(problem.topology, **{kind: caps}))
            assert some_plan_fits(mended) == fits or line.startswith("at most")


def message(problem: Problem, params: SearchParams = DEFAULT) -> str:
    with pytest.raises(InfeasibleError) as raised:
        solve(problem, Stop(effort=0.1), 0, params=params)
    assert raised.value.exit_code == 3
    return str(raised.value)


def test_one_demand_that_cannot_be_met_is_one() -> None:
    """Host memory, of ranks that have nothing else."""
    large = a_workload(a_table("large", 2_000_000, 64), batch_size=16)
    ranks = Topology(2, 2, (0, 0), (120 * MIB,) * 2)
    text = message(a_problem(large, ranks, hardware=load_hardware("cpu-gloo")))
    assert "This demand alone cannot be met" in text
    assert "together" not in text


def test_pins_that_fill_a_rank() -> None:
    """Three of five tables are pinned to a rank that holds two."""
    wants = Constraints(sharding_types=TABLE_WISE, compute_kernels=FUSED, ranks=(0,))
    pinned = [a_table(f"pinned{i}", 200_000, 64, constraints=wants) for i in range(3)]
    free = [a_table(f"free{i}", 200_000, 64) for i in range(2)]
    caps = (120 * MIB,) * 4
    problem = a_problem(
        a_workload(*pinned, *free, batch_size=16), Topology(4, 4, caps, (10_000 * MIB,) * 4)
    )
    text = message(problem)
    assert "rank 0 is short of" in text
    assert "cannot be met together" in text
    for i in range(3):
        assert f"constraints.ranks [0] of table 'pinned{i}'" in text
        assert f"dropping constraints.ranks [0] of table 'pinned{i}'" in text
    assert "free" not in text
    assert "the HBM of the ranks: 120.0 MiB on each" in text
    assert "host memory of the ranks" not in text
    assert "GPUs of this kind" not in text, "they would not help tables pinned to rank 0"


def test_pins_and_ties_that_exclude_each_other() -> None:
    tables = [
        a_table(f"t{rank}", constraints=Constraints(ranks=(rank,), co_locate="pair"))
        for rank in range(2)
    ]
    text = message(a_problem(a_workload(*tables), hosts(2)))
    for words in (
        "constraints.ranks [0] of table 't0'",
        "constraints.ranks [1] of table 't1'",
        "constraints.co_locate pair of tables 't0', 't1'",
    ):
        assert f"  {words}" in text
        assert f"  dropping {words}" in text
    assert "HBM of the ranks" not in text


def test_one_table_with_no_option() -> None:
    wants = Constraints(sharding_types=TABLE_WISE, compute_kernels=FUSED)
    tables = [a_table("wide", 3_000_000, 64, constraints=wants), a_table("small", 1000)]
    topology = hosts(2, hbm=500 * MIB)
    text = message(a_problem(a_workload(*tables, batch_size=16), topology))
    assert "table 'wide': no sharding option is left" in text
    assert "constraints.sharding_types [table_wise] of table 'wide'" in text
    assert "dropping constraints.compute_kernels [fused] of table 'wide'" in text
    assert "more HBM for tables on every rank" in text


@pytest.mark.slow
def test_the_least_number_of_gpus() -> None:
    wants = Constraints(sharding_types=TABLE_WISE, compute_kernels=FUSED)
    tables = [a_table(f"t{i}", 200_000, 64, constraints=wants) for i in range(5)]
    problem = a_problem(
        a_workload(*tables, batch_size=16), Topology(3, 3, (60 * MIB,) * 3, (0,) * 3)
    )
    text = message(problem)
    assert "5 GPUs of this kind (one host)" in text
    assert "To try:" not in text, "general advice gives way to what would do"
    five = replace(problem, topology=Topology(5, 5, (60 * MIB,) * 5, (0,) * 5))
    assert solve(five, Stop(effort=0.1), 0).plans


def test_nothing_is_claimed_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no work for proofs, no set is told, and no plan is said not to exist."""
    wants = Constraints(sharding_types=TABLE_WISE, compute_kernels=FUSED)
    rows = [100_000 + 7919 * i for i in range(24)]
    tables = [a_table(f"t{i}", r, 64, constraints=wants) for i, r in enumerate(rows)]
    need = sum(t.weight_bytes for t in tables) / 5
    problem = a_problem(
        a_workload(*tables, batch_size=16), Topology(5, 5, (int(1.003 * need),) * 5, (0,) * 5)
    )
    monkeypatch.setattr("search.infeasible.WORK", 1e-6)
    text = message(problem, SearchParams(proof_work=1e-6))
    assert text.startswith("no plan was found that fits")
    assert "cannot be met together" not in text


def test_a_search_out_of_time_explains_no_further() -> None:
    tables = [a_table(f"t{i}", constraints=Constraints(ranks=(i,), co_locate="p")) for i in (0, 1)]
    problem = a_problem(a_workload(*tables), hosts(2))
    oracle = Oracle(problem, 1.0, 100, stop=lambda: True)
    assert find_conflict(oracle) is None
    assert remedy.find_remedies(oracle, list_demands(problem)) == []
