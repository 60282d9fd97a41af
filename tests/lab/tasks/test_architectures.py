"""Tasks of several architectures: dense parts captured, plans that TorchRec runs, a rows file that
says what to build."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lab.architecture import KINDS, architecture_of
from lab.rankers import model_facts
from lab.tasks import architectures
from lab.tasks.architectures import (
    MAX_PLANS,
    NOTHING,
    OURS,
    THEIRS,
    captured,
    draw_architecture,
    draw_architecture_task,
)
from lab.tasks.draw import task_topology
from lab.tasks.models import MAX_TABLES_BYTES
from lab.tasks.task_set import TaskSet
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.captured import CapturedDense
from predictor.model.op_calls import Lookup, LookupBackward
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.workload import Workload
from shardopt.bench.job import Job
from shardopt.bench.rows import read_rows, write_rows
from shardopt.bench.run import new_rows
from shardopt.config import load_model
from shardopt.config.write import with_digest, write_model
from tests.builders import a_topology, plan_of, table_wise
from tests.quick import quick_first

pytest.importorskip("torchrec")


DLRM, DCN, SASREC = 0, 1, 4


@pytest.mark.parametrize("seed", quick_first(1, [DCN, SASREC]))
def test_the_dense_part_is_that_of_the_module(seed: int, tmp_path: Path) -> None:
    drawn = draw_architecture(seed)
    made = with_digest(captured(drawn, "m.ops.json"))
    assert isinstance(made.dense, CapturedDense)
    assert made.dense.optimizer == drawn.workload.dlrm.optimizer
    program = made.dense.program(made)
    looked_up = [e.module for e in program.forward if isinstance(e, Lookup)]
    returned = [e.module for e in program.backward if isinstance(e, LookupBackward)]
    assert sorted(looked_up) == sorted(returned) == sorted(made.modules)
    write_model(tmp_path / "m.yaml", made)
    assert load_model(tmp_path / "m.yaml").sha256 == made.sha256


def test_a_dlrm_needs_no_capture() -> None:
    drawn = draw_architecture(DLRM)
    assert captured(drawn, "m.ops.json") is drawn.workload


@pytest.mark.slow
def test_plans_are_few_and_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence cannot be replicated on CPUs, so structures that do are left out."""
    hardware = load_hardware("cpu-gloo")
    ranks = task_topology(hardware, 2, 2)
    made = SimpleNamespace(profile=hardware)
    task_set = cast(TaskSet, SimpleNamespace(ranks=ranks, made=made))
    monkeypatch.setattr(architectures, "EFFORT", 0.01)
    task = draw_architecture_task(SASREC, task_set)
    assert list(task.plans)[:2] == [THEIRS, OURS]
    assert len(task.plans) <= MAX_PLANS
    sequences = [t.name for t in task.workload.tables if not t.is_pooled]
    for plan in task.plans.values():
        kinds = {plan.tables[name].sharding_type for name in sequences}
        assert ShardingType.DATA_PARALLEL not in kinds


def test_a_rows_file_says_what_to_build(tmp_path: Path) -> None:
    drawn = draw_architecture(DCN)
    assert drawn.architecture is not None
    facts = model_facts(drawn.workload, drawn.architecture)
    rows = new_rows(Job(drawn.workload, {"p": _plan(drawn.workload)}, facts=facts))
    write_rows(tmp_path / "rows.json", rows)
    read = read_rows(tmp_path / "rows.json")
    assert architecture_of(read) == drawn.architecture
    assert [13, 256] in read.model["linears"]
    assert architecture_of(new_rows(Job(drawn.workload, {"p": _plan(drawn.workload)}))) is None


def _plan(workload: Workload) -> ShardingPlan:
    return plan_of(workload, a_topology(2, 2), [table_wise(t, 0) for t in workload.tables])


SEEDS = quick_first(14, range(28))


def test_seven_seeds_are_the_seven_kinds() -> None:
    drawn = [draw_architecture(seed) for seed in range(7)]
    kinds = [model.architecture.kind for model in drawn if model.architecture]
    assert sorted(kinds) == sorted(KINDS)
    (dlrm,) = [model for model in drawn if model.architecture is None]
    assert dlrm.workload.dlrm.top_mlp != NOTHING.top_mlp


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_one_model_within_bounds(seed: int) -> None:
    made = draw_architecture(seed)
    assert draw_architecture(seed) == made
    workload = made.workload
    assert workload.embedding_bytes <= MAX_TABLES_BYTES
    assert 32 <= workload.batch_size <= 2048
    assert len({t.name for t in workload.tables}) == len(workload.tables)
    features = [f.name for t in workload.tables for f in t.features]
    assert len(set(features)) == len(features)


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1"):
        draw_architecture(-1)
