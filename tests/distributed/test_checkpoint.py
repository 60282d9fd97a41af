"""Checkpoints saved under one plan and resumed under another, for real, on 2 gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.errors import PlanError
from predictor.model.plan import ShardingPlan, ShardingType, TablePlan
from shardopt.torchrec import check_resume, load_training_state, training_state
from tests.builders import a_table, a_workload, column_wise, data_parallel, table_wise
from tests.distributed import training_case as case
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed
T = ShardingType
LOAD = case.workload()
COLUMNS = case.uniform_plan(T.COLUMN_WISE)
PLANS = {
    "table_wise": case.uniform_plan(T.TABLE_WISE),
    "row_wise": case.uniform_plan(T.ROW_WISE),
    "column_wise": COLUMNS,
    # with as many shards, of unequal widths
    "other_columns": replace(
        COLUMNS, tables={**COLUMNS.tables, "ebc/t0": column_wise(LOAD.tables[0], 4, 12)}
    ),
    "data_parallel": case.uniform_plan(T.DATA_PARALLEL),
    "mixed": case.make_plan(case.MIXED),
}
WORKS = [(name, name) for name in PLANS if name != "other_columns"]
WORKS += [("table_wise", "row_wise"), ("row_wise", "table_wise")]
STEPS = 2


def steps(model: DistributedModelParallel, first: int) -> list[float]:
    return case.train(model, LOAD, case.own_batches(LOAD, STEPS, first))


def resume_all(folder: Path) -> dict[str, dict[str, Any]]:
    """Every plan saves; every plan resumes what every plan saved."""
    results: dict[str, dict[str, Any]] = {}
    for before, plan in PLANS.items():
        model = case.sharded_model(LOAD, plan)
        steps(model, 0)
        dcp.save(training_state(model), checkpoint_id=str(folder / before))
        results[before] = {"went on": steps(model, STEPS)}
        for after, new_plan in PLANS.items():
            results[before][after] = resumed(folder / before, plan, new_plan)
    return results


def resumed(checkpoint: Path, before: ShardingPlan, after: ShardingPlan) -> dict[str, Any]:
    """Resume under another plan; return shardopt's verdict and the losses or loading errors."""
    refused = None
    try:
        check_resume(before, after, LOAD)
    except PlanError as error:
        refused = str(error)
    model = case.sharded_model(LOAD, after)
    state = training_state(model)
    try:
        dcp.load(state, checkpoint_id=str(checkpoint))
        load_training_state(model, state)
        failed = None
    except (dcp.api.CheckpointException, RuntimeError) as error:
        failed = str(error)
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failed)  # one rank alone may fail
    if any(failures):
        return {"refused": refused, "failures": failures}
    return {"refused": refused, "losses": steps(model, STEPS)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the cases on both ranks; return the results of each."""
    return on_ranks(resume_all, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(("before", "after"), [*product(PLANS, PLANS)])
def test_what_is_allowed_goes_on_as_if_nothing_had_happened(
    found: list[dict[str, Any]], before: str, after: str
) -> None:
    """And what is refused does not: torch.distributed.checkpoint fails, or training differs."""
    ranks = [rank[before][after] for rank in found]
    same = all(
        "losses" in rank and np.allclose(rank["losses"], result[before]["went on"], rtol=1e-5)
        for rank, result in zip(ranks, found, strict=True)
    )
    refused = {rank["refused"] is not None for rank in ranks}
    assert refused == {not same}, ranks
    assert same == ((before, after) in WORKS)


# --- without training --------------------------------------------------------------------------

TABLE = a_table(rows=8, dim=16)
WHOLE, HALVES = table_wise(TABLE), column_wise(TABLE, 8, 8)


def check(before: TablePlan, after: TablePlan, optimizer: str) -> None:
    load = a_workload(replace(TABLE, optimizer=optimizer))
    check_resume(*(ShardingPlan({"t": table}, 2, 2) for table in (before, after)), load)


@pytest.mark.parametrize("optimizer", ["adam", "exact_adagrad", "exact_sgd", "lamb", "lars_sgd"])
def test_element_wise_states_move_freely(optimizer: str) -> None:
    check(HALVES, WHOLE, optimizer)


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "partial_row_wise_adam"])
def test_row_states_need_the_same_columns(optimizer: str) -> None:
    check(HALVES, replace(HALVES, sharding_type=T.TABLE_COLUMN_WISE), optimizer)
    with pytest.raises(PlanError, match=r"'t' .*\[0, 8\] .*\[0\]"):
        check(HALVES, WHOLE, optimizer)


def test_the_dense_optimizer_has_its_own_states() -> None:
    copies = data_parallel(TABLE, 2)
    check(copies, copies, "adam")
    for pair in [(copies, HALVES), (HALVES, copies)]:
        with pytest.raises(PlanError, match="dense"):
            check(*pair, "adam")


def test_unequal_columns_are_not_loaded() -> None:
    with pytest.raises(PlanError, match=r"\[4, 12\]"):
        check(HALVES, column_wise(TABLE, 4, 12), "adam")
