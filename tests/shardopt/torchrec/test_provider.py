"""The provider of TorchRec 1.9's planning sessions, and its absence before."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from torchrec.distributed.planner.types import ParameterConstraints

from predictor.errors import InputError, ShardoptError
from predictor.hardware.loader import load_hardware
from shardopt.torchrec import (
    ShardoptPlannerExecutor,
    ShardoptPlannerProvider,
    ShardoptPlanReporter,
)
from tests.shardopt.torchrec.hook_models import EFFORT, SHARDERS, Model, bag, factors

HAS_PROVIDERS = importlib.util.find_spec("torchrec.distributed.planner.provider") is not None


newer = pytest.mark.skipif(not HAS_PROVIDERS, reason="planner providers came with torchrec 1.9")


@pytest.mark.skipif(HAS_PROVIDERS, reason="this torchrec has planner providers")
def test_an_older_torchrec_is_named() -> None:
    for make in (ShardoptPlannerProvider, ShardoptPlannerExecutor):
        with pytest.raises(
            ImportError, match=r"no PlannerProvider.*1\.9.*ShardoptPlanner"
        ) as caught:
            make()
        assert isinstance(caught.value, ShardoptError)


def session(
    sku: str, hardware: dict[str, Any] | None = None, reporter: Any = None, **more: Any
) -> tuple[Any, Any]:
    """Result and context of planning for one SKU."""
    from torchrec.distributed.planner.api import ProductionPlannerOrchestrator
    from torchrec.distributed.planner.types import PlannerSessionContext, ShardingPlanRequest

    fields = {
        "model": Model(),
        "sharders": SHARDERS,
        "world_size": 4,
        "local_world_size": 4,
        "batch_size": 512,
        "constraints": factors(a=20.0, b=2.0),
        "compute_device": "cuda",
        "capture_search_space": True,
    }
    request = ShardingPlanRequest(**{**fields, **more})
    context = PlannerSessionContext(request=request, results={})
    executor = ShardoptPlannerExecutor(ShardoptPlannerProvider(hardware, effort=EFFORT))
    results = ProductionPlannerOrchestrator(executor, sku, reporter).plan(request, context)
    return results[sku], context


@newer
def test_a_session_plans_with_ours_and_reports() -> None:
    result, context = session("H100")
    assert result.success, result.planner_failure_reason
    assert set(result.sharding_plan.plan["ebc"]) == {"a", "b"}
    assert {option.fqn for option in result.sharding_options} == {"ebc.a", "ebc.b"}
    assert {option.fqn for option in context.search_space["H100"]} == {"ebc.a", "ebc.b"}
    assert result.estimated_max_hbm_bytes > 0
    for reporter in (None, ShardoptPlanReporter()):
        result, context = session("H100", reporter=reporter)
        outcome = context.stats[-1].found
        assert result.critical_path_ms == outcome.prediction.iteration_ms
        parts = result.comms_critical_path_ms + result.comp_critical_path_ms
        assert parts == pytest.approx(result.critical_path_ms)
        assert 0 < result.comms_critical_path_ms < result.critical_path_ms
        assert result.estimated_qps == pytest.approx(4 * 512 / result.critical_path_ms * 1e3)


@newer
def test_what_the_numbers_lack_is_in_the_result() -> None:
    from torch import nn

    class Asks(nn.Module):
        """Forward takes what cannot be made from the features."""

        def __init__(self) -> None:
            super().__init__()
            self.ebc, self.over = Model().ebc, nn.Linear(128, 1)

        def forward(self, batch: object) -> object:
            return batch

    result, _ = session("H100", model=Asks())
    assert any("linear layer" in warning for warning in result.validation_warnings)
    assert not session("H100")[0].validation_warnings


@newer
def test_the_profile_says_what_memory_there_is() -> None:
    """TorchRec takes 32 GB whatever the SKU."""
    for sku, name in (("H100", "h100-sxm"), ("B200", "b200")):
        _, context = session(sku)
        (topology,) = context.topology_cache.values()
        assert topology.devices[0].storage.hbm == pytest.approx(load_hardware(name).hbm_bytes)
    _, context = session("H100", hbm_gb=5.0)
    (topology,) = context.topology_cache.values()
    assert topology.devices[0].storage.hbm == 5 * 1024**3


@newer
def test_an_unknown_sku_asks_for_a_profile() -> None:
    with pytest.raises(InputError, match=r"SKU 'MTIA'.*hardware="):
        session("MTIA")
    assert session("MTIA", {"MTIA": "a100-80gb"})[0].success


@newer
def test_what_does_not_fit_is_a_result_not_a_traceback() -> None:
    constraints = factors(a=1.0)
    constraints["a"] = ParameterConstraints(
        pooling_factors=[1.0], sharding_types=["table_wise"], compute_kernels=["fused"]
    )
    result, _ = session(
        "H100", model=Model(bag("a", 20_000_000)), constraints=constraints, hbm_gb=2.0
    )
    assert not result.success
    assert "Possible solutions" in result.planner_failure_reason


@newer
def test_knobs_of_torchrecs_search_are_named(caplog: pytest.LogCaptureFixture) -> None:
    from torchrec.distributed.planner.types import PlannerConfig, PlannerVariant

    session("H100", planner_config=PlannerConfig(proposer_type="greedy"))
    assert "proposer_type" in caplog.text
    config = PlannerConfig(planner_variant=PlannerVariant.LINEAR_PROGRAMMING)
    with pytest.raises(NotImplementedError):
        session("H100", planner_config=config)
