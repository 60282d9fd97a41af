"""Tasks: one for a seed, within their ranges, with plans that differ and that TorchRec runs."""

from functools import cache

import pytest

from lab.tasks import draw
from lab.tasks.draw import Task, draw_task, task_topology
from lab.tasks.plans import (
    MAX_PLANS,
    column_wise,
    distinct_share,
    plan_of,
    signature,
    table_wise_by_skew,
)
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingType
from predictor.model.plan_check import (
    RuntimeSetting,
    check_plan,
    find_runtime_problem,
    in_torchrec_order,
)
from predictor.model.workload import Feature
from predictor.predict import predict
from tests.builders import a_table, a_topology, a_workload
from tests.quick import quick_first

PAIRS = quick_first(1, [(1, 2), (1, 1), (6, 2)])


def task(seed: int, local: int = 2) -> Task:
    return drawn(seed, local)


@cache
def drawn(seed: int, local: int) -> Task:
    """Drawn once, however a test names its arguments."""
    return draw_task(seed, a_topology(2, local), "shapes")


def times(made: Task, local: int = 2) -> dict[str, float]:
    hardware = load_hardware(draw.PROFILE)
    topology = task_topology(hardware, 2, local)
    return {
        name: predict(made.workload, topology, hardware, plan).iteration_ms
        for name, plan in made.plans.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "local"), PAIRS)
def test_plans_are_many_different_and_close(seed: int, local: int) -> None:
    made = task(seed, local)
    assert 10 <= len(made.plans) <= MAX_PLANS
    keys = made.workload.keys
    kinds = [signature([plan.tables[key] for key in keys]) for plan in made.plans.values()]
    assert len(set(kinds)) == len(kinds)
    found = times(made, local)
    best = min(found.values())
    assert found[next(iter(found))] == best
    types = {t.sharding_type for plan in made.plans.values() for t in plan.tables.values()}
    assert types >= {
        ShardingType.DATA_PARALLEL,
        ShardingType.TABLE_WISE,
        ShardingType.ROW_WISE,
        ShardingType.COLUMN_WISE,
    }
    assert local > 1 or ShardingType.TABLE_COLUMN_WISE not in types


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "local"), PAIRS)
def test_torchrec_runs_every_plan(seed: int, local: int) -> None:
    made = task(seed, local)
    shapes = {t.name: (t.num_embeddings, t.embedding_dim) for t in made.workload.tables}
    for name, plan in made.plans.items():
        assert (plan.world_size, plan.local_world_size) == (2, local)
        check_plan(plan, made.workload, where=name)
        for key, table in plan.tables.items():
            setting = RuntimeSetting(shapes[key], "sum", 2, local, "cpu")
            assert find_runtime_problem(in_torchrec_order(table), setting) is None, (name, key)


def test_the_skewed_plan_has_one_rank_slowest_forward_and_the_other_backward() -> None:
    hot = [a_table(f"h{i}", 2000, features=(Feature(f"h{i}", 50.0),)) for i in range(4)]
    cold = [a_table(f"c{i}", 2_000_000, features=(Feature(f"c{i}", 3.0),)) for i in range(4)]
    workload = a_workload(*cold, *hot)
    hardware = load_hardware(draw.PROFILE)
    topology = task_topology(hardware, 2, 2)
    plan = table_wise_by_skew(workload, topology, hardware)
    tables = workload.tables
    on = [[t for t, p in zip(tables, plan, strict=True) if p.ranks == (r,)] for r in (0, 1)]
    shares = [[distinct_share(t, 2 * workload.batch_size) for t in held] for held in on]
    assert max(shares[0]) <= min(shares[1])
    busy = [
        load.busy_ms
        for load in predict(
            workload, topology, hardware, plan_of(workload, topology, plan)
        ).per_rank
    ]
    assert busy[0]["embedding_forward"] > busy[1]["embedding_forward"]
    assert busy[0]["embedding_backward"] < busy[1]["embedding_backward"]


def test_columns_are_cut_as_fbgemm_takes_them() -> None:
    assert [s.size for s in column_wise(a_table(rows=10, dim=16), 2).shards] == [(10, 8)] * 2
    assert len(column_wise(a_table(dim=4), 2).shards) == 1


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1; it must be at least 0"):
        draw_task(-1, a_topology(2, 2), "shapes")
