"""TorchRec's rating and count of memory, of any plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.planners.published import TorchRecObjective
from predictor.model.memory.ranks import MemoryRules, shard_memory
from predictor.model.plan import ComputeKernel, ShardingType
from search.baselines.torchrec_planner import CostModel, torchrec_plan
from search.space.enumerate import enumerate_space
from search.space.option import place
from tests.search.problems import H100, a_problem, a_table, a_workload, hosts, random_problem


@pytest.mark.parametrize("seed", range(12))
def test_it_rates_torchrecs_plan_as_torchrec_does(seed: int) -> None:
    problem = random_problem(seed)
    theirs = torchrec_plan(problem.workload, problem.topology)
    if theirs is None:
        pytest.skip("TorchRec finds no plan")
    torchrec = TorchRecObjective(problem.workload, problem.topology)
    assert torchrec.rating_ms(theirs.tables) == pytest.approx(theirs.rating_ms, rel=1e-12)
    assert torchrec.fits(theirs.tables)


def test_the_costliest_rank_counts() -> None:
    workload = a_workload(a_table("a", 1000, 64, 2.0), a_table("b", 1000, 64, 6.0))
    topology = hosts(2)
    torchrec = TorchRecObjective(workload, topology)
    options = [
        next(o for o in table if o.label == "TW/fused")
        for table in enumerate_space(workload, topology).options
    ]
    costs = [CostModel(workload, topology).shard_perf(o).total for o in options]
    together = [place(o, (1,)) for o in options]
    apart = [place(o, (rank,)) for rank, o in enumerate(options)]
    assert torchrec.rating_ms(together) == pytest.approx(sum(costs))
    assert torchrec.rating_ms(apart) == pytest.approx(max(costs))


def test_a_rank_without_room_does_not_fit() -> None:
    """Both tables on one rank take twice the memory; one byte less is too little."""
    workload = a_workload(a_table("a"), a_table("b"), train_pipeline="prefetch_sparse_dist")
    ample = hosts(2)
    # TorchRec counts with its default pipeline type
    base = replace(workload, train_pipeline="base")
    kinds = ShardingType.TABLE_WISE, ComputeKernel.FUSED
    size = [(base.tables[0].num_embeddings, base.tables[0].embedding_dim)]
    need = shard_memory(base.tables[0], base, ample, *kinds, size, rules=MemoryRules.TORCHREC)
    options = [
        next(o for o in table if o.label == "TW/fused")
        for table in enumerate_space(workload, ample).options
    ]
    plan = [place(o, (0,)) for o in options]
    for missing, fits in ((0, True), (1, False)):
        topology = hosts(2, hbm=2 * need[0].hbm_bytes - missing)
        assert TorchRecObjective(workload, topology).fits(plan) is fits


def test_a_counted_space_has_the_options_of_the_other() -> None:
    problem = a_problem(a_workload(a_table("a", data_type="fp16", optimizer="adam")), hosts(2))
    torchrec = TorchRecObjective(problem.workload, problem.topology)
    space = enumerate_space(problem.workload, problem.topology, H100.device)
    counted = torchrec.with_torchrec_memory(space)
    for before, after in zip(space.options[0], counted.options[0], strict=True):
        assert (before.label, before.sizes) == (after.label, after.sizes)
        assert after.memory == torchrec.memory(before)
    # fp16 states, which FBGEMM keeps in fp32
    assert any(
        np.any([a.hbm_bytes < b.hbm_bytes for a, b in zip(o.memory, p.memory, strict=True)])
        for o, p in zip(counted.options[0], space.options[0], strict=True)
    )
