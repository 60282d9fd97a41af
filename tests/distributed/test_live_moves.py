"""Moves of running models for real, on 2 gloo ranks: training goes on as if nothing had moved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import GIB
from search.in_use.price import MovePrice, find_obstacles
from search.problem import Problem
from shardopt.live.reshard import Proposal, reshard
from shardopt.torchrec import load_under_plan, save_for_plan
from tests.builders import column_wise, cut, table_wise
from tests.distributed import live_case as case
from tests.distributed.ranks import on_ranks
from tests.distributed.test_live import said
from tests.distributed.training_case import own_batches, sharded_model, train

pytestmark = pytest.mark.distributed

HALF = 4
TABLE = case.workload().tables[0]
HALVES, SWAPPED = column_wise(TABLE, 16, 16), column_wise(TABLE, 16, 16, first=1)
ROWS = cut(TABLE, ShardingType.ROW_WISE, [0, 1])
ON_0, ON_1 = table_wise(TABLE, 0), table_wise(TABLE, 1)
COLUMN_ON_0, COLUMN_ON_1 = column_wise(TABLE, 32), column_wise(TABLE, 32, first=1)
CASES = {
    "in place, columns to other ranks": (
        "exact_row_wise_adagrad",
        (HALVES, ON_0, HALVES, ON_1),
        (SWAPPED, ON_1, HALVES, ON_1),
    ),
    "in place, other cuts": (
        "exact_adagrad",
        (HALVES, COLUMN_ON_0, HALVES, ON_1),
        (COLUMN_ON_1, SWAPPED, SWAPPED, ON_0),
    ),
    "in place, no state": (
        "exact_sgd",
        (HALVES, ON_0, ON_0, ON_1),
        (COLUMN_ON_1, ON_1, ON_0, ON_1),
    ),
    "rows": (
        "exact_row_wise_adagrad",
        (ON_0, HALVES, ROWS, ON_1),
        (ROWS, SWAPPED, ON_1, ON_0),
    ),
    "types": ("exact_adagrad", (ON_0, HALVES, ROWS, ON_1), (ROWS, ON_1, HALVES, HALVES)),
    "no state": ("exact_sgd", (ON_0, HALVES, ROWS, ON_1), (ROWS, ROWS, HALVES, ON_0)),
}
"""Name -> optimizer, and the four tables before and after."""


def move_all(job: Path) -> dict[str, dict[str, Any]]:
    """Every case: train, move, train on; and the same without the move."""
    results = {}
    for name, (optimizer, *when) in CASES.items():
        load = case.workload(optimizer)
        before, after = (
            ShardingPlan(dict(zip(load.keys, tables, strict=True)), 2, 2) for tables in when
        )
        still = train(sharded_model(load, before), load, own_batches(load, 2 * HALF))
        move = in_place if name.startswith("in place") else through_checkpoint
        results[name] = {"still": still, **move(load, before, after, job / name)}
    return results


def in_place(
    load: Workload, before: ShardingPlan, after: ShardingPlan, _: Path
) -> dict[str, list[float]]:
    """`reshard`, as `ReplanMonitor.apply` calls it."""
    ranks = Topology.uniform(2, 2, hbm_bytes=0, ddr_bytes=4 * GIB)
    price = MovePrice(Problem(load, ranks, load_hardware("cpu-gloo")), before)
    move = price.of(after)
    obstacles = find_obstacles(price.tables, before, after, move.tables)
    new_bytes = tuple(int(size) for size in price.rebuilt_bytes(after))
    proposal = Proposal(before, after, Mock(), move, tuple(obstacles), new_bytes, 1.0, "")
    model = sharded_model(load, before)
    losses = train(model, load, own_batches(load, HALF))
    reshard(model, proposal)
    return {"moved": losses + train(model, load, own_batches(load, HALF, HALF))}


def through_checkpoint(
    load: Workload, before: ShardingPlan, after: ShardingPlan, folder: Path
) -> dict[str, Any]:
    """Save, build anew, load; and what must not be saved."""
    model = sharded_model(load, before)
    losses = train(model, load, own_batches(load, HALF))
    refused = refusals(model, load, before, after, folder)
    dist.barrier()
    saved_nothing = not folder.exists()
    dist.barrier()
    save_for_plan(model, before, after, load, folder)
    del model
    anew = sharded_model(load, after)
    refused["empty"] = said(lambda: load_under_plan(anew, folder.parent))
    load_under_plan(anew, folder)
    return {
        "moved": losses + train(anew, load, own_batches(load, HALF, HALF)),
        "refused": refused,
        "saved nothing": saved_nothing,
    }


def refusals(
    model: Any, load: Workload, before: ShardingPlan, after: ShardingPlan, folder: Path
) -> dict[str, str]:
    """Return case -> error message for the pairs of plans that must not be saved."""
    columns = replace(after, tables={**after.tables, load.keys[0]: HALVES})
    pairs = {
        "another": (after, before),
        "disagree": (before, after if dist.get_rank() else before),
        "lost": (before, columns),
    }
    return {
        case: said(partial(save_for_plan, model, *pair, load, folder))
        for case, pair in pairs.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the cases on both ranks; return the results of each."""
    return on_ranks(move_all, tmp_path_factory.mktemp("moves"))


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert rank[name]["moved"] == pytest.approx(rank[name]["still"], rel=1e-5)
        assert len(set(rank[name]["still"])) > 1


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("in place")])
def test_what_cannot_be_resumed_is_not_saved(found: list[dict[str, Any]], name: str) -> None:
    words = {
        "another": "another plan",
        "disagree": "ranks [1]",
        "empty": "cannot be loaded",
    }
    if name == "rows":
        words["lost"] = "row and column shard"
    for rank in found:
        for refusal, word in words.items():
            assert word in rank[name]["refused"][refusal], refusal
        assert rank[name]["saved nothing"] == (name == "rows")
