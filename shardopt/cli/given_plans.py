"""Reading the plans that `predict` and `explain` are given, and predicting them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from predictor.errors import InputError
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import check_plan, load_plan, model_mismatch
from predictor.predict import predict
from shardopt.cli.messages import warn
from shardopt.cli.resolve import Flags, Setting, check_flags, resolve
from shardopt.cli.strict import refuse_outside
from shardopt.explain.explanation import PredictedPlan


def predict_plans(
    model: Path, paths: Sequence[Path], flags: Flags
) -> tuple[Setting, list[PredictedPlan]]:
    """Predictions of plan files in one setting, in the order given.

    Raises:
        InputError: a plan cannot be read, does not fit the model, or is for other ranks or other
            hardware than the first while no flag decides.
    """
    check_flags(flags, needs_ranks=False)
    plans = [load_plan(path) for path in paths]
    _check_alike(paths, plans, flags)
    setting = resolve(model, flags, plans[0])
    found = []
    for path, plan in zip(paths, plans, strict=True):
        fitting = check_plan(plan, setting.workload, where=str(path))
        for text in _doubts(plan, setting):
            warn(f"{path}: {text}")
        prediction = predict(setting.workload, setting.topology, setting.hardware, fitting)
        if flags.strict:
            refuse_outside(prediction.out_of_range, str(path))
        found.append(PredictedPlan(str(path), fitting, prediction))
    return setting, found


def _check_alike(paths: Sequence[Path], plans: Sequence[ShardingPlan], flags: Flags) -> None:
    """Times of different machines side by side would rank machines, not plans."""
    first = plans[0]
    decided = flags.hardware is not None
    for path, plan in zip(paths[1:], plans[1:], strict=True):
        if plan.world_size != first.world_size:
            raise InputError(
                f"{path} is for {plan.world_size} ranks, {paths[0]} for {first.world_size}; "
                "compare plans for the same number of ranks"
            )
        given = (first.meta.get("hardware"), plan.meta.get("hardware"))
        if not decided and flags.cluster is None and given[0] != given[1]:
            raise InputError(
                f"{path} was made for hardware {given[1] or '(not said)'}, {paths[0]} for "
                f"{given[0] or '(not said)'}; give --hardware to predict both on the same"
            )


def _doubts(plan: ShardingPlan, setting: Setting) -> list[str]:
    """What may make the prediction of a plan differ from what its file says."""
    doubts = []
    mismatch = model_mismatch(plan, setting.workload)
    if mismatch:
        doubts.append(mismatch)
    batch = plan.meta.get("batch_size")
    if isinstance(batch, int) and batch != setting.workload.batch_size:
        doubts.append(
            f"the plan was made for batches of {batch} per rank, this predicts "
            f"{setting.workload.batch_size}; --batch-size {batch} predicts what it was made for"
        )
    return doubts
