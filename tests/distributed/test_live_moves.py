"""Moves of running models for real, on 2 gloo ranks: training goes on as if nothing had moved."""

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torchrec")

from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_json import plan_to_dict
from predictor.model.workload import Workload
from shardopt.config.write import write_model
from tests.distributed import live_case as case
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
T = ShardingType
ROWS, DIM = 5000, 32


def columns(first: int, *widths: int) -> TablePlan:
    """Column shards on one rank after the other, from the first."""
    start, shards = 0, []
    for i, width in enumerate(widths):
        shards.append(Shard((first + i) % 2, (0, start), (ROWS, width)))
        start += width
    return TablePlan(T.COLUMN_WISE, ComputeKernel.FUSED, tuple(shards))


def rows() -> TablePlan:
    """Half of the rows on either rank."""
    shards = tuple(Shard(r, (r * ROWS // 2, 0), (ROWS // 2, DIM)) for r in range(2))
    return TablePlan(T.ROW_WISE, ComputeKernel.FUSED, shards)


def model(optimizer: str) -> Workload:
    load = case.workload()
    return replace(load, tables=tuple(replace(t, optimizer=optimizer) for t in load.tables))


def plans(load: Workload, before: list[Any], after: list[Any]) -> tuple[ShardingPlan, ShardingPlan]:
    """Tables whole on a rank, where a number stands."""
    given = []
    for tables in (before, after):
        whole = case.plan(load, tuple(t if isinstance(t, int) else 0 for t in tables))
        named = dict(zip(load.keys, tables, strict=True))
        other = {key: t for key, t in named.items() if not isinstance(t, int)}
        given.append(replace(whole, tables={**whole.tables, **other}))
    return given[0], given[1]


HALVES, SWAPPED = columns(0, 16, 16), columns(1, 16, 16)
CASES: dict[str, tuple[str, list[Any], list[Any]]] = {
    "in place, columns to other ranks": (
        "exact_row_wise_adagrad",
        [HALVES, 0, HALVES, 1],
        [SWAPPED, 1, HALVES, 1],
    ),
    "in place, other cuts": (
        "exact_adagrad",
        [HALVES, columns(0, 32), HALVES, 1],
        [columns(1, 32), SWAPPED, SWAPPED, 0],
    ),
    "in place, no state": ("exact_sgd", [HALVES, 0, 0, 1], [columns(1, 32), 1, 0, 1]),
    "rows": ("exact_row_wise_adagrad", [0, HALVES, rows(), 1], [rows(), SWAPPED, 1, 0]),
    "types": ("exact_adagrad", [0, HALVES, rows(), 1], [rows(), 1, HALVES, HALVES]),
    "no state": ("exact_sgd", [0, HALVES, rows(), 1], [rows(), rows(), HALVES, 0]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw."""
    job = tmp_path_factory.mktemp("moves")
    for folder in ("plans", "models"):
        (job / folder).mkdir()
    for name, (optimizer, before, after) in CASES.items():
        load = model(optimizer)
        write_model(job / "models" / f"{name}.yaml", load)
        for when, plan in zip(("before", "after"), plans(load, before, after), strict=True):
            path = job / "plans" / f"{name}.{when}.json"
            path.write_text(json.dumps(plan_to_dict(plan)))
    run_ranks("live_moves_worker", job)
    return [json.loads((job / f"moved.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert rank[name]["moved"] == pytest.approx(rank[name]["still"], rel=1e-5)
        assert len(set(rank[name]["still"])) > 1


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("in place")])
def test_what_cannot_be_resumed_is_not_saved(found: list[dict[str, Any]], name: str) -> None:
    words = {
        "another": "another plan than the given one runs: table",
        "disagree": "ranks [1] have another proposal than rank 0",
        "empty": "cannot be loaded into this model",
    }
    if name == "rows":
        words["lost"] = "with a state for each row and column shard"
    for rank in found:
        for what, said in words.items():
            assert said in rank[name]["refused"][what], what
        assert rank[name]["saved nothing"] == (name == "rows")
