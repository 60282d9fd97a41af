"""From summed loads to the time of a launch: shared caches, sorted bits, the longest latency."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.loads import COLUMNS, LONGEST, SHARED, Load, fused_backward_ms, fused_forward_ms
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.distribution import Zipf
from predictor.model.plan import TablePlan
from predictor.model.workload import Feature, Workload
from tests.builders import a_table, a_topology, a_workload, hardware, table_wise

loads = st.lists(st.floats(0, 10), min_size=COLUMNS, max_size=COLUMNS).map(np.array)


def small_batch(tables: int, lookups: float = 400.0, batch: int = 256) -> Workload:
    feature = Feature("f", lookups, 1.0, Zipf(0.9))
    names = [f"t{i}" for i in range(tables)]
    return a_workload(
        *(a_table(n, 1_000_000, 128, features=(feature,)) for n in names), batch_size=batch
    )


def on_rank_0(workload: Workload, count: int) -> list[TablePlan]:
    """The first tables on rank 0, the others on rank 1."""
    return [table_wise(t, int(i >= count)) for i, t in enumerate(workload.tables)]


@given(loads, st.integers(0, COLUMNS - 1), st.floats(0, 5))
@settings(max_examples=100, deadline=None)
def test_a_launch_is_never_faster_than_its_shards(
    load: np.ndarray, column: int, more: float
) -> None:
    """The lower bound of `search.bound.relaxation` relies on it."""
    batch = PlanScorer(a_workload(), a_topology(2), hardware())
    batch.group_index(0, table_wise(batch.workload.tables[0]))
    group, hw = batch.groups[0], hardware()
    times = fused_forward_ms(load), fused_backward_ms(load, group, hw)
    assert times[0] >= load[Load.FORWARD_MS]
    assert times[1] >= load[Load.BACKWARD_MS]
    if column == Load.SORTED:
        return  # what the shards have paid for already
    grown = load.copy()
    grown[column] += more
    assert fused_forward_ms(grown) >= times[0] * (1 - 1e-12)
    assert fused_backward_ms(grown, group, hw) >= times[1] * (1 - 1e-12)


def test_the_cost_at_a_share_is_that_of_the_table_with_so_much_cache() -> None:
    """Sums of tabulated shards against the law itself, at a number that is tabulated."""
    workload, topology = small_batch(5), a_topology(2)
    batch = PlanScorer(workload, topology, hardware())
    alone = batch.totals(on_rank_0(workload, 1))[0, 0]
    four = batch.totals(on_rank_0(workload, 4))[0, 0]
    assert alone[SHARED].any()
    four[LONGEST] = alone[LONGEST] = 0.0
    shared = alone[Load.FORWARD_MS] + alone[Load.SHARED_2_MS] + alone[Load.SHARED_4_MS]
    assert float(fused_forward_ms(four)) == pytest.approx(4 * shared)
    assert float(fused_forward_ms(alone)) == pytest.approx(alone[Load.FORWARD_MS])


def test_the_longest_latency_counts_once() -> None:
    """A few bags on an idle device: more tables beside the one with long bags cost nothing."""
    short, long = (Feature(n, lookups) for n, lookups in (("s", 1.0), ("l", 100.0)))
    tables = [a_table(n, 1000, 64, features=(short,)) for n in "abc"]
    tables.append(a_table("d", 1000, 64, features=(long,)))
    workload, hw = a_workload(*tables, batch_size=8), hardware()
    batch = PlanScorer(workload, a_topology(1), hw)
    total = batch.totals([table_wise(t) for t in workload.tables])[0, 0]
    alone = batch.shards.of_table(3, table_wise(workload.tables[3]))[1][0]
    assert float(fused_forward_ms(total)) == alone[Load.FORWARD_LONGEST_MS] > total[Load.FORWARD_MS]


def test_shares_of_the_cache_are_linear_between_those_tabulated() -> None:
    load = np.zeros(COLUMNS)
    load[SHARED] = 1.0, 2.0, 4.0, 8.0
    times = []
    for tables in (0, 1, 1.5, 2, 3, 4, 6, 8, 16, 100):
        load[Load.SHARDS] = tables
        times.append(float(fused_forward_ms(load)))
    assert times == [0, 0, 0.5, 1, 2, 3, 5, 7, 15, 15]
