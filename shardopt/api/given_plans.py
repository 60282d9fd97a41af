"""Predictions of plan files on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from predictor.errors import InputError
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import check_plan, model_mismatch
from predictor.model.plan_json import load_plan
from predictor.predict import Prediction
from shardopt.api.setting import Machine, Setting, check_machine, resolve


@dataclass(frozen=True)
class PredictedPlan:
    """One plan with its prediction.

    Args:
        name: the path as given.
        doubts: why the prediction may differ from what the plan file says.
    """

    name: str
    plan: ShardingPlan
    prediction: Prediction
    doubts: tuple[str, ...] = ()


def predict_plans(
    model: Path, paths: Sequence[Path], machine: Machine
) -> tuple[Setting, list[PredictedPlan]]:
    """Predictions of plan files in one setting, in the order given.

    Raises:
        InputError: a plan cannot be read, does not fit the model, or is for other ranks or other
            hardware than the first while the machine does not say which.
    """
    check_machine(machine, needs_ranks=False)
    plans = [load_plan(path) for path in paths]
    _check_alike(paths, plans, machine)
    setting = resolve(model, machine, plans[0])
    found = []
    for path, plan in zip(paths, plans, strict=True):
        fitting = check_plan(plan, setting.workload, where=str(path))
        doubts = _doubts(plan, setting)
        found.append(PredictedPlan(str(path), fitting, setting.predict(fitting), doubts))
    return setting, found


def _check_alike(paths: Sequence[Path], plans: Sequence[ShardingPlan], machine: Machine) -> None:
    """Times of different machines side by side would rank machines, not plans."""
    first = plans[0]
    decided = machine.hardware is not None or machine.cluster is not None
    for path, plan in zip(paths[1:], plans[1:], strict=True):
        if plan.world_size != first.world_size:
            raise InputError(
                f"{path} is for {plan.world_size} ranks, {paths[0]} for {first.world_size}; "
                "compare plans for the same number of ranks"
            )
        given = (first.meta.get("hardware"), plan.meta.get("hardware"))
        if not decided and given[0] != given[1]:
            raise InputError(
                f"{path} was made for hardware {given[1] or '(not said)'}, {paths[0]} for "
                f"{given[0] or '(not said)'}; choose the hardware to predict both on the same",
                inputs=("hardware",),
            )


def _doubts(plan: ShardingPlan, setting: Setting) -> tuple[str, ...]:
    doubts = []
    mismatch = model_mismatch(plan, setting.workload)
    if mismatch:
        doubts.append(mismatch)
    batch = plan.meta.get("batch_size")
    if isinstance(batch, int) and batch != setting.workload.batch_size:
        doubts.append(
            f"the plan was made for {batch} samples per rank, this predicts "
            f"{setting.workload.batch_size}; a batch size of {batch} predicts what it was made for"
        )
    return tuple(doubts)
