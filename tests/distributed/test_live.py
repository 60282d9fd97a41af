"""A running job watched and moved, for real, on 2 gloo ranks; and what cannot move in place."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")

from predictor.model.plan import ComputeKernel, Shard, ShardingType, TablePlan
from predictor.model.plan_json import plan_to_dict
from search.in_use.price import allowed_in_place, find_obstacles
from shardopt.config.write import write_model
from tests.distributed import live_case as case
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw."""
    job = tmp_path_factory.mktemp("live")
    load = case.workload()
    write_model(job / "model.yaml", load)
    for name, ranks in (("plan", case.RANKS), ("other", (1, 1, 0, 0))):
        (job / f"{name}.json").write_text(json.dumps(plan_to_dict(case.plan(load, ranks))))
    run_ranks("live_worker", job)
    return [json.loads((job / f"found.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_moved(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["losses"] == pytest.approx(rank["still"], rel=1e-5)
        assert not rank["matches"]
        assert rank["moved"] != [f"[{r}]" for r in case.RANKS]


@pytest.mark.slow
def test_the_proposal_is_that_of_plan_from(found: list[dict[str, Any]]) -> None:
    first, second = (rank["proposal"] for rank in found)
    assert first == second
    assert first["move"]["recommended"]
    assert first["move"]["in_place"]
    assert first["obstacles"] == []
    assert first["from"]["horizon"] == 10**7
    assert first["iteration_ms"] < first["from"]["iteration_ms"]
    assert first["gain"] == pytest.approx(1 - first["iteration_ms"] / first["from"]["iteration_ms"])
    hot = {"t0", "t1"}
    assert len(hot & {key.split("/")[-1] for key in first["from"]["moved"]}) == 1, (
        "the hot tables part"
    )
    kept = {"window-6.npz", "window-12.npz", "stats-12.npz", "window-18.npz"}
    assert set(found[0]["windows"]) == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another", "the plan is not the one that runs: table 't0' runs on ranks [0], the plan"),
        ("nothing proposed", "call propose()"),
        ("other plan", "it is for another plan than the one that runs"),
        ("ranks disagree", "ranks [1] have another proposal than rank 0"),
        ("an obstacle", "table 't' has adam"),
        ("memory", "rank 1 needs"),
        ("pipeline", "pipeline.detach()"),
    ],
)
def test_bad_proposals_are_named_on_every_rank(
    found: list[dict[str, Any]], what: str, words: str
) -> None:
    for rank in found:
        assert words in rank["refused"][what]


# --- without training --------------------------------------------------------------------------

T = ShardingType
LOAD = case.workload()
TABLES = dict(zip(LOAD.keys, LOAD.tables, strict=True))
BEFORE = case.plan(LOAD)


def obstacles(key: str, after: TablePlan, **of: Any) -> str:
    tables = {k: replace(table, **of) for k, table in TABLES.items()}
    plan = replace(BEFORE, tables={**BEFORE.tables, key: after})
    return "; ".join(find_obstacles(tables, BEFORE, plan, [key]))


def test_what_moves_in_place() -> None:
    there = case.plan(LOAD, (1, 0, 1, 1)).tables["t0"]
    for optimizer in ("exact_row_wise_adagrad", "exact_adagrad", "exact_sgd"):
        assert not obstacles("t0", there, optimizer=optimizer)
    for optimizer in ("adam", "lamb", "partial_row_wise_adam"):
        assert "only the first is moved" in obstacles("t0", there, optimizer=optimizer)
    assert "does not pool" in obstacles("t0", there, pooling="none")
    halves = (Shard(0, (0, 0), (5000, 16)), Shard(1, (0, 16), (5000, 16)))
    columns = TablePlan(T.COLUMN_WISE, ComputeKernel.FUSED, halves)
    assert "goes from table_wise to column_wise" in obstacles("t0", columns)
    assert "do not follow other column cuts" in obstacles("t0", columns)
    uneven = (Shard(0, (0, 0), (5000, 8)), Shard(1, (0, 8), (5000, 24)))
    assert "shards of [8, 24] columns" in obstacles("t0", replace(columns, shards=uneven))
    uvm = replace(there, compute_kernel=ComputeKernel.FUSED_UVM)
    assert "only fused" in obstacles("t0", uvm)
    twice = replace(columns, shards=tuple(replace(shard, rank=0) for shard in halves))
    assert "two shards on one rank" in obstacles("t0", twice)


def test_what_keeps_a_whole_module_where_it_is() -> None:
    key = LOAD.keys[0]
    own = BEFORE.tables[key]
    assert allowed_in_place(TABLES, BEFORE)(key, own)
    mixed = {**TABLES, LOAD.keys[1]: replace(TABLES[LOAD.keys[1]], optimizer="exact_sgd")}
    assert not allowed_in_place(mixed, BEFORE)(key, own)
    copies = tuple(Shard(rank, (0, 0), (5000, 32)) for rank in range(2))
    replicated = TablePlan(T.DATA_PARALLEL, ComputeKernel.DENSE, copies)
    plan = replace(BEFORE, tables={**BEFORE.tables, LOAD.keys[1]: replicated})
    assert not allowed_in_place(TABLES, plan)(key, own)


def test_without_a_running_job_there_is_nothing_to_watch(tmp_path: Path) -> None:
    from predictor.errors import InputError
    from shardopt.live.monitor import ReplanMonitor

    with pytest.raises(InputError, match="every is 0"):
        ReplanMonitor(None, BEFORE, 0, model=tmp_path / "model.yaml")
