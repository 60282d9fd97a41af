"""Checkpoints saved under one plan and resumed under another, for real, on 2 gloo ranks."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

from predictor.errors import PlanError
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_json import plan_to_dict
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.torchrec import check_resume
from tests.distributed import training_case as case
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed
T = ShardingType


def other_columns() -> ShardingPlan:
    """Column-wise with as many shards, of unequal widths."""
    plan = case.uniform_plan(T.COLUMN_WISE, 2, 2)
    table = plan.tables["ebc/t0"]
    shards = (Shard(0, (0, 0), (101, 4)), Shard(1, (0, 4), (101, 12)))
    return replace(plan, tables={**plan.tables, "ebc/t0": replace(table, shards=shards)})


PLANS = {
    "table_wise": case.uniform_plan(T.TABLE_WISE, 2, 2),
    "row_wise": case.uniform_plan(T.ROW_WISE, 2, 2),
    "column_wise": case.uniform_plan(T.COLUMN_WISE, 2, 2),
    "other_columns": other_columns(),
    "data_parallel": case.uniform_plan(T.DATA_PARALLEL, 2, 2),
    "mixed": case.make_plan(case.MIXED, 2, 2),
}
WORKS = [(name, name) for name in PLANS if name != "other_columns"]
WORKS += [("table_wise", "row_wise"), ("row_wise", "table_wise")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw."""
    job = tmp_path_factory.mktemp("checkpoints")
    (job / "plans").mkdir()
    for name, plan in PLANS.items():
        (job / "plans" / f"{name}.json").write_text(json.dumps(plan_to_dict(plan)))
    run_ranks("checkpoint_worker", job)
    return [json.loads((job / f"resumed.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [*product(PLANS, PLANS)])
def test_what_is_allowed_goes_on_as_if_nothing_had_happened(
    found: list[dict[str, Any]], before: str, after: str
) -> None:
    """And what is refused does not: torch.distributed.checkpoint fails, or training differs."""
    ranks = [rank[before][after] for rank in found]
    same = all(
        "losses" in rank and np.allclose(rank["losses"], of[before]["went on"], rtol=1e-5)
        for rank, of in zip(ranks, found, strict=True)
    )
    refused = {rank["refused"] is not None for rank in ranks}
    assert refused == {not same}, ranks
    assert same == ((before, after) in WORKS)


# --- without training --------------------------------------------------------------------------


def one_table(optimizer: str) -> Workload:
    table = Table("t", 8, 16, (Feature("f", 1.0),), optimizer=optimizer)
    return Workload("m", 4, (table,), DenseArch(1, (), (), "concat"))


def split(*widths: int, kind: ShardingType = T.COLUMN_WISE, kernel: str = "fused") -> ShardingPlan:
    first, shards = 0, []
    for rank, width in enumerate(widths):
        shards.append(Shard(rank, (0, first), (8, width)))
        first += width
    return ShardingPlan({"t": TablePlan(kind, ComputeKernel(kernel), tuple(shards))}, 2, 2)


@pytest.mark.parametrize("optimizer", ["adam", "exact_adagrad", "exact_sgd", "lamb", "lars_sgd"])
def test_element_wise_states_move_freely(optimizer: str) -> None:
    check_resume(split(8, 8), split(16, kind=T.TABLE_WISE), one_table(optimizer))


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "partial_row_wise_adam"])
def test_row_states_need_the_same_columns(optimizer: str) -> None:
    load = one_table(optimizer)
    check_resume(split(8, 8), split(8, 8, kind=T.TABLE_COLUMN_WISE), load)
    with pytest.raises(PlanError, match=r"table 't' has .*cut at \[0, 8\] before and \[0\] after"):
        check_resume(split(8, 8), split(16, kind=T.TABLE_WISE), load)


def test_the_dense_optimizer_has_its_own_states() -> None:
    whole = (Shard(0, (0, 0), (8, 16)), Shard(1, (0, 0), (8, 16)))
    table = TablePlan(T.DATA_PARALLEL, ComputeKernel.DENSE, whole)
    copies = ShardingPlan({"t": table}, 2, 2)
    check_resume(copies, copies, one_table("adam"))
    for pair in [(copies, split(8, 8)), (split(8, 8), copies)]:
        with pytest.raises(PlanError, match="fused and the dense optimizer"):
            check_resume(*pair, one_table("adam"))


def test_unequal_columns_are_not_loaded() -> None:
    with pytest.raises(PlanError, match=r"shards of \[4, 12\] columns"):
        check_resume(split(8, 8), split(4, 12), one_table("adam"))
