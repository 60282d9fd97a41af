"""A running job watched and moved, for real, on 2 gloo ranks; and what cannot move in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from predictor.errors import InputError, ShardoptError
from predictor.model.plan import ComputeKernel, ShardingPlan, TablePlan
from predictor.model.plan_json import plan_to_dict
from search.in_use.price import allowed_in_place, find_obstacles
from shardopt.api.request import Machine
from shardopt.config import load_model
from shardopt.config.write import write_model
from shardopt.live import reshard
from shardopt.live.monitor import ReplanMonitor
from shardopt.plan import load_plan
from shardopt.training.batch import Batch, synthetic_batch
from tests.builders import column_wise, data_parallel, table_wise
from tests.distributed import live_case as case
from tests.distributed.ranks import on_ranks
from tests.distributed.training_case import sharded_model, train

pytestmark = pytest.mark.distributed


def run_job(job: Path) -> dict[str, Any]:
    """Train twice on the same batches, with and without moves: the losses of both, the proposal,
    and what bad proposals ended in."""
    load = load_model(job / "model.yaml")
    batches = [
        synthetic_batch(
            load if step < case.EVERY else case.drifted(load), rank=dist.get_rank(), index=step
        )
        for step in range(case.STEPS)
    ]
    still = sharded_model(load, load_plan(job / "plan.json"))
    return {"still": train(still, load, batches), **watched(job, batches)}


def watched(job: Path, batches: list[Batch]) -> dict[str, Any]:
    """With a monitor, which moves when the second window of drifted data has closed."""
    load = load_model(job / "model.yaml")
    given = load_plan(job / "plan.json")
    model = sharded_model(load, given)
    outcome: dict[str, Any] = {"losses": [], "refused": {}}

    def monitor_of(plan: Any) -> ReplanMonitor:
        return ReplanMonitor(
            model,
            plan,
            case.EVERY,
            model=job / "model.yaml",
            folder=job / "windows",
            machine=Machine(hardware="cpu-gloo", ddr_gib=2.0),
            horizon=10**7,
            effort=0.05,
        )

    monitor = monitor_of(given)
    outcome["refused"]["another"] = said(lambda: monitor_of(load_plan(job / "other.json")))
    outcome["refused"]["nothing proposed"] = said(lambda: monitor.apply(model))
    for step, batch in enumerate(batches):
        outcome["losses"] += train(model, load, [batch])
        if monitor.step(batch.sparse) and step + 1 == 2 * case.EVERY:
            proposal = monitor.propose()
            outcome["proposal"] = proposal.to_object()
            outcome["refused"] |= refusals(monitor, model)
            monitor.apply(model)
            outcome["moved"] = [table.ranks for table in model.plan.plan["sparse.ebc"].values()]
            outcome["matches"] = list(reshard.find_mismatches(model, proposal.plan))
    outcome["windows"] = sorted(path.name for path in (job / "windows").iterdir())
    return outcome


def refusals(monitor: ReplanMonitor, model: Any) -> dict[str, str]:
    """Proposals that must not be followed, and what is said of them."""
    good, second = monitor.proposal, dist.get_rank() == 1
    assert good is not None
    refused = {}

    def try_it(name: str, proposal: Any) -> None:
        monitor.proposal = proposal
        refused[name] = said(lambda: monitor.apply(model))
        monitor.proposal = good

    try_it("other plan", replace(good, before=good.plan))
    try_it("ranks disagree", replace(good, plan=good.before) if second else good)
    try_it("an obstacle", replace(good, obstacles=("table 't' has adam",)))
    with pytest.MonkeyPatch.context() as patch:
        if second:
            patch.setattr(reshard, "free_bytes", lambda device: 1000)
        try_it("memory", good)
    ebc = model.module.sparse["ebc"]
    ebc.forward = ebc.forward
    try_it("pipeline", good)
    del ebc.forward
    return refused


def said(action: Callable[[], object]) -> str:
    try:
        action()
    except ShardoptError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the cases on both ranks; return the results of each."""
    job = tmp_path_factory.mktemp("live")
    load = case.workload()
    write_model(job / "model.yaml", load)
    for name, ranks in (("plan", case.RANKS), ("other", (1, 1, 0, 0))):
        (job / f"{name}.json").write_text(json.dumps(plan_to_dict(case.plan(load, ranks))))
    return on_ranks(run_job, job)


def test_training_goes_on_as_if_nothing_had_moved(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["losses"] == pytest.approx(rank["still"], rel=1e-5)
        assert not rank["matches"]
        assert rank["moved"] != [[r] for r in case.RANKS]


def test_the_proposal_is_that_of_plan_from(found: list[dict[str, Any]]) -> None:
    first, second = (rank["proposal"] for rank in found)
    assert first == second
    assert first["move"]["recommended"]
    assert first["move"]["in_place"]
    assert first["obstacles"] == []
    before = first["from"]
    assert before["horizon"] == 10**7
    assert first["iteration_ms"] < before["iteration_ms"]
    assert first["gain"] == pytest.approx(1 - first["iteration_ms"] / before["iteration_ms"])
    hot = {key.split("/")[-1] for key in before["moved"]} & {"t0", "t1"}
    assert len(hot) == 1, "the hot tables part"
    files = {"window-6.npz", "window-12.npz", "stats-12.npz", "window-18.npz"}
    assert set(found[0]["windows"]) == files


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another", ("table 't0'", "ranks [0]")),
        ("nothing proposed", ("propose()",)),
        ("other plan", ("another plan",)),
        ("ranks disagree", ("ranks [1]", "another proposal")),
        ("an obstacle", ("table 't' has adam",)),
        ("memory", ("rank 1",)),
        ("pipeline", ("pipeline.detach()",)),
    ],
)
def test_bad_proposals_are_named_on_every_rank(
    found: list[dict[str, Any]], what: str, words: tuple[str, ...]
) -> None:
    for rank in found:
        assert all(word in rank["refused"][what] for word in words), rank["refused"][what]


# --- without training --------------------------------------------------------------------------

LOAD = case.workload()
TABLES = dict(zip(LOAD.keys, LOAD.tables, strict=True))
BEFORE = case.plan(LOAD)
FIRST, SECOND = LOAD.keys[:2]


def obstacles(after: TablePlan, **fields: Any) -> str:
    tables = {k: replace(table, **fields) for k, table in TABLES.items()}
    plan = replace(BEFORE, tables={**BEFORE.tables, FIRST: after})
    return "; ".join(find_obstacles(tables, BEFORE, plan, [FIRST]))


def test_what_moves_in_place() -> None:
    table = TABLES[FIRST]
    there, columns = table_wise(table, 1), column_wise(table, 16, 16)
    for optimizer in ("exact_row_wise_adagrad", "exact_adagrad", "exact_sgd"):
        assert not obstacles(there, optimizer=optimizer)
    for optimizer in ("adam", "lamb", "partial_row_wise_adam"):
        assert optimizer in obstacles(there, optimizer=optimizer)
    assert obstacles(there, pooling="none")
    assert "table_wise to column_wise" in obstacles(columns)
    assert "column cuts" in obstacles(columns)
    assert "[8, 24]" in obstacles(column_wise(table, 8, 24))
    assert "fused" in obstacles(replace(there, compute_kernel=ComputeKernel.FUSED_UVM))
    one_rank = tuple(replace(shard, rank=0) for shard in columns.shards)
    assert "one rank" in obstacles(replace(columns, shards=one_rank))


def test_what_keeps_a_whole_module_where_it_is() -> None:
    own = BEFORE.tables[FIRST]
    assert allowed_in_place(TABLES, BEFORE)(FIRST, own)
    mixed = {**TABLES, SECOND: replace(TABLES[SECOND], optimizer="exact_sgd")}
    assert not allowed_in_place(mixed, BEFORE)(FIRST, own)
    replicated = data_parallel(TABLES[SECOND], 2)
    plan = ShardingPlan({**BEFORE.tables, SECOND: replicated}, 2, 2)
    assert not allowed_in_place(TABLES, plan)(FIRST, own)


def test_without_a_running_job_there_is_nothing_to_watch(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="every is 0"):
        ReplanMonitor(None, BEFORE, 0, model=tmp_path / "model.yaml")
