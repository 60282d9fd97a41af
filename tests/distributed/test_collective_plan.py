"""Planning together when a rank fails or stays away."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torchrec.distributed.planner import ParameterConstraints, Topology

from shardopt.torchrec import Confirm, ShardoptPlanner, hook
from shardopt.torchrec.collective import search_seconds
from tests.distributed.ranks import on_ranks
from tests.distributed.training_case import EFFORT, SHARDERS
from tests.shardopt.torchrec.hook_models import Model, bag


def plan(group: Any = None, **options: Any) -> str:
    """Kind and words of the error that planning together ends in.

    Args:
        options: to the planner.
    """
    planner = ShardoptPlanner(batch_size=4, effort=EFFORT, debug=False, **options)
    try:
        planner.collective_plan(Model(bag("t", 100, 8)).ebc, SHARDERS, group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


TOLD = {"constraints": {"t": ParameterConstraints(pooling_factors=[2.0])}}


def test_without_a_group_the_way_to_one_is_named() -> None:
    ranks = Topology(world_size=2, compute_device="cpu")
    assert "torch.distributed.init_process_group()" in plan(topology=ranks, **TOLD)


def plan_in_trouble() -> dict[str, Any]:
    """First the planning rank fails, then rank 1 stays away: the errors that a rank meets."""
    outcome: dict[str, Any] = {"failed": plan(strict=True)}
    alone = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    outcome["seconds"] = [search_seconds(limit, alone) for limit in (None, 0.1, 60.0)]
    if dist.get_rank() == 0:
        outcome["missing"] = plan(alone, **TOLD)
    return outcome


@pytest.mark.distributed
def test_errors_reach_all_ranks_and_a_missing_rank_is_named() -> None:
    """TorchRec leaves the others waiting for a plan."""
    first, second = on_ranks(plan_in_trouble)
    assert first["failed"].startswith("PlannerInputError")
    assert "pooling factor" in first["failed"]
    assert first["failed"] == second["failed"]
    assert first["seconds"] == [0.5, 0.1, 0.5], "a quarter of the group's 2 s"
    kind, missing = first["missing"].split(":", 1)
    assert kind == "PlannerError"
    assert "1" in missing.split(";")[0]
    assert "longer timeout" in missing


def plan_with_a_fault() -> dict[str, Any]:
    """A search that fails where the plan is made, and a topology of other ranks than there are."""
    outcome: dict[str, Any] = {}
    with patch.object(hook, "find_plans", side_effect=ZeroDivisionError):
        outcome["fault"] = plan(**TOLD)
    outcome["many"] = plan(topology=Topology(world_size=8, compute_device="cpu"), **TOLD)
    planner = ShardoptPlanner(batch_size=4, effort=EFFORT, debug=False, confirm=Confirm([]), **TOLD)
    with patch.object(hook, "confirm_plans", side_effect=ZeroDivisionError):
        planner.collective_plan(Model(bag("t", 100, 8)).ebc, SHARDERS)
    outcome["confirmed"] = planner.confirmed
    return outcome


@pytest.mark.slow
@pytest.mark.distributed
def test_a_fault_ends_no_rank() -> None:
    first, second = on_ranks(plan_with_a_fault)
    assert first == second == {"fault": "nothing", "many": "nothing", "confirmed": None}
