"""Near-empty models can be rebuilt from the params of their rows."""

import json

import pytest

from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.workload import Workload
from shardopt.calibrate.design.near_empty import DEEPER, iteration_points, near_empty
from shardopt.calibrate.design.points import Point

KINDS = {
    "dp": ShardingType.DATA_PARALLEL,
    "tw": ShardingType.TABLE_WISE,
    "rw": ShardingType.ROW_WISE,
    "cw": ShardingType.COLUMN_WISE,
}
POINTS = iteration_points(ranks=2)


def rebuilt(point: Point) -> tuple[Workload, ShardingPlan]:
    return near_empty(json.loads(json.dumps(point.params)))


@pytest.mark.parametrize("point", POINTS, ids=lambda p: "-".join(map(str, p.params.values())))
def test_the_plan_has_the_types_it_is_named_after(point: Point) -> None:
    workload, plan = rebuilt(point)
    assert len(workload.tables) == len(plan.tables) == point.params["tables"]
    found = {table.sharding_type for table in plan.tables.values()}
    assert found == {KINDS[kind] for kind in point.params["plan"].split("+")}
    assert workload.train_pipeline == point.params["pipeline"]
    for table in workload.tables:
        shards = plan.tables[table.name].shards
        area = sum(shard.size[0] * shard.size[1] for shard in shards)
        copies = 2 if plan.tables[table.name].sharding_type is KINDS["dp"] else 1
        assert area == copies * table.num_embeddings * table.embedding_dim


def test_the_deeper_model_has_more_layers_and_is_the_same_otherwise() -> None:
    shallow = next(p for p in POINTS if p.params["plan"] == "tw")
    deep = next(p for p in POINTS if p.params["layers"])
    few, many = rebuilt(shallow)[0], rebuilt(deep)[0]
    assert len(many.dense.top_mlp) == len(few.dense.top_mlp) + DEEPER
    assert many.tables == few.tables


def test_ranks_joined_by_a_link_are_hosts() -> None:
    point = iteration_points(ranks=2, link_gbit_s=1.0)[0]
    assert rebuilt(point)[1].local_world_size == 1
