"""Where shardopt meets TorchRec; the names below load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from predictor.model.topology import ReplicaGroups
    from shardopt.torchrec.module.model_file import to_yaml
    from shardopt.torchrec.plan.checkpoint import (
        check_resume,
        load_training_state,
        load_under_plan,
        save_for_plan,
        training_state,
    )
    from shardopt.torchrec.planning.estimator import ShardoptPerfEstimator
    from shardopt.torchrec.planning.hook import ShardoptPlanner
    from shardopt.torchrec.planning.perf_model import ShardoptPerfModel
    from shardopt.torchrec.planning.provider import ShardoptPlannerProvider

__all__ = [
    "ReplicaGroups",
    "ShardoptPerfEstimator",
    "ShardoptPerfModel",
    "ShardoptPlanner",
    "ShardoptPlannerProvider",
    "check_resume",
    "load_training_state",
    "load_under_plan",
    "save_for_plan",
    "to_yaml",
    "training_state",
]

_HOME_OF = {
    "ReplicaGroups": "predictor.model.topology",
    "ShardoptPerfEstimator": "shardopt.torchrec.planning.estimator",
    "ShardoptPerfModel": "shardopt.torchrec.planning.perf_model",
    "ShardoptPlanner": "shardopt.torchrec.planning.hook",
    "ShardoptPlannerProvider": "shardopt.torchrec.planning.provider",
    "check_resume": "shardopt.torchrec.plan.checkpoint",
    "load_training_state": "shardopt.torchrec.plan.checkpoint",
    "load_under_plan": "shardopt.torchrec.plan.checkpoint",
    "save_for_plan": "shardopt.torchrec.plan.checkpoint",
    "to_yaml": "shardopt.torchrec.module.model_file",
    "training_state": "shardopt.torchrec.plan.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
