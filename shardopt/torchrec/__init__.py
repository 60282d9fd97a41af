"""Where shardopt meets TorchRec; the names below load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardopt.torchrec.checkpoint import check_resume, load_training_state, training_state
    from shardopt.torchrec.estimator import ShardoptPerfEstimator
    from shardopt.torchrec.hook import ShardoptPlanner
    from shardopt.torchrec.model_file import to_yaml
    from shardopt.torchrec.perf_model import ShardoptPerfModel
    from shardopt.torchrec.provider import ShardoptPlannerProvider

__all__ = [
    "ShardoptPerfEstimator",
    "ShardoptPerfModel",
    "ShardoptPlanner",
    "ShardoptPlannerProvider",
    "check_resume",
    "load_training_state",
    "to_yaml",
    "training_state",
]

_HOME_OF = {
    "ShardoptPerfEstimator": "shardopt.torchrec.estimator",
    "ShardoptPerfModel": "shardopt.torchrec.perf_model",
    "ShardoptPlanner": "shardopt.torchrec.hook",
    "ShardoptPlannerProvider": "shardopt.torchrec.provider",
    "check_resume": "shardopt.torchrec.checkpoint",
    "load_training_state": "shardopt.torchrec.checkpoint",
    "to_yaml": "shardopt.torchrec.model_file",
    "training_state": "shardopt.torchrec.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
