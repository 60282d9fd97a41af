"""What `shardopt.api` makes of the machine flags, with ``--strict`` and the hints at flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from predictor.errors import RangeError
from predictor.iteration.ranges import OutOfRange, ranks_outside
from predictor.model.plan import ShardingPlan
from shardopt.api.given_plans import PredictedPlan
from shardopt.api.given_plans import predict_plans as predict_anywhere
from shardopt.api.setting import Machine, Setting
from shardopt.api.setting import resolve as resolve_anywhere
from shardopt.cli.output import warn
from shardopt.report.prediction import range_lines


def resolve(
    model: Path,
    machine: Machine,
    plan: ShardingPlan | None = None,
    *,
    strict: bool = False,
    stats: Sequence[Path] = (),
) -> Setting:
    """The setting of a command; under ``--strict`` one whose ranks the profile covers."""
    setting = resolve_anywhere(model, machine, plan, stats)
    if strict:
        refuse_outside(ranks_outside(setting.hardware, setting.installed))
    return _with_hint(setting)


def predict_plans(
    model: Path, paths: Sequence[Path], machine: Machine, *, strict: bool = False
) -> tuple[Setting, list[PredictedPlan]]:
    """Predictions of plan files, with a warning for every doubt about them."""
    setting, found = predict_anywhere(model, paths, machine)
    if strict:
        refuse_outside(ranks_outside(setting.hardware, setting.installed))
    for item in found:
        for doubt in item.doubts:
            warn(f"{item.name}: {doubt}")
        if strict:
            refuse_outside(item.prediction.out_of_range, item.name)
    return _with_hint(setting), found


def refuse_outside(found: Iterable[OutOfRange], where: str = "") -> None:
    """What ``--strict`` does about costs outside the ranges of their profile.

    Args:
        where: the plan, where there are several.

    Raises:
        RangeError: there is such a cost; says which and what to do.
    """
    lines = range_lines(found)
    if lines:
        place = f"{where}: " if where else ""
        raise RangeError(
            f"{place}{'; '.join(lines)} (refused by --strict); plan for other ranks or a smaller "
            "--batch-size, use a profile that covers them, or leave --strict out"
        )


def _with_hint(setting: Setting) -> Setting:
    if setting.hardware_from != "default":
        return setting
    hint = f"hardware is {setting.hardware_name}, the default; --hardware chooses another profile"
    return replace(setting, notes=(*setting.notes, hint))
