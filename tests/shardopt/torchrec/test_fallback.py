"""TorchRec's own plan in the place of ours, where that cannot be made or gains nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from predictor.errors import InputError
from predictor.units import GIB
from shardopt.torchrec import ShardoptPlanner, hook, planning
from shardopt.torchrec.beside import TorchRecsPlan
from tests.shardopt.torchrec.hook_models import (
    EFFORT,
    SHARDERS,
    Model,
    bag,
    factors,
    planner,
    topology,
)

MESSAGE = "the plan is TorchRec's own"


def torchrecs(model: nn.Module, **more: Any) -> str:
    arguments = {"topology": topology(), "batch_size": 512, "constraints": factors(a=20.0, b=2.0)}
    return str(
        EmbeddingShardingPlanner(**{**arguments, "debug": False, **more}).plan(model, SHARDERS)
    )


def fails(*_: Any, **__: Any) -> NoReturn:
    raise ZeroDivisionError("a fault of ours")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if MESSAGE in r.getMessage()]


@pytest.mark.parametrize(
    ("module", "broken"),
    [
        (planning, "find_plans"),  # the search
        (planning, "read_workload"),  # reading the module
        (hook, "check_bandwidths"),  # as the planner is made
        (planning, "to_options"),  # its plan as TorchRec's
        (hook, "check_table_sizes"),
        (planning, "torchrecs_plan"),
    ],
)
def test_a_fault_of_ours_gives_torchrecs_plan_and_one_warning(
    module: Any, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = []

    def changes(options: list[Any]) -> list[Any]:
        called.append(len(options))
        return options

    monkeypatch.setattr(module, broken, fails)
    monkeypatch.setattr(TorchRecsPlan, "ties", lambda *_: False)
    faulty = planner(callbacks=[changes])
    assert str(faulty.plan(Model(), SHARDERS)) == torchrecs(Model())
    (message,) = told(caplog)
    assert "ZeroDivisionError: a fault of ours" in message
    assert "torch" in message or Path(message.split()[-1]).is_file()
    assert faulty.found is None
    assert called[-1] == 2, "the user's callbacks are TorchRec's"
    monkeypatch.undo()
    if broken != "check_bandwidths":
        faulty.plan(Model(), SHARDERS)
        assert faulty.found is not None, "the next plan is ours again"


def test_who_interrupts_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "find_plans", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planner().plan(Model(), SHARDERS)


def test_what_shardopt_refuses_and_torchrec_plans_is_torchrecs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any, **__: Any) -> NoReturn:
        raise InputError("such a module is not planned")

    monkeypatch.setattr(planning, "read_workload", refuses)
    with pytest.raises(PlannerError, match="such a module") as caught:
        planner(strict=True).plan(Model(), SHARDERS)
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION
    assert str(planner().plan(Model(), SHARDERS)) == torchrecs(Model())
    (message,) = told(caplog)
    assert "such a module is not planned" in message
    assert "report" not in message


def test_what_torchrec_cannot_plan_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_plans", fails)
    constraints = factors(a=1.0)
    constraints["a"].sharding_types, constraints["a"].compute_kernels = ["table_wise"], ["fused"]
    hook = planner(topology=topology(2, GIB), constraints=constraints)
    with pytest.raises(PlannerError) as caught:
        hook.plan(Model(bag("a", 4_000_000, 256)), SHARDERS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_devices_without_costs_are_planned_as_torchrec_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Topology(world_size=2, compute_device="mtia")
    arguments = {"topology": ranks, "batch_size": 512, "debug": False}
    hook, torchrec_planner = ShardoptPlanner(**arguments), EmbeddingShardingPlanner(**arguments)
    assert str(hook.plan(Model(), SHARDERS)) == str(torchrec_planner.plan(Model(), SHARDERS))
    assert len(told(caplog)) == 1
    with pytest.raises(PlannerError, match="mtia devices"):
        ShardoptPlanner(**arguments, strict=True)


def test_a_tie_keeps_torchrecs_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Seven tables that the search would split by columns for nothing."""
    names = [f"t{i}" for i in range(7)]
    model = Model(*(bag(n, 8 if n == "t0" else 50_000, 128) for n in names))
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})
    arguments = {
        "topology": Topology(world_size=2, compute_device="cuda", hbm_cap=16 * GIB),
        "constraints": factors(**dict.fromkeys(names, 1.0)),
    }
    hook = planner(**arguments, effort=0.05)
    plan = hook.plan(model, SHARDERS)
    assert hook.found is not None
    assert hook.found.torchrecs is not None
    assert hook.found.torchrecs.returned
    assert str(plan) == torchrecs(model, **arguments)
    assert "this is TorchRec's plan" in caplog.text


def test_a_call_has_one_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second search has what the first left."""
    stops: list[Any] = []
    monkeypatch.setattr(
        planning, "find_plans", lambda _, stop, *a, **k: stops.append(stop) or fails()
    )
    for more, limit in (
        ({"effort": None}, hook.SECONDS),
        ({"effort": None, "timeout_seconds": 7}, 7.0),
        ({"effort": 0.1}, None),
    ):
        planner(**more).plan(Model(), SHARDERS)
        assert stops[-1].time_limit_s == limit
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    planner(effort=None).plan(Model(), SHARDERS)
    assert stops[-1].time_limit_s is None, "other processes must find the same plan"


def test_where_time_is_up_before_the_search_the_plan_is_torchrecs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("search.stop.Stop.elapsed_s", property(lambda self: 60.0))
    hook = planner(timeout_seconds=5, cache=False)
    assert str(hook.plan(Model(), SHARDERS)) == torchrecs(Model())
    assert "no time is left to search" in caplog.text


def test_a_callback_that_drops_a_table_is_told(caplog: pytest.LogCaptureFixture) -> None:
    hook = planner(callbacks=[lambda options: options[:1]])
    plan = hook.plan(Model(), SHARDERS)
    assert set(plan.plan["ebc"]) == {"a"}
    assert "callbacks left out table 'b'" in caplog.text
    assert hook.found is None


@pytest.mark.parametrize(("world", "local"), [(2, 8), (4, 8), (12, 8)])
def test_ranks_that_are_part_of_a_host(world: int, local: int) -> None:
    hook = planner(topology=topology(world, local_world_size=local))
    assert set(hook.plan(Model(), SHARDERS).plan["ebc"]) == {"a", "b"}
    assert (hook.found is None) == (world == 12)


def test_bandwidths_of_a_topology_are_named_once_and_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TorchRec replicates both tables by them, and only then."""
    model = Model(bag("a", 1000), bag("b", 100_000))
    slow = topology(intra_host_bw=1e3, hbm_mem_bw=2.5e9)
    with_them = planner(topology=slow, batch_size=64)
    with_them.plan(model, SHARDERS)
    planner(topology=slow, batch_size=64)
    assert caplog.text.count("hbm_mem_bw=2.5e+09") == 1
    without = planner(batch_size=64)
    without.plan(model, SHARDERS)
    assert with_them.found is not None
    assert without.found is not None
    assert with_them.found.problem == without.found.problem, "nor what may be chosen"


def test_a_table_that_replicating_would_help_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(bag("a", 100), bag("b", 100_000))
    arguments = {"topology": Topology(2, "cuda"), "batch_size": 64}
    hook = planner(**arguments, default_pooling_factor=1.0, constraints=None)
    hook.plan(model, SHARDERS)
    assert hook.found is not None
    usual = hook.found.prediction.iteration_ms
    advised = "ParameterConstraints(sharding_types=['data_parallel'"
    (line,) = [r.getMessage() for r in caplog.records if advised in r.getMessage()]
    assert "'a'" in line
    types = ["data_parallel", "table_wise", "row_wise", "column_wise"]
    allowed = {n: ParameterConstraints(sharding_types=types) for n in "ab"}
    hook = planner(**arguments, default_pooling_factor=1.0, constraints=allowed)
    hook.plan(model, SHARDERS)
    assert hook.found is not None
    assert hook.found.prediction.iteration_ms < usual


def test_dims_that_fused_kernels_refuse_have_the_dense_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for device, hardware in (("cpu", "cpu-gloo"), ("cuda", "a100-80gb")):
        ranks = Topology(world_size=2, compute_device=device)
        hook = planner(topology=ranks, hardware=hardware)
        plan = hook.plan(Model(bag("a", 1000, 10), bag("b", 1000, 33)), SHARDERS).plan["ebc"]
        assert {sharding.compute_kernel for sharding in plan.values()} == {"dense"}
    assert "FBGEMM refuses" not in caplog.text
    wants = factors(a=1.0)
    wants["a"].sharding_types = ["table_wise"]
    planner(constraints=wants).plan(Model(bag("a", 1000, 10)), SHARDERS)
    assert "FBGEMM refuses" in caplog.text


def test_features_without_ids_and_of_two_tables_are_planned() -> None:
    shared = Model(bag("a"), bag("b"))
    config = shared.ebc.embedding_bag_configs()[1]
    config.feature_names = ["a_f0"]
    model = Model(*shared.ebc.embedding_bag_configs())
    hook = planner(constraints=factors(a=0.0, b=2.0))
    assert set(hook.plan(model, SHARDERS).plan["ebc"]) == {"a", "b"}
    assert hook.found is not None


@pytest.mark.skipif(torch.distributed.is_initialized(), reason="there is a process group already")
def test_a_group_of_one_rank_needs_no_topology(tmp_path: Path) -> None:
    group = torch.distributed
    group.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        hook = ShardoptPlanner(batch_size=512, effort=EFFORT, default_pooling_factor=1.0)
        plan = hook.collective_plan(Model(), SHARDERS)
    finally:
        group.destroy_process_group()
    assert {r for t in plan.plan["ebc"].values() for r in t.ranks} == {0}
    assert hook.found is not None
