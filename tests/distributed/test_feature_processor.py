"""Ops, bytes and collectives of a feature processor on two gloo ranks, as they are predicted."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from predictor.cost.ops.position_weights import (
    OPS,
    PREPARE_BYTES,
    PREPARE_OPS,
    RANGE_BYTES,
    READ_BACK_BYTES,
    SPREAD_BYTES,
    SPREAD_OPS,
    WEIGH_BYTES,
)
from predictor.model.dlrm_program import dense_program
from predictor.model.plan import ShardingType, TablePlan
from predictor.model.plan_json import plan_to_dict
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.cli.output import to_json
from shardopt.config.write import write_model
from tests.builders import a_topology, plan_of, sharded, table_wise

pytest.importorskip("torchrec")
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

POSITIONS, BATCH, DIM = 64, 128, 16
TABLES = tuple(
    Table(
        f"t{at}",
        4000,
        DIM,
        (Feature(f"f{at}", 30.0, position_weights=POSITIONS),),
        "fp",
        weighted=True,
    )
    for at in range(4)
)
WORKLOAD = Workload("weighed", BATCH, TABLES, DenseArch(13, (16,), (16, 1), "concat"))


def plans(kind: str) -> tuple[TablePlan, ...]:
    whole = tuple(table_wise(table, at % 2) for at, table in enumerate(TABLES))
    rows = sharded(WORKLOAD, a_topology(2), ShardingType.ROW_WISE)
    return {"whole": whole, "rows": rows, "both": (*whole[:2], *rows[2:])}[kind]


@pytest.mark.parametrize("kind", ["whole", "rows", "both"])
def test_as_many_ops_and_bytes_as_predicted(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path / "model.yaml", WORKLOAD)
    plan = plan_of(WORKLOAD, a_topology(2), plans(kind))
    (tmp_path / "plan.json").write_text(to_json(plan_to_dict(plan)))
    run_ranks("feature_processor_worker", tmp_path)
    gradients = dense_program(WORKLOAD).gradient_bytes
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found.{rank}.json").read_text())
        check(found["parts"], found["ids"], travels=kind != "whole")
        moved = [(name, dtype, count) for name, dtype, count in found["moved"]]
        assert sum(count for name, _, count in moved if name == "allreduce_") == gradients / 4
        of_ids = [(i, m) for i, m in enumerate(moved) if m[1] == "torch.int64" and m[2] > BATCH]
        weights = [("alltoall_base_", "torch.float32", ids[2]) for _, ids in of_ids]
        after = [moved[i + 1] for i, _ in of_ids]
        assert (after == weights) is (kind != "whole")


def check(parts: dict[str, Any], ids: dict[str, Any], *, travels: bool) -> None:
    looked_up, features = sum(ids["looked up"]), sum(ids["features"])
    exchanges = len(ids["looked up"])
    outputs = BATCH * DIM * len(TABLES)
    if travels:
        (local,) = ids["local"]
        assert len(parts["prepare"]["ops"]) == PREPARE_OPS
        assert parts["prepare"]["bytes"] == PREPARE_BYTES * local
    else:
        assert "prepare" not in parts
    weigh = Counter(parts["weigh"]["ops"])
    offsets = weigh.pop("asynchronous_complete_cumsum")  # the lookup needs them anyway
    a_rank, a_feature = OPS[False]
    assert (offsets, weigh.total()) == (exchanges, a_rank * exchanges + a_feature * features)
    each = (READ_BACK_BYTES if travels else RANGE_BYTES) + WEIGH_BYTES
    assert parts["weigh"]["bytes"] == each * looked_up
    assert len(parts["spread"]["ops"]) == SPREAD_OPS[False]
    assert parts["spread"]["bytes"] == SPREAD_BYTES[False] * outputs
    backward = Counter(parts["backward"]["ops"])
    a_rank, a_feature = OPS[True]
    assert backward["mul_"] == a_rank * exchanges
    for name in ("new_zeros", "scatter_add", "add"):
        assert 3 * backward[name] == a_feature * features
