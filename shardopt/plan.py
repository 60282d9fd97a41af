"""Plan files for users: load, save, and convert to TorchRec's plans."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import load_plan as read_plan
from predictor.model.plan_json import plan_text, plan_to_dict
from shardopt.files import atomic_write_text

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["LoadedPlan", "load_plan", "save_plan"]


class LoadedPlan(ShardingPlan):
    """A `ShardingPlan` that can turn itself into TorchRec's."""

    def to_torchrec(
        self,
        module: nn.Module,
        *,
        device: str | torch.device | None = None,
        intra_group_size: int | None = None,
    ):
        """TorchRec's `ShardingPlan` for ``module``: see `shardopt.to_torchrec`."""
        from shardopt.torchrec.convert import to_torchrec

        return to_torchrec(self, module, device=device, intra_group_size=intra_group_size)


def load_plan(path: str | PathLike[str]) -> LoadedPlan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, is not JSON, or does not have the form of a plan.
    """
    plan = read_plan(path)
    return LoadedPlan(plan.tables, plan.world_size, plan.local_world_size, plan.meta)


def save_plan(plan: ShardingPlan, path: str | PathLike[str]) -> None:
    """Write a plan file, for instance of a plan from `shardopt.from_torchrec`.

    Raises:
        InputError: the file cannot be written.
    """
    atomic_write_text(Path(path), plan_text(plan_to_dict(plan)))
