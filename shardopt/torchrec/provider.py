"""Plans for machines that are not here: of one module for several of them, and TorchRec 1.9's
planning sessions, to which `ShardoptPlannerProvider` gives our planner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from predictor.errors import InputError, ShardoptError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.workload import Workload
from predictor.units import GIB
from shardopt.api.cache import ResultCache
from shardopt.api.inputs import stop_of
from shardopt.api.machines import OnMachine
from shardopt.api.machines import plan_machines as plan_model
from shardopt.api.request import PlanRequest
from shardopt.extras import needs_torchrec
from shardopt.logs import logger
from shardopt.torchrec.convert import to_torchrec
from shardopt.torchrec.costs import ShardoptPerfEstimator
from shardopt.torchrec.hook import ShardoptPlanner
from shardopt.torchrec.model_file import to_yaml
from shardopt.torchrec.read_module import known_workload, merge_constraints
from shardopt.torchrec.report import ShardoptStats, short_of

with needs_torchrec():
    import torchrec
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.stats import EmbeddingStats
    from torchrec.distributed.planner.types import StorageReservation
    from torchrec.distributed.types import ShardingPlan


class MachinePlan(NamedTuple):
    """Answer and plan of a module on one machine.

    Args:
        machine: with the answer there, as ``shardopt plan`` has it for one of several.
        plan: for `DistributedModelParallel`; None where none fits.
    """

    machine: OnMachine
    plan: ShardingPlan | None


def plan_machines(
    module: nn.Module,
    hardware: Sequence[str],
    gpus: Sequence[int],
    *,
    batch_size: int,
    prices: Mapping[str, float] | None = None,
    effort: float = 1.0,
    cache: bool = True,
    **capture: Any,
) -> list[MachinePlan]:
    """Plan a module for every hardware with every number of GPUs, as ``shardopt plan`` does for
    a model file; no GPU is needed, and the module is read and captured once.

    Args:
        hardware: names or files of profiles.
        batch_size: samples per rank.
        prices: hardware -> price of a GPU for an hour.
        effort, cache: as in `ShardoptPlanner`.
        capture: further arguments of `to_yaml`, such as ``constraints``.

    Raises:
        InputError: something given cannot be used.
    """
    result_cache = ResultCache.of_user() if cache else None
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{type(module).__name__}.yaml"
        to_yaml(module, path, batch_size=batch_size, **capture)
        request = PlanRequest(model=path, effort=effort)
        machines = list(plan_model(request, hardware, gpus, prices or {}, result_cache, stop_of))
    return [MachinePlan(machine, _for_torchrec(machine, module)) for machine in machines]


def _for_torchrec(machine: OnMachine, module: nn.Module) -> ShardingPlan | None:
    if machine.answer is None:
        return None
    device = machine.answer.setting.hardware.device
    return to_torchrec(machine.answer.result.best.plan, module, device=device)


class NoProviderError(ShardoptError, ImportError):
    """The installed TorchRec has no planner providers; says which version has."""


try:
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.provider import DefaultPlannerProvider
except ModuleNotFoundError:
    DefaultPlannerExecutor = DefaultPlannerProvider = None


IGNORED = (
    "proposer_type",
    "proposer_config",
    "partitioner_type",
    "partitioner_sort_by",
    "performance_model",
    "memory_balanced_max_search_count",
    "memory_balanced_tolerance",
)
"""Fields of a `PlannerConfig` that choose among TorchRec's searches."""


class ShardoptPlannerProvider(DefaultPlannerProvider or object):  # type: ignore[misc]
    """Builds a `ShardoptPlanner` where TorchRec would build an `EmbeddingShardingPlanner`: give it
    to a `DefaultPlannerExecutor`, for `ProductionPlannerOrchestrator` or `DryRunOrchestrator`.

    Where a request leaves ``hbm_gb`` or ``ddr_gb`` out, the profile's capacity holds, not the
    32 GB that TorchRec takes.

    Args:
        hardware: SKU -> name, file or contents of a hardware profile; SKUs that it lacks are looked
            up among the shipped profiles (H100, A100, B200, ...).
        model: as in `ShardoptPlanner`.
        options: more of its keywords, such as ``seed``, ``effort``, ``objective``, ``scenarios``.

    Raises:
        NoProviderError: the installed TorchRec has no planner providers.
    """

    def __init__(
        self,
        hardware: Mapping[str, str | HardwareProfile] | None = None,
        *,
        model: str | PathLike[str] | Workload | None = None,
        **options: Any,
    ) -> None:
        if DefaultPlannerProvider is None:
            raise NoProviderError(
                f"torchrec {torchrec.__version__} has no PlannerProvider (new in 1.9); use "
                "ShardoptPlanner instead, or install torchrec 1.9 or newer"
            )
        self._hardware = dict(hardware or {})
        self._known = known_workload(model)
        # the planner reads a file itself, as that may name windows of data
        self._options = {**options, "model": model}

    def profile(self, sku: str) -> HardwareProfile:
        """Return costs and capacities of a SKU.

        Raises:
            InputError: none is given and none is shipped for it.
        """
        profile = self._hardware.get(sku, profile_of_device(sku))
        if profile is None:
            raise InputError(
                f"no hardware profile is known for SKU '{sku}'; give one: "
                f"ShardoptPlannerProvider(hardware={{'{sku}': 'h100-sxm'}})"
            )
        return profile if isinstance(profile, HardwareProfile) else load_hardware(profile)

    def build_topology(self, sku: str, request: Any, ctx: Any) -> TorchRecTopology:
        """Build TorchRec's topology, with the profile's memory where the request names none."""
        profile = self.profile(sku)
        caps = {
            "hbm_gb": profile.hbm_bytes / GIB if request.hbm_gb is None else request.hbm_gb,
            "ddr_gb": profile.ddr_bytes / GIB if request.ddr_gb is None else request.ddr_gb,
        }
        return super().build_topology(sku, dataclasses.replace(request, **caps), ctx)

    def build_planner(
        self,
        sku: str,
        *,
        topology: TorchRecTopology,
        storage_reservation: StorageReservation,
        ctx: Any,
    ) -> Any:
        """Build a `ShardoptPlanner` for TorchRec's own variants, with our costs of shards in its
        enumerator; TorchRec's provider refuses others."""
        request, config = ctx.request, ctx.request.planner_config
        if config.planner_variant.name not in ("UNSET", "OSS"):
            return super().build_planner(
                sku, topology=topology, storage_reservation=storage_reservation, ctx=ctx
            )
        unused = [name for name in IGNORED if getattr(config, name, None) is not None]
        if unused:
            logger.warning("shardopt ignores these fields of planner_config: %s", ", ".join(unused))
        profile = self.profile(sku)
        constraints = merge_constraints(self._known, request.constraints)
        estimators = [
            ShardoptPerfEstimator(topology, constraints, hardware=profile, model=self._known),
            self._build_storage_estimator(topology, constraints, config),
        ]
        return ShardoptPlanner(
            topology,
            request.batch_size,
            hardware=profile,
            constraints=request.constraints,
            storage_reservation=storage_reservation,
            enumerator=EmbeddingEnumerator(
                topology, request.batch_size, constraints, estimator=estimators
            ),
            stats=ctx.stats,
            debug=config.debug,
            timeout_seconds=config.timeout_seconds,
            **self._options,
        )


class ShardoptPlannerExecutor(DefaultPlannerExecutor or object):  # type: ignore[misc]
    """A `DefaultPlannerExecutor` whose results say what is predicted: throughput, the critical path
    and its part in collectives, and, as warnings, what the numbers lack. Where a reporter has
    statistics of its own, they need a `ShardoptStats` for it.

    TorchRec leaves ``estimated_qps`` empty, and takes the critical path from sums of shards.

    Args:
        provider: builds the planner; by default ``ShardoptPlannerProvider()``.
    """

    def __init__(self, provider: Any = None) -> None:
        # without a provider's class ours says which version of TorchRec has it
        super().__init__(ShardoptPlannerProvider() if provider is None else provider)

    def run(self, sku: str, ctx: Any, pg: Any = None) -> Any:
        """Run as TorchRec's executor does, with a `ShardoptStats` in place of its statistics."""
        if ctx.stats is None or [type(sink) for sink in ctx.stats] == [EmbeddingStats]:
            ctx.stats = [ShardoptStats()]
        ours = next((sink for sink in ctx.stats if isinstance(sink, ShardoptStats)), None)
        result, last_search = super().run(sku, ctx, pg), ours and ours.found
        if last_search is None or not result.success:
            return result
        path_ms = last_search.prediction.iteration_ms
        return dataclasses.replace(
            result,
            estimated_qps=last_search.samples_per_s,
            critical_path_ms=path_ms,
            comms_critical_path_ms=last_search.communication_ms,
            comp_critical_path_ms=path_ms - last_search.communication_ms,
            validation_warnings=(
                *result.validation_warnings,
                *last_search.missing,
                *short_of(last_search.prediction.memory),
            ),
        )
