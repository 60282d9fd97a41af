"""The placement of TorchRec's planner is that of its rules applied rank by rank."""

from __future__ import annotations

import random

import pytest

from predictor.model.topology import Topology
from search.baselines.torchrec_planner import (
    CostedOption,
    NoRoomError,
    Perf,
    RankState,
    partition,
)
from search.space.enumerate import enumerate_space
from search.space.option import Partition
from tests.search.problems import a_table, a_workload


def step_by_step(choices: list[CostedOption], topology: Topology) -> list[tuple[int, ...]]:
    """Place whole tables, tables by host and by all ranks, and look at every rank each time."""
    ranks = RankState(topology)
    size, local = topology.intra_group_size, topology.local_world_size

    def fits(choice: CostedOption, shard: int, rank: int) -> bool:
        return choice.hbm[shard] <= ranks.hbm[rank] and choice.ddr[shard] <= ranks.ddr[rank]

    def key(rank: int) -> tuple[float, int, int]:
        return ranks.total[rank], rank % local, rank

    placed: list[tuple[int, ...]] = [()] * len(choices)
    rest = sorted(
        (i for i, c in enumerate(choices) if not c.uniform),
        key=lambda i: (choices[i].sum_hbm, choices[i].sum_ddr),
        reverse=True,
    )
    for i in [*(i for i, c in enumerate(choices) if c.uniform), *rest]:
        choice, where = choices[i], []
        hosts = [range(first, first + size) for first in range(0, topology.world_size, size)]
        hosts.sort(key=lambda host: sum(ranks.total[rank] for rank in host))
        if choice.option.partition is Partition.UNIFORM:
            where = list(range(topology.world_size))
        elif choice.option.partition is Partition.HOST:
            fitting = (h for h in hosts if all(fits(choice, s, r) for s, r in enumerate(h)))
            where = list(next(fitting, ()))
        for shard in range(choice.count):
            if choice.option.partition is Partition.DEVICE:
                free = [r for r in range(topology.world_size) if fits(choice, shard, r)]
                where += [min(free, key=key)] if free else []
            if len(where) <= shard or not fits(choice, shard, where[shard]):
                raise NoRoomError
            ranks.put(choice, shard, where[shard])
        placed[i] = tuple(where)
    return placed


@pytest.mark.parametrize("seed", range(12))
def test_tables_of_all_kinds_lie_where_the_rules_put_them(seed: int) -> None:
    rng = random.Random(seed)
    roomy = seed % 3 != 0
    topology = Topology.uniform(8, 2, hbm_bytes=10_000 if roomy else 300, ddr_bytes=0)
    tables = [a_table(f"t{i}", 40 + i, 128, 2.0) for i in range(30)]
    kinds = ("table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel")
    choices = []
    for options in enumerate_space(a_workload(*tables), topology).options:
        of_kind = {str(o.sharding_type): o for o in options}
        option = of_kind[rng.choice(kinds)]
        perf = Perf(*(rng.choice([0.5, 1.0, rng.random()]) for _ in range(4)))
        hbm = (rng.randrange(1, 40),) * option.num_shards
        choices.append(CostedOption(option, perf, hbm, (0,) * len(hbm), 0))
    try:
        expected = step_by_step(choices, topology)
    except NoRoomError:
        with pytest.raises(NoRoomError):
            partition(choices, topology)
    else:
        assert partition(choices, topology) == expected
