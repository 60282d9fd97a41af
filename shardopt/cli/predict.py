"""``shardopt predict``: the predicted time of given plans, side by side."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import Machine
from shardopt.report.blocks import View


def predict(model: Path, plans: list[Path], machine: Machine, strict: bool = False) -> View:
    """Predict the iteration time of one or more plans.

    Ranks and hardware are those of the first plan unless you set them.
    """
    from shardopt.cli.output import predict_plans
    from shardopt.report.prediction import predict_view

    return predict_view(predict_plans(model, plans, machine, strict=strict))
