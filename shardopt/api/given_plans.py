"""Predictions of plan files on one machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from predictor.document import shown
from predictor.errors import InputError, PlanError
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import (
    RuntimeSetting,
    check_plan,
    find_mean_problems,
    find_runtime_problem,
    in_torchrec_order,
    model_mismatch,
)
from predictor.model.plan_json import load_plan
from predictor.predict import Prediction
from search.in_use.plan import find_broken_constraint
from shardopt.api.document import GivenPlan, PredictAnswer
from shardopt.api.request import MADE, Machine
from shardopt.api.setting import Setting, refuse_outside, resolve


def predict_plans(
    model: Path,
    inputs: Sequence[Path | ShardingPlan],
    machine: Machine,
    *,
    strict: bool = False,
    stats: Sequence[Path] = (),
) -> PredictAnswer:
    """Predictions of plans in one setting, in the order given.

    Args:
        inputs: plan files, or plans, which are named by their number.
        strict: refuse costs outside the range that the profile covers.

    Raises:
        RangeError: there is such a cost.
        InputError: a plan cannot be read, does not fit the model, or is for other ranks or other
            hardware than the first while the machine does not say which.
    """
    plans = [item if isinstance(item, ShardingPlan) else load_plan(item) for item in inputs]
    paths = [
        f"plan {at + 1}" if isinstance(item, ShardingPlan) else str(item)
        for at, item in enumerate(inputs)
    ]
    _check_alike(paths, plans, machine)
    setting = resolve(model, machine, plans[0], stats, strict=strict)
    predicted = []
    for path, plan in zip(paths, plans, strict=True):
        fitting = fit_plan(plan, setting, where=path)
        doubts = (*_doubts(plan, setting, machine), *broken(fitting, setting))
        prediction = setting.predict(fitting)
        if strict:
            refuse_outside(prediction.out_of_range, path)
        bound = None if doubts else _proved_bound(plan, setting, prediction)
        predicted.append(
            GivenPlan.of(fitting, prediction, plan=path, doubts=doubts, bound_ms=bound)
        )
    keys = {"setting": setting, "predictions": predicted}
    return PredictAnswer.model_validate({**setting.facts(), **keys})


def _proved_bound(plan: ShardingPlan, setting: Setting, prediction: Prediction) -> float | None:
    """The lower bound in a plan file, in ms; None where it is of another model or machine, of
    another predictor, or of the plans near a plan in use."""
    bound, planned = (plan.meta.get(key) for key in ("lower_bound_ms", "iteration_ms"))
    made_by = plan.meta.get(MADE)
    if not isinstance(bound, int | float) or not isinstance(planned, int | float):
        return None
    if not isinstance(made_by, Mapping) or made_by.get("inputs") != setting.digests():
        return None
    same = math.isclose(planned, prediction.iteration_ms, rel_tol=1e-6)
    return float(bound) if same and bound > 0 else None


def fit_plan(plan: ShardingPlan, setting: Setting, *, where: str) -> ShardingPlan:
    """The plan under the model's own table keys, if it fits the model and TorchRec can run it.

    Args:
        where: the plan's file, for messages.

    Raises:
        PlanError: a table is unknown, missing, planned twice, not tiled by its shards, or split as
            TorchRec splits no table.
    """
    fitting = check_plan(plan, setting.workload, where=where)
    for (key, planned), table in zip(fitting.tables.items(), setting.workload.tables, strict=True):
        about = RuntimeSetting(
            (table.num_embeddings, table.embedding_dim),
            table.pooling,
            plan.world_size,
            setting.topology.local_world_size,
            setting.hardware.device,
            setting.workload.training,
        )
        problem = find_runtime_problem(in_torchrec_order(planned), about)
        if problem:
            raise PlanError(f"{where}: table '{key}': {problem}")
    return fitting


def _check_alike(paths: Sequence[str], plans: Sequence[ShardingPlan], machine: Machine) -> None:
    """Refuse plans for different machines: their times would rank machines, not plans."""
    first = plans[0]
    decided = machine.hardware is not None or machine.cluster is not None
    for path, plan in zip(paths[1:], plans[1:], strict=True):
        if plan.world_size != first.world_size:
            raise InputError(
                f"{path} is for {plan.world_size} ranks, {paths[0]} for {first.world_size}; "
                "compare plans for the same number of ranks"
            )
        names = (first.meta.get("hardware"), plan.meta.get("hardware"))
        if not decided and names[0] != names[1]:
            raise InputError(
                f"{path} was made for hardware {names[1] or '(not said)'}, {paths[0]} for "
                f"{names[0] or '(not said)'}; choose the hardware to predict both on the same",
                inputs=("hardware",),
            )


def _doubts(plan: ShardingPlan, setting: Setting, machine: Machine) -> list[str]:
    doubts = [*filter(None, [model_mismatch(plan, setting.workload)])]
    batch = plan.meta.get("batch_size")
    if isinstance(batch, int) and batch != setting.workload.batch_size:
        doubts.append(
            f"the plan was made for {batch} samples per rank, this predicts "
            f"{setting.workload.batch_size}; a batch size of {batch} predicts what it was made for"
        )
    made_by = plan.meta.get(MADE)
    settings = made_by.get("settings") if isinstance(made_by, Mapping) else None
    cluster = settings.get("cluster") if isinstance(settings, Mapping) else None
    if isinstance(cluster, str) and machine.cluster is None:
        doubts.append(
            f"the plan was made for the machines of {shown(cluster)}, this predicts as many ranks "
            "without its links; that cluster file predicts what it was made for"
        )
    return doubts


def broken(plan: ShardingPlan, setting: Setting) -> list[str]:
    """Constraints of the model that a plan breaks, and means that TorchRec would compute wrong."""
    workload = setting.workload
    planned = list(zip(plan.tables.items(), workload.tables, strict=True))
    problems = [
        f"table '{key}' breaks the model's constraints: {broken}"
        for (key, sharding), table in planned
        if (broken := find_broken_constraint(table, sharding))
    ]
    ranks: dict[str, set[frozenset[int]]] = {}
    for (_, sharding), table in planned:
        if table.constraints.co_locate is not None:
            ranks.setdefault(table.constraints.co_locate, set()).add(frozenset(sharding.ranks))
    problems += [
        f"tables of constraints.co_locate '{group}' lie on different ranks"
        for group, places in ranks.items()
        if len(places) > 1
    ]
    return problems + find_mean_problems(plan, workload)
