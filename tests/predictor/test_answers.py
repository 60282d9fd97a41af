"""Predictions on every shipped profile: one small model, and ops of the dense part.

Any change of a cost, of the graph or of a shipped constant moves some figures of
tests/golden/answers.yaml or ops.yaml. Where the change is meant, ``SHARDOPT_UPDATE_GOLDEN=1``
writes both files, and their diff shows what moved.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from predictor.cost.ops.op_time import (
    ATTENTION,
    CONVOLUTIONS,
    DECODES,
    GATHERS,
    KNOWN,
    PRODUCTS,
    SCATTERS,
    OpTimes,
)
from predictor.hardware.loader import list_hardware
from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Feature, QComm, Workload
from predictor.predict import predict
from tests.builders import a_table, a_topology, a_workload, cut, data_parallel, hardware, plan_of
from tests.contract.test_op_models import call_of

GOLDEN = Path(__file__).parents[1] / "golden"
ANSWERS, OPS = GOLDEN / "answers.yaml", GOLDEN / "ops.yaml"
OP_KINDS = {
    "products": PRODUCTS,
    "convolutions": CONVOLUTIONS,
    "attention": ATTENTION,
    "gathers": GATHERS,
    "scatters": SCATTERS,
    "decodes": DECODES,
    "other": KNOWN - GATHERS - SCATTERS - DECODES,
}
ACCEPT = "SHARDOPT_UPDATE_GOLDEN=1 accepts the new ones"
T = ShardingType
PIPELINES = ("sparse_dist", "prefetch_sparse_dist", "semi_sync")
CASES = {name: (name, "base") for name in list_hardware()} | {
    f"h100-sxm, {pipeline}": ("h100-sxm", pipeline) for pipeline in PIPELINES
}


def skewed(name: str, pooling: float) -> tuple[Feature, ...]:
    return (Feature(f"{name}_f", pooling, distribution=Zipf(1.05), pooling_factor_std=pooling / 2),)


def a_job(pipeline: str) -> Workload:
    """Tables of every pooling, two modules, weighted ids and a compressed wire."""
    tables = (
        a_table("hot", 1_000_000, 128, features=skewed("hot", 40.0)),
        a_table("wide", 400_000, 256),
        a_table("mean", 2_000_000, 64, features=skewed("mean", 10.0), pooling="mean"),
        a_table("rows", 3_000_000, 64, weighted=True),
        a_table("host", 5_000_000, 128, features=skewed("host", 5.0)),
        a_table("tiny", 1_000, 32),
        a_table("history", 500_000, 64, module="ec", pooling="none", index_dedup=True),
        a_table("columns", 600_000, 128),
        a_table("grid", 4_000_000, 128),
    )
    return a_workload(
        *tables, batch_size=4096, train_pipeline=pipeline, qcomm=QComm("fp16", "bf16")
    )


def a_plan(workload: Workload, topology: Topology, *, on_device: bool) -> list[TablePlan]:
    """Tables of every sharding type, and one behind a cache where there are devices."""
    hot, wide, mean, rows, host, tiny, history, columns, grid = workload.tables
    world, local = topology.world_size, topology.local_world_size
    cached = replace(
        cut(host, T.TABLE_WISE, [1]),
        compute_kernel=ComputeKernel.FUSED_UVM_CACHING,
        parameters={"cache_params": {"load_factor": 0.1}},
    )
    return [
        cut(hot, T.TABLE_WISE, [0]),
        cut(wide, T.COLUMN_WISE, [0, 1], columns=2),
        cut(mean, T.ROW_WISE, range(world)),
        cut(rows, T.TABLE_ROW_WISE, range(local)),
        cached if on_device else cut(host, T.TABLE_WISE, [1]),
        data_parallel(tiny, world),
        cut(history, T.ROW_WISE, range(world)),
        cut(columns, T.TABLE_COLUMN_WISE, [2, 3], columns=2),
        cut(grid, T.GRID_SHARD, range(world), columns=2),
    ]


def answer(name: str, pipeline: str) -> dict[str, Any]:
    profile, workload = hardware(name), a_job(pipeline)
    topology = a_topology(16, 8)
    plan = plan_of(workload, topology, a_plan(workload, topology, on_device=not profile.inline))
    prediction = predict(workload, topology, profile, plan)
    busy: dict[str, float] = defaultdict(float)
    for rank in prediction.per_rank:
        for phase, ms in rank.busy_ms.items():
            busy[phase] += ms
    peaks = [rank.peak for rank in prediction.memory]
    return {
        "iteration_ms": prediction.iteration_ms,
        "most_ms": prediction.interval_ms[1],
        "host_ms": sum(op.host_ms for op in prediction.graph.ops),
        "idle_ms": sum(rank.idle_ms for rank in prediction.per_rank),
        "busy_ms": dict(sorted(busy.items())),
        "reserved_bytes": max(peak.reserved_bytes for peak in peaks if peak is not None),
    }


def op_answer(name: str) -> dict[str, float]:
    """Return the time in ms of one call of every op, by kind; `a_job` runs few of them."""
    times = OpTimes(hardware(name), "fp32")
    return {
        kind: math.fsum(times.cost(call_of(op, 40)).ms for op in ops)
        for kind, ops in OP_KINDS.items()
    }


def golden(path: Path, compute: Callable[[str], Any], cases: Iterable[str]) -> dict[str, Any]:
    """Read a file of answers, written anew where ``SHARDOPT_UPDATE_GOLDEN`` is set."""
    if os.environ.get("SHARDOPT_UPDATE_GOLDEN"):
        computed = {case: compute(case) for case in cases}
        path.write_text(yaml.safe_dump(computed, sort_keys=False), encoding="utf-8")
    stored: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return stored


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return golden(ANSWERS, lambda case: answer(*CASES[case]), CASES)


@pytest.fixture(scope="module")
def op_answers() -> dict[str, Any]:
    return golden(OPS, op_answer, list_hardware())


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_as_they_were(case: str, answers: dict[str, Any]) -> None:
    computed, stored = answer(*CASES[case]), dict(answers.get(case, {}))
    assert computed.pop("busy_ms") == pytest.approx(stored.pop("busy_ms", {}), rel=1e-9), ACCEPT
    assert computed == pytest.approx(stored, rel=1e-9), ACCEPT


@pytest.mark.parametrize("name", list_hardware())
def test_ops_take_as_long_as_they_did(name: str, op_answers: dict[str, Any]) -> None:
    assert op_answer(name) == pytest.approx(op_answers.get(name, {}), rel=1e-9), ACCEPT


def test_every_answer_is_of_a_case(answers: dict[str, Any], op_answers: dict[str, Any]) -> None:
    assert answers.keys() == CASES.keys(), ACCEPT
    assert op_answers.keys() == {*list_hardware()}, ACCEPT
