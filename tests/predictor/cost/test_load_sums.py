"""Rows of loads add up to what the shards say, however many rows a sharding takes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from predictor.cost.load_sums import LoadSums, Selection
from predictor.cost.loads import COLUMNS, LONGEST, ShardLoads, add
from search.space.enumerate import enumerate_space
from search.space.option import place
from tests.builders import a_topology, device_bound, random_candidate, random_workload

TOPOLOGY = a_topology(8, 4)


@pytest.mark.parametrize("seed", range(5))
def test_totals_are_those_of_the_shards(seed: int) -> None:
    """Plans that lie in two lookup groups, one of which is left out; the last plan is empty."""
    workload, pick = random_workload(seed, "base"), random.Random(seed)
    space = enumerate_space(workload, TOPOLOGY)
    shards = ShardLoads(workload, TOPOLOGY, device_bound())
    rows, plans = LoadSums(shards), 6
    owners, wanted = [], np.zeros((plans, TOPOLOGY.world_size, COLUMNS))
    for plan in range(plans - 1):
        for index, table in enumerate(random_candidate(space, TOPOLOGY, pick)):
            rows.append(index, table, group=index % 2)
            owners.append(plan)
            if index % 2:
                for rank, load in zip(*shards.of_table(index, table), strict=True):
                    add(wanted[plan, rank], load)
    numbers = np.arange(len(owners))
    chosen = Selection(numbers, np.array(owners), None)
    total = rows.totals(chosen, plans, np.array([1, 0]), 1)
    at = 1 - rows.group(numbers)
    odd = Selection(numbers[at == 0], chosen.owners[at == 0], None)
    rows.put_longest(total, odd, at[at == 0])
    found = total[:, 0].T
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-9)
    assert np.array_equal(found[..., LONGEST], wanted[..., LONGEST])

    twice = Selection(np.tile(numbers, 2), np.tile(owners, 2), np.repeat([1.0, -1.0], len(numbers)))
    scale = np.abs(total).max()
    assert np.abs(rows.totals(twice, plans, np.array([1, 0]), 1)).max() < 1e-12 * scale


def test_what_all_ranks_have_alike_is_one_row() -> None:
    """A plan over many ranks is as fast to sum as one over few."""
    workload = random_workload(0, "base")
    space = enumerate_space(workload, TOPOLOGY)
    everywhere = next(o for o in space.options[0] if o.sharding_type == "data_parallel")
    plan = place(everywhere, tuple(range(TOPOLOGY.world_size)))
    rows = LoadSums(ShardLoads(workload, TOPOLOGY, device_bound()))
    rows.append(0, plan, 0)
    assert rows.load(0) == pytest.approx(rows.load(0)[[0] * TOPOLOGY.world_size])
    assert len(rows.everywhere.of(np.array([0]))[0]) == 1
    assert len(rows.alone.of(np.array([0]))[0]) == 0
