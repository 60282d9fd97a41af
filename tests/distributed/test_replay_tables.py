"""Scaled tables are those of a model with more modules; lookups read the tables of their plan."""

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from predictor.trace.read import load_traces
from shardopt.replay.check import Scale
from shardopt.replay.generate import generate, programs_of
from shardopt.replay.launch import replay
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from shardopt.replay.program.tables import TableSummary
from shardopt.replay.scale.tables import repeat_tables
from tests.distributed.ranks import run_ranks
from tests.distributed.replay_tables_case import ROWS, model_and_plan

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

QUICK = ["--device", "cpu", "--warm-up", "1", "--iterations", "2"]


def captured(job: Path, modules: int, pipeline: str) -> Path:
    """Traces of two gloo ranks."""
    run_ranks("replay_tables_worker", job, modules, pipeline)
    return job / "traces"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(tmp_path_factory.mktemp("one"), 1, "base")


def programs(traces: Path) -> list[RankProgram]:
    return programs_of(load_traces([traces], keep_args=True), Annotations())


def exchanged(program: RankProgram) -> list[tuple[str, int]]:
    """Collectives but the all-reduces of the dense part, which has more to do in a larger model."""
    calls = [call for call in program.calls if call.is_collective]
    return sorted((call.op, call.bytes or 0) for call in calls if "allreduce" not in call.op)


def lookups(program: RankProgram) -> list[str]:
    return sorted(call.op for call in program.calls if "codegen" in call.op)


def test_lookups_read_the_tables_of_their_plan(one: Path, tmp_path: Path) -> None:
    summary = TableSummary(*model_and_plan(1, "base"), "model")
    made = generate([one], tmp_path / "b", tables=summary, scale=Scale(tables=2))
    rows = [
        [fill["rows"] for fill in program.fills.values() if fill["kind"] == "table_ids"]
        for program in made.programs
    ]
    whole = [ROWS[0], ROWS[4]]
    assert sorted(rows[0]) == sorted(2 * [whole, [ROWS[1]], [61], [ROWS[3]]])
    assert sorted(rows[1]) == sorted(2 * [[ROWS[1]], [60], [ROWS[3]]])
    result = replay(tmp_path / "b", QUICK)
    assert result["not_replayed"] == {}
    assert result["ops_replayed"] == result["ops_total"] == made.ops_total


def test_scaled_tables_exchange_what_two_modules_do(
    one: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    both = programs(captured(tmp_path_factory.mktemp("two"), 2, "base"))
    for scaled, real in zip(repeat_tables(programs(one), 2), both, strict=True):
        assert lookups(scaled) == lookups(real)
        assert exchanged(scaled) == exchanged(real)


def test_a_pipeline_announces_both_modules_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    alone, both = (
        programs(captured(tmp_path_factory.mktemp(str(n)), n, "sparse_dist")) for n in (1, 2)
    )
    for scaled, real in zip(repeat_tables(alone, 2), both, strict=True):
        assert lookups(scaled) == lookups(real)
        mine, theirs = exchanged(scaled), exchanged(real)
        assert sum(size for _, size in mine) == sum(size for _, size in theirs)
        assert len(mine) == len(theirs) + 1
