"""Behaviour of TorchRec's planner that scripts rely on: both planners must show it.

The behaviour is that of TorchRec's own planner tests, which `make test-torchrec-own` runs in full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedAbsoluteStorageReservation
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    Stats,
)
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    DataType,
    ShardingPlan,
)

from shardopt.torchrec import ShardoptPlanner
from tests.shardopt.torchrec.hook_models import Kept, Model, Offering, bag

MIB = 2**20
Make = Callable[..., EmbeddingShardingPlanner]


@pytest.fixture(
    params=[
        EmbeddingShardingPlanner,
        partial(ShardoptPlanner, effort=0.005, default_pooling_factor=1.0),
    ],
    ids=["torchrec", "shardopt"],
)
def make(request: pytest.FixtureRequest) -> Make:
    """A planner for two small GPUs."""

    def of(**more: Any) -> EmbeddingShardingPlanner:
        ranks = Topology(world_size=2, hbm_cap=2 * MIB, compute_device="cuda")
        built: EmbeddingShardingPlanner = request.param(**{"topology": ranks, **more})
        return built

    return of


FUSED = {"table_wise": ["fused"]}


def tables(count: int, rows: int = 100, dim: int = 64) -> Model:
    return Model(*(bag(f"t{i}", rows, dim) for i in range(count)))


def ranks_of(plan: ShardingPlan) -> list[list[int]]:
    return sorted(table.ranks for table in plan.plan["ebc"].values())


def test_whole_tables_are_spread_over_the_ranks(make: Make) -> None:
    plan = make().plan(tables(4), [Offering(**FUSED)])
    assert ranks_of(plan) == [[0], [0], [1], [1]]


def test_what_never_fits_is_a_lack_of_storage(make: Make) -> None:
    either = make()
    with pytest.raises(PlannerError) as caught:
        either.plan(tables(2, 10**7, 10**7), [Offering(**FUSED, row_wise=["fused"])])
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_a_planner_that_failed_plans_again(make: Make) -> None:
    either, model = make(), tables(1, 4096, 128)
    with pytest.raises(PlannerError) as caught:
        either.plan(model, [Offering(**FUSED)])
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    assert ranks_of(either.plan(model, [Offering(**FUSED, row_wise=["fused"])])) == [[0, 1]]


def test_a_reservation_says_itself_why_nothing_fits(make: Make) -> None:
    either = make(
        topology=Topology(world_size=2, hbm_cap=MIB, compute_device="cuda"),
        storage_reservation=FixedAbsoluteStorageReservation(int(0.9 * MIB)),
    )
    with pytest.raises(PlannerError, match="Storage reservation") as caught:
        either.plan(tables(2, 2048, 128), [Offering(**FUSED)])
    assert caught.value.error_type is not PlannerErrorType.OTHER


FIELDS: dict[str, dict[str, Any]] = {
    "t0": {"enforce_hbm": True, "cache_params": CacheParams(algorithm=CacheAlgorithm.LFU)},
    "t1": {"enforce_hbm": False, "stochastic_rounding": True},
    "t2": {"bounds_check_mode": BoundsCheckMode.FATAL, "output_dtype": DataType.FP16},
    "t3": {
        "cache_params": CacheParams(
            algorithm=CacheAlgorithm.LFU,
            load_factor=0.1,
            reserved_memory=1.0,
            precision=DataType.FP16,
        )
    },
}
"""Of a table -> what its constraint says, which its sharding must say too."""


def told() -> dict[str, ParameterConstraints]:
    return {table: ParameterConstraints(**fields) for table, fields in FIELDS.items()}


def test_fields_of_constraints_reach_the_plan_and_its_options(make: Make) -> None:
    either = make(constraints=told())
    plan = either.plan(tables(4), [Offering(**FUSED)]).plan["ebc"]
    (options,) = ({option.name: option for option in either._best_plan or ()},)
    for table, fields in FIELDS.items():
        for name in {name for fields in FIELDS.values() for name in fields}:
            assert getattr(plan[table], name) == fields.get(name)
            assert getattr(options[table], name) == fields.get(name)


def test_the_hash_of_what_is_planned_tells_what_was_given_apart(make: Make) -> None:
    def hash_of(batch_size: int) -> int:
        either = make(constraints=told(), batch_size=batch_size)
        either.plan(tables(1), [Offering(**FUSED)])
        return either.hash_planner_context_inputs()

    assert hash_of(128) == hash_of(128)
    assert hash_of(128) != hash_of(256)


def test_a_kept_plan_is_taken_where_it_is_of_the_same_inputs(make: Make) -> None:
    first, model = make(constraints=told()), tables(4)
    plan = first.plan(model, [Offering(**FUSED)])
    context = first.hash_planner_context_inputs_str()
    flipped = {}
    for option in first._best_plan or ():
        key = option.storage_hash()
        for shard in option.shards:
            shard.rank = 1 - int(shard.rank or 0)
        flipped[key] = option
    for options in (flipped, None):
        loader = Kept(options, context)
        again = make(constraints=told(), plan_loader=loader).plan(model, [Offering(**FUSED)])
        same = [
            again.plan["ebc"][name].ranks == sharding.ranks
            for name, sharding in plan.plan["ebc"].items()
        ]
        assert same == [options is None] * 4
    with pytest.raises(PlannerError) as caught:
        make(constraints=told(), plan_loader=Kept({}, "another")).plan(model, [Offering(**FUSED)])
    assert caught.value.error_type is PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH


class Sink(Stats):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def log(self, **entries: Any) -> None:
        self.told = entries


def test_callbacks_and_statistics_are_told_the_plan_with_estimates(make: Make) -> None:
    sink, received = Sink(), list[Any]()

    def callback(options: list[Any]) -> list[Any]:
        received.extend(options)
        return options

    plan = make(stats=sink, callbacks=[callback]).plan(tables(4), [Offering(**FUSED)])
    assert sink.told["sharding_plan"] == plan
    assert all(shard.rank is not None for option in received for shard in option.shards)
    assert [option.name for option in received] == [o.name for o in sink.told["best_plan"]]
    assert {option.name for option in sink.told["best_plan"]} == {"t0", "t1", "t2", "t3"}
    for option in sink.told["best_plan"]:
        assert all(shard.perf.total > 0 and shard.storage.hbm > 0 for shard in option.shards)


def test_without_statistics_given_there_is_one_with_torchrecs_table(make: Make) -> None:
    either = make()
    either.plan(tables(1), [Offering(**FUSED)])
    (stats,) = either._stats
    assert isinstance(stats, EmbeddingStats)
    assert any("Planner Statistics" in row for row in stats._stats_table)
    assert make(stats=[])._stats == []
