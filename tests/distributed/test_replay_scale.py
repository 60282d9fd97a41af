"""Benchmarks of a larger job are those of that job, captured on two gloo ranks: more tables are a
model with more modules, a larger batch is a larger batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.workload import DenseArch, Feature, Table, Workload
from predictor.trace.read import load_traces
from shardopt.replay.check import Scale
from shardopt.replay.doubled import scale_by_pair
from shardopt.replay.generate import generate, programs_of
from shardopt.replay.launch import replay
from shardopt.replay.more_tables import repeat_tables
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from shardopt.replay.program.tables import TableSummary
from tests.builders import table_wise
from tests.distributed.replay_case import QUICK, captured, programs
from tests.distributed.training_case import table_plan
from tests.shardopt.replay.differences import check_equal

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

T = ShardingType
ROWS, WIDTH = (100, 110, 121, 130, 90), 16
KINDS = (T.TABLE_WISE, T.COLUMN_WISE, T.ROW_WISE, T.DATA_PARALLEL, T.TABLE_WISE)


def alike(modules: int, pipeline: str = "base") -> tuple[Workload, ShardingPlan]:
    """Embedding modules that are alike, of five tables each: the first and the last on rank 0."""
    tables, plans = [], {}
    for module in range(modules):
        for at, (rows, kind) in enumerate(zip(ROWS, KINDS, strict=True)):
            name = f"m{module}_t{at}"
            feature = Feature(f"m{module}_f{at}", 2.0 + at, distribution=Zipf(1.1))
            tables.append(Table(name, rows, WIDTH, (feature,), module=f"m{module}"))
            plans[name] = table_plan(tables[-1], kind)
    dense = DenseArch(13, (32, WIDTH), (32, 1))
    load = Workload("alike", 32, tuple(tables), dense, train_pipeline=pipeline)
    return load, ShardingPlan(plans, 2, 2)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory):
    """Traces of as many modules under a pipeline."""

    @cache
    def of(modules: int, pipeline: str) -> Path:
        return captured(tmp_path_factory.mktemp(f"{modules}"), *alike(modules, pipeline))

    return of


def with_args(traces: Path) -> list[RankProgram]:
    return programs_of(load_traces([traces]), Annotations())


def exchanged(program: RankProgram) -> list[tuple[str, int]]:
    """Collectives but the all-reduces of the dense part, which has more to do in a larger model."""
    calls = [call for call in program.calls if call.is_collective]
    return sorted((call.op, call.bytes or 0) for call in calls if "allreduce" not in call.op)


def lookups(program: RankProgram) -> list[str]:
    return sorted(call.op for call in program.calls if "codegen" in call.op)


def test_lookups_read_the_tables_of_their_plan(traces, tmp_path: Path) -> None:
    summary = TableSummary(*alike(1), "model")
    generated = generate([traces(1, "base")], tmp_path / "b", tables=summary, scale=Scale(tables=2))
    rows = [
        [fill["rows"] for fill in program.fills.values() if fill["kind"] == "table_ids"]
        for program in generated.programs
    ]
    full_tables = [ROWS[0], ROWS[4]]
    assert sorted(rows[0]) == sorted(2 * [full_tables, [ROWS[1]], [61], [ROWS[3]]])
    assert sorted(rows[1]) == sorted(2 * [[ROWS[1]], [60], [ROWS[3]]])
    result = replay(tmp_path / "b", QUICK)
    assert result["not_replayed"] == {}
    assert result["ops_replayed"] == result["ops_total"] == generated.ops_total


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist"])
def test_scaled_tables_exchange_what_two_modules_do(traces, pipeline: str) -> None:
    alone, both = (with_args(traces(modules, pipeline)) for modules in (1, 2))
    for scaled, real in zip(repeat_tables(alone, 2), both, strict=True):
        assert lookups(scaled) == lookups(real)
        mine, theirs = exchanged(scaled), exchanged(real)
        if pipeline == "base":
            assert mine == theirs
        else:  # both modules are announced at once
            assert sum(size for _, size in mine) == sum(size for _, size in theirs)
            assert len(mine) == len(theirs) + 1


@pytest.mark.parametrize("batch", [48, 16])
def test_a_larger_batch_of_a_dlrm(batch: int, tmp_path: Path) -> None:
    """A batch of 16 samples equals the width of a table, which scaling must not confuse."""
    tables = tuple(Table(f"t{i}", 500, WIDTH, (Feature(f"f{i}", 4.0),)) for i in range(6))
    load = Workload("dlrm", batch, tables, DenseArch(13, (64, 32, WIDTH), (64, 32, 1)))
    placed = (table_wise(table, i % 2) for i, table in enumerate(tables))
    plan = ShardingPlan(dict(zip(load.keys, placed, strict=True)), 2, 2)
    jobs = [
        programs(captured(tmp_path / str(times), replace(load, batch_size=times * batch), plan, 1))
        for times in (1, 2, 3)
    ]
    for first, two, whole in zip(*jobs, strict=True):
        check_equal(scale_by_pair(first, two, 3), whole)
